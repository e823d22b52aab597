"""Frozen parameters over processes: no gradient crosses the border of what is trained."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import fpipe
from fpipe import Schedule, pytree, schedules
from fpipe.program.program import Send
from tests.cut_model import IN_DIMS, language_model, make_batch, make_params
from tests.distributed.crew import Crew, values
from tests.models import assert_identical, mean_square, mlp


def step_of_a_half(group: dist.ProcessGroup | None, schedule: Schedule) -> Any:
    """A step of a chain whose first half is frozen, and its messages back."""
    stages = schedule.num_stages
    model = mlp(stages, 7)
    chain = fpipe.pipeline(
        model.stages,
        mean_square,
        schedule,
        compile=False,
        group=group,
        trainable=[s >= stages // 2 for s in range(stages)],
    )
    step = chain.step(chain.local(model.params), model.batch)
    programs = chain.programs(chain.local(model.params), model.batch)
    back = [
        i.message.source
        for program in programs
        for i in program.instructions
        if isinstance(i, Send) and i.message.action.op == "SEND_B"
    ]
    return step, back


def steps_of_choices(group: dist.ProcessGroup | None, schedule: Schedule) -> Any:
    """The same, and a step of a function."""
    function = fpipe.pipeline(
        language_model,
        schedule=schedules.zbv(ranks=2, microbatches=4),
        in_dims=IN_DIMS,
        compile=False,
        group=group,
        trainable=lambda path: "qkv" in path,
    )
    return *step_of_a_half(group, schedule), function.step(make_params(), make_batch())


def test_frozen_start(crew: Crew) -> None:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=3)
    step, back, function = steps_of_choices(None, schedule)
    assert back == []
    assert pytree.flatten(step.grads[0])[0] == [] and len(pytree.flatten(step.grads[1])[0]) == 2
    held = []
    for rank, (own, sent, parts) in enumerate(
        values(crew.run(steps_of_choices, schedule, ranks=range(2)))
    ):
        assert sent == []
        assert_identical(own.loss, step.loss)
        assert_identical(own.grads[rank], step.grads[rank])
        assert_identical(parts.loss, function.loss)
        for block, whole in zip(parts.grads["blocks"], function.grads["blocks"], strict=True):
            assert block["scale"] is None and whole["scale"] is None
            if block["qkv"] is not None:
                assert_identical(block["qkv"], whole["qkv"])
                held.append(rank)
        assert parts.grads["table"] is None and function.grads["table"] is None
    assert sorted(held) == [0, 0, 1, 1]


def test_gradients_flow_where_the_start_is_trained(crew: Crew) -> None:
    """The same count is not zero for a looped pipeline, whose trained half is on both ranks."""
    schedule = schedules.interleaved_1f1b(ranks=2, microbatches=4)
    expected = step_of_a_half(None, schedule)
    for own in values(crew.run(step_of_a_half, schedule, ranks=range(2))):
        assert own[1] == expected[1] == [1] * 4
        assert_identical(own[0].loss, expected[0].loss)
