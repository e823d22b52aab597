"""How a rank waits: it looks whether a message is there, and takes nothing for one."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from fpipe.execute.watch import Watch
from fpipe.transport import waiting
from fpipe.transport.connect import Lines, connect, lines_of
from fpipe.transport.waiting import Arrival, look_out
from tests.distributed.actors import model_of, pipeline, recorded
from tests.distributed.crew import Crew, values
from tests.models import assert_identical

MARK = waiting._MARK


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_what_fills_a_buffer_arrives(dtype: torch.dtype) -> None:
    buffer = torch.zeros(3, 8, dtype=dtype)
    arrival = Arrival(buffer)
    assert not arrival()
    buffer[:2] = 1
    assert not arrival()
    buffer.copy_(torch.ones(3, 8))
    assert arrival()


def test_a_buffer_without_room_for_a_mark_is_left_alone() -> None:
    for buffer in (torch.ones(3, dtype=torch.uint8), torch.ones(1, dtype=torch.bfloat16)):
        assert Arrival(buffer)()
        assert buffer.eq(1).all()


def test_looks_until_it_is_there_or_patience_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 1e9)
    looks = iter([False, False, True])
    look_out(lambda: next(looks))
    assert not list(looks)
    monkeypatch.setattr(waiting, "BRIEF", 0.0)
    looks = iter([False, False, True])
    look_out(lambda: next(looks))
    assert not list(looks)
    monkeypatch.setattr(waiting, "PATIENCE", 0.0)
    look_out(lambda: False)


def own_channels(group: dist.ProcessGroup) -> list[Any]:
    """The channels that a step has made: their ends, and how they differ from `group`."""
    model, pipe = recorded(group, "mlp", fpipe.schedules.one_f_one_b(ranks=2, microbatches=2), 4)
    pipe.step(pipe.local(model.params), model.batch)
    controller: Any = pipe._engine._controller
    channels: dict[Any, Any] = controller._transports[0]._channels
    cpu = torch.device("cpu")
    shared: Any = group._get_backend(cpu).options
    others = {id(channel) for channel in channels.values()} - {id(group)}
    same = []
    for channel in channels.values():
        own: Any = channel._get_backend(cpu).options
        same.append(own._timeout == shared._timeout and own._devices == shared._devices)
    return [sorted(channels), len(others), all(same)]


def test_each_direction_has_a_connection_of_its_own(crew: Crew) -> None:
    """On one for both, gloo's thread contends with who sends: V schedules took twice as long."""
    for found in values(crew.run(own_channels, ranks=range(2))):
        assert found == [[(0, 1), (1, 0)], 2, True]


def channels_of_two(group: dist.ProcessGroup) -> list[bool]:
    """Whether pipelines over one group, of which the first is gone, have the same channels."""
    model = model_of("mlp", 2, 4)

    def channels(pipe: fpipe.Pipeline) -> dict[Any, Any]:
        pipe.step(pipe.local(model.params), model.batch)
        controller: Any = pipe._engine._controller
        own: dict[Any, Any] = controller._transports[0]._channels
        return own

    first = channels(pipeline(group, model, fpipe.schedules.gpipe(ranks=2, microbatches=2)))
    other = channels(pipeline(group, model, fpipe.schedules.zb_h1(ranks=2, microbatches=4)))
    return [other[pair] is first[pair] for pair in ((0, 1), (1, 0))]


def test_pipelines_over_a_group_share_its_channels(crew: Crew) -> None:
    # Each had its own. On NCCL those take memory of the device, and are never given back.
    assert values(crew.run(channels_of_two, ranks=range(2))) == [[True, True]] * 2


def test_pipelines_over_a_group_have_one_device() -> None:
    alone = connect("gloo", dist.HashStore(), 0, 1, timedelta(seconds=5))
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    lines = lines_of(alone, "lines", dist.HashStore(), first)
    assert lines_of(alone, "lines", dist.HashStore(), first) is lines
    with pytest.raises(fpipe.StageError, match=r"is cuda:1, and .* move their values on cuda:0"):
        lines_of(alone, "lines", dist.HashStore(), second)


def test_a_rank_that_never_comes_to_connect_is_not_waited_for_without_end() -> None:
    alone = connect("gloo", dist.HashStore(), 0, 1, timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match="a rank did not come to connect"):
        lines = Lines(alone, "lines", dist.HashStore(), torch.device("cpu"))
        lines.make("gloo", "control", range(2))


def one_is_elsewhere(group: dist.ProcessGroup) -> list[str]:
    """What rank 0 logs while rank 1 takes its time before it calls the step."""
    model, pipe = recorded(group, "mlp", fpipe.schedules.one_f_one_b(ranks=2, microbatches=2), 4)
    params = pipe.local(model.params)
    pipe.step(params, model.batch)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("fpipe")
    log.addHandler(handler)
    try:
        with patch("fpipe.transport.waiting.LONG", 0.1):
            time.sleep(0.6 * group.rank())
            pipe.step(params, model.batch)
    finally:
        log.removeHandler(handler)
    return [text for text in told if "waited" in text]


def test_a_rank_that_waits_for_long_says_so(crew: Crew) -> None:
    # It was silent until the timeout of the process group, half an hour.
    first, second = values(crew.run(one_is_elsewhere, ranks=range(2)))
    (text,) = first
    assert text.startswith("rank 0 has called pipe.step and waited for 0 s for all others to do so")
    assert not second


@pytest.mark.parametrize(
    "text",
    [
        "Timed out waiting 6000ms for send operation to complete",
        "Application timeout caused pair closure",  # on the other rank
    ],
)
def test_a_wait_that_the_process_group_ends_blames_no_connection(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fpipe.execute.watch.BEAT", 0.1)
    monkeypatch.setattr("fpipe.execute.watch.DEAD", 0.5)  # nobody else has anything to tell
    store = dist.HashStore()
    watches = [Watch(store, ["0", "1"], rank, 60.0, ring=lambda: None) for rank in (0, 1)]
    for watch in watches:
        watch.begin("step")
    fault = watches[0].culprit(None, text)
    assert fault.text.startswith("a rank that lives is in something else, such as a collective")
    assert fault.text.endswith(f"for the timeout of their process group: {text}")
    for watch in watches:
        watch.close()


def marks(weight: Tensor, x: Tensor) -> dict[str, Tensor]:
    """A value that ends, as all of it, in the very mark, and one that is sent before it."""
    return {"x": x @ weight, "y": torch.full((4,), MARK, dtype=torch.int32)}


def checked(weight: Tensor, value: dict[str, Tensor]) -> Tensor:
    return (value["x"] @ weight) * (value["y"] == MARK).all()


def slow_step(group: dist.ProcessGroup | None) -> tuple[Tensor, list[Tensor | None]]:
    pipe = fpipe.pipeline(
        [marks, checked],
        lambda y, _: y.mean(),
        fpipe.schedules.one_f_one_b(ranks=2, microbatches=2),
        compile=False,
        group=group,
    )
    x = torch.linspace(1, 2, 48, dtype=torch.float64).view(6, 8)
    loss, grads = pipe.step(pipe.local([torch.eye(8, dtype=torch.float64)] * 2), x)
    return loss, grads


def test_a_value_that_is_the_mark_arrives(crew: Crew) -> None:
    loss, grads = slow_step(None)
    assert loss > 1
    for rank, (own_loss, own) in enumerate(values(crew.run(slow_step, ranks=range(2)))):
        assert_identical(own_loss, loss)
        assert_identical(own[rank], grads[rank])


def lazily(group: dist.ProcessGroup) -> Tensor:
    """A step over a group that connects when it first sends."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    try:
        lazy = dist.new_group(range(group.size()))
        model = model_of("mlp", 4, 8)
        pipe = pipeline(lazy, model, fpipe.schedules.one_f_one_b(ranks=4, microbatches=4))
        loss, _ = pipe.step(pipe.local(model.params), model.batch)
        dist.destroy_process_group(lazy)
        return loss
    finally:
        del os.environ["TORCH_GLOO_LAZY_INIT"]


def test_a_group_that_connects_lazily(crew: Crew) -> None:
    """Groups that share its device waited for each other for ever."""
    model = model_of("mlp", 4, 8)
    alone = pipeline(None, model, fpipe.schedules.one_f_one_b(ranks=4, microbatches=4))
    for loss in values(crew.run(lazily)):
        assert_identical(loss, alone.step(model.params, model.batch).loss)


def steps_around_a_wait(group: dist.ProcessGroup, seconds: float) -> Tensor:
    """A step, a wait of rank 1 in its store, and another step."""
    model = model_of("mlp", 2, 8)
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=4)
    pipe = pipeline(group, model, schedule, timeout=seconds / 3)
    pipe.step(pipe.local(model.params), model.batch)
    if group.rank() == 1:
        store = dist.distributed_c10d._get_default_store()
        with suppress(dist.DistStoreError):
            store.wait(["never"], timedelta(seconds=seconds))
    return pipe.step(pipe.local(model.params), model.batch).loss


def test_a_rank_that_waits_in_its_store_responds(crew: Crew) -> None:
    """Such as in `dist.new_group`, for ranks that come late: its beats waited for the store."""
    first, second = values(crew.run(steps_around_a_wait, 4.5, ranks=range(2)))
    assert_identical(first, second)
