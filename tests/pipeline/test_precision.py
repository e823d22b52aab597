"""`mp_policy`: stages compute in one dtype, of parameters and with sums of gradients in another."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fpipe
from fpipe import BatchError, StageError, pytree, schedules
from tests.models import assert_same

HALF: Final = torch.bfloat16
WIDE: Final = torch.float32
MICROBATCHES: Final = 4
BOTH: Final = MixedPrecisionPolicy(HALF, WIDE, WIDE)


def layer(params: Any, x: Any) -> Tensor:
    x = x["x"] if isinstance(x, dict) else x
    return F.gelu(x @ params["w"]) + params["b"]


def loss(y: Tensor, batch: Any) -> Tensor:
    return (y - batch["y"]).square().mean()


def problem(stages: int = 2) -> tuple[list[Any], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    params = [{"w": draw(8, 8) / 3, "b": draw(8)} for _ in range(stages)]
    return params, {"x": draw(16, 8), "y": draw(16, 8)}


def expected_under(
    params: Any, batch: Any, policy: MixedPrecisionPolicy, forward: Any, loss: Any
) -> tuple[Tensor, Any]:
    """What FSDP2 computes: each microbatch in the policy's dtypes, and the sum of its gradients."""
    leaves, spec = pytree.flatten(params)
    sum_dtype = policy.reduce_dtype or policy.param_dtype or WIDE
    sums = [torch.zeros_like(leaf, dtype=sum_dtype) for leaf in leaves]
    total = torch.zeros(())
    for m in range(MICROBATCHES):
        part = {name: leaf.chunk(MICROBATCHES)[m] for name, leaf in batch.items()}
        own = [leaf.to(policy.param_dtype or leaf.dtype).requires_grad_() for leaf in leaves]
        inputs = part["x"]
        if policy.cast_forward_inputs:
            inputs = inputs.to(policy.param_dtype or inputs.dtype)
        output = forward(pytree.unflatten(spec, own), inputs)
        value = loss(output.to(policy.output_dtype or output.dtype), part) / MICROBATCHES
        grads = torch.autograd.grad(value, own)
        sums = [total + grad.to(sum_dtype) for total, grad in zip(sums, grads, strict=True)]
        total = total + value.detach()
    return total, pytree.unflatten(spec, [s.to(WIDE) for s in sums])


def chain(params: Any, x: Tensor) -> Tensor:
    for own in params:
        x = layer(own, x)
    return x


@pytest.mark.parametrize(
    "policy",
    [
        BOTH,
        MixedPrecisionPolicy(HALF),
        MixedPrecisionPolicy(HALF, WIDE),
        MixedPrecisionPolicy(reduce_dtype=torch.float64),
        MixedPrecisionPolicy(output_dtype=torch.float64),
        MixedPrecisionPolicy(torch.float64, WIDE, WIDE),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["one_f_one_b", "zbv"])
def test_stages_compute_what_the_policy_says(policy: MixedPrecisionPolicy, family: str) -> None:
    schedule = schedules.get(family, ranks=2, microbatches=MICROBATCHES)
    params, batch = problem(schedule.num_stages)
    pipe = fpipe.pipeline(
        [layer] * schedule.num_stages, loss, schedule, compile=False, mp_policy=policy
    )
    value, grads = pipe.step(params, batch)
    total, sums = expected_under(params, batch, policy, chain, loss)
    assert_same(
        [value.float(), grads], [total.float(), sums], 1e-6 if value.dtype != HALF else 1e-2
    )
    assert {leaf.dtype for leaf in pytree.flatten(grads)[0]} == {WIDE}
    assert value.dtype == pipe.value(params, batch).dtype
    forward = pipe.forward(params, batch)
    assert forward.dtype == (policy.output_dtype or policy.param_dtype or WIDE)


def test_values_between_stages_are_narrow_and_parameters_are_cast_once() -> None:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=MICROBATCHES)
    params, batch = problem()
    seen: list[Any] = []

    def noting(params: Any, x: Any) -> Tensor:
        y = layer(params, x)
        seen.append((params["w"].dtype, y.dtype))
        return y.float()  # is cast again, for the wire

    def post_sizes(**options: Any) -> list[str]:
        pipe = fpipe.pipeline([noting] * 2, loss, schedule, compile=False, **options)
        text = str(pipe.programs(params, batch)[1])
        return [line for line in text.splitlines() if "post " in line]

    narrow, wide = post_sizes(mp_policy=BOTH), post_sizes()
    assert seen[:2] == [(HALF, HALF)] * 2
    assert all("(64 bytes)" in line for line in narrow)
    assert all("(128 bytes)" in line for line in wide)
    pipe = fpipe.pipeline([layer] * 2, loss, schedule, compile=False, mp_policy=BOTH)
    with _Casts() as casts:
        pipe.step(params, batch)
    assert casts.shapes.count((8, 8)) == 2  # the weight of each stage, not of each microbatch


class _Casts(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the shapes of float32 tensors that are cast to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == HALF:
            self.shapes.append(tuple(result.shape))
        return result


def test_inputs_that_are_not_cast_stay_as_they_are() -> None:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=MICROBATCHES)
    params, batch = problem()
    policy = MixedPrecisionPolicy(HALF, WIDE, cast_forward_inputs=False)
    seen = []

    def mixed(params: Any, x: Any) -> Tensor:
        x = x["x"] if isinstance(x, dict) else x
        seen.append(x.dtype)
        return x.to(HALF) @ params["w"] + 0.5

    pipe = fpipe.pipeline([mixed] * 2, loss, schedule, compile=False, mp_policy=policy)
    pipe.step(params, batch)
    assert set(seen) == {WIDE, HALF}  # the batch, and what the first stage returns


def test_one_function_gets_its_arguments_cast() -> None:
    params, batch = problem()
    schedule = schedules.zb_h1(ranks=2, microbatches=MICROBATCHES)

    def whole(params: Any, batch: Any) -> Tensor:
        assert batch["y"].dtype == HALF
        y = fpipe.cut(layer(params[0], batch["x"]))
        return loss(layer(params[1], y).float(), batch)

    policy = MixedPrecisionPolicy(HALF, WIDE)
    pipe = fpipe.pipeline(whole, schedule=schedule, compile=False, mp_policy=policy)
    value, grads = pipe.step(params, batch)
    rounded = batch | {"y": batch["y"].to(HALF)}
    assert_same([value, grads], [*expected_under(params, rounded, BOTH, chain, loss)], 1e-6)
    with pytest.raises(StageError, match=r"output_dtype=torch\.float32, and one function"):
        fpipe.pipeline(whole, schedule=schedule, compile=False, mp_policy=BOTH)


class Net(nn.Module):
    """Two layers, the first with a buffer that stays as it is."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        assert self.scale.dtype == WIDE
        y: Tensor = self.last(F.gelu(self.first(x)) * self.scale.to(x.dtype))
        return y


@pytest.mark.parametrize("dtype", [WIDE, HALF])
def test_a_module_computes_in_half_precision_with_wide_parameters(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Net()
    params = {name: own.detach().clone() for name, own in module.named_parameters()}
    module = module.to(dtype)
    module.scale = torch.full((8,), 0.5)
    schedule = schedules.zb_h1(ranks=2, microbatches=MICROBATCHES)
    pipe = fpipe.from_module(
        module, schedule=schedule, cuts=["first"], loss=loss, compile=False, mp_policy=BOTH
    )
    batch = problem()[1]
    value, grads = pipe.step(params, batch)

    def forward(params: Any, x: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(module, params, (x,))
        return output

    assert_same([value, grads], [*expected_under(params, batch, BOTH, forward, loss)], 1e-6)
    trainer = fpipe.train(pipe, torch.optim.AdamW, lr=0.1, max_norm=1.0)
    after = trainer.step(params, trainer.init(params), batch)
    assert {leaf.dtype for leaf in after.params.values()} == {WIDE}


def test_wide_parameters_of_a_narrow_module_need_a_policy() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(HALF)
    pipe = fpipe.from_module(
        module,
        schedule=schedules.one_f_one_b(ranks=2, microbatches=2),
        cuts=["0"],
        loss=lambda y, batch: y.float().square().mean(),
        compile=False,
    )
    params = {name: own.detach().float() for name, own in module.named_parameters()}
    with pytest.raises(BatchError, match=r"params\['0.weight'\] is torch.float32, .* mp_policy="):
        pipe.step(params, {"input": torch.randn(4, 8, dtype=HALF)})


def test_wrong_policies_are_told() -> None:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)

    def make(**options: Any) -> Any:
        return fpipe.pipeline([layer] * 2, loss, schedule, compile=False, **options)

    with pytest.raises(
        StageError, match=r"must be a MixedPrecisionPolicy of torch\.distributed\.fsdp"
    ):
        make(mp_policy=HALF)
    with pytest.raises(StageError, match=r"is given beside mp_policy, whose reduce_dtype"):
        make(mp_policy=BOTH, accum_dtype=WIDE)
    with pytest.raises(StageError, match=r"mp_policy has param_dtype=torch\.int32"):
        make(mp_policy=MixedPrecisionPolicy(torch.int32))
    params, batch = problem()
    with pytest.raises(
        StageError, match=r"accum_dtype=torch\.bfloat16 is narrower than torch\.float32"
    ):
        make(accum_dtype=HALF).step(params, batch)


def test_transforms_keep_the_policy() -> None:
    params, batch = problem()
    schedule = schedules.one_f_one_b(ranks=2, microbatches=MICROBATCHES)
    pipe = fpipe.pipeline([layer] * 2, loss, schedule, compile=False, mp_policy=BOTH)
    members = pytree.tree_map(lambda leaf: torch.stack([leaf, -leaf]), params)
    together = fpipe.vmap(pipe, in_dims=(0, None)).step(members, batch)
    alone = pipe.step(params, batch)
    first = pytree.tree_map(lambda leaf: leaf[0], together)
    assert_same([first.loss, first.grads], [alone.loss, alone.grads], 1e-2)
    assert {leaf.dtype for leaf in pytree.flatten(together.grads)[0]} == {WIDE}


@pytest.mark.inductor
def test_compiled_numbers_are_those_of_the_policy() -> None:
    params, batch = problem()
    schedule = schedules.zb_h1(ranks=2, microbatches=MICROBATCHES)
    pipe = fpipe.pipeline([layer] * 2, loss, schedule, mp_policy=BOTH)
    value, grads = pipe.step(params, batch)
    total, sums = expected_under(params, batch, BOTH, chain, loss)
    assert_same([value, grads], [total, sums], 2e-2)
    assert {leaf.dtype for leaf in pytree.flatten(grads)[0]} == {WIDE}
