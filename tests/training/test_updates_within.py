"""Stages are updated within the step, where the schedule has their UPDATE."""

from __future__ import annotations

import itertools
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe
from fpipe import Schedule, pytree, schedules
from fpipe.schedule import Op
from tests.models import Model, assert_identical, assert_same, mlp, pipe_of, piped

STEPS: Final = 3
# Families that are neighbours have one placement: one of them is clipped, where the other is not.
FAMILIES: Final = list(zip(schedules.FAMILIES, itertools.cycle([(0.05,), (None, 1e3)])))


def trained_with_updates(
    pipe: fpipe.Pipeline,
    params: Any,
    batch: Any,
    optimizer: Any = torch.optim.AdamW,
    **options: Any,
) -> tuple[list[fpipe.TrainStep], list[list[str]]]:
    """Some steps, and the updates that each rank has recorded in the last one."""
    trainer = fpipe.train(pipe, optimizer, **{"lr": 0.1, **options})
    state = trainer.init(params)
    steps = []
    with fpipe.record() as recording:
        for _ in range(STEPS):
            steps.append(trainer.step(params, state, batch))
            params, state = steps[-1].params, steps[-1].state
    return steps, [
        [
            str(event.action)
            for event in row
            if event.action.op == Op.UPDATE and event.end > event.start
        ]
        for row in recording.timeline.events
    ]


@pytest.mark.parametrize(("family", "norms"), FAMILIES)
def test_the_bits_are_those_of_a_step_that_waits(
    family: str, norms: tuple[float | None, ...]
) -> None:
    schedule = schedules.get(family, ranks=2, microbatches=4)
    model, pipe = piped(mlp, schedule, 8)
    ranks = schedule.num_ranks
    for max_norm in norms:
        within, updates = trained_with_updates(pipe, model.params, model.batch, max_norm=max_norm)
        after, none = trained_with_updates(
            pipe, model.params, model.batch, max_norm=max_norm, clip="wait"
        )
        assert_identical(within, after)
        assert updates == [[f"{s}UPDATE" for s in _order(schedule, rank)] for rank in range(ranks)]
        assert none == [[]] * ranks
        if max_norm is not None:  # both ways are taken
            found = [step.norm for step in within if step.norm is not None]
            assert [norm > max_norm for norm in found] == [max_norm < 1] * STEPS


def _order(schedule: Schedule, rank: int) -> list[int]:
    updated = schedule.updated().actions[rank]
    return [action.stage for action in updated if action.op == Op.UPDATE]


def test_a_step_that_is_clipped_and_one_that_is_not_are_both_right() -> None:
    model = mlp(2, 8)
    schedule = schedules.zb_h1(ranks=2, microbatches=4)
    norm = fpipe.global_norm(pipe_of(model, schedule).step(model.params, model.batch).grads)
    for max_norm in (float(norm) * 0.999, float(norm) * 1.001):
        pipe = pipe_of(model, schedule)
        within, _ = trained_with_updates(pipe, model.params, model.batch, max_norm=max_norm)
        after, _ = trained_with_updates(
            pipe, model.params, model.batch, max_norm=max_norm, clip="wait"
        )
        assert_identical(within, after)


def test_the_schedule_says_when_a_stage_is_updated() -> None:
    rows = "0F0 1F0 1B0 1UPDATE 0B0 0UPDATE"
    schedule = Schedule.from_text(rows)
    model = mlp(2, 8)
    pipe = pipe_of(model, schedule)
    with fpipe.record() as recording:
        trainer = fpipe.train(pipe, torch.optim.SGD, lr=0.1)
        trainer.step(model.params, trainer.init(model.params), model.batch)
    ran = " ".join(str(event.action) for event in recording.timeline.events[0])
    assert ran == rows
    # Any other step runs the schedule as if they were not there.
    assert_same(pipe.step(model.params, model.batch), pipe_of(model, _plain()).step(*_of(model)))


def _plain() -> Schedule:
    return Schedule.from_text("0F0 1F0 1B0 0B0")


def _of(model: Model) -> tuple[Any, Any]:
    return model.params, model.batch


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_what_the_loss_does_not_depend_on_decays(max_norm: float | None) -> None:
    stages = [lambda p, x: x * p["w"], lambda p, x: x * p["w"]]
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(stages, lambda y, _: y.square().mean(), schedule, compile=False)
    params = [{"w": torch.ones(3), "idle": torch.ones(2)}, {"w": torch.ones(3)}]
    options: Any = {"weight_decay": 0.5, "max_norm": max_norm}
    steps, _ = trained_with_updates(pipe, params, torch.ones(4, 3), torch.optim.SGD, **options)
    waited, _ = trained_with_updates(
        pipe, params, torch.ones(4, 3), torch.optim.SGD, clip="wait", **options
    )
    assert_identical(steps, waited)
    assert_same(steps[0].params[0]["idle"], torch.full((2,), 0.95))


def test_groups_frozen_stages_and_sums_in_another_dtype_are_kept() -> None:
    model = mlp(3, 8)
    params = pytree.tree_map(lambda leaf: leaf.to(torch.bfloat16), model.params)
    batch = pytree.tree_map(lambda leaf: leaf.to(torch.bfloat16), model.batch)
    schedule = schedules.one_f_one_b(ranks=3, microbatches=4)
    pipe = pipe_of(model, schedule, trainable=[True, False, True], accum_dtype=torch.float32)
    options: Any = {"groups": {"0.b": None, "2.*": {"lr": 0.01}}, "max_norm": 0.5}
    within, updates = trained_with_updates(pipe, params, batch, **options)
    waited, _ = trained_with_updates(pipe, params, batch, clip="wait", **options)
    assert_identical(within, waited)
    assert updates == [["0UPDATE"], [], ["2UPDATE"]]
    assert within[-1].params[0]["w"].dtype == torch.bfloat16
    assert torch.equal(within[-1].params[0]["b"], params[0]["b"])


class Tied(torch.nn.Module):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.body = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(self.embed(x))))
        return out


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_tied_parameter_is_updated_once_behind_its_sum(max_norm: float | None) -> None:
    torch.manual_seed(0)
    module = Tied()
    pipe = fpipe.from_module(
        module,
        loss=lambda y, batch: F.cross_entropy(y.flatten(0, 1), batch["y"].flatten()),
        schedule=schedules.one_f_one_b(ranks=2, microbatches=2),
        cuts=["body"],
        compile=False,
    )
    x = torch.randint(7, (4, 5))
    params = dict(module.named_parameters())
    batch = {"x": x, "y": x}
    within, updates = trained_with_updates(pipe, params, batch, max_norm=max_norm)
    waited, _ = trained_with_updates(pipe, params, batch, max_norm=max_norm, clip="wait")
    assert_identical(within, waited)
    assert updates == [["0UPDATE"], []]  # the first rank that reads it


def test_gradients_go_as_stages_are_updated() -> None:
    model = mlp(2, 8)
    pipe = pipe_of(model, schedules.one_f_one_b(ranks=2, microbatches=4))
    trainer = fpipe.train(pipe, torch.optim.SGD, lr=0.1)
    for program in trainer.programs(model.params, model.batch):
        assert program.results.updates and not program.results.grads
    clipping = fpipe.train(pipe, torch.optim.SGD, lr=0.1, max_norm=1.0)
    for program in clipping.programs(model.params, model.batch):
        assert program.results.updates and program.results.grads


def test_wrong_choices_are_told() -> None:
    model = mlp(2, 8)
    pipe = pipe_of(model, schedules.one_f_one_b(ranks=2, microbatches=4))
    with pytest.raises(fpipe.FpipeError, match="clip='never' must be one of 'validate', 'wait'"):
        fpipe.train(pipe, torch.optim.SGD, lr=0.1, clip="never")  # type: ignore[arg-type]


def test_parameters_of_a_module_are_updated_within() -> None:
    model = mlp(2, 8)
    pipe = pipe_of(model, schedules.one_f_one_b(ranks=2, microbatches=4))
    params = pytree.tree_map(torch.nn.Parameter, model.params)
    within, updates = trained_with_updates(pipe, params, model.batch)
    assert updates == [["0UPDATE"], ["1UPDATE"]]
    assert_identical(within, trained_with_updates(pipe, model.params, model.batch)[0])
    assert not any(leaf.requires_grad for leaf in pytree.flatten(within[0].params)[0])
