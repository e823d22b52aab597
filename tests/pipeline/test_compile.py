"""The ways to make graphs callable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor

import fpipe
from fpipe import StageError, schedules
from tests.models import assert_same, check, gpt, mlp, plain_pipeline, unpipelined

MODEL = mlp(2, 4)


class Checked:
    """A compiler of a user's own, which checks what it is given."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, module: fx.GraphModule, examples: list[Tensor]
    ) -> Callable[[list[Tensor]], Any]:
        assert isinstance(module, fx.GraphModule)
        assert all(isinstance(example, FakeTensor) for example in examples)
        shapes = [(tuple(e.shape), e.stride(), e.dtype) for e in examples]

        def call(inputs: list[Tensor]) -> Any:
            """The boxed protocol: a list that may be emptied."""
            assert type(inputs) is list
            assert [(tuple(i.shape), i.stride(), i.dtype) for i in inputs] == shapes
            assert not torch.is_grad_enabled()
            self.calls += 1
            taken = tuple(inputs)
            inputs.clear()
            return module(*taken)

        return call


def test_a_callable_gets_graphs_and_makes_boxed_callables() -> None:
    compile = Checked()
    check(MODEL.stages, MODEL.params, MODEL.batch, compile=compile)
    # F and W of two stages on two microbatches, and I: the first stage's is its shared chain.
    assert compile.calls == 2 * (2 + 2 + 2)


def test_values_have_the_strides_that_were_traced() -> None:
    """Compiled pieces do not check them; here they are checked, for a model that permutes."""
    # In float64 torch before 2.13 tells another dtype of what attention keeps than it has.
    model = gpt(3, 6, torch.float32)
    check(model.stages, model.params, model.batch, model.loss, 1e-4, compile=Checked())


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_callable_need_not_empty_its_inputs(remat: str) -> None:
    def compile(module: fx.GraphModule, examples: Any) -> Callable[[list[Tensor]], Any]:
        return lambda inputs: module(*inputs)

    check(MODEL.stages, MODEL.params, MODEL.batch, compile=compile, remat=remat)


@pytest.mark.parametrize("compile", ["eager", {"backend": "eager"}, {"backend": "aot_eager"}])
def test_backends_of_torch_compile(compile: Any) -> None:
    check(MODEL.stages, MODEL.params, MODEL.batch, compile=compile)


@pytest.mark.inductor
def test_what_inductor_made_is_there_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pipeline asks for itself, as another process would; what is kept is for some threads."""
    model, found = mlp(1, 2), []
    for threads in (1, 1, 2):
        counters.clear()
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        config: Any = torch.compiler.config
        with config.patch(cache_key_tag=str(tmp_path)):
            check(model.stages, model.params, model.batch, compile=True, microbatches=1)
        made = counters["inductor"]
        found.append((made["fxgraph_cache_miss"] > 0, made["fxgraph_cache_hit"] > 0))
    assert found == [(True, False), (False, True), (True, False)]


@pytest.mark.inductor
@pytest.mark.parametrize(
    "compile",
    [
        {"options": {"size_asserts": True, "max-autotune": False}},
        {"mode": "default"},
        {"backend": "inductor"},
    ],
)
def test_options_of_inductor(compile: Any) -> None:
    model = mlp(1, 2)
    check(model.stages, model.params, model.batch, compile=compile)


def test_unknown_backend() -> None:
    pipe = plain_pipeline(MODEL.stages, compile="no_such_backend")
    with pytest.raises(Exception, match="no_such_backend"):
        pipe.step(MODEL.params, MODEL.batch)


def test_a_compiler_that_fails() -> None:
    def broken(module: Any, examples: Any) -> Any:
        return examples[7]

    pipe = plain_pipeline(MODEL.stages, compile=broken)
    rule = r"F of stage 0 \(mlp_first\) cannot be compiled: IndexError: .* \(compile=False runs"
    with pytest.raises(StageError, match=rule) as caught:
        pipe.step(MODEL.params, MODEL.batch)
    assert isinstance(caught.value.__cause__, IndexError)


def test_a_compiler_that_makes_nothing() -> None:
    def forgetful(module: Any, examples: Any) -> Any:
        return None

    pipe = plain_pipeline(MODEL.stages, compile=forgetful)
    rule = r"compile=.*forgetful made None of F of stage 0 .*: it must return a boxed callable"
    with pytest.raises(StageError, match=rule):
        pipe.step(MODEL.params, MODEL.batch)


def test_trace_does_not_depend_on_grad_mode() -> None:
    pipe = plain_pipeline(MODEL.stages)
    with torch.no_grad():
        step = pipe.step(MODEL.params, MODEL.batch)
    assert_same(step, unpipelined(*MODEL))


@pytest.mark.parametrize("method", ["step", "value", "forward"])
def test_a_call_within_a_compiled_function(method: str) -> None:
    """torch.compile went into the pipeline, and failed there."""
    pipe = plain_pipeline(MODEL.stages)

    def whole(params: Any, batch: Any) -> Any:
        return getattr(pipe, method)(params, {k: v * 2 for k, v in batch.items()})

    compiled = torch.compile(whole, backend="eager")
    assert_same(compiled(MODEL.params, MODEL.batch), whole(MODEL.params, MODEL.batch))


@pytest.mark.inductor
@pytest.mark.parametrize(
    "middle",
    [lambda _, x: x.T.T, lambda _, x: torch.cat([x.new_zeros(len(x), 0), x], 1)],
    ids=["forward", "backward"],
)
def test_a_stage_of_which_nothing_is_left(middle: Callable[[Any, Tensor], Tensor]) -> None:
    """Inductor returns the graph itself, which has no code of Inductor's."""
    stages = [lambda w, x: torch.tanh(x @ w), middle, lambda w, x: x @ w]
    params = [torch.eye(3), None, torch.full((3, 3), 0.5)]
    schedule = schedules.zb_h1(ranks=3, microbatches=2)
    batch = torch.linspace(0, 1, 12).view(4, 3)
    compiled, plain = (
        fpipe.pipeline(stages, lambda y, _: y.square().mean(), schedule, compile=flag)
        for flag in (True, False)
    )
    assert_same(compiled.step(params, batch), plain.step(params, batch), 1e-5)
