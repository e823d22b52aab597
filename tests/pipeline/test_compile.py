"""The ways to make graphs callable."""

from __future__ import annotations

import ctypes
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
from fpipe.pieces import kernel_cache
from fpipe.trace.isolation import uncompiled
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
@pytest.mark.parametrize("kept", [True, False])
def test_what_inductor_made_is_there_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Each pipeline asks for itself, as another process would; what is kept is for some threads."""
    model, found, loaded = mlp(1, 2), [], [0]

    def load(key: str, take: Any = kernel_cache.load) -> Any:
        call = take(key) if kept else None
        loaded[-1] += call is not None
        return call

    monkeypatch.setattr(kernel_cache, "load", load)
    for threads in (1, 1, 2):
        counters.clear()
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        config: Any = torch.compiler.config
        with config.patch(cache_key_tag=str(tmp_path)):
            check(model.stages, model.params, model.batch, compile=True, microbatches=1)
        made = counters["inductor"]
        found.append((made["fxgraph_cache_miss"] > 0, made["fxgraph_cache_hit"] > 0))
        loaded.append(0)
    assert found == [(True, False), (False, not kept), (True, False)]
    assert [number > 0 for number in loaded] == [False, kept, False, False]


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
    check(model.stages, model.params, model.batch, compile=compile, microbatches=1)


def test_a_compiler_that_fails() -> None:
    def broken(module: Any, examples: Any) -> Any:
        return examples[7]

    pipe = plain_pipeline(MODEL.stages, compile=broken)
    rule = r"F of stage 0 \(mlp_first\) cannot be compiled: IndexError: .* \(compile=False runs"
    with pytest.raises(StageError, match=rule) as caught:
        pipe.step(MODEL.params, MODEL.batch)
    assert isinstance(caught.value.__cause__, IndexError)


def test_a_library_that_was_not_written_to_its_end(tmp_path: Path) -> None:
    """A process that is killed while it compiles leaves it in the cache, for all after it."""

    def loads(module: Any, examples: Any) -> Any:
        library = tmp_path / "kernel.so"
        library.write_bytes(b"\x7fELF")
        return ctypes.CDLL(str(library))

    pipe = plain_pipeline(MODEL.stages, compile=loads)
    rule = r"kernel\.so: file too short \(a compilation that was interrupted has left that file"
    with pytest.raises(StageError, match=rule):
        pipe.step(MODEL.params, MODEL.batch)


def test_a_compiler_that_makes_nothing() -> None:
    def forgetful(module: Any, examples: Any) -> Any:
        return None

    pipe = plain_pipeline(MODEL.stages, compile=forgetful)
    rule = r"compile=.*forgetful made None of F of stage 0 .*: it must return a boxed callable"
    with pytest.raises(StageError, match=rule):
        pipe.step(MODEL.params, MODEL.batch)


@pytest.mark.parametrize("backend", ["aot_eager", "graph"])
def test_a_compiler_whose_callables_are_not_boxed(backend: str) -> None:
    """As the backends of `torch.compile` are: what they made failed as if the stage did."""
    make: Any = torch._dynamo.lookup_backend("aot_eager")
    pipe = plain_pipeline(
        MODEL.stages, compile=make if backend == "aot_eager" else lambda module, _: module
    )
    raised = "StopIteration" if backend == "aot_eager" else r"\w+: .*"
    rule = (
        rf"made what raised {raised} \(it must be a boxed callable, .* compile=\{{\"backend\": …\}}"
    )
    with pytest.raises(fpipe.PipelineError, match=rule):
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


@pytest.mark.parametrize("fullgraph", [False, True])
def test_functions_that_the_caller_has_compiled_are_traced_as_they_were_written(
    fullgraph: bool,
) -> None:
    # A helper in somebody else's module kept all of it from being a stage.
    compiled: list[torch.fx.GraphModule] = []

    def backend(module: fx.GraphModule, examples: Any) -> Any:
        compiled.append(module)
        return module.forward

    def wave(x: Tensor) -> Tensor:
        return torch.sin(x) * 2

    def stage(w: Tensor, x: Tensor) -> Tensor:
        return helper(x @ w)

    def loss(y: Tensor, batch: Tensor) -> Tensor:
        return helper(y).square().mean()

    helper: Any = torch.compile(wave, backend=backend, fullgraph=fullgraph)
    whole: Any = torch.compile(stage, backend=backend, fullgraph=fullgraph)
    params, x = [torch.eye(4) / 2, torch.full((4, 4), 0.3)], torch.linspace(0, 1, 32).view(8, 4)

    def plain(params: list[Tensor], batch: Tensor) -> Tensor:
        for w in params:
            batch = wave(batch @ w)
        return wave(batch).square().mean()

    grads, value = torch.func.grad_and_value(plain)(params, x)
    schedule = schedules.zb_h1(ranks=2, microbatches=4)
    pipe = fpipe.pipeline([stage, whole], loss, schedule, compile=False)
    assert_same(pipe.step(params, x), fpipe.Step(value, grads), 1e-6)

    def cut(params: list[Tensor], batch: Tensor) -> Tensor:
        return helper(whole(params[1], fpipe.cut(stage(params[0], batch)))).square().mean()

    one = fpipe.pipeline(cut, schedule=schedule, compile=False)
    assert_same(one.step(params, x), fpipe.Step(value, grads), 1e-6)
    vector = [torch.ones(4, 4)] * 2
    expected = torch.func.grad(lambda p: sum(g.sum() for g in torch.func.grad(plain)(p, x)))(params)
    assert_same(fpipe.hvp(one).step(params, x, vector).hvp, expected, 1e-5)
    assert not compiled
    helper(x)  # is compiled as before where it is the caller's
    assert len(compiled) == 1


# torch 2.14 looks into what makes the programs, until it meets what it does not know.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_programs_that_are_asked_for_within_a_compiled_function() -> None:
    # There torch lets nobody set a stance, as tracing does.
    pipe = plain_pipeline(MODEL.stages)

    def peak(params: Any, batch: Any) -> int:
        return pipe.programs(params, batch)[0].peak_bytes

    compiled: Any = torch.compile(peak, backend="eager")
    found = compiled(MODEL.params, MODEL.batch)
    assert found == plain_pipeline(MODEL.stages).programs(MODEL.params, MODEL.batch)[0].peak_bytes


def test_a_module_that_is_divided_within_a_compiled_function() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    params = {name: p.detach() for name, p in module.named_parameters()}
    schedule = schedules.gpipe(ranks=2, microbatches=2)

    def whole(x: Tensor) -> Tensor:
        pipe = fpipe.from_module(
            module,
            schedule=schedule,
            stages=2,
            example={"input": x},
            loss=lambda y, _: y.square().mean(),
            compile=False,
        )
        return pipe.step(params, {"input": x}).loss

    x = torch.linspace(0, 1, 16).view(4, 4)
    compiled: Any = torch.compile(whole, backend="eager")
    assert_same(compiled(x), whole(x))


def test_a_stance_that_another_thread_sets_while_a_function_is_traced() -> None:
    """It put back that of the trace, and the process compiled no more."""
    stances: Any = torch._dynamo.eval_frame
    before = stances._stance
    with uncompiled():
        other = torch.compiler.set_stance("eager_on_recompile")
    assert stances._stance.stance == "eager_on_recompile"
    other.__exit__(None, None, None)
    assert stances._stance == before


class Waving(torch.nn.Module):
    """A module that calls a function which was compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return _compiled_wave(self.second(_compiled_wave(self.first(x))))


_compiled_wave: Any = torch.compile(torch.sin, backend="eager")


def test_a_module_that_calls_a_function_which_was_compiled() -> None:
    module = Waving()
    pipe = fpipe.from_module(
        module,
        schedule=schedules.gpipe(ranks=2, microbatches=2),
        stages=2,
        example={"x": torch.ones(4, 4)},
        loss=lambda y, _: y.square().mean(),
        compile=False,
    )
    params = {name: p.detach() for name, p in module.named_parameters()}
    x = torch.linspace(0, 1, 16).view(4, 4)

    def plain(params: dict[str, Tensor]) -> Tensor:
        y = x
        for name in ("first", "second"):
            weight, bias = (params[f"{name}.{kind}"] for kind in ("weight", "bias"))
            y = torch.sin(torch.nn.functional.linear(y, weight, bias))
        return y.square().mean()

    assert_same(pipe.step(params, {"x": x}).grads, torch.func.grad(plain)(params), 1e-6)


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
    schedule = schedules.zb_h1(ranks=3, microbatches=1)
    batch = torch.linspace(0, 1, 12).view(4, 3)
    compiled, plain = (
        fpipe.pipeline(stages, lambda y, _: y.square().mean(), schedule, compile=flag)
        for flag in (True, False)
    )
    assert_same(compiled.step(params, batch), plain.step(params, batch), 1e-5)
