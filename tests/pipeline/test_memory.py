"""What a step holds, seen from outside."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fpipe
from fpipe import Schedule, pytree, schedules
from fpipe.program.program import Compute
from tests.meter import Meter
from tests.models import MODELS, Model, mlp_layer, rand


class Watch:
    """A compiler whose callables note which of their tensors are alive.

    Attributes:
        seen: weak references to all tensors that kernels took or returned, by their memory.
        peak: most bytes of them that were alive when a kernel had returned.
    """

    def __init__(self, callers: list[Tensor]) -> None:
        self.seen: dict[int, weakref.ref[Any]] = {}
        self.peak = 0
        self.last: list[weakref.ref[Tensor]] = []
        self._callers = {leaf.untyped_storage().data_ptr() for leaf in callers}

    def __call__(self, module: fx.GraphModule, examples: Any) -> Callable[[list[Tensor]], Any]:
        module.graph.set_codegen(fx.graph._BoxedCodeGen())
        module.recompile()

        def call(inputs: list[Tensor]) -> Any:
            before = {id(value): weakref.ref(value) for value in inputs}
            # Only those that the interpreter still holds are alive beside the outputs.
            outputs = module.forward(inputs)
            assert not inputs
            self.seen.update(before)
            self.seen.update({id(value): weakref.ref(value) for value in outputs})
            self.peak = max(self.peak, self.alive())
            return outputs

        return call

    def alive(self) -> int:
        """Bytes of the tensors that are alive, the caller's left out."""
        tensors = [value for ref in self.seen.values() if (value := ref()) is not None]
        storages = {value.untyped_storage().data_ptr(): value.nbytes for value in tensors}
        return sum(size for place, size in storages.items() if place not in self._callers)


def watched(model: Model, schedule: Schedule, **options: Any) -> tuple[Watch, fpipe.Pipeline]:
    watch = Watch(pytree.flatten((model.params, model.batch))[0])
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=watch, **options)
    pipe.step(model.params, model.batch)
    watch.seen.clear()
    watch.peak = 0
    return watch, pipe


def test_nothing_is_alive_after_a_step_but_its_results() -> None:
    model = MODELS["gpt"](4, 6)
    watch, pipe = watched(model, schedules.zbv(ranks=2, microbatches=3))
    step = pipe.step(model.params, model.batch)
    grads = sum(leaf.nbytes for leaf in pytree.flatten(step.grads)[0])
    seeds = 3 * 8  # the weights of the losses belong to the plan
    assert watch.alive() == grads + seeds
    del step
    assert watch.alive() == seeds


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_are_settled_one_by_one(dtype: torch.dtype) -> None:
    """Divided by the batch's weight, and rounded to the parameters' dtype, in no second copy."""
    weights = [torch.ones(64, 64, dtype=dtype) / 64 for _ in range(8)]
    x = torch.ones(2, 64, dtype=dtype)

    def loss(weights: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        for weight in weights:
            x = x @ weight
        return x.sum(), x.new_tensor(5.0)

    pipe = fpipe.pipeline(
        loss,
        schedule=schedules.gpipe(ranks=1, microbatches=1),
        reduction="weighted",
        accum_dtype=torch.promote_types(dtype, torch.float32),
        compile=False,
    )
    (program,) = pipe.programs(weights, x)
    pipe.step(weights, x)
    with Meter([*weights, x]) as meter:
        pipe.step(weights, x)
    assert meter.peak <= program.peak_bytes + weights[0].nbytes


def test_1f1b_holds_less_than_gpipe() -> None:
    model = MODELS["gpt"](2, 8)
    peaks = []
    for family in (schedules.gpipe, schedules.one_f_one_b):
        watch, pipe = watched(model, family(ranks=2, microbatches=8))
        pipe.step(model.params, model.batch)
        peaks.append(watch.peak)
    assert peaks[1] < peaks[0] / 2


def test_remat_holds_less() -> None:
    model = MODELS["gpt"](2, 8)
    peaks = []
    for remat in ("none", "except_last", "full"):
        watch, pipe = watched(model, schedules.gpipe(ranks=2, microbatches=4), remat=remat)
        pipe.step(model.params, model.batch)
        peaks.append(watch.peak)
    assert peaks[0] > peaks[1] >= peaks[2]
    assert peaks[2] < peaks[0] / 2


def test_each_stage_may_have_a_policy() -> None:
    """1F1B holds most on the first rank: to compute again there alone makes room where it lacks."""
    model = MODELS["gpt"](4, 16)
    schedule = schedules.one_f_one_b(ranks=4, microbatches=8)

    def peaks(remat: Any) -> list[int]:
        pipe = fpipe.pipeline(model.stages, model.loss, schedule, remat=remat, compile=False)
        return [program.peak_bytes for program in pipe.programs(model.params, model.batch)]

    none, full, mixed = peaks("none"), peaks("full"), peaks(["full", "full", "none", "none"])
    assert mixed == [*full[:2], *none[2:]]
    assert full[0] < none[0]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_full_remat_keeps_what_was_drawn_and_nothing_else(dropout: float) -> None:
    def attend(params: Tensor, batch: Tensor) -> Tensor:
        q, k, v = (batch @ params).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).exp()

    schedule = schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline([attend], lambda y, _: y.sum(), schedule, remat="full", compile=False)
    (program,) = pipe.programs([rand(8, 24)], rand(2, 5, 8))
    (forward,) = (i for i in program.instructions if isinstance(i, Compute) and i.action.op == "F")
    assert (len(forward.outputs) == 1) == (dropout == 0)  # the loss


def test_evaluation_keeps_nothing_for_a_backward() -> None:
    model = MODELS["gpt"](2, 8)
    watch, pipe = watched(model, schedules.gpipe(ranks=2, microbatches=8))
    pipe.value(model.params, model.batch)
    evaluation = watch.peak
    watch.peak = 0
    pipe.step(model.params, model.batch)
    assert evaluation < watch.peak / 10


def test_an_activation_is_gone_after_its_last_use() -> None:
    """With `compile=False`: each stage's output is read by the next stage's kernel alone."""
    outputs: list[weakref.ref[Tensor]] = []
    alive: list[list[bool]] = []

    def compile(module: fx.GraphModule, examples: Any) -> Callable[[list[Tensor]], Any]:
        module.graph.set_codegen(fx.graph._BoxedCodeGen())
        module.recompile()

        def call(inputs: list[Tensor]) -> Any:
            alive.append([ref() is not None for ref in outputs])
            made = module.forward(inputs)
            outputs.append(weakref.ref(made[0]))
            return made

        return call

    stages = [mlp_layer] * 4
    params = [{"w": rand(3, 3), "b": rand(3)} for _ in stages]
    schedule = schedules.looped_bfs(ranks=2, microbatches=1, stages_per_rank=2)
    pipe = fpipe.pipeline(stages, lambda y, _: y.sum(), schedule, compile=compile)
    pipe.forward(params, rand(4, 3))
    assert alive == [[], [True], [False, True], [False, False, True]]


def test_inputs_are_freed_while_a_piece_runs() -> None:
    """A boxed call hands its inputs over: nothing else holds what nobody reads afterwards."""
    model = MODELS["gpt"](1, 2)
    schedule = schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=False)
    (program,) = pipe.programs(model.params, model.batch)
    (backward,) = (i for i in program.instructions if isinstance(i, Compute) and i.action.op == "B")
    bound = {slot for _, _, slot in (*program.bindings.params, *program.bindings.batch)}
    bound |= {slot for _, slot in program.bindings.seeds}
    residuals = set(backward.inputs) - bound
    assert residuals
    assert residuals == set(backward.last_use)
