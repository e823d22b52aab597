"""What stands for operations of torch whose kernels do not go through a transform, or do wrongly.

Whole kinds of them lie in `formulas`. Of the others, fused attention has no forward-mode rule
anywhere, and no batching rule on the CPU, where `vmap` would run it member by member; for a query
that may look at no key its plain mathematics have no finite one. A gated unit has no derivative of
its forward-mode rule, a leaky unit whose slope is drawn no batching rule, and what `vmap` makes of
``select_scatter`` has another gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe.functional.constants import Constants
from fpipe.functional.formulas.embedding import EMBEDDINGS
from fpipe.functional.formulas.linear import LINEAR
from fpipe.functional.refusals import REFUSED
from fpipe.functional.smooth_formulas import NORMALISATIONS
from fpipe.torch_internals import beneath_forward_mode, functorch
from fpipe.trace.constant_propagation import symbolic_zeros
from fpipe.trace.overrides.recurrent import RECURRENT
from fpipe.trace.overrides.standin import Instead

aten = torch.ops.aten


@contextmanager
def batched(devices: Collection[str]) -> Iterator[None]:
    """The context in which `vmap` runs over values on devices of these types."""
    # A mapped tensor does not say that it is differentiated, so the other kernels of CUDA do not
    # keep what their backward reads.
    flash = "cpu" not in devices and torch.backends.cuda.flash_sdp_enabled()
    kernels = [SDPBackend.MATH, *[SDPBackend.FLASH_ATTENTION] * flash]
    with sdpa_kernel(kernels), Instead(_BATCHED):
        yield


@contextmanager
def differentiable_twice() -> Iterator[None]:
    """The context in which forward-mode derivatives are taken that are differentiated again."""
    kernels, constants = _Kernels(under_vmap=_under_vmap()), Constants()
    with beneath_forward_mode(), sdpa_kernel(SDPBackend.MATH), kernels, Instead(_SMOOTH), constants:
        yield
    constants.check()


def _under_vmap() -> bool:
    levels = functorch.get_interpreter_stack() or []
    return any(level.key() == functorch.TransformType.Vmap for level in levels)


class _Kernels(TorchDispatchMode):
    """Refuses the kernels whose second derivative would be wrong without a word.

    Args:
        under_vmap: make the zeros that stand for a missing direction in full, as a tracer does.
    """

    def __init__(self, *, under_vmap: bool) -> None:
        super().__init__()
        self._under_vmap = under_vmap

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.overloadpacket in _WRONG:
            raise NotImplementedError(
                f"the second derivative of {func} would be wrong; call torch.nn.functional.{{layer,"
                "batch,instance}_norm, which are written out here, or write the formula"
            )
        if func in _REDUCTIONS and "prod" in (*args, *(kwargs or {}).values()):
            raise NotImplementedError(
                f"the derivative of {func} with reduce='prod' would be wrong in forward mode; "
                "write the product of what does not come together, or the sum of logarithms"
            )
        if not self._under_vmap and func is aten._efficientzerotensor.default:
            with symbolic_zeros():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_WRONG = frozenset(
    {
        aten.native_layer_norm,
        aten.native_batch_norm,
        aten._native_batch_norm_legit,
        aten._batch_norm_with_update,
        aten.cudnn_batch_norm,
        aten.miopen_batch_norm,
    }
)


# Their tangent of products is zero.
_REDUCTIONS = frozenset({aten.scatter_reduce.two, aten.scatter_reduce_.two})


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    left, gate = input.chunk(2, dim)
    return left * gate.sigmoid()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *rest: Any,
    **options: Any,
) -> Tensor:
    if attn_mask is None:
        return F.scaled_dot_product_attention(query, key, value, None, *rest, **options)
    # The output for a query that may look at no key is 0, and so is its derivative.
    if attn_mask.dtype == torch.bool:
        alone = (~attn_mask).all(-1, keepdim=True)
        mask = attn_mask | alone
    else:
        alone = (attn_mask == -torch.inf).all(-1, keepdim=True)
        mask = attn_mask.masked_fill(alone, 0.0)
    found = F.scaled_dot_product_attention(query, key, value, mask, *rest, **options)
    return found.masked_fill(alone, 0.0)


def _select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    size = input.shape[dim]
    chosen = torch.arange(size, device=input.device) == index % size
    after = input.dim() - 1 - dim % input.dim()
    return torch.where(chosen.view(-1, *(1 for _ in range(after))), src.unsqueeze(dim), input)


def _rrelu(
    input: Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    if training:
        return F.rrelu(input, lower, upper, training, inplace)
    return F.leaky_relu(input, (lower + upper) / 2, inplace)


def _group_norm(input: Tensor, num_groups: int, *rest: Any, **options: Any) -> Tensor:
    # Its rules take a view of channels and places, which in channels_last lie apart.
    return F.group_norm(input.contiguous(), num_groups, *rest, **options)


def _sinc(input: Tensor) -> Tensor:
    # By its series about 0, where the rule divides by it.
    angle = torch.pi * (input if input.is_floating_point() or input.is_complex() else input.float())
    small = angle.abs() < 0.05
    away, near = torch.where(small, 1, angle), torch.where(small, angle, 0).square()
    series = 1 - near / 6 * (1 - near / 20 * (1 - near / 42))
    return torch.where(small, series, away.sin() / away)


def _lerp_(input: Tensor, end: Tensor, weight: Any) -> Tensor:
    # The abstract kernel of the update in place looks for an overload, and prints its arguments for
    # each that does not fit. That fails within a jvp, and so does every jvp of the thread after it.
    return input.copy_(torch.lerp(input.clone(), end, weight))


_BATCHED: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.select_scatter: _select_scatter,
    Tensor.select_scatter: _select_scatter,
    F.rrelu: _rrelu,
    F.group_norm: _group_norm,
    **EMBEDDINGS,
    **RECURRENT,
    **LINEAR,
}

_SMOOTH: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.glu: _glu,
    F.scaled_dot_product_attention: _attention,
    torch.sinc: _sinc,
    Tensor.sinc: _sinc,
    torch.special.sinc: _sinc,
    **RECURRENT,
    **NORMALISATIONS,
    **EMBEDDINGS,
    Tensor.lerp_: _lerp_,
    torch.linalg.lu_solve: LINEAR[torch.linalg.lu_solve],
    **REFUSED,
}
