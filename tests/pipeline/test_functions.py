"""`torch.autograd.Function`s whose forward takes ctx, however they are called and wherever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe.divide.function_tracer import FunctionTracer
from fpipe.inputs.signature import TreeShape
from fpipe.pieces.compiler import Compiler
from fpipe.pieces.partition import save_all
from fpipe.pieces.piece import Piece
from fpipe.plan.codes import codes_of_stages, live_leaves
from fpipe.pytree import flatten
from fpipe.spec.objective import Objective
from tests.eager import check_members, check_rows, check_stages, eager, pipelines, with_cuts
from tests.models import assert_same, rand
from tests.stage.pieces import count, ops, pieces_of

PARAMS = [rand(3, 3), rand(3)]
BATCH = rand(4, 3)


def first(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).tanh()


class Cubed(torch.autograd.Function):
    """Its gradient is five times what it should be, so that it is seen to be used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 15 * grads[0] * x * x


cubed = Cubed.apply


class Attributes(torch.autograd.Function):
    """Keeps on ctx what it needs: numbers, shapes, tensors, and a dict of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scale, ctx.shape = 2.5, x.shape
        ctx.sine = x.sin()
        ctx.more = {"pair": (x, 3)}
        return x.reshape(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, three = ctx.more["pair"]
        return grads[0].reshape(ctx.shape) * ctx.scale * ctx.sine + x * three


class Waves(torch.autograd.Function):
    """Two outputs, one of which is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        sine, cosine = x.sin(), x.cos()
        ctx.save_for_backward(x, cosine, None)
        return sine, cosine

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, cosine, nothing = ctx.saved_tensors
        assert nothing is None
        return grads[0] * cosine * 2 - grads[1] * x


class Given(torch.autograd.Function):
    """Takes what is no tensor, and returns None for it."""

    @staticmethod
    def forward(
        ctx: Any, factor: float, x: Tensor, how: str, dtype: torch.dtype, no: None, n: Any
    ) -> Tensor:
        ctx.factor, ctx.how, ctx.n = factor, how, n
        return (getattr(x, how)() * factor).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (
            None,
            getattr(grads[0], ctx.how)() * ctx.factor + ctx.n["n"][0],
            None,
            None,
            None,
            None,
        )


class NoneFor(torch.autograd.Function):
    """Has no gradient by the second of its tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0], None


class Asks(torch.autograd.Function):
    """Asks of which of its arguments a gradient is wanted, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, n: int) -> Tensor:
        ctx.wanted = ctx.needs_input_grad
        ctx.save_for_backward(x, w)
        return x * w * (n + sum(ctx.wanted))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert ctx.needs_input_grad == ctx.wanted
        x, w = ctx.saved_tensors
        by_x = grads[0] * w if ctx.needs_input_grad[0] else None
        by_w = (grads[0] * x).sum(0) if ctx.needs_input_grad[1] else None
        return by_x, by_w, None


class Marked(torch.autograd.Function):
    """Says of its second output, a float, and of its third that they have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size, order = x.abs(), x.argsort(-1)
        ctx.mark_non_differentiable(size, order)
        return x * 2, size, order

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


class Bare(torch.autograd.Function):
    """Sees which of its outputs was used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (0 if grads[0] is None else grads[0]) + (7.0 if grads[1] is None else grads[1])


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        given = grads[0].clone()
        given[ctx.saved_tensors[0] < 0] = 0.5
        return given


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


class Activation(nn.Module):
    """Keeps a name for a Function, as modules that choose a kernel do."""

    def __init__(self) -> None:
        super().__init__()
        self.function: Callable[..., Any] = Cubed.apply

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.function(x)
        return made


ACTIVATION = Activation()


def used_twice(w: Tensor, x: Tensor) -> Tensor:
    """By its value and by the one that it was made in place of."""
    y = x * w
    made: Tensor = Dirty.apply(y)
    return made * y


def both_waves(w: Tensor, x: Tensor) -> Tensor:
    sine, cosine = Waves.apply(x * w)
    return sine * cosine.exp()


def marked(w: Tensor, x: Tensor) -> Tensor:
    doubled, size, order = Marked.apply(x * w)
    return doubled * size + order


def within_checkpoint(use_reentrant: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def stage(w: Tensor, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(
            lambda y: cubed(y * w).sin(), x * 1.0, use_reentrant=use_reentrant
        )
        return made

    return stage


STAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by its class": lambda w, x: Cubed.apply(x * w),
    "by a name": lambda w, x: cubed(x * w),
    "by an attribute of a module": lambda w, x: ACTIVATION(x * w),
    "attributes": lambda w, x: Attributes.apply(x * w),
    "outputs": both_waves,
    "one output of two": lambda w, x: Waves.apply(x * w)[1],
    "no tensors": lambda w, x: Given.apply(2.5, x * w, "tanh", torch.float64, None, {"n": [3]}),
    "None": lambda w, x: NoneFor.apply(x, w),
    "needs_input_grad": lambda w, x: Asks.apply(x, w, 1),
    "needs_input_grad of a constant": lambda w, x: Asks.apply(x * w, w.detach(), 1),
    "needs_input_grad without any": lambda w, x: Asks.apply(x.detach(), w.detach(), 1) * w,
    "marked": marked,
    "first of two": lambda w, x: Bare.apply(x * w)[0],
    "second of two": lambda w, x: Bare.apply(x * w)[1],
    "once differentiable": lambda w, x: Once.apply(x * w),
    "dirty": used_twice,
    "twice": lambda w, x: cubed(cubed(x * w) + x),
    "of a parameter": lambda w, x: x * cubed(w),
    "of the input": lambda w, x: cubed(x) * w,
    "without gradients": lambda w, x: cubed(x.detach()) * w,
    "within checkpoint": within_checkpoint(use_reentrant=False),
    "within reentrant checkpoint": within_checkpoint(use_reentrant=True),
}


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_functions_are_as_in_eager(stage: Any) -> None:
    check_stages([first, stage], PARAMS, BATCH)


def test_what_is_not_trained_is_not_asked_for() -> None:
    """`needs_input_grad` says so."""
    stages = [first, lambda w, x: Asks.apply(x, w, 1)]
    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
    expected = eager(with_cuts([first, lambda w, x: Asks.apply(x, w.detach(), 1)]), PARAMS, BATCH)
    for pipe in pipelines(stages, trainable=[True, False]):
        found = pipe.with_schedule(schedule).step(PARAMS, BATCH)
        assert found.grads[1] is None
        assert_same((found.loss, found.grads[0]), (expected.loss, expected.grads[0]))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.activation = Activation()

    def forward(self, x: Tensor) -> Tensor:
        sine, cosine = Waves.apply(self.activation(self.linear(x)))
        return x + sine * cosine


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_functions_in_a_module(schedule: str, remat: Any) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Layer(), Layer()).double()
    pipe = fpipe.from_module(
        module,
        schedule=getattr(fpipe.schedules, schedule)(ranks=2, microbatches=2),
        cuts=["0"],
        loss=lambda y, _: y.square().mean(),
        compile=False,
        remat=remat,
    )
    params = {name: leaf.detach() for name, leaf in module.named_parameters()}

    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(module, params, (batch,))
        return made.square().mean()

    assert_same(pipe.step(params, {"input": BATCH}), eager(loss_fn, params, BATCH))


# ── which piece a backward belongs to ───────────────────────────────────────────────────────────


class Linear(torch.autograd.Function):
    """A product; each gradient is made by an operation that is found nowhere else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        both = grads[0].tanh()
        return (both @ w.t()).sin(), (x.t() @ both).cos()


def check_pieces(pieces: dict[str, Piece]) -> None:
    assert count(pieces["F"], ["mm"]) == 1
    assert count(pieces["I"], ["mm"]) == count(pieces["W"], ["mm"]) == 1
    assert {"tanh", "sin"} <= set(ops(pieces["I"])) and "cos" not in ops(pieces["I"])
    assert "cos" in ops(pieces["W"]) and not {"tanh", "sin"} & set(ops(pieces["W"]))


def test_gradients_of_a_function_belong_to_what_they_feed() -> None:
    check_pieces(pieces_of(lambda w, x: Linear.apply(x, w), PARAMS[0], BATCH))


def test_gradients_of_a_function_behind_a_cut_belong_to_what_they_feed() -> None:
    stages = [lambda w, x: x * w, lambda w, x: Linear.apply(x, w), lambda w, x: x * w]
    params, spec = flatten([rand(3), PARAMS[0], rand(3)])
    batch, batch_spec = flatten(BATCH)
    shape = TreeShape.of(spec, params)
    tracer = FunctionTracer(with_cuts(stages), 3, Objective())
    chain = tracer([shape] * 3, TreeShape.of(batch_spec, batch), "step", 4)
    codes = codes_of_stages(chain, live_leaves([chain]), [save_all] * 3, Compiler(False))
    check_pieces(dict(codes[1].pieces))


# ── within transforms ───────────────────────────────────────────────────────────────────────────


class Ruled(torch.autograd.Function):
    """Has a rule for vmap, and a forward that takes ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 15 * grads[0] * x * x

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return Ruled.apply(x), in_dims[0]


class Generated(torch.autograd.Function):
    """Lets torch make a rule for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 15 * grads[0] * x * x


class SetsUp(torch.autograd.Function):
    """Has no rule for vmap, though a setup_context."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 15 * grads[0] * x * x


MAPPED = pytest.mark.parametrize("function", [Ruled, Generated], ids=["a rule", "a generated one"])


@MAPPED
def test_members_of_a_function_with_a_rule(function: Any) -> None:
    check_members([first, lambda w, x: function.apply(x * w)], PARAMS, BATCH)


@MAPPED
def test_single_rows_of_a_function_with_a_rule(function: Any) -> None:
    check_rows([first, lambda w, x: function.apply(x * w)], PARAMS, BATCH)


@MAPPED
def test_vmap_within_a_stage(function: Any) -> None:
    check_stages(
        [first, lambda w, x: torch.func.vmap(lambda row: function.apply(row * w))(x)],
        PARAMS,
        BATCH,
        plainly=[first, lambda w, x: function.apply(x * w)],
    )


def slope(w: Tensor, x: Tensor) -> Tensor:
    """The derivative of a Function's result, by autograd itself."""
    own = x if x.requires_grad else x.clone().requires_grad_()
    made: Tensor = torch.autograd.grad(cubed(own * w).sum(), own, create_graph=True)[0]
    return made


@pytest.mark.parametrize("function", [Cubed, Ruled, Generated, SetsUp])
def test_grad_within_a_stage(function: Any) -> None:
    """torch itself takes no forward with ctx there."""
    check_stages(
        [first, lambda w, x: torch.func.grad(lambda x: function.apply(x * w).sum())(x)],
        PARAMS,
        BATCH,
        plainly=[first, slope],
    )


def rows_of(function: Any) -> Any:
    """A stage that takes the gradient of a Function for each row."""
    return lambda w, x: torch.func.vmap(torch.func.grad(lambda row: function.apply(row * w).sum()))(
        x
    )


def test_vmap_of_grad_within_a_stage() -> None:
    check_stages([first, rows_of(Generated)], PARAMS, BATCH, plainly=[first, slope])


def test_vmap_of_grad_with_a_forward_that_takes_ctx_is_refused_by_name() -> None:
    for pipe in pipelines([first, rows_of(Ruled)]):
        with pytest.raises(
            fpipe.StageError,
            match=r"calls .*Ruled, .* in a derivative of torch\.func within vmap at",
        ):
            pipe.step(PARAMS, BATCH)


@pytest.mark.parametrize("function", [Cubed, SetsUp])
@pytest.mark.parametrize("transform", ["vmap", "per_example_grads", "a vmap of the stage"])
def test_function_without_a_rule_for_vmap_is_refused_by_name(function: Any, transform: str) -> None:
    def mapped(w: Tensor, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: function.apply(row * w))(x)

    own = transform == "a vmap of the stage"
    stages = [first, mapped if own else lambda w, x: function.apply(x * w)]
    rule = (
        rf"calls .*{function.__name__}, a torch\.autograd\.Function that has no rule for vmap.* at "
        r".*test_functions\.py:\d+: write its vmap, a staticmethod; or setup_context .* "
        r"generate_vmap_rule = True"
    )
    for pipe in pipelines(stages):
        params = PARAMS
        if transform == "vmap":
            pipe, params = fpipe.vmap(pipe), [torch.stack([p, p * 2]) for p in PARAMS]
        elif transform == "per_example_grads":
            pipe = fpipe.per_example_grads(pipe)
        with pytest.raises(fpipe.StageError, match=rule):
            pipe.step(params, BATCH)


@pytest.mark.parametrize("function", [Cubed, Ruled, Generated, SetsUp])
@pytest.mark.parametrize("transform", [fpipe.jvp, fpipe.hvp])
def test_direction_of_a_function_without_a_rule_is_refused_by_name(
    function: Any, transform: Any
) -> None:
    rule = rf"calls .*{function.__name__}, .* has no jvp of its own.* at .*test_functions\.py:\d+: "
    for pipe in pipelines([first, lambda w, x: function.apply(x * w)]):
        with pytest.raises(fpipe.StageError, match=rule):
            made = transform(pipe)
            getattr(made, "step" if transform is fpipe.hvp else "value")(PARAMS, BATCH, PARAMS)
