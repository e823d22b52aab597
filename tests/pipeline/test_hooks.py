"""Hooks of tensors, modules and of what is saved, and derivatives within a stage: as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fpipe
from tests.eager import check_members, check_rows, check_stages, eager, pipelines, with_cuts
from tests.models import assert_same, rand

PARAMS = [rand(3, 3), rand(3)]
BATCH = rand(4, 3)


def first(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).tanh()


def clamped(gradient: Tensor) -> Tensor:
    """Of a sum another than the sum of each."""
    return gradient.clamp(-0.01, 0.01)


def nothing(gradient: Tensor) -> None:
    """Leaves the gradient as it is."""


def hooked(*hooks: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def stage(w: Tensor, x: Tensor) -> Tensor:
        y = x * w
        for hook in hooks:
            y.register_hook(hook)
        return y.sin() * y

    return stage


def hooked_input(w: Tensor, x: Tensor) -> Tensor:
    x.register_hook(clamped)
    return x.sin() * w * x


def hooked_parameter(w: Tensor, x: Tensor) -> Tensor:
    w.register_hook(clamped)
    return x.sin() * w * x + w


def hooked_output(w: Tensor, x: Tensor) -> Tensor:
    y = x * w
    y.register_hook(clamped)
    return y


def removed(w: Tensor, x: Tensor) -> Tensor:
    y = x * w
    y.register_hook(torch.neg).remove()
    return y


def hooked_view(w: Tensor, x: Tensor) -> Tensor:
    y = x * w
    y[:1].register_hook(torch.neg)
    row = y[1:]
    row.register_hook(clamped)
    return y * row


def hooked_before_a_write(w: Tensor, x: Tensor) -> Tensor:
    y = x * w
    y.register_hook(torch.neg)
    y.mul_(2)
    return y


def hooked_within_checkpoint(w: Tensor, x: Tensor) -> Tensor:
    made: Tensor = checkpoint(lambda y: hooked(clamped)(w, y), x, use_reentrant=False)
    return made


def packed(w: Tensor, x: Tensor) -> Tensor:
    """What is kept is not what was saved: the gradient is another."""
    with saved_tensors_hooks(lambda kept: (kept * 2, 3), lambda held: held[0] + held[1]):
        y = (x * w).exp()
    return y.sin()


def on_cpu(w: Tensor, x: Tensor) -> Tensor:
    with save_on_cpu():
        return (x * w).tanh().square()


def slope(create_graph: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def stage(w: Tensor, x: Tensor) -> Tensor:
        energy = (x * w).sin().square().sum()
        made: Tensor = torch.autograd.grad(energy, x, create_graph=create_graph)[0]
        return made * w + x

    return stage


def slope_by_a_parameter(w: Tensor, x: Tensor) -> Tensor:
    return x * (w - torch.autograd.grad((x * w).cos().sum(), w, create_graph=True)[0])


def slope_with_a_hook(w: Tensor, x: Tensor) -> Tensor:
    y = x * w
    y.register_hook(lambda gradient: gradient * 3)
    return y * torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0]


def slope_by_a_leaf_of_its_own(w: Tensor, x: Tensor) -> Tensor:
    own = x.detach().requires_grad_()
    return x * w + torch.autograd.grad((own * w).sin().sum(), own, create_graph=True)[0]


STAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scale": hooked(lambda gradient: gradient * 2),
    "clamp": hooked(clamped),
    "nothing": hooked(nothing),
    "several": hooked(clamped, nothing, torch.neg),
    "of the input": hooked_input,
    "of the output": hooked_output,
    "of a parameter": hooked_parameter,
    "removed": removed,
    "of a view": hooked_view,
    "before a write": hooked_before_a_write,
    "within checkpoint": hooked_within_checkpoint,
    "packed": packed,
    "on the CPU": on_cpu,
    "slope": slope(create_graph=False),
    "slope that is differentiated": slope(create_graph=True),
    "slope by a parameter": slope_by_a_parameter,
    "slope with a hook": slope_with_a_hook,
    "slope by a leaf of its own": slope_by_a_leaf_of_its_own,
}


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_hooks_and_inner_gradients_are_as_in_eager(stage: Any) -> None:
    check_stages([first, stage], PARAMS, BATCH)


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_hooks_and_inner_gradients_in_a_forward(stage: Any) -> None:
    """A pipeline differentiates nothing there, and the function may."""
    w, v = (leaf.clone().requires_grad_() for leaf in PARAMS)
    expected = torch.cat([stage(v, first(w, part)) for part in BATCH.chunk(2)])
    pipe = next(pipelines([first, stage]))
    assert_same(pipe.forward(PARAMS, BATCH), expected.detach())


def test_hook_that_reads_a_number_is_refused() -> None:
    def stage(w: Tensor, x: Tensor) -> Tensor:
        y = x * w
        y.register_hook(lambda gradient: gradient / max(gradient.norm().item(), 1.0))
        return y

    for pipe in pipelines([first, stage]):
        with pytest.raises(
            fpipe.StageError, match=r"branches on data or reads a value.* at .*test_hooks\.py:\d+"
        ):
            pipe.step(PARAMS, BATCH)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (
            lambda w, y: w.register_post_accumulate_grad_hook(print),
            "registers a hook for what has been accumulated",
        ),
        (lambda w, y: y.retain_grad(), r"retain_grad\(\)"),
        (lambda w, y: y.sum().backward(), r"calls backward\(\)"),
        (lambda w, y: torch.autograd.backward(y.sum()), r"calls backward\(\)"),
    ],
    ids=["accumulated", "retain_grad", "backward", "torch.autograd.backward"],
)
def test_what_fills_grad_is_refused_by_name(call: Any, rule: str) -> None:
    def stage(w: Tensor, x: Tensor) -> Tensor:
        y = x * w
        call(w, y)
        return y

    for pipe in pipelines([first, stage]):
        with pytest.raises(
            fpipe.StageError, match=rf"{rule}.* at .*test_hooks\.py:\d+: .* no \.grad"
        ):
            pipe.step(PARAMS, BATCH)


# ── what several stages read ────────────────────────────────────────────────────────────────────


def steps_equal(loss_fn: Any, params: Any, stages: int) -> None:
    expected = eager(loss_fn, params, BATCH)
    for schedule in (fpipe.schedules.gpipe, fpipe.schedules.zb_h1):
        for remat in ("none", "full"):
            pipe = fpipe.pipeline(
                loss_fn,
                schedule=schedule(ranks=stages, microbatches=2),
                compile=False,
                remat=remat,
            )
            assert_same(pipe.step(params, BATCH), expected)
    assert_same(pipe.value(params, BATCH), expected.loss)


@pytest.mark.parametrize("behind", [False, True])
def test_hook_hears_the_whole_gradient_once(behind: bool) -> None:
    """Of a value that its own stage and two later ones read."""

    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        x = first(params[0], batch)
        y = x * 1.0 if behind else fpipe.cut(x * 1.0)
        y.register_hook(clamped)
        z = fpipe.cut(y.sin()) if behind else y.sin()
        z = fpipe.cut(z * y * params[1])
        return (z * y + y.cos() * params[1]).square().mean()

    steps_equal(loss_fn, PARAMS, 3)


def test_hook_on_a_parameter_of_several_stages_is_refused() -> None:
    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        w.register_hook(clamped)
        return (fpipe.cut(x * w) * w).square().mean()

    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    with pytest.raises(
        fpipe.StageError, match=r"registers a hook on a tensor that several stages read.* one of"
    ):
        pipe.step(PARAMS[1], BATCH)


def test_hook_on_what_is_made_of_a_parameter_of_several_stages() -> None:
    """As the refusal advises."""

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        own = w * 1.0
        own.register_hook(clamped)
        return (fpipe.cut(x * own) * w).square().mean()

    steps_equal(loss_fn, PARAMS[1], 2)


# ── modules ─────────────────────────────────────────────────────────────────────────────────────


def double_in(module: Any, inputs: Any, outputs: Any) -> Any:
    return tuple(g if g is None else g * 2 for g in inputs)


def clamp_out(module: Any, outputs: Any) -> Any:
    return tuple(map(clamped, outputs))


def keep_output(module: Any, given: Any, output: Any) -> None:
    module.seen = output


def negate_output(module: Any, given: Any, output: Any) -> Any:
    return -output


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "backward": lambda m: m.register_full_backward_hook(double_in),
    "before the backward": lambda m: m.register_full_backward_pre_hook(clamp_out),
    "both": lambda m: (
        m.register_full_backward_pre_hook(clamp_out),
        m.register_full_backward_hook(double_in),
    ),
    "forward": lambda m: m.register_forward_hook(negate_output),
    "forward, that keeps what it sees": lambda m: m.register_forward_hook(keep_output),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    block = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*block).double()


def whole(module: nn.Module) -> Callable[[Any, Any], Tensor]:
    def loss_fn(params: Any, batch: Any) -> Tensor:
        made: Tensor = torch.func.functional_call(module, params, (batch,))
        return made.square().mean()

    return loss_fn


def of_module(module: nn.Module, schedule: str, remat: Any = "none") -> Any:
    return fpipe.from_module(
        module,
        schedule=getattr(fpipe.schedules, schedule)(ranks=3, microbatches=2),
        cuts=["0", "1"],
        loss=lambda y, _: y.square().mean(),
        compile=False,
        remat=remat,
    )


def detached(module: nn.Module) -> dict[str, Tensor]:
    return {name: leaf.detach() for name, leaf in module.named_parameters()}


@pytest.mark.parametrize("name", ["1", "1.0", "2.1"])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_hooks_of_modules(hook: Callable[[nn.Module], Any], name: str) -> None:
    """Of a block, whose output crosses a cut; of a layer in it; of the last."""
    module = model()
    hook(module.get_submodule(name))
    expected = eager(whole(module), detached(module), BATCH)
    for schedule, remat in (("gpipe", "none"), ("zb_h1", "full")):
        pipe = of_module(module, schedule, remat)
        assert_same(pipe.step(detached(module), {"input": BATCH}), expected)
    assert_same(pipe.value(detached(module), {"input": BATCH}), expected.loss)


def test_hook_of_all_modules_is_refused() -> None:
    """torch's counter of FLOPs has one, too."""
    module = model()
    handle = nn.modules.module.register_module_full_backward_hook(double_in)
    try:
        with pytest.raises(fpipe.StageError, match="while a backward hook of all modules is regis"):
            of_module(module, "zb_h1").step(detached(module), {"input": BATCH})
    finally:
        handle.remove()


def test_what_a_forward_hook_has_kept_cannot_be_read_later() -> None:
    """It is a value of the trace. A module of `fpipe.from_module` has none of it left."""
    module = model()
    layer: Any = module.get_submodule("1")
    layer.register_forward_hook(keep_output)
    of_module(module, "gpipe").step(detached(module), {"input": BATCH})
    assert not hasattr(layer, "seen")

    def stage(w: Tensor, x: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(module, own, (x * w,))
        return made

    own = detached(module)
    for keeps in pipelines([first, stage]):
        keeps.step(PARAMS, BATCH)
        for reads in pipelines([first, lambda w, x: x * w + layer.seen.sum()]):
            with pytest.raises(fpipe.StageError, match=r"closes over an abstract tensor"):
                reads.step(PARAMS, BATCH)


def test_modules_with_backward_hooks_in_stages() -> None:
    module = model()
    for hook in HOOKS.values():
        hook(module.get_submodule("1"))
    own = detached(module)

    def stage(w: Tensor, x: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(module, own, (x * w,))
        return made

    check_stages([first, stage], PARAMS, BATCH)


# ── within transforms, where torch hears no hook ────────────────────────────────────────────────


def with_module(hook: str) -> Callable[[Tensor, Tensor], Tensor]:
    module = model()
    HOOKS[hook](module.get_submodule("1"))
    own = detached(module)

    def stage(w: Tensor, x: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(module, own, (x * w,))
        return made

    return stage


def in_transform(pipe: Any, transform: str) -> Any:
    """What a transform of a pipeline gives."""
    if transform == "vmap":
        return fpipe.vmap(pipe).step([torch.stack([leaf, leaf * 2]) for leaf in PARAMS], BATCH)
    if transform == "per_example_grads":
        return fpipe.per_example_grads(pipe).step(PARAMS, BATCH)
    if transform == "jvp":
        return fpipe.jvp(pipe).value(PARAMS, BATCH, PARAMS)
    return fpipe.hvp(pipe).step(PARAMS, BATCH, PARAMS)


TRANSFORMS = pytest.mark.parametrize("transform", ["vmap", "per_example_grads", "jvp", "hvp"])


@TRANSFORMS
@pytest.mark.parametrize(
    ("stage", "rule"),
    [
        (hooked(clamped), "registers a hook on a tensor within a transform"),
        (with_module("backward"), "calls a module that has backward hooks within a transform"),
        (
            with_module("before the backward"),
            "calls a module that has backward hooks within a transform",
        ),
        (slope(create_graph=True), r"differentiates with torch\.autograd .* torch\.func\.grad"),
    ],
    ids=["tensor", "module", "module, before", "slope"],
)
def test_hooks_within_transforms_are_refused(stage: Any, rule: str, transform: str) -> None:
    for pipe in pipelines([first, stage]):
        with pytest.raises(fpipe.StageError, match=rule) as refused:
            in_transform(pipe, transform)
        assert "test_hooks.py:" in str(refused.value)


@pytest.mark.parametrize("stage", [packed, on_cpu])
def test_saved_tensor_hooks_of_members_and_rows(stage: Any) -> None:
    check_members([first, stage], PARAMS, BATCH)
    check_rows([first, stage], PARAMS, BATCH)


@pytest.mark.parametrize("transform", ["jvp", "hvp"])
def test_saved_tensor_hooks_in_a_direction_are_right_or_refused(transform: str) -> None:
    """Never without the hooks, which make the gradient another."""
    stages = [first, packed]
    own = [leaf.clone().requires_grad_() for leaf in PARAMS]
    loss = torch.stack([with_cuts(stages)(own, part) for part in BATCH.chunk(2)]).mean()
    grads = torch.autograd.grad(loss, own, create_graph=True)
    along = torch.stack([(g * leaf).sum() for g, leaf in zip(grads, PARAMS, strict=True)]).sum()
    products = list(torch.autograd.grad(along, own))
    for pipe in pipelines(stages):
        try:
            found = in_transform(pipe, transform)
        except fpipe.StageError as refused:
            assert "saved-tensor hooks" in str(refused) and "test_hooks.py:" in str(refused)
        else:
            right = along.detach() if transform == "jvp" else products
            assert_same(found.jvp if transform == "jvp" else found.hvp, right)


def test_hooks_in_a_gradient_of_the_value() -> None:
    """`torch.func.grad` of a pipeline is a step, which hears them."""
    for name in ("scale", "of the input", "slope that is differentiated"):
        stages = [first, STAGES[name]]
        expected = eager(with_cuts(stages), PARAMS, BATCH)
        for pipe in pipelines(stages):

            def value(params: Any, pipe: Any = pipe) -> Any:
                return pipe.value(params, BATCH)

            assert_same(torch.func.grad(value)(PARAMS), expected.grads)


def test_saved_tensor_hooks_in_a_gradient_of_the_value() -> None:
    """torch.func.grad takes none in what it differentiates, which a pipeline's stages are not."""
    for pipe in pipelines([first, packed]):

        def value(params: Any, pipe: Any = pipe) -> Any:
            return pipe.value(params, BATCH)

        assert_same(torch.func.grad(value)(PARAMS), pipe.step(PARAMS, BATCH).grads)
