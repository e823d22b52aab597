"""A pipeline that is called while its caller traces: it is right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fpipe
from tests.models import assert_same, rand

PLACES = torch.tensor([2, 0, 1])
PARAMS = [rand(3, 3), rand(3, 3)]
BATCH = rand(4, 3)


def stage(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w)[:, PLACES]


def new() -> fpipe.Pipeline:
    """One that has not been called, so that its plan is made within the caller's trace."""
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=2)
    return fpipe.pipeline([stage, stage], lambda y, _: y.square().mean(), schedule, compile=False)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated", "ignore:Attempted to insert a get_attr"
)
def test_linearize_gives_the_derivative_in_a_direction() -> None:
    """The trace was recorded into the caller's, and ran again on memory that nobody had written."""
    pipe, along = new(), rand(3, 3)

    def value(w: Tensor) -> Tensor:
        return pipe.value([w, PARAMS[1]], BATCH)

    _, slope = torch.func.linearize(value, PARAMS[0])
    assert_same(slope(along), torch.func.jvp(value, (PARAMS[0],), (along,))[1])


@pytest.mark.filterwarnings("ignore:.*torch.fx")
def test_a_graph_of_a_step_computes_the_step() -> None:
    pipe = new()
    graph = make_fx(lambda w, x: pipe.step([w, PARAMS[1]], x).loss)(PARAMS[0], BATCH)
    other = PARAMS[0] * 2
    assert_same(graph(other, BATCH), pipe.step([other, PARAMS[1]], BATCH).loss)


def within_fake(pipe: fpipe.Pipeline) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return pipe.step(PARAMS, BATCH)


def within_jit(pipe: fpipe.Pipeline) -> Any:
    return torch.jit.trace(lambda w, x: pipe.value([w, PARAMS[1]], x), (PARAMS[0], BATCH))


def within_functionalize(pipe: fpipe.Pipeline) -> Any:
    return torch.func.functionalize(lambda w: pipe.step([w, PARAMS[1]], BATCH).loss)(PARAMS[0])


def within_fake_trace(pipe: fpipe.Pipeline) -> Any:
    traced = make_fx(lambda w: pipe.step([w, PARAMS[1]], BATCH).loss, tracing_mode="fake")
    return traced(PARAMS[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*TracerWarning")
@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (within_fake, "under a FakeTensorMode.* pipe.programs takes shapes"),
        (within_fake_trace, "under a FakeTensorMode.* pipe.programs takes shapes"),
        (within_jit, "while torch.jit.trace records.* trace the functions"),
        (within_functionalize, "inside torch.func.functionalize: a step is pure already"),
    ],
)
def test_others_are_refused_by_name(call: Callable[[fpipe.Pipeline], Any], rule: str) -> None:
    pipe = new()
    with pytest.raises(fpipe.FpipeError, match=rule):
        call(pipe)
    assert_same(pipe.step(PARAMS, BATCH), new().step(PARAMS, BATCH))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", ["to_sparse_csr", "to_sparse_csc", "to_sparse"])
def test_sparse_constants_are_refused(layout: str) -> None:
    graph = getattr(torch.eye(3, dtype=torch.float64), layout)()
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=1)
    pipe = fpipe.pipeline(
        [stage, lambda w, h: (graph @ h.T).T @ w], lambda y, _: y.mean(), schedule, compile=False
    )
    with pytest.raises(fpipe.StageError, match=r"sparse tensor .*\.to_dense\(\)"):
        pipe.step(PARAMS, BATCH)
