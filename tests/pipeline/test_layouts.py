"""How values lie in memory: kernels read each as it lay when they were traced, in every microbatch.

The microbatches of a step may differ in their number of rows, and so may their traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fpipe
from fpipe import pytree, schedules
from tests.laid_out import laid_out, look
from tests.models import assert_identical, assert_same, rand, unpipelined

TABLE = rand(3, 4)


def position(p: Tensor, x: Tensor) -> Tensor:
    """Over one row nothing is summed, and the gradient lies as that of the transposed value."""
    return torch.tanh(x + p).transpose(1, 2) @ TABLE


def heads(p: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("btd,hde->bhte", x, p).square()


def scaled(p: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, p.t() * 2).transpose(1, 2)


CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Sequence[Tensor]]] = {
    "added to rows": (position, [rand(1, 3, 5), rand(5, 1, 3).permute(1, 2, 0)]),
    "products by head": (heads, [rand(2, 5, 4), rand(5, 4, 2).permute(2, 0, 1)]),
    "transposed": (scaled, [rand(5, 4), rand(4, 5).t(), rand(1, 4).expand(5, 4)]),
}


@pytest.mark.parametrize("rows", [3, 5])
@pytest.mark.parametrize("name", CASES)
def test_gradients_lie_as_their_parameters(name: str, rows: int) -> None:
    stage, params = CASES[name]
    x = rand(rows, 3, 5)

    def loss(y: Tensor, _: Any) -> Tensor:
        return y.square().mean()

    schedule = schedules.zb_h1(ranks=1, microbatches=2)
    pipe = fpipe.pipeline([stage], loss, schedule, compile=laid_out)
    for param in params:
        found = pipe.step([param], x)
        assert_same(found, unpipelined([stage], loss, [param], x))
        dense = param if param.untyped_storage().nbytes() == param.nbytes else param.contiguous()
        assert look(found.grads[0]) == look(dense)


def test_gradients_of_members_lie_as_their_parameters() -> None:
    stage, params = CASES["added to rows"]
    schedule = schedules.zb_h1(ranks=1, microbatches=2)
    pipe = fpipe.pipeline([stage], lambda y, _: y.square().mean(), schedule, compile=laid_out)
    members = torch.stack([params[0], 2 * params[0]])
    grads = fpipe.vmap(pipe).step([members], rand(3, 3, 5)).grads
    assert look(grads[0]) == look(members)


def test_state_may_lie_otherwise_than_what_is_left_of_it() -> None:
    """The second microbatch reads what the first has left, with the kernels of the first."""

    def loss_fn(w: Tensor, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ w @ state).square().mean(), 0.9 * state + 1

    schedule = schedules.gpipe(ranks=1, microbatches=3)
    given = rand(5, 4), rand(3, 4).t(), rand(6, 5)
    found, expected = (
        fpipe.pipeline(loss_fn, schedule=schedule, has_state=True, compile=compile).step(*given)
        for compile in (laid_out, False)
    )
    assert_identical(tuple(found), tuple(expected))


@pytest.mark.inductor
def test_compiled() -> None:
    stage, params = CASES["added to rows"]
    schedule = schedules.zb_h1(ranks=1, microbatches=1)
    pipe = fpipe.pipeline([stage], lambda y, _: y.square().mean(), schedule)
    x = rand(1, 3, 5)
    found = pipe.step([params[0]], x)
    expected = unpipelined([stage], lambda y, _: y.square().mean(), [params[0]], x)
    assert_same(found, expected)
    assert all(leaf.is_contiguous() for leaf in pytree.flatten(found.grads)[0])


def put_off(kind: str) -> Tensor:
    """A constant of which torch has put off a negation, a conjugation, or both."""
    value = torch.complex(rand(5), rand(5) + 1)
    return {
        "negated": value.conj().imag,
        "conjugated": value.conj(),
        "both": torch._neg_view(value.conj()),
    }[kind]


@pytest.mark.inductor
def test_compiled_values_lie_as_in_the_trace() -> None:
    """Attention behind an empty cache, as Hugging Face's, which Inductor lays out otherwise.

    The product did not compile, and the backward read another element than the forward had left.
    """

    def stage(p: Tensor, x: Tensor) -> Tensor:
        keys = (x @ p).view(len(x), 3, 2, 2).transpose(1, 2)
        keys = torch.cat([torch.tensor([], dtype=keys.dtype), keys], dim=-2)
        return F.scaled_dot_product_attention(keys, keys, keys) + keys @ (keys.mT @ keys)

    def loss(y: Tensor, _: Any) -> Tensor:
        return y.square().mean()

    # The abstract kernel of torch 2.11 takes what attention keeps of float64 for float32.
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query = rand(1, 1, 2, 2)
    with FakeTensorMode() as mode:
        kept = attention(*[mode.from_tensor(query)] * 3)[1]
    if kept.dtype != attention(*[query] * 3)[1].dtype:
        pytest.skip("torch takes what attention keeps of float64 for float32")
    x, params = rand(2, 3, 4), [rand(4, 4)]
    pipe = fpipe.pipeline([stage], loss, schedules.zb_h1(ranks=1, microbatches=1))
    assert_same(pipe.step(params, x), unpipelined([stage], loss, params, x))


@pytest.mark.inductor
def test_a_compiled_value_that_a_product_reads_lies_as_in_the_trace() -> None:
    """Inductor puts the sum and the product together, whose result has other strides, and copies
    what is made of it for the second product: that copy came out, and the gradient of the last
    parameter was that of its transpose."""

    def stage(p: Any, x: Tensor) -> Tensor:
        return ((p["turned"].t() + x @ p["w"]) / p["scale"]) @ p["last"]

    def loss(y: Tensor, _: Any) -> Tensor:
        return y.square().mean()

    x = rand(4, 4)
    params = [{name: rand(4, 4) for name in ("turned", "w", "last")} | {"scale": rand(1, 4) + 2}]
    pipe = fpipe.pipeline([stage], loss, schedules.zb_h1(ranks=1, microbatches=1))
    assert_same(pipe.step(params, x), unpipelined([stage], loss, params, x))


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_constants_that_torch_has_yet_to_negate_or_conjugate() -> None:
    """Kernels read the memory as it lay: other numbers without a word, or none at all."""
    constants = {kind: put_off(kind) for kind in ("negated", "conjugated", "both")}

    def stage(p: Tensor, x: Tensor) -> Tensor:
        for kind, constant in constants.items():
            shift = constant if kind == "negated" else constant.angle()
            if kind == "conjugated":  # of both, Inductor takes the wrong sign
                shift = shift + constant.imag
            x = torch.tanh(x * p + shift) + (p * constant).real
        return x

    def loss(y: Tensor, _: Any) -> Tensor:
        return y.square().mean()

    params, x = [rand(5)], rand(4, 5)
    pipe = fpipe.pipeline([stage], loss, schedules.gpipe(ranks=1, microbatches=1))
    for _ in range(2):
        assert_same(pipe.step(params, x), unpipelined([stage], loss, params, x))
        for constant in constants.values():
            constant.mul_(2)  # what is written to it counts


def test_parameter_without_memory() -> None:
    """As forward mode makes them; a kernel read it, and the process was gone."""

    def loss(y: Tensor, _: Any) -> Tensor:
        return y.square().mean()

    def read(module: Any, _: Any) -> Any:
        def run(values: list[Tensor]) -> Any:
            assert all(value.data_ptr() for value in values)
            return module(*values)

        return run

    params, x = [torch._efficientzerotensor((3,), dtype=torch.float64)], rand(4, 3)
    stages, schedule = [lambda p, x: torch.cos(x + p)], schedules.gpipe(ranks=1, microbatches=2)
    pipe = fpipe.pipeline(stages, loss, schedule, compile=read)
    zeros = [torch.zeros(3, dtype=torch.float64)]
    assert_same(pipe.step(params, x), unpipelined(stages, loss, zeros, x))
