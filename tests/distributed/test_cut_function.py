"""A function that was cut, over processes: every rank gets the whole gradient of what it reads."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from fpipe import Schedule, pytree, schedules
from fpipe.plan.plan import Latest
from tests.custom_model import WrongWithCtx, with_cuts
from tests.custom_model import make_batch as custom_batch
from tests.custom_model import make_params as custom_params
from tests.cut_model import make_batch, make_params
from tests.distributed.actors import over, recorded_function
from tests.distributed.crew import Crew, values
from tests.models import assert_identical, rand
from tests.pipeline import test_microbatches, test_read_by_size


def step(group: dist.ProcessGroup | None, schedule: Schedule) -> fpipe.Step:
    return recorded_function(group, schedule).step(make_params(), make_batch(8))


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.zbv(ranks=2, microbatches=4),
        schedules.one_f_one_b(ranks=4, microbatches=4),
    ],
    ids=lambda schedule: schedule.name,
)
def test_shared_parameter_has_the_same_bits_on_every_rank(crew: Crew, schedule: Schedule) -> None:
    crew.start(step, schedule, ranks=range(schedule.num_ranks))
    parts: list[fpipe.Step] = values(crew.collect())
    expected = step(None, schedule)
    held: dict[str, Any] = {}
    for part in parts:
        assert_identical(part.loss, expected.loss)
        for path, grad, whole in zip(
            pytree.paths(pytree.structure(make_params())),
            *(leaves(result.grads) for result in (part, expected)),
            strict=True,
        ):
            if grad is not None:
                assert_identical(grad, whole)
                held.setdefault(path, []).append(grad)
    # The table is read by the first and the last stage; everything else by one stage or by none.
    readers = {schedule.placement[0], schedule.placement[-1]}
    assert len(held["['table']"]) == len(readers)
    assert all(len(held[path]) == 1 for path in held if "blocks" in path)


def custom_step(group: dist.ProcessGroup | None) -> fpipe.Step:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    loss_fn = partial(with_cuts, WrongWithCtx)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False, group=group)
    return pipe.step(custom_params(), custom_batch())


def test_backward_of_a_function_is_its_own_on_every_rank(crew: Crew) -> None:
    crew.start(custom_step, ranks=range(2))
    parts: list[fpipe.Step] = values(crew.collect())
    expected = custom_step(None)
    for part in parts:
        assert_identical(part.loss, expected.loss)
    spec = pytree.structure(custom_params())
    flat = [spec.flatten_up_to(result.grads) for result in (*parts, expected)]
    for first, second, whole in zip(*flat, strict=True):
        assert first is not None or second is not None
        for grad in (first, second):
            assert grad is None or torch.equal(grad, whole)


@cache
def _uneven_pipe() -> fpipe.Pipeline:
    return test_microbatches.language_pipe(schedules.gpipe(ranks=3, microbatches=1))


def uneven_pipe(group: dist.ProcessGroup | None) -> fpipe.Pipeline:
    """Of microbatches of several lengths; those of a process share their recordings."""
    return over(_uneven_pipe(), schedules.zb_h1(ranks=3, microbatches=4), group)


def uneven_step(group: dist.ProcessGroup | None, turn: bool) -> list[Any]:
    """A step on microbatches of several lengths, which the last rank may take in another order."""
    lengths = test_microbatches
    pipe = uneven_pipe(group)
    parts = lengths.make_parts()
    batch = fpipe.Microbatches(parts[::-1] if turn and pipe.rank in (None, 2) else parts)
    step = pipe.step(lengths.make_params(), batch)
    return [step.loss, step.grads]


def test_microbatches_of_several_lengths(crew: Crew) -> None:
    crew.start(uneven_step, False, ranks=range(3))
    parts: list[Any] = values(crew.collect())
    loss, grads = uneven_step(None, False)
    for own_loss, own in parts:
        assert_identical(own_loss, loss)
        held = {name: grad for name, grad in own.items() if grad is not None}
        assert held
        assert_identical(held, {name: grads[name] for name in held})


def test_microbatches_in_another_order_on_one_rank(crew: Crew) -> None:
    crew.start(uneven_step, True, ranks=range(3))
    for outcome in crew.collect():
        text = outcome.error.text
        assert "rank 2 got a batch of another shape, 13 rows in microbatches of [" in text
        assert text.count("batch['tokens']: int64") == 2 and "int64[3, 4]" in text


def many_orders(group: dist.ProcessGroup | None) -> list[Tensor]:
    """Losses of microbatches in many orders, with room for two plans, after calls that fail."""
    lengths = test_microbatches
    pipe = uneven_pipe(group)
    controller: Any = pipe._engine._controller
    if group is not None:
        controller._calls._agreed = Latest(2)
    controller.planner.plans = Latest(2)
    params, parts = lengths.make_params(), lengths.make_parts()
    found = []
    for number, order in enumerate([(0, 1, 2, 3), (1, 0, 2, 3), (3, 2, 1, 0), (0, 1, 2, 3)] * 2):
        batch = fpipe.Microbatches(parts[place] for place in order)
        with pytest.raises(fpipe.FpipeError):
            pipe.step(params, batch if pipe.rank in (0, 1) else {"tokens": 0})
        found.append(pipe.value(params, batch) if number % 3 else pipe.step(params, batch).loss)
    return found


def test_ranks_forget_the_same(crew: Crew) -> None:
    crew.start(many_orders, ranks=range(3))
    parts: list[list[Tensor]] = values(crew.collect())
    expected = many_orders(None)
    for part in parts:
        assert all(map(torch.equal, part, expected))


def split_by_one(group: dist.ProcessGroup | None) -> Tensor:
    """A step on a batch that one rank alone splits itself."""
    pipe = test_microbatches.mixed_pipe(out_dims=0, group=group)
    x = rand(6, 3)
    batch = {"x": x if pipe.rank else fpipe.Microbatches(x.split(2)), "row": rand(6)}
    loss: Tensor = pipe.step({"w": rand()}, {**batch, "shared": rand()}).loss
    return loss


def test_one_rank_splits_the_batch_itself(crew: Crew) -> None:
    crew.start(split_by_one, ranks=range(2))
    first, second = values(crew.collect())
    assert torch.equal(first, second)


def turned(params: Any, batch: Tensor) -> Tensor:
    """Two stages read one table, and what the second has of its gradient is transposed."""
    h = fpipe.cut(batch @ params)
    return h.square().mean() * params.T.tanh().mean()


def transposed(group: dist.ProcessGroup | None) -> fpipe.Step:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(turned, schedule=schedule, compile=False, group=group)
    return pipe.step(rand(3, 3), rand(4, 3))


def test_shared_parameter_whose_gradient_is_transposed_in_one_stage(crew: Crew) -> None:
    crew.start(transposed, ranks=range(2))
    parts: list[fpipe.Step] = values(crew.collect())
    expected = transposed(None)
    for part in parts:
        assert_identical(part.grads, expected.grads)


def apart(params: Any, batch: Tensor) -> Tensor:
    """Two stages read one scale, and the first lets no gradient through."""
    h = fpipe.cut(batch @ params["a"] * params["scale"].detach())
    return (h * params["scale"]).square().mean()


def trained_function(group: dist.ProcessGroup | None) -> list[Any]:
    """Two steps of descent, with what each rank has of the gradients, and the losses by row."""
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(apart, schedule=schedule, compile=False, group=group)
    params, batch = {"a": rand(2, 2), "scale": rand(2)}, rand(4, 2)
    found: list[Any] = []
    for _ in range(2):
        loss, grads = pipe.step(params, batch)
        found += [loss, grads["scale"], fpipe.per_example_grads(pipe).step(params, batch)]
        params = {k: p if grads[k] is None else p - grads[k] for k, p in params.items()}
    return found


def test_parameter_that_is_read_without_a_gradient_is_kept_up_to_date(crew: Crew) -> None:
    crew.start(trained_function, ranks=range(2))
    parts = values(crew.collect())
    for index, expected in enumerate(trained_function(None)):
        for part in parts:
            found, wanted = part[index], expected
            if isinstance(found, fpipe.Step):
                assert_identical(found.loss, wanted.loss)
                found, wanted = found.grads["scale"], wanted.grads["scale"]
            assert_identical(found, wanted)


def by_size(group: dist.ProcessGroup | None, family: str, size: int) -> fpipe.Step:
    """Stages that read parameters, tied ones too, in microbatches of one size alone."""
    pipe, _ = test_read_by_size.pipeline(family, size, group)
    return fpipe.grad(pipe, ("params", "batch")).step(*test_read_by_size.problem())


@pytest.mark.parametrize("size", [3, 2])
@pytest.mark.parametrize("family", test_read_by_size.FAMILIES)
def test_parameter_that_is_read_in_microbatches_of_one_size(
    crew: Crew, family: str, size: int
) -> None:
    crew.start(by_size, family, size, ranks=range(2))
    parts: list[fpipe.Step] = values(crew.collect())
    expected = by_size(None, family, size)
    own, given = expected.grads
    held: set[str] = set()
    for rank, part in enumerate(parts):
        assert_identical(part.loss, expected.loss)
        for name, grad in part.grads[0].items():
            if grad is not None:
                assert_identical(grad, own[name])
                held.add(name)
        assert_identical(part.grads[1], given if rank == 0 else None)
    assert held == {"a", "b", "c", "d"}
    assert all(part.grads[0]["a"] is not None for part in parts)


def leaves(grads: Any) -> list[Any]:
    """The gradients in flat order, None where there is none."""
    spec = pytree.structure(make_params())
    return list(spec.flatten_up_to(grads))
