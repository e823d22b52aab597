"""`torch.func.vmap` over pytrees, and batching rules in place of torch's missing or wrong ones.

- ``select_scatter``: the batching rule of torch has another gradient.
- ``rrelu`` in evaluation, recurrent layers: torch has no batching rule.
- ``group_norm``: torch takes a view that channels_last does not have.
- ``linalg.solve``, ``lu_solve``: with one matrix for several right-hand sides, or several matrices
  for one, torch reads other memory. Here both are expanded first.
- embeddings with padding: see `fpipe.functional.jvp_overrides`.
- attention: the fused kernel of the CPU has no batching rule, and would run member by member.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

import optree
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fpipe import pytree
from fpipe.functional.jvp_overrides import EMBEDDINGS
from fpipe.trace.overrides.recurrent import RECURRENT
from fpipe.trace.overrides.standin import Instead

_SOLVE_EX: Any = torch.return_types.linalg_solve_ex  # type: ignore[attr-defined]


def vmap_pytrees(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    in_dims: Sequence[Any],
    randomness: str = "error",
) -> Any:
    """The outputs of `function` for all members at once, stacked along dimension 0.

    torch sees flat leaves alone, so the nodes may be those of `fpipe.pytree`.

    Args:
        function: from pytrees of tensors to a pytree of tensors.
        arguments: its arguments, stacked; at least one leaf must be, if there are any.
        in_dims: for each argument a pytree prefix of dimensions, None for leaves that are shared.
        randomness: as in `torch.func.vmap`.
    """
    leaves, spec = pytree.flatten(tuple(arguments))
    if not leaves:
        return function(*arguments)  # torch's vmap refuses to call it
    dims = [
        dim
        for number, (prefix, argument) in enumerate(zip(in_dims, arguments, strict=True))
        for dim in pytree.broadcast_prefix(f"in_dims[{number}]", prefix, argument, "the argument")
    ]
    out_specs: list[optree.PyTreeSpec] = []

    def flat(*values: Any) -> tuple[Any, ...]:
        outputs, out_spec = pytree.flatten(function(*pytree.unflatten(spec, values)))
        out_specs.append(out_spec)
        return tuple(outputs)

    outputs = torch.vmap(flat, in_dims=tuple(dims), randomness=randomness)(*leaves)
    return pytree.unflatten(out_specs[-1], outputs)


@contextmanager
def batching_rules(devices: Collection[str]) -> Iterator[None]:
    """The context in which `torch.func.vmap` runs a stage on devices of these types."""
    # A mapped tensor does not say that it is differentiated, so the other kernels of CUDA do not
    # keep what their backward reads.
    flash = "cpu" not in devices and torch.backends.cuda.flash_sdp_enabled()
    kernels = [SDPBackend.MATH, *[SDPBackend.FLASH_ATTENTION] * flash]
    with sdpa_kernel(kernels), Instead(_BATCHING_RULES):
        yield


def _select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    size = input.shape[dim]
    is_selected = torch.arange(size, device=input.device) == index % size
    after = input.dim() - 1 - dim % input.dim()
    return torch.where(is_selected.view(-1, *(1 for _ in range(after))), src.unsqueeze(dim), input)


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
    return F.group_norm(input.contiguous(), num_groups, *rest, **options)


def lu_solve(
    LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False
) -> Tensor:
    """`torch.linalg.lu_solve`, of factors and right-hand sides that are expanded first."""
    outer = torch.broadcast_shapes(LU.shape[:-2], B.shape[:-2])
    return torch.linalg.lu_solve(
        _expanded(LU, outer, 2),
        _expanded(pivots, outer, 1),
        _expanded(B, outer, 2),
        left=left,
        adjoint=adjoint,
    )


def _solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    matrix, right, is_vector = _both_expanded(A, B)
    solution = torch.linalg.solve(matrix, right, left=left)
    return solution.squeeze(-1) if is_vector else solution


def _solve_ex(A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    matrix, right, is_vector = _both_expanded(A, B)
    solution, info = torch.linalg.solve_ex(matrix, right, left=left, check_errors=check_errors)
    return _SOLVE_EX((solution.squeeze(-1) if is_vector else solution, info))


def _both_expanded(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Matrices and right-hand sides with the same outer dimensions; whether `B` has vectors."""
    is_vector = B.dim() == 1 or B.shape == A.shape[:-1]
    right = B.unsqueeze(-1) if is_vector else B
    outer = torch.broadcast_shapes(A.shape[:-2], right.shape[:-2])
    return _expanded(A, outer, 2), _expanded(right, outer, 2), is_vector


def _expanded(value: Tensor, outer: Sequence[int], inner: int) -> Tensor:
    """The value, expanded to the dimensions `outer`, with the last `inner` dimensions of its own.

    The result has its own memory. An expanded view has another stride from matrix to matrix, which
    torch reads even where there is one matrix alone.
    """
    shape = (*outer, *value.shape[value.dim() - inner :])
    if value.shape == shape:
        return value
    return value.expand(shape).clone(memory_format=torch.contiguous_format)


_BATCHING_RULES: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {
        torch.select_scatter: _select_scatter,
        Tensor.select_scatter: _select_scatter,
        F.rrelu: _rrelu,
        F.group_norm: _group_norm,
        torch.linalg.solve: _solve,
        torch.linalg.solve_ex: _solve_ex,
        torch.linalg.lu_solve: lu_solve,
        **EMBEDDINGS,
        **RECURRENT,
    }
)
