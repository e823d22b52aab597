"""What torch draws from its generator, drawn from keys instead: the table of operations.

Code that was written for torch's generator, such as `torch.nn.Dropout`, then gives the same numbers
for the same key. The n-th operation that draws, in the order of the program, draws from
``fold_in(key, n)``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType, MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe import random
from fpipe.errors import FpipeError
from fpipe.torch_internals import functorch, temporarily_clear_interpreter_stack

aten = torch.ops.aten


def generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """The generators from which what computes on these devices may draw, that of the CPU first."""
    indices = {
        torch.cuda.current_device() if device.index is None else device.index
        for device in devices
        if device.type == "cuda"
    }
    own = [torch.cuda.default_generators[index] for index in sorted(indices)]
    return [torch.default_generator, *own]


def _like(x: Tensor, value: Tensor, memory_format: Any = None) -> Tensor:
    """What was drawn as it lies in memory where torch draws it: as `x` does."""
    if memory_format is None and x.is_contiguous():
        return value
    options = {} if memory_format is None else {"memory_format": memory_format}
    return torch.empty_like(x, dtype=value.dtype, device=value.device, **options).copy_(value)


def _check(fits: bool, rule: str) -> None:
    """Refuse what torch refuses to draw."""
    if not fits:
        raise FpipeError(f"what torch draws is drawn from a key, and {rule}")


# ── the operations: arguments that have their defaults do not come ──────────────────────────────


def _bernoulli(key: Tensor, x: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
    return random.bernoulli(key.to(x.device), p, x.shape).to(x.dtype)  # torch's is contiguous, too


def _each_bernoulli(key: Tensor, p: Tensor, *, generator: Any = None) -> Tensor:
    return _bernoulli(key, p, p)


def _native_dropout(key: Tensor, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:
        return x, torch.ones_like(x, dtype=torch.bool)
    mask = random.bernoulli(key.to(x.device), 1 - p, x.shape)
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _middles(key: Tensor, x: Tensor) -> Tensor:
    """A number of (0, 1) for each element of `x`, in float64."""
    random.check_dtype(x.dtype)
    return random.middles(key.to(x.device), x.shape, x.dtype)


def _uniform(
    key: Tensor, x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None
) -> Tensor:
    _check(low <= high, f"low={low} must not be greater than high={high}")
    drawn = random.uniform(key.to(x.device), x.shape, x.dtype)
    if (low, high) != (0.0, 1.0):
        drawn = (drawn.double() * (high - low) + low).to(x.dtype)
        # The greatest may be rounded up to the end, which is not one of them.
        drawn = torch.where(drawn < high, drawn, low)
    return _like(x, drawn)


def _normal(
    key: Tensor, x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None
) -> Tensor:
    _check(std >= 0, f"std={std} must be 0 or more")
    drawn = random.normal_doubles(key.to(x.device), x.shape, x.dtype, mean, std)
    return _like(x, drawn.to(x.dtype))


def _normal_about(key: Tensor, mean: Any, std: Any = 1.0, *, generator: Any = None) -> Tensor:
    # Torch lets no gradient through it.
    mean, std = (v.detach() if isinstance(v, Tensor) else v for v in (mean, std))
    like = mean if isinstance(mean, Tensor) else std
    shape = torch.broadcast_shapes(*(v.shape for v in (mean, std) if isinstance(v, Tensor)))
    drawn = random.normal_doubles(key.to(like.device), shape, like.dtype)
    return (drawn * std + mean).to(like.dtype)


def _normal_of(
    key: Tensor,
    mean: float,
    std: float,
    size: Sequence[int],
    *,
    dtype: Any = None,
    device: Any = None,
    **_: Any,
) -> Tensor:
    _check(std >= 0, f"std={std} must be 0 or more")
    kind = dtype or torch.get_default_dtype()
    return random.normal_doubles(key.to(device or "cpu"), size, kind, mean, std).to(kind)


def _exponential(key: Tensor, x: Tensor, rate: float = 1.0, *, generator: Any = None) -> Tensor:
    _check(rate > 0, f"the rate of exponential_, {rate}, must be more than 0")
    drawn = (-torch.log(_middles(key, x)) / rate).to(x.dtype)
    return _like(x, drawn.clamp_min(torch.finfo(x.dtype).tiny))  # torch draws no 0


def _log_normal(
    key: Tensor, x: Tensor, mean: float = 1.0, std: float = 2.0, *, generator: Any = None
) -> Tensor:
    _check(std > 0, f"std={std} must be more than 0")
    normal = random.normal_doubles(key.to(x.device), x.shape, x.dtype, mean, std)
    return _like(x, normal.exp().to(x.dtype))


def _cauchy(
    key: Tensor, x: Tensor, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None
) -> Tensor:
    _check(sigma > 0, f"sigma={sigma} must be more than 0")
    angle = math.pi * (_middles(key, x) - 0.5)
    return _like(x, (torch.tan(angle) * sigma + median).to(x.dtype))


def _geometric(key: Tensor, x: Tensor, p: float, *, generator: Any = None) -> Tensor:
    _check(0 < p < 1, f"p={p} of geometric_ must lie between 0 and 1")
    middles = random.middles(key.to(x.device), x.shape, torch.float64)
    return _like(x, (torch.floor(torch.log(middles) / math.log1p(-p)) + 1).to(x.dtype))


def _multinomial(
    key: Tensor, x: Tensor, num: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    _check(x.is_floating_point(), f"the probabilities of multinomial are {x.dtype}: no floats")
    _check(num > 0, f"num_samples={num} must be more than 0")
    key, wide = key.to(x.device), x.detach().double()
    if not replacement:
        fits = num <= x.shape[-1]
        _check(fits, f"num_samples={num} without replacement is more than {x.shape[-1]}")
        return random.perturbed(key, wide.log()).topk(num).indices
    sums = wide.cumsum(-1)
    drawn = random.randint(key, 0, 1 << 32, (*x.shape[:-1], num)).double() * 2.0**-32
    found = torch.searchsorted(sums, drawn * sums[..., -1:], right=True)
    return found.clamp_max(x.shape[-1] - 1)


def _rrelu(
    key: Tensor,
    x: Tensor,
    noise: Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    generator: Any = None,
) -> tuple[Tensor, Tensor]:
    """A leaky unit whose slopes are drawn, and the slopes, by which its backward multiplies."""
    if not training:
        return F.leaky_relu(x, (lower + upper) / 2), noise
    slopes = torch.where(x <= 0, _uniform(key, x.detach(), lower, upper), 1.0)
    return x * slopes, slopes


def _randperm(key: Tensor, num: int, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    kind = dtype or torch.int64
    if not kind.is_floating_point:
        _check(num - 1 <= torch.iinfo(kind).max, f"the last of randperm({num}) is no {kind}")
    return random.permutation(key.to(device or "cpu"), num).to(kind)


def _randint(
    key: Tensor, high: int, size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    return _randint_from(key, 0, high, size, dtype=dtype, device=device)


def _randint_from(
    key: Tensor,
    low: int,
    high: int,
    size: Sequence[int],
    *,
    dtype: Any = None,
    device: Any = None,
    **_: Any,
) -> Tensor:
    return random.randint(key.to(device or "cpu"), low, high, size, dtype or torch.int64)


def _sized(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operation that draws so many numbers, of a function of a key, a shape and a dtype."""

    def drawn(
        key: Tensor, size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any
    ) -> Tensor:
        return draw(key.to(device or "cpu"), size, dtype or torch.get_default_dtype())

    return drawn


def _alike(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operation that draws as many numbers as a tensor has, of the same kind of function.

    What comes after the tensor in the operation's own arguments comes before the shape.
    """

    def drawn(
        key: Tensor,
        x: Tensor,
        *bounds: int,
        dtype: Any = None,
        device: Any = None,
        memory_format: Any = None,
        **_: Any,
    ) -> Tensor:
        made = draw(key.to(device or x.device), *bounds, x.shape, dtype or x.dtype)
        return _like(x, made, memory_format)

    return drawn


def _below(key: Tensor, high: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return random.randint(key, 0, high, shape, dtype)


KEYED: Final[Mapping[OpOverload, Callable[..., Any]]] = MappingProxyType(
    {
        aten.bernoulli.default: _each_bernoulli,
        aten.bernoulli.p: _bernoulli,
        aten.bernoulli.Tensor: _bernoulli,
        aten.native_dropout.default: _native_dropout,
        aten.uniform.default: _uniform,
        aten.normal_functional.default: _normal,
        aten.normal.Tensor_float: _normal_about,
        aten.normal.float_Tensor: _normal_about,
        aten.normal.Tensor_Tensor: _normal_about,
        aten.normal.float_float: _normal_of,
        aten.exponential.default: _exponential,
        aten.log_normal.default: _log_normal,
        aten.cauchy.default: _cauchy,
        aten.geometric.default: _geometric,
        aten.multinomial.default: _multinomial,
        aten.rrelu_with_noise_functional.default: _rrelu,
        aten.randperm.default: _randperm,
        aten.randint.default: _randint,
        aten.randint.low: _randint_from,
        aten.randint_like.default: _alike(_below),
        aten.randint_like.low_dtype: _alike(random.randint),
        aten.rand.default: _sized(random.uniform),
        aten.randn.default: _sized(random.normal),
        aten.rand_like.default: _alike(random.uniform),
        aten.randn_like.default: _alike(random.normal),
    }
)
"""By operation: a function of a key and of the operation's own arguments."""

_IN_PLACE: Final[Mapping[OpOverload, Callable[..., Any]]] = {
    aten.bernoulli_.float: _bernoulli,
    aten.bernoulli_.Tensor: _bernoulli,
    aten.uniform_.default: _uniform,
    aten.normal_.default: _normal,
    aten.exponential_.default: _exponential,
    aten.log_normal_.default: _log_normal,
    aten.cauchy_.default: _cauchy,
    aten.geometric_.default: _geometric,
}


_RRELU: Final = aten.rrelu_with_noise.default
"""It writes the slopes that it draws to its second argument."""


def draws(op: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether an operation draws from torch's generator, called like this."""
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    # Attention is tagged so, and draws only if it drops something. A tracer leaves out arguments
    # that equal their defaults.
    declared = op._schema.arguments
    given = {each.name: each.default_value for each in declared if each.has_default_value()}
    given |= {each.name: value for each, value in zip(declared, arguments, strict=False)}
    return bool({**given, **options}.get("dropout_p", True))


def refusal(op: Any) -> str:
    """What to say of an operation that is not in the table."""
    return (
        f"draws with {op}, of which there is no function of a key (there is one of dropout, "
        "bernoulli, multinomial, rand, randn, randint, randperm, uniform, normal, log_normal, "
        "exponential, cauchy and geometric): draw with one of these, or do without a key; what "
        "torch's generator draws is then kept for the backward"
    )


class OpenAttention(TorchFunctionMode):
    """Within it attention that drops something is computed operation by operation.

    The kernels of CUDA draw within themselves, and there is no function of a key for them.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`."""
        options = kwargs or {}
        dropped = args[4] if len(args) > 4 else options.get("dropout_p")
        if func is not F.scaled_dot_product_attention or not dropped:
            return func(*args, **options)
        with sdpa_kernel(SDPBackend.MATH):
            return func(*args, **options)


_PIPELINES: ContextVar[int] = ContextVar("fpipe.pipelines", default=0)
"""How many calls of pipelines this is within."""


@contextmanager
def within_pipeline() -> Iterator[None]:
    """Within it what draws does not draw from the key of a `keyed` around the pipeline."""
    token = _PIPELINES.set(_PIPELINES.get() + 1)
    try:
        yield
    finally:
        _PIPELINES.reset(token)


class _Keyed(TorchDispatchMode):
    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self._key = key
        self._drawn = 0
        self._pipelines = _PIPELINES.get()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if not draws(func, args, options):
            return func(*args, **options)
        if _PIPELINES.get() != self._pipelines:
            raise FpipeError(
                "a pipeline that draws from torch's generator was called within fpipe.nn.keyed, "
                "whose key it does not get: let it draw from its own, Stage(fn, reads_key=True) or "
                "has_key=True, or call it outside"
            )
        if options.get("generator") is not None:
            raise FpipeError("the block draws from a torch.Generator of its own: leave it out")
        if func not in KEYED and func not in _IN_PLACE and func is not _RRELU:
            raise FpipeError(f"the block {refusal(func)}")
        if _is_computed_again():
            raise FpipeError(
                "the block draws within torch.utils.checkpoint, which calls the function again for "
                "the backward, where it would draw other numbers: leave the checkpoint out, which "
                "changes no number (model.gradient_checkpointing_disable() of Hugging Face)"
            )
        # Transforms of torch.func have been here before: what comes now is below them.
        with temporarily_clear_interpreter_stack():
            own = random.fold_in(self._key, self._drawn)
            self._drawn += 1
            if func is _RRELU:
                made, slopes = _rrelu(own, *args, **options)
                args[1].copy_(slopes)
                return made
            if func in _IN_PLACE:
                return args[0].copy_(_IN_PLACE[func](own, *args, **options))
            return KEYED[func](own, *args, **options)


def _is_computed_again() -> bool:
    """Whether this is called from a `torch.utils.checkpoint` that will call it again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == torch.utils.checkpoint.__file__:
            # The one that is reentrant is an autograd.Function, within which grad mode is off.
            return torch.is_grad_enabled() or code.co_name in ("forward", "backward")
        frame = frame.f_back
    return False


@contextmanager
def keyed(key: Tensor) -> Iterator[None]:
    """Within it torch's own random operations draw from keys: the n-th from ``fold_in(key, n)``.

    A pipeline of a module with ``has_key=True`` draws for each microbatch what this draws from
    the microbatch's key. What draws within a pipeline that is called here goes on as it does
    outside, from the pipeline's own key.

    Args:
        key: shape ``(2,)``, of `fpipe.random`.

    Raises:
        FpipeError: `key` is no key, or mapped by `torch.func.vmap`; or an operation draws that has
            no function of a key, or with arguments that torch refuses, within
            `torch.utils.checkpoint`, or in a pipeline that has no key.

    Example:
        >>> import torch, fpipe
        >>> with keyed(fpipe.random.key(0)):
        ...     first = torch.nn.functional.dropout(torch.ones(5))
        >>> own = fpipe.random.fold_in(fpipe.random.key(0), 0)
        >>> torch.equal(first, fpipe.random.dropout(own, torch.ones(5)))
        True
    """
    random.check_key(key)
    own = unwrapped(key)
    if own is None:
        raise FpipeError(
            "key is mapped by torch.func.vmap, or that of a stage while it is traced, but what "
            "torch's operations draw has one key: call the functions of fpipe.random with the key, "
            "or let a module draw from that of the step (fpipe.from_module, has_key=True)"
        )
    with OpenAttention(), _Keyed(own):
        yield


def unwrapped(key: Tensor) -> Tensor | None:
    """The key itself, within `torch.func.grad` and the like, to whose level all belongs there.

    Returns:
        None where it is mapped, and has other numbers for each member.
    """
    while functorch.is_gradtrackingtensor(key):
        key = functorch.get_unwrapped(key)
    return None if functorch.is_functorch_wrapped_tensor(key) else key
