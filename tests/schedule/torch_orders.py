"""The orders of torch.distributed.pipelining, taken from torch itself by running it on fakes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch.distributed.pipelining.schedules as torch_schedules

Order = list[list[str]]  # one row of texts such as "2F0" per rank


class FakeStage:
    """As much of a torch stage as the schedules read; it writes down what it is told to run."""

    def __init__(self, index: int, ranks: int, stages: int) -> None:
        self.stage_index = index
        self.num_stages = stages
        self.group_size = ranks
        self.group_rank = 0
        self.submod = None
        self.is_first = index == 0
        self.is_last = index == stages - 1
        self.has_backward = True
        self.log: list[str] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.log.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.log.append(f"{self.stage_index}B{microbatch}")

    def __getattr__(self, name: str) -> Any:
        """Every call about communication: there is none."""
        if name.startswith(("get_", "perform_")):
            return lambda *_: []
        raise AttributeError(name)


def single(name: str, *, ranks: int, microbatches: int) -> Order:
    """What torch's class of one stage per rank runs. (Its `pipeline_order` is for drawing only.)"""
    order = []
    for rank in range(ranks):
        stage: Any = FakeStage(rank, ranks, ranks)
        schedule: Any = torch_schedules.get_schedule_class(name)(stage, microbatches, lambda: 0)
        chunks = [()] * microbatches
        nothing: Any = lambda *_, **__: None  # noqa: E731
        with patch.multiple(
            schedule,
            _initialize_stage=nothing,
            _maybe_compute_loss=nothing,
            _maybe_get_loss=nothing,
            _update_losses=nothing,
        ):
            schedule._step_microbatches(chunks, [{}] * microbatches, chunks, [])
        order.append(stage.log)
    return order


def multi(name: str, *, ranks: int, microbatches: int, stages_per_rank: int) -> Order:
    """The compute actions of torch's class of several stages per rank, in its own lowering."""
    stages: Any = [
        FakeStage(index, ranks, ranks * stages_per_rank) for index in range(stages_per_rank)
    ]
    schedule: Any = torch_schedules.get_schedule_class(name)(stages, microbatches)
    return [
        [text for action in schedule.pipeline_order[rank] if action for text in _flat(action)]
        for rank in range(ranks)
    ]


def _flat(action: Any) -> list[str]:
    if action.sub_actions:
        return [text for part in action.sub_actions for text in _flat(part)]
    return [str(action)]
