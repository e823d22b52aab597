"""What a search finds, for costs that were told or measured, runs, and is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe import Action, Cost, Op, schedules
from fpipe.schedule.placements import linear, looped, vee
from tests.models import assert_same, gpt, mlp, piped, unpipelined


@pytest.mark.parametrize(
    ("make", "memory"), [(linear, 1.5), (linear, 4), (vee, 1), (vee, 3), (looped, 2)]
)
def test_searched_schedules_equal_the_unpipelined_function(make: Any, memory: float) -> None:
    placement = make(2, 2) if make is looped else make(2)
    found = fpipe.search(
        ranks=2,
        microbatches=5,
        cost=Cost(10, 12, 8, comm=1),
        memory=memory,
        placement=placement,
        iterations=40,
    )
    fpipe.verify(found.schedule)
    model, pipe = piped(mlp, found.schedule, 7)
    assert_same(pipe.step(model.params, model.batch), unpipelined(*model))


def test_a_rank_without_a_stage_is_no_bar_to_measuring() -> None:
    # The schedules that measure had a rank less than there are devices.
    rows = [*schedules.one_f_one_b(ranks=2, microbatches=2).actions, ()]
    model = mlp(2, 4)
    pipe = fpipe.pipeline(
        model.stages,
        model.loss,
        fpipe.Schedule([0, 1], rows),
        compile=False,
        devices=["cpu"] * 3,
    )
    cost = fpipe.profile(pipe, model.params, model.batch, steps=1)
    assert isinstance(cost.f, tuple) and len(cost.f) == 2


def test_from_measured_costs_to_a_schedule_that_runs() -> None:
    model, pipe = piped(gpt, schedules.one_f_one_b(ranks=2, microbatches=4), 8)
    cost = fpipe.profile(pipe, model.params, model.batch, steps=2)
    plain = fpipe.simulate(schedules.gpipe(ranks=2, microbatches=4), cost)
    found = fpipe.search(
        ranks=2, microbatches=4, cost=cost, memory=0.75 * max(plain.peak), iterations=40
    )
    assert found.schedule.num_stages == 2  # the cost has a value for each stage
    assert max(found.timeline.peak) <= 0.75 * max(plain.peak)
    searched = pipe.with_schedule(found.schedule)
    assert_same(searched.step(model.params, model.batch), unpipelined(*model))


def test_microbatches_of_other_lengths_are_measured_beside_each_other() -> None:
    def stage(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(x @ w)
        return x

    schedule = schedules.one_f_one_b(ranks=2, microbatches=4)
    pipe = fpipe.pipeline([stage, stage], lambda y, _: y.mean(), schedule, compile=False)
    params = [torch.eye(128)] * 2
    long, short = torch.ones(4, 512, 128), torch.ones(4, 32, 128)
    cost = fpipe.profile(pipe, params, fpipe.Microbatches([long, short, long, short]), steps=3)
    assert cost.sizes is not None
    first, second, third, fourth = cost.sizes
    assert first == third > 1 > second == fourth
    assert first + second == pytest.approx(2)  # their mean is 1
    timeline = fpipe.simulate(schedule, cost)
    events = {event.action: event.end - event.start for row in timeline.events for event in row}
    assert events[Action(1, Op.F, 0)] / events[Action(1, Op.F, 1)] == pytest.approx(first / second)
    # All of one length need no sizes, and a batch that does not divide evenly is told without.
    assert fpipe.profile(pipe, params, fpipe.Microbatches([short] * 4), steps=1).sizes is None
    assert fpipe.profile(pipe, params, long.flatten(0, 1)[:9], steps=1).sizes is None


def block(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + torch.tanh(x @ params["up"]) @ params["down"]


def test_what_a_stage_keeps_does_not_depend_on_where_the_next_one_is() -> None:
    """W reads the gradient that comes in: it did not count where another rank had sent it."""
    width, rows, microbatches = 8, 64, 4
    params = [{"up": torch.randn(width, 32), "down": torch.randn(32, width)} for _ in range(4)]
    batch = torch.randn(rows * microbatches, width)
    there, costs = range(4), []
    for placement in ([0] * 4, [0, 1, 2, 3]):
        rows_of = [[] for _ in range(max(placement) + 1)]  # type: list[list[Action]]
        for op, order in ((Op.F, there), (Op.I, there[::-1]), (Op.W, there)):
            for stage in order:
                own = (Action(stage, op, m) for m in range(microbatches))
                rows_of[placement[stage]].extend(own)
        schedule = fpipe.Schedule(placement, rows_of)
        pipe = fpipe.pipeline([block] * 4, lambda y, _: y.square().mean(), schedule, compile=False)
        costs.append(fpipe.profile(pipe, params, batch, steps=1))
    one, four = costs
    assert one.activation == four.activation and one.freed_by_i == four.freed_by_i
    # A microbatch of an inner stage: its input, tanh's output, and their gradients, for W.
    assert four.freed_by_i[1] == -4 * rows * (width + 32)  # type: ignore[index]
    planned = pipe.programs(params, batch)[1].peak_bytes
    sums = sum(leaf.nbytes for leaf in params[1].values())
    simulated = fpipe.simulate(schedule, four).peak[1]
    assert simulated == microbatches * 2 * 4 * rows * (width + 32)
    assert simulated <= planned - sums <= simulated + 4 * 4 * rows * width
