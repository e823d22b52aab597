"""Operations in their plain mathematics, where the kernels of torch do not go through a transform.

Fused attention has no forward-mode rule anywhere, and no batching rule on the CPU, where `vmap`
would run it member by member; for a query that may look at no key its plain mathematics have no
finite one. The normalisations have forward-mode rules, but the derivative of those by the input is
silently wrong (pytorch #196699 and #196700: the saved mean and deviation are taken for constants),
as is some linear algebra, and that of a gated unit does not exist. That of ``logcumsumexp`` loses
its digits, that of ``cumprod`` is NaN at zeros, weight normalisation has none (and the derivative
of its backward is wrong), that of an embedding moves the padding, from which no gradient comes, and
``lerp_``, of which quantiles are made, fails on abstract tensors within a `jvp`. Recurrent layers,
and leaky units whose slope is drawn, have no batching rules, oneDNN's LSTM no forward-mode ones
either, and what `vmap` makes of ``select_scatter``, and of embeddings with padding, has another
gradient. Written out, all are right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decomposition_table
from torch._functorch import eager_transforms
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe.stage.refusing.explain import SPARSE, Untraceable
from fpipe.stage.standin import Instead
from fpipe.stage.tracing.known import symbolic_zeros
from fpipe.transforms.linear import LINEAR, UNKNOWN

aten = torch.ops.aten


@contextmanager
def batched(devices: Collection[str]) -> Iterator[None]:
    """The context in which `vmap` runs over values on devices of these types."""
    with sdpa_kernel(SDPBackend.MATH) if "cpu" in devices else nullcontext(), Instead(_BATCHED):
        yield


@contextmanager
def differentiable_twice() -> Iterator[None]:
    """The context in which forward-mode derivatives are taken that are differentiated again."""
    kernels = _Kernels(under_vmap=_under_vmap())
    with beneath_forward_mode(), sdpa_kernel(SDPBackend.MATH), kernels, Instead(_SMOOTH):
        yield


@contextmanager
def beneath_forward_mode() -> Iterator[None]:
    """Let `torch.func.jvp` run while a level of forward-mode autograd is open.

    It would open another one, which torch refuses, where it is not within itself; and what is
    traced has no part in the level that is open.
    """
    opened = forward_ad._current_level >= 0 and eager_transforms.JVP_NESTING == 0
    eager_transforms.JVP_NESTING += opened
    try:
        yield
    finally:
        eager_transforms.JVP_NESTING -= opened


def _under_vmap() -> bool:
    levels = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


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


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    dims = list(range(-len(normalized_shape), 0))
    return _scaled(_normalized(input, dims, eps), input, weight, bias)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    shape = (1, -1, *(1 for _ in input.shape[2:]))
    if training or running_mean is None or running_var is None:
        _refuse_running(running_mean)
        found = _normalized(input, [0, *range(2, input.dim())], eps)
    else:
        mean, variance = running_mean.view(shape), running_var.view(shape)
        found = (input - mean) * (variance + eps).rsqrt()
    return _scaled(found, input, _viewed(weight, shape), _viewed(bias, shape))


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    _refuse_running(running_mean)
    shape = (1, -1, *(1 for _ in input.shape[2:]))
    found = _normalized(input, list(range(2, input.dim())), eps)
    return _scaled(found, input, _viewed(weight, shape), _viewed(bias, shape))


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    left, gate = input.chunk(2, dim)
    return left * gate.sigmoid()


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    over = None if dim == -1 else [other for other in range(v.dim()) if other != dim % v.dim()]
    return v * (g / torch.linalg.vector_norm(v, 2, over, keepdim=over is not None))


def _refuse_running(running_mean: Tensor | None) -> None:
    if running_mean is not None:
        raise NotImplementedError(
            "a normalisation in training updates its running statistics in place, but a stage is a "
            "pure function: leave them out (track_running_stats=False)"
        )


def _normalized(input: Tensor, dims: list[int], eps: float) -> Tensor:
    # As the kernels do, in single precision at least.
    x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    x = x - x.mean(dims, keepdim=True)
    return x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()


def _scaled(found: Tensor, like: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    found = found if weight is None else found * weight
    found = found if bias is None else found + bias
    # Under autocast the kernels return single precision.
    return found if torch.is_autocast_enabled(like.device.type) else found.to(like.dtype)


def _viewed(value: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    return None if value is None else value.view(shape)


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


def _logcumsumexp(input: Tensor, dim: int) -> Tensor:
    # Each sum by itself: the forward-mode rule has differences of sums, which cancel.
    values = input.movedim(dim, -1).unsqueeze(-2)
    size = values.shape[-1]
    earlier = torch.ones(size, size, dtype=torch.bool, device=input.device).tril()
    return torch.where(earlier, values, -torch.inf).logsumexp(-1).movedim(-1, dim)


def _cumprod(
    input: Tensor, dim: int, *, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    # By doubling, in products alone: the derivative of the forward-mode rule divides by zeros.
    if out is not None:
        return torch.cumprod(input, dim, dtype=dtype, out=out)  # which has no derivative
    input = input if dtype is None else input.to(dtype)
    if not (input.is_floating_point() or input.is_complex()):
        return torch.cumprod(input, dim)
    if not input.dim():
        return input.clone()
    half = input.dtype in (torch.float16, torch.bfloat16)
    found, reach = (input.float() if half else input).movedim(dim, -1), 1
    while reach < found.shape[-1]:
        later = found[..., reach:] * found[..., :-reach]
        found, reach = torch.cat([found[..., :reach], later], -1), 2 * reach
    return found.movedim(-1, dim).to(input.dtype)


def _cumprod_(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    return input.copy_(_cumprod(input.clone(), dim, dtype=dtype))


def _lerp_(input: Tensor, end: Tensor, weight: Any) -> Tensor:
    # The abstract kernel of the update in place looks for an overload, and prints its arguments for
    # each that does not fit. That fails within a jvp, and so does every jvp of the thread after it.
    return input.copy_(torch.lerp(input.clone(), end, weight))


def _quantile(
    input: Tensor,
    q: float | Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Tensor:
    return _at_rank(input, q, dim, keepdim, interpolation, counts_nan=True)


def _nanquantile(
    input: Tensor,
    q: float | Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Tensor:
    return _at_rank(input, q, dim, keepdim, interpolation, counts_nan=False)


def _at_rank(
    input: Tensor,
    q: float | Tensor,
    dim: int | None,
    keepdim: bool,
    interpolation: str,
    *,
    counts_nan: bool,
) -> Tensor:
    """A quantile; torch interpolates by an update in place, as in `_lerp_`, and may look at `q`."""
    line = input.flatten() if dim is None or not input.dim() else input.movedim(dim, -1)
    values = line.sort(-1).values  # NaN comes last
    missing = values.isnan()
    last = values.shape[-1] - 1
    at = q if isinstance(q, Tensor) else values.new_tensor(q)
    if counts_nan:
        ranks = torch.where(missing.any(-1, keepdim=True), last, at.reshape(-1) * last)
    else:
        ranks = at.reshape(-1) * (last - missing.sum(-1, keepdim=True)).clamp(min=0)
    if interpolation == "nearest":
        ranks = ranks.round()
    lower, upper = ranks.floor(), ranks.ceil()
    below, above = values.gather(-1, lower.long()), values.gather(-1, upper.long())
    match interpolation:
        case "linear":
            found = torch.lerp(below, above, ranks - lower)
        case "midpoint":
            found = torch.lerp(below, above, 0.5)
        case "higher":
            found = above
        case _:
            found = below
    found = found.movedim(-1, 0)
    if keepdim:
        dims = input.dim()
        if dim is None or not dims:
            found = found.reshape(-1, *[1] * dims)
        else:
            found = found.unsqueeze(dim % dims + 1)
    return found if at.dim() else found.squeeze(0)


def _taken_apart(func: Callable[..., Any], op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Recurrent layers in steps; those of packed sequences, whose weights come fourth, as they are.

    What torch takes them apart to knows no dropout between the layers, so each is one by itself.
    """

    def steps(*args: Any) -> Any:
        with _without_onednn():
            return decomposition_table[op](*args)

    def layers(*args: Any) -> Any:
        if isinstance(args[3], list | tuple):
            return func(*args)
        x, start, weights, has_biases, count, dropout, train, bidirectional, batch_first = args
        if not train or not dropout or count == 1:
            return steps(*args)
        states, many = (start, True) if isinstance(start, list | tuple) else ((start,), False)
        parts = [state.chunk(count) for state in states]
        size = len(weights) // count
        ends: list[Sequence[Tensor]] = []
        x = x.transpose(0, 1) if batch_first else x
        for number in range(count):
            own = [part[number] for part in parts]
            held = weights[number * size : (number + 1) * size]
            given = (x, own if many else own[0], held, has_biases, 1, 0.0, train)
            x, *end = steps(*given, bidirectional, False)
            ends.append(end)
            if number < count - 1:
                x = torch.dropout(x, dropout, True)
        x = x.transpose(0, 1) if batch_first else x
        return x, *map(torch.cat, zip(*ends, strict=True))

    return layers


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Within it torch takes a layer apart to steps, for the CPU too.

    In single precision it has one operation of oneDNN for all, which no transform goes through.
    """
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if sparse:
        raise Untraceable(*SPARSE)
    # Of members who have tables or indices of their own it would be the padding of the first alone.
    found = F.embedding(input, weight, None, max_norm, norm_type, scale_grad_by_freq)
    if padding_idx is None:
        return found
    return _without_padding(found, input, padding_idx % len(weight))


def _torch_embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if sparse:
        raise Untraceable(*SPARSE)
    found = torch.embedding(weight, indices, -1, scale_grad_by_freq)
    return found if padding_idx < 0 else _without_padding(found, indices, padding_idx)


def _without_padding(found: Tensor, input: Tensor, padding_idx: int) -> Tensor:
    """What was found, from whose padding no gradient comes."""
    return torch.where((input == padding_idx).unsqueeze(-1), found.detach(), found)


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


def _refused(func: Callable[..., Any], instead: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"the second derivative of {func.__name__} would be wrong; {instead}"
        )

    return refuse


_BATCHED: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.select_scatter: _select_scatter,
    Tensor.select_scatter: _select_scatter,
    F.embedding: _embedding,
    torch.embedding: _torch_embedding,
    F.rrelu: _rrelu,
    torch.lstm: _taken_apart(torch.lstm, aten.lstm.input),
    torch.gru: _taken_apart(torch.gru, aten.gru.input),
    torch.rnn_tanh: _taken_apart(torch.rnn_tanh, aten.rnn_tanh.input),
    torch.rnn_relu: _taken_apart(torch.rnn_relu, aten.rnn_relu.input),
}

_SMOOTH: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    F.glu: _glu,
    torch._weight_norm: _weight_norm,
    F.scaled_dot_product_attention: _attention,
    torch.lstm: _taken_apart(torch.lstm, aten.lstm.input),
    F.embedding: _embedding,
    torch.embedding: _torch_embedding,
    torch.logcumsumexp: _logcumsumexp,
    Tensor.logcumsumexp: _logcumsumexp,
    torch.cumprod: _cumprod,
    Tensor.cumprod: _cumprod,
    Tensor.cumprod_: _cumprod_,
    Tensor.lerp_: _lerp_,
    torch.quantile: _quantile,
    Tensor.quantile: _quantile,
    torch.nanquantile: _nanquantile,
    Tensor.nanquantile: _nanquantile,
    **LINEAR,
    **{func: _refused(func, instead) for func, instead in UNKNOWN.items()},
}
