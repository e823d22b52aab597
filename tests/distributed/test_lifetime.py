"""A pipeline that nobody holds any more leaves no thread, no connection and no code behind."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from fpipe import schedules
from fpipe.execute.watch import Watch
from tests.distributed.actors import model_of, pipeline
from tests.distributed.crew import Crew, attempt, values
from tests.distributed.traps import Trap


def make_and_drop(group: dist.ProcessGroup, victim: int | None) -> tuple[bool, int]:
    """Whether a pipeline that was dropped is still there, and how many threads it has left."""
    schedule = schedules.zb_h1(ranks=group.size(), microbatches=4)
    model = model_of("mlp", schedule.num_stages, 8)
    trap = Trap()

    def use() -> weakref.ref[object]:
        pipe = pipeline(group, model, schedule, compile=trap)
        params = pipe.local(model.params)
        pipe.step(params, model.batch)
        if group.rank() == victim:
            trap.arm("boom", 0)
        failed = attempt(pipe.step, params, model.batch).failure is not None
        assert failed == (victim is not None)
        return weakref.ref(pipe._engine._controller)

    before = threading.enumerate()
    use()  # what is imported on the way is there to stay
    gc.collect()
    gc.disable()
    try:
        dropped = use()
        own = [t for t in threading.enumerate() if t.name.startswith("fpipe ") and t not in before]
        for thread in own:
            thread.join(5)  # one that was at work has dropped the last reference, and ends itself
        return dropped() is not None, sum(thread.is_alive() for thread in own)
    finally:
        gc.enable()


def refuse_and_drop(group: dist.ProcessGroup) -> bool:
    """Whether a pipeline that has refused a batch, and was dropped, is still there."""
    schedule = schedules.gpipe(ranks=group.size(), microbatches=4)
    model = model_of("mlp", schedule.num_stages, 8)

    def use() -> weakref.ref[object]:
        pipe = pipeline(group, model, schedule)
        params = pipe.local(model.params)
        pipe.step(params, model.batch)
        few = {name: leaf[:2] for name, leaf in model.batch.items()}
        assert attempt(pipe.step, params, few).failure is not None
        # One that cannot be traced: the stages want other columns.
        thin = {name: leaf[:, :1] for name, leaf in model.batch.items()}
        assert attempt(pipe.step, params, thin).failure is not None
        return weakref.ref(pipe._engine._controller)

    use()
    gc.collect()
    gc.disable()
    try:
        return use()() is not None
    finally:
        gc.enable()


def held_after_lengths(group: dist.ProcessGroup) -> tuple[int, int]:
    """Numbers in tensors that live after two steps, and after as many more of other lengths."""
    schedule = schedules.zb_h1(ranks=group.size(), microbatches=2)
    model = model_of("mlp", schedule.num_stages, 512)
    pipe = pipeline(group, model, schedule)
    params = pipe.local(model.params)

    def held(*lengths: int) -> int:
        for rows in lengths:
            pipe.step(params, {name: leaf[:rows] for name, leaf in model.batch.items()})
        gc.collect()
        leaves = [o for o in gc.get_objects() if type(o) is Tensor]  # no abstract one
        return sum(leaf.numel() for leaf in leaves if leaf.numel() > 256)

    return held(512, 512), held(*range(128, 513, 128))


def buffers_of_steps(group: dist.ProcessGroup) -> list[list[int]]:
    """Where the receive buffers lie after each of some steps."""
    schedule = schedules.zbv(ranks=2, microbatches=6)
    model = model_of("mlp", schedule.num_stages, 12)
    pipe = pipeline(group, model, schedule)
    controller: Any = pipe._engine._controller
    kept: dict[Any, list[Tensor]] = controller._transports[0]._buffers._kept
    found = []
    for _ in range(4):
        grads = pipe.step(pipe.local(model.params), model.batch).grads  # which the caller may hold
        found.append(sorted(buffer.data_ptr() for own in kept.values() for buffer in own))
    del grads
    return found


def test_a_step_receives_into_the_buffers_of_the_last(crew: Crew) -> None:
    for first, *others in values(crew.run(buffers_of_steps, ranks=range(2))):
        assert first and others == [first] * 3


def test_buffers_of_lengths_that_are_gone_are_given_up(crew: Crew) -> None:
    # Each length had buffers of its own for ever, and memory ran out where lengths are many.
    for before, after in values(crew.run(held_after_lengths, ranks=range(2))):
        assert after == before


def test_a_refused_batch_is_not_kept(crew: Crew) -> None:
    # The error was a local variable of a frame in its own traceback, with the batch in another.
    assert values(crew.run(refuse_and_drop, ranks=range(2))) == [False] * 2


@pytest.mark.parametrize("victim", [None, 0, 1])
def test_a_dropped_pipeline_ends_at_once(crew: Crew, victim: int | None) -> None:
    # Its transport and its watch referred to the controller that held them, and the frames of a
    # step that failed to themselves, so threads, connections and kernels stayed until the garbage
    # collector came by.
    assert values(crew.run(make_and_drop, victim, ranks=range(2))) == [(False, 0)] * 2


def test_a_rank_without_a_pipeline_is_not_silent() -> None:
    # What it had written last stood still, so a rank that took its time until its next pipeline
    # was told of as one that had stopped.
    store = dist.HashStore()
    first, second = (Watch(store, ["0", "1"], rank, 60.0, ring=lambda: None) for rank in (0, 1))
    first.beat()
    assert second._silence(0).has_beaten
    first.close()
    assert not second._silence(0).has_beaten
    second.close()
