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
from types import FrameType, MappingProxyType
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe import random
from fpipe.errors import FpipeError

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


# Arguments that have their defaults do not come.
def _bernoulli(key: Tensor, x: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
    return random.bernoulli(key.to(x.device), p, x.shape).to(x.dtype)


def _each_bernoulli(key: Tensor, p: Tensor, *, generator: Any = None) -> Tensor:
    return _bernoulli(key, p, p)


def _native_dropout(key: Tensor, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:
        return x, torch.ones_like(x, dtype=torch.bool)
    mask = random.bernoulli(key.to(x.device), 1 - p, x.shape)
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _uniform(
    key: Tensor, x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None
) -> Tensor:
    return random.uniform(key.to(x.device), x.shape, x.dtype) * (high - low) + low


def _normal(
    key: Tensor, x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None
) -> Tensor:
    return random.normal(key.to(x.device), x.shape, x.dtype) * std + mean


def _exponential(key: Tensor, x: Tensor, rate: float = 1.0, *, generator: Any = None) -> Tensor:
    return -torch.log1p(-random.uniform(key.to(x.device), x.shape, x.dtype)) / rate


def _normal_about(key: Tensor, mean: Any, std: Any = 1.0, *, generator: Any = None) -> Tensor:
    # Torch lets no gradient through it.
    mean, std = (v.detach() if isinstance(v, Tensor) else v for v in (mean, std))
    like = mean + std
    return random.normal(key.to(like.device), like.shape, like.dtype) * std + mean


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
    return _randn(key, size, dtype=dtype, device=device) * std + mean


def _log_normal(
    key: Tensor, x: Tensor, mean: float = 1.0, std: float = 2.0, *, generator: Any = None
) -> Tensor:
    return _normal(key, x, mean, std).exp()


def _cauchy(
    key: Tensor, x: Tensor, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None
) -> Tensor:
    angle = math.pi * (random.uniform(key.to(x.device), x.shape, x.dtype) - 0.5)
    return torch.tan(angle) * sigma + median


def _geometric(key: Tensor, x: Tensor, p: float, *, generator: Any = None) -> Tensor:
    if p == 1:
        return torch.ones_like(x)
    uniform = random.uniform(key.to(x.device), x.shape, torch.float64)
    return (torch.floor(torch.log1p(-uniform) / math.log1p(-p)) + 1).to(x.dtype)


def _multinomial(
    key: Tensor, x: Tensor, num: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    logits = x.log()
    if replacement:
        each = logits.unsqueeze(-2).expand(*x.shape[:-1], num, x.shape[-1])
        return random.categorical(key.to(x.device), each)
    return random.perturbed(key.to(x.device), logits).topk(num).indices


def _randperm(key: Tensor, num: int, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return random.permutation(key.to(device or "cpu"), num).to(dtype or torch.int64)


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


def _randint_like(
    key: Tensor, x: Tensor, high: int, *, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    return _randint_from_like(key, x, 0, high, dtype=dtype, device=device)


def _randint_from_like(
    key: Tensor,
    x: Tensor,
    low: int,
    high: int,
    *,
    dtype: Any = None,
    device: Any = None,
    **_: Any,
) -> Tensor:
    return random.randint(key.to(device or x.device), low, high, x.shape, dtype or x.dtype)


def _rand(
    key: Tensor, size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    return random.uniform(key.to(device or "cpu"), size, dtype or torch.get_default_dtype())


def _randn(
    key: Tensor, size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    return random.normal(key.to(device or "cpu"), size, dtype or torch.get_default_dtype())


def _rand_like(
    key: Tensor, x: Tensor, *, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    return random.uniform(key.to(device or x.device), x.shape, dtype or x.dtype)


def _randn_like(
    key: Tensor, x: Tensor, *, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    return random.normal(key.to(device or x.device), x.shape, dtype or x.dtype)


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
        aten.randperm.default: _randperm,
        aten.randint.default: _randint,
        aten.randint.low: _randint_from,
        aten.randint_like.default: _randint_like,
        aten.randint_like.low_dtype: _randint_from_like,
        aten.rand.default: _rand,
        aten.randn.default: _randn,
        aten.rand_like.default: _rand_like,
        aten.randn_like.default: _randn_like,
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


class _Keyed(TorchDispatchMode):
    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self._key = key
        self._drawn = 0

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
        if func not in KEYED and func not in _IN_PLACE:
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
    the microbatch's key.

    Args:
        key: shape ``(2,)``, of `fpipe.random`.

    Raises:
        FpipeError: `key` is no key, or mapped by `torch.func.vmap`; or an operation draws that has
            no function of a key, or within `torch.utils.checkpoint`.

    Example:
        >>> import torch, fpipe
        >>> with keyed(fpipe.random.key(0)):
        ...     first = torch.nn.functional.dropout(torch.ones(5))
        >>> own = fpipe.random.fold_in(fpipe.random.key(0), 0)
        >>> torch.equal(first, fpipe.random.dropout(own, torch.ones(5)))
        True
    """
    random.check_key(key)
    with _Keyed(_unwrapped(key)):
        yield


def _unwrapped(key: Tensor) -> Tensor:
    """The key itself, within `torch.func.grad` and the like, which do not differentiate it."""
    while torch._C._functorch.is_gradtrackingtensor(key):
        key = torch._C._functorch.get_unwrapped(key)
    if torch._C._functorch.is_functorch_wrapped_tensor(key):
        raise FpipeError(
            "key is mapped by torch.func.vmap, but what torch's operations draw has one key: call "
            "the functions of fpipe.random with each key"
        )
    return key
