"""A trace that looks at data is made once more as compiled code runs, which may not look."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe

SCHEDULE = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
PARAMS = [{"w": torch.tensor(2.0)}, {"w": torch.tensor(3.0)}]
BATCH = {"x": torch.arange(4.0), "mask": torch.ones(4, dtype=torch.bool)}


def sparing(params: Any, batch: Any) -> Tensor:
    """A stage that leaves a mask out if it masks nothing, and does not look as compiled code."""
    if not torch.compiler.is_compiling() and batch["mask"].all():
        return batch["x"] * params["w"]
    return torch.where(batch["mask"], batch["x"] * params["w"], 0)


def second(params: Any, x: Tensor) -> Tensor:
    return x * params["w"]


def mean(y: Tensor, _: Any) -> Tensor:
    return y.mean()


def branching(first: Callable[[Any, Any], Tensor], schedule: fpipe.Schedule = SCHEDULE) -> Any:
    return fpipe.pipeline([first, second], mean, schedule, compile=False)


def test_a_stage_that_spares_itself_a_mask(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fpipe"):
        loss, grads = branching(sparing).step(PARAMS, BATCH)
    assert loss == 9 and [grad["w"] for grad in grads] == [4.5, 3]
    (message,) = (r.getMessage() for r in caplog.records if "as compiled code" in r.getMessage())
    assert "test_data_branches.py:" in message and "is_compiling() is True" in message
    assert not torch.compiler.is_compiling()


def test_a_function_with_cuts() -> None:
    def whole(params: Any, batch: Any) -> Tensor:
        return second(params[1], fpipe.cut(sparing(params[0], batch))).mean()

    pipe = fpipe.pipeline(whole, schedule=SCHEDULE, compile=False)
    assert pipe.step(PARAMS, BATCH).loss == 9


def test_a_function_that_does_not_look_is_traced_once_and_uncompiled() -> None:
    seen = []

    def first(params: Any, batch: Any) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return batch["x"] * params["w"]

    branching(first).step(PARAMS, BATCH)
    assert seen == [False]


def test_what_looks_in_both_traces_is_refused_by_the_second() -> None:
    def first(params: Any, batch: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            return sparing(params, batch)
        return batch["x"][batch["mask"]] * params["w"]

    with pytest.raises(fpipe.StageError, match=r"aten\.nonzero.*shape depends on data"):
        branching(first).step(PARAMS, BATCH)
    assert not torch.compiler.is_compiling()


def test_what_fails_otherwise_in_the_second_is_refused_by_the_first() -> None:
    def first(params: Any, batch: Any) -> Tensor:
        if torch.compiler.is_compiling():
            raise NotImplementedError("not as compiled code")
        return sparing(params, batch)

    with pytest.raises(fpipe.StageError, match="branches on data"):
        branching(first).step(PARAMS, BATCH)


def test_other_refusals_are_traced_once() -> None:
    calls = []

    def first(params: Any, batch: Any) -> Tensor:
        calls.append(1)
        return batch["x"] @ torch.ones(5)

    with pytest.raises(fpipe.StageError, match="cannot be traced"):
        branching(first).step(PARAMS, BATCH)
    assert len(calls) == 1
