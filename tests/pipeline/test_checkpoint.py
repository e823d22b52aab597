"""`torch.utils.checkpoint` within what is traced."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import fpipe
from fpipe import pytree, schedules
from tests.meter import Meter
from tests.models import rand

aten = torch.ops.aten

WIDTH = 8
Params = list[dict[str, Tensor]]
Block = Callable[[dict[str, Tensor], Tensor], Tensor]


def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
    h = F.gelu(F.layer_norm(x, (WIDTH,)) @ p["a"])
    return x + F.gelu(h @ p["b"]) @ p["c"]


def saves_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    product = op is aten.mm.default
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


def selective(choice: Any) -> Any:
    return partial(create_selective_checkpoint_contexts, choice)


def nested(p: dict[str, Tensor], x: Tensor) -> Tensor:
    inner = checkpoint(block, p, x, use_reentrant=False)
    return checkpoint(block, p, inner, use_reentrant=True)


BLOCKS: dict[str, Block] = {
    "plain": block,
    "reentrant": partial(checkpoint, block, use_reentrant=True),
    "not reentrant": partial(checkpoint, block, use_reentrant=False),
    "saves": partial(checkpoint, block, use_reentrant=False, context_fn=selective(saves_products)),
    "saves a list": partial(
        checkpoint, block, use_reentrant=False, context_fn=selective([aten.mm.default])
    ),
    "saves none": partial(
        checkpoint, block, use_reentrant=False, context_fn=selective(lambda *_, **__: False)
    ),
}


def layer() -> dict[str, Tensor]:
    wide = 4 * WIDTH
    return {"a": rand(WIDTH, wide) / 4, "b": rand(wide, wide) / 4, "c": rand(wide, WIDTH) / 4}


DEEP = [[layer() for _ in range(3)] for _ in range(2)]
PARAMS = [layers[:2] for layers in DEEP]
BATCH = rand(128, WIDTH)


def stage_of(own: Block) -> Callable[[Params, Tensor], Tensor]:
    def stage(params: Params, x: Tensor) -> Tensor:
        for p in params:
            x = own(p, x)
        return x

    return stage


def loss(y: Tensor, _: Any) -> Tensor:
    return y.square().mean()


def checkpointed(
    own: Block, *, cut: bool = False, stages: int = 2, **options: Any
) -> fpipe.Pipeline:
    stage = stage_of(own)
    schedule = options.pop("schedule", schedules.gpipe(ranks=2, microbatches=4))
    options = {"compile": False} | options
    if not cut:
        return fpipe.pipeline([stage] * stages, loss, schedule, **options)

    def loss_fn(params: list[Params], batch: Tensor) -> Tensor:
        return loss(stage(params[1], fpipe.cut(stage(params[0], batch))), batch)

    return fpipe.pipeline(loss_fn, schedule=schedule, **options)


def peaks(pipe: fpipe.Pipeline, params: list[Params] = PARAMS) -> list[int]:
    return [program.peak_bytes for program in pipe.programs(params, BATCH)]


@cache
def step_without_checkpoints(cut: bool, schedule: fpipe.Schedule) -> fpipe.Step:
    return checkpointed(block, cut=cut).with_schedule(schedule).step(PARAMS, BATCH)


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_answer_does_not_depend_on_it(name: str, cut: bool) -> None:
    turn = list(BLOCKS).index(name) % 2
    pipe = checkpointed(BLOCKS[name], cut=cut, remat="full" if cut == turn else "none")
    for family in ("gpipe", "zb_h1"):
        schedule = schedules.get(family, ranks=2, microbatches=4)
        expected = step_without_checkpoints(cut, schedule)
        found = pipe.with_schedule(schedule).step(PARAMS, BATCH)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_it_holds_one_block_at_a_time() -> None:
    held = {name: max(peaks(checkpointed(own), DEEP)) for name, own in BLOCKS.items()}
    whole = max(peaks(checkpointed(block, remat="full"), DEEP))
    assert held["reentrant"] == held["not reentrant"] == held["saves none"]
    assert held["reentrant"] < 0.7 * whole < 0.7 * held["plain"]
    assert held["saves"] == held["saves a list"]
    assert held["reentrant"] < held["saves"] < held["plain"]


def test_a_function_with_cuts_holds_one_block_at_a_time() -> None:
    names = ("reentrant", "saves", "plain")
    held = {name: max(peaks(checkpointed(BLOCKS[name], cut=True), DEEP)) for name in names}
    whole = max(peaks(checkpointed(block, cut=True, remat="full"), DEEP))
    assert held["reentrant"] < 0.7 * whole < 0.7 * held["plain"]
    assert held["reentrant"] < held["saves"] < held["plain"]


@pytest.mark.parametrize("name", BLOCKS)
def test_peak_is_what_is_held(name: str) -> None:
    schedule = schedules.gpipe(ranks=1, microbatches=3)
    stage = stage_of(BLOCKS[name])
    pipe = fpipe.pipeline([stage], loss, schedule, compile=False)
    pipe.step(PARAMS[:1], BATCH)
    (program,) = pipe.programs(PARAMS[:1], BATCH)
    with Meter([*pytree.flatten(PARAMS[:1])[0], BATCH]) as meter:
        pipe.step(PARAMS[:1], BATCH)
    assert meter.peak == pytest.approx(program.peak_bytes, rel=0.05)


def test_segments_that_differ_in_it_are_not_alike() -> None:
    blocks = [block, BLOCKS["not reentrant"], block, block]

    def loss_fn(params: list[Params], batch: Tensor) -> Tensor:
        for index, (layers, own) in enumerate(zip(params, blocks, strict=True)):
            batch = stage_of(own)(layers, batch)
            batch = fpipe.cut(batch) if index < 3 else batch
        return loss(batch, None)

    schedule = schedules.gpipe(ranks=4, microbatches=1)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    programs = pipe.programs([PARAMS[0]] * 4, BATCH)
    assert programs[1].peak_bytes < programs[2].peak_bytes


def test_calls_within_calls_belong_to_the_outer() -> None:
    expected = checkpointed(lambda p, x: block(p, block(p, x))).step(PARAMS, BATCH)
    held = []
    for own in (nested, partial(checkpoint, nested, use_reentrant=False)):
        pipe = checkpointed(own)
        torch.testing.assert_close(pipe.step(PARAMS, BATCH), expected, rtol=0, atol=0)
        held.append(max(peaks(pipe)))
    assert held[0] != held[1]


def test_draws_once() -> None:
    def noisy(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return F.dropout(block(p, x), 0.5)

    results = []
    for own in (noisy, partial(checkpoint, noisy, use_reentrant=False)):
        torch.manual_seed(0)
        results.append(checkpointed(own).step(PARAMS, BATCH))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_writes_within_it() -> None:
    def writing(p: dict[str, Tensor], x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = 2 * x[:, 1]
        return block(p, x).mul_(2)

    expected = checkpointed(writing)
    own = checkpointed(partial(checkpoint, writing, use_reentrant=False))
    torch.testing.assert_close(own.step(PARAMS, BATCH), expected.step(PARAMS, BATCH))
    assert max(peaks(own)) < max(peaks(expected))


class Normed(nn.Module):
    """A layer with running statistics, computed again in its backward or not."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.last, self.again = nn.Linear(4, 2), again

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            return self.last(checkpoint(self.first, x, use_reentrant=False))
        return self.last(self.first(x))


def test_running_statistics_count_once() -> None:
    results = []
    for again in (False, True):
        torch.manual_seed(0)
        module = Normed(again)
        pipe = fpipe.from_module(
            module,
            schedule=schedules.one_f_one_b(ranks=2, microbatches=2),
            cuts=["first"],
            loss=lambda output, _: output.square().mean(),
            has_state=True,
            compile=False,
        )
        params = {name: parameter.detach() for name, parameter in module.named_parameters()}
        batch = {"x": torch.arange(32.0).view(8, 4).sin()}
        results.append(pipe.step(params, pipe.init_state(), batch))
    torch.testing.assert_close(results[1], results[0])
    assert results[1].state["first.1.num_batches_tracked"] == 2


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@pytest.mark.parametrize("write", [True, False])
def test_a_policy_that_counts(write: bool) -> None:
    """As that of torchtitan, which saves every second product."""
    products: list[int] = []  # returned by each piece, the forward's first

    def every_second() -> Any:
        seen = 0

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            nonlocal seen
            seen += op is aten.mm.default
            saves = op is aten.mm.default and seen % 2 == 0
            return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    def own(p: dict[str, Tensor], x: Tensor) -> Tensor:
        if write:  # which is found in the graph, and recorded again without
            x = Twice.apply(x).clone()
            x[:, 0] = 2 * x[:, 1]
        return block(p, x)

    def compile(module: fx.GraphModule, _: Any) -> Callable[[list[Tensor]], Any]:
        returned: Any = module.graph.output_node().args[0]
        products.append(sum(node.target is aten.mm.default for node in returned))
        module.graph.set_codegen(fx.graph._BoxedCodeGen())
        module.recompile()
        return module.forward

    around = partial(checkpoint, own, use_reentrant=False, context_fn=every_second)
    schedule = schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline([stage_of(around)], loss, schedule, compile=compile)
    expected = fpipe.pipeline([stage_of(own)], loss, schedule, compile=False)
    torch.testing.assert_close(pipe.step(DEEP[:1], BATCH), expected.step(DEEP[:1], BATCH))
    assert products[0] == 3  # one of the three of each block


def test_a_context_of_its_own() -> None:
    entered = []

    class Within(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            entered.append(func)
            return func(*args, **(kwargs or {}))

    own = partial(checkpoint, block, use_reentrant=False, context_fn=lambda: (Within(), Within()))
    expected = checkpointed(block).step(PARAMS, BATCH)
    torch.testing.assert_close(checkpointed(own).step(PARAMS, BATCH), expected)
    assert F.gelu in entered


def test_in_a_row() -> None:
    def row(p: dict[str, Tensor], x: Tensor) -> Tensor:
        functions = [partial(block, p), torch.tanh, partial(block, p)]
        return checkpoint_sequential(functions, 2, x, use_reentrant=False)

    def plain(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return block(p, torch.tanh(block(p, x)))

    torch.testing.assert_close(
        checkpointed(row).step(PARAMS, BATCH), checkpointed(plain).step(PARAMS, BATCH)
    )


@pytest.mark.parametrize("transform", ["vmap", "per_example_grads", "hvp"])
def test_transformed(transform: str) -> None:
    found = []
    for name in ("plain", "not reentrant"):
        pipe = checkpointed(BLOCKS[name])
        if transform == "vmap":
            stacked = pytree.tree_map(lambda leaf: torch.stack([leaf, 2 * leaf]), PARAMS)
            found.append(fpipe.vmap(pipe).step(stacked, BATCH))
        elif transform == "hvp":
            found.append(fpipe.hvp(pipe).step(PARAMS, BATCH, PARAMS))
        else:
            found.append(fpipe.per_example_grads(pipe).step(PARAMS, BATCH))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("implementation", CheckpointImpl)
def test_wrapped_modules(implementation: CheckpointImpl) -> None:
    def module() -> torch.nn.Sequential:
        torch.manual_seed(0)
        made = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(2)),
        )
        return made.double()

    wrapped = module()
    apply_activation_checkpointing(
        wrapped,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=implementation),
        check_fn=lambda own: isinstance(own, torch.nn.Sequential) and own is not wrapped,
    )
    steps = []
    for own in (module(), wrapped):
        pipe = fpipe.from_module(
            own,
            schedule=schedules.zb_h1(ranks=2, microbatches=2),
            cuts=["0"],
            loss=loss,
            compile=False,
        )
        params = {name: leaf.detach() for name, leaf in own.named_parameters()}
        steps.append(pipe.step(params, {"input": BATCH}))
    assert torch.equal(steps[0].loss, steps[1].loss)
    torch.testing.assert_close([*steps[1].grads.values()], [*steps[0].grads.values()])


def test_a_stage_that_fails_within_it() -> None:
    def wrong(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return x @ p["b"]

    for reentrant in (True, False):
        with pytest.raises(fpipe.StageError, match=r"test_checkpoint.py:\d+: RuntimeError"):
            checkpointed(partial(checkpoint, wrong, use_reentrant=reentrant)).step(PARAMS, BATCH)
    # Plain torch has it back.
    x = rand(2, 3).requires_grad_()
    checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


@pytest.mark.inductor
def test_compiled() -> None:
    params = [PARAMS[0][:1]]  # few kernels
    options: Any = {"schedule": schedules.gpipe(ranks=1, microbatches=4), "stages": 1}
    plain = checkpointed(block, **options)
    expected = plain.step(params, BATCH)
    # Some of it is kept, and some is computed again.
    pipe = checkpointed(BLOCKS["saves"], compile=True, **options)
    torch.testing.assert_close(pipe.step(params, BATCH), expected)
    assert max(peaks(pipe, params)) < max(peaks(plain, params))
