"""Loops of several graphs are compiled side by side, and all are there when a plan is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile

from fpipe import StageError
from fpipe.pieces import backends
from fpipe.pieces.side_by_side import collected, deferred
from tests.models import assert_same, mlp, plain_pipeline, unpipelined

MODEL = mlp(2, 4)


def test_what_is_compiled_is_waited_for_later() -> None:
    waits: list[Callable[[], None]] = []

    def scope_of(number: int) -> dict[str, Any]:
        kernel: Future[int] = Future()
        kernel.set_result(number)
        return {"kernel": kernel}

    first, second, third = map(scope_of, range(3))
    with config.patch(compile_threads=2):
        with collected(waits), deferred():
            AsyncCompile().wait(first)
        with collected(waits):
            AsyncCompile().wait(second)
        with deferred():
            AsyncCompile().wait(third)
        assert isinstance(first["kernel"], Future)
        assert (second["kernel"], third["kernel"]) == (1, 2)
        (wait,) = waits
        wait()
        assert dict(first) == {"kernel": 0}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The errors of the first graphs that are compiled, told when their loops are waited for."""
    ends: list[Any] = []

    def by_inductor(module: Any, examples: Any, patches: Any, takes_kernel: bool) -> Any:
        loops: Future[Any] = Future()
        scope: dict[str, Any] = {"loops": loops}
        end = ends.pop(0) if ends else None
        with config.patch(compile_threads=2), deferred():
            AsyncCompile().wait(scope)
        loops.set_exception(end) if end else loops.set_result(module)
        return lambda inputs: scope["loops"](*inputs)

    monkeypatch.setattr(backends, "by_inductor", by_inductor)
    return ends


def test_a_step_waits_for_all(late: list[Any]) -> None:
    with config.patch(compile_threads=2):
        pipe = plain_pipeline(MODEL.stages, compile=True)
        assert_same(pipe.step(MODEL.params, MODEL.batch), unpipelined(*MODEL))


def test_loops_that_cannot_be_compiled_are_those_of_a_piece(late: list[Any]) -> None:
    late += [None, OSError("no space left")]
    with config.patch(compile_threads=2):
        pipe = plain_pipeline(MODEL.stages, compile=True)
        rule = r"[FI] of stage \d \(.*\) cannot be compiled: OSError: no space left \(compile=False"
        with pytest.raises(StageError, match=rule):
            pipe.step(MODEL.params, MODEL.batch)
        # Nothing is left of what was made beside them.
        assert_same(pipe.step(MODEL.params, MODEL.batch), unpipelined(*MODEL))
