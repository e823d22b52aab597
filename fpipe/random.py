"""Random numbers as functions of a key: the same key gives the same numbers, anywhere.

A key is a tensor of two 32-bit words. What is drawn from it depends on the key and on the place in
the result alone, so nothing is advanced, and nothing changes when it is computed twice, elsewhere
or in another order. Use a key once; make new ones of it with `split` and `fold_in`.

The generator is Threefry2x32 (`fpipe.threefry`), on the counters of the places. `key`, `split`,
`fold_in` and `bits` agree with ``jax.random`` (``jax_threefry_partitionable``, its default). All of
it is integer arithmetic in plain tensor operations, and for `normal` sums and products of doubles
(`fpipe.normal_quantile`): the same bits on every device, compiled or not, and under
`torch.func.vmap`, `vjp` and `jvp`. `categorical`, which takes logarithms, says where it may differ.
Words are held in int64, because torch has no addition and no shift of uint32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fpipe.errors import FpipeError, a_type
from fpipe.normal_quantile import normal_quantile
from fpipe.schedule.arguments import plain_integer
from fpipe.threefry import MASK, threefry2x32

__all__ = [
    "bernoulli",
    "bits",
    "categorical",
    "dropout",
    "fold_in",
    "key",
    "normal",
    "permutation",
    "randint",
    "split",
    "uniform",
]


def __dir__() -> list[str]:
    return __all__


_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def key(seed: int, *, device: torch.device | str | None = None) -> Tensor:
    """The key of a seed.

    Args:
        seed: an integer of at most 64 bits.
        device: where the key lies, and what is drawn from it. A pipeline's key is best kept on the
            CPU.

    Returns:
        int64 tensor of shape ``(2,)``: the two words of the seed, each from 0 to 2³²−1.

    Raises:
        FpipeError: `seed` is no integer, or too large.

    Example:
        >>> from fpipe import random
        >>> random.key(7).tolist()
        [0, 7]
    """
    number = plain_integer(seed)
    if number is None or not -(1 << 63) <= number < 1 << 64:
        raise FpipeError(f"seed={seed!r:.60} must be an integer of at most 64 bits")
    return torch.tensor([number >> 32 & MASK, number & MASK], dtype=torch.int64, device=device)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key of a key and a number, such as that of a step, a layer or a microbatch.

    Args:
        key: shape ``(2,)``, or ``(..., 2)`` for many.
        data: an integer, or integers of a shape that broadcasts with that of the keys.

    Returns:
        Keys of the shape ``(..., 2)``.

    Raises:
        FpipeError: `key` is no key, or `data` no integer of at most 64 bits.

    Example:
        >>> from fpipe import random
        >>> random.fold_in(random.key(0), 1).tolist()
        [928981903, 3453687069]
    """
    check_key(key, single=False)
    _check_integer(data)
    if isinstance(data, Tensor):
        number = data.to(key.device, torch.int64)
    else:  # made there, for a copy would wait for the device
        own = plain_integer(data)
        assert own is not None
        number = torch.full((), own, dtype=torch.int64, device=key.device)
    counter = (number >> 32 & MASK, number & MASK)
    return torch.stack(threefry2x32((key[..., 0], key[..., 1]), counter), -1)


def split(key: Tensor, num: int = 2) -> Tensor:
    """New keys of a key: the number `i` is ``fold_in(key, i)``.

    Args:
        key: shape ``(2,)``, or ``(..., 2)`` for many.
        num: how many.

    Returns:
        Keys of the shape ``(..., num, 2)``, which unpack: ``first, second = split(key)``.

    Raises:
        FpipeError: `key` is no key, or `num` no number of them.

    Example:
        >>> from fpipe import random
        >>> random.split(random.key(0)).tolist()
        [[1797259609, 2579123966], [928981903, 3453687069]]
    """
    check_key(key, single=False)
    return fold_in(key.unsqueeze(-2), torch.arange(_count(num), device=key.device))


def bits(key: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Uniformly distributed 32-bit words.

    Args:
        key: shape ``(2,)``.
        shape: of the result. Element `i`, counted flat, depends on the key and `i` alone.

    Returns:
        int64 tensor of numbers from 0 to 2³²−1.

    Raises:
        FpipeError: `key` is no key, or `shape` no shape.

    Example:
        >>> from fpipe import random
        >>> random.bits(random.key(0)).item()
        4070199207
    """
    high, low = _words(key, shape)
    return high ^ low


def uniform(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniformly distributed numbers from 0, inclusive, to 1, exclusive.

    They are the multiples of the spacing that `dtype` has just below 1, all equally likely, and
    exactly the same on every device.

    Args:
        key: shape ``(2,)``.
        shape: of the result.
        dtype: float16, bfloat16, float32 or float64.

    Raises:
        FpipeError: `key` is no key, or `dtype` another.

    Example:
        >>> from fpipe import random
        >>> random.uniform(random.key(0), (2,)).tolist()
        [0.94766..., 0.97857...]
    """
    check_dtype(dtype)
    digits = 1 - int(math.log2(torch.finfo(dtype).eps))
    return _integers(key, shape, digits).to(dtype) * 2.0**-digits


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of the standard normal distribution.

    The inverse of its distribution function is taken of 32 binary digits, for float64 of 52, in
    double precision and rounded to `dtype`: exactly the same on every device, compiled or not. None
    lies beyond ±6.34, for float64 ±8.21. What `torch.export` makes of it needs fpipe where it runs.

    Args:
        key: shape ``(2,)``.
        shape: of the result.
        dtype: float16, bfloat16, float32 or float64.

    Raises:
        FpipeError: `key` is no key, or `dtype` another.

    Example:
        >>> from fpipe import random
        >>> numbers = random.normal(random.key(0), (10_000,))
        >>> abs(numbers.mean().item()) < 0.05, abs(numbers.std().item() - 1) < 0.05
        (True, True)
    """
    return normal_doubles(key, shape, dtype).to(dtype)


def normal_doubles(
    key: Tensor, shape: Sequence[int], dtype: torch.dtype, mean: float = 0.0, std: float = 1.0
) -> Tensor:
    """Numbers of a normal distribution, before they are rounded.

    Args:
        key: shape ``(2,)``.
        shape: of the result.
        dtype: of what will be made of them.
        mean: of the distribution.
        std: its standard deviation.

    Returns:
        float64 tensor, whatever `dtype` is.

    Raises:
        FpipeError: as for `normal`.

    Example:
        >>> import torch
        >>> from fpipe import random
        >>> random.normal_doubles(random.key(0), (2,), torch.float32).exp()  # log-normal
        tensor([5.0665, 7.5781], dtype=torch.float64)
    """
    check_dtype(dtype)
    exact = dtype == torch.float64
    digits = 52 if exact else 32
    number = _integers(key, shape, digits)
    return normal_quantile(number, digits, exact=exact, mean=mean, std=std)


def middles(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The middles of 2³² equal parts of (0, 1), all equally likely; for float64 of 2⁵².

    Of these the inverse of a distribution function is taken, which may be infinite at the ends.

    Args:
        key: shape ``(2,)``.
        shape: of the result.
        dtype: of what will be made of them.

    Returns:
        float64 tensor, whatever `dtype` is; the middles are exact, and never an end.

    Example:
        >>> import torch
        >>> from fpipe import random
        >>> -random.middles(random.key(0), (2,), torch.float32).log()  # exponential
        tensor([0.0538, 0.0217], dtype=torch.float64)
    """
    digits = 52 if dtype == torch.float64 else 32
    return (_integers(key, shape, digits).double() + 0.5) * 2.0**-digits


def bernoulli(key: Tensor, p: float | Tensor = 0.5, shape: Sequence[int] | None = None) -> Tensor:
    """True with probability `p`.

    Args:
        key: shape ``(2,)``.
        p: from 0 to 1: a number, which is taken to the next multiple of 2⁻³², or a floating-point
            tensor that broadcasts to `shape`, of which 24 digits count.
        shape: of the result; None for that of `p`.

    Returns:
        Bool tensor.

    Raises:
        FpipeError: `key` is no key, or the number `p` no probability.

    Example:
        >>> from fpipe import random
        >>> random.bernoulli(random.key(0), 0.9, (5,)).tolist()
        [False, False, True, True, True]
    """
    if isinstance(p, Tensor):
        return uniform(key, p.shape if shape is None else shape) < p
    _check_probability(p)
    return bits(key, () if shape is None else shape) < round(p * 2**32)


def randint(
    key: Tensor,
    low: int,
    high: int,
    shape: Sequence[int] = (),
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Uniformly distributed integers from `low`, inclusive, to `high`, exclusive.

    They are remainders of 63 random digits: of two integers one is more likely than the other by at
    most (high − low) / 2⁶³ of its probability.

    Args:
        key: shape ``(2,)``.
        low: the least.
        high: one more than the greatest.
        shape: of the result.
        dtype: of the result.

    Raises:
        FpipeError: `key` is no key; `low` or `high` is no integer of 64 bits, or nothing lies
            between them.

    Example:
        >>> from fpipe import random
        >>> random.randint(random.key(0), 1, 7, (6,)).tolist()  # a die
        [4, 1, 5, 4, 2, 3]
    """
    least, end = plain_integer(low), plain_integer(high)
    if least is None or end is None or not -(1 << 63) <= least < end <= 1 << 63:
        raise FpipeError(
            f"low={low!r:.60} and high={high!r:.60} must be integers of 64 bits with their sign, "
            "the first less than the second"
        )
    if end - least >= 1 << 63:
        raise FpipeError(f"high - low={end - least} must be less than 2**63")
    if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool):
        held = torch.iinfo(dtype)
        if least < held.min or end - 1 > held.max:
            raise FpipeError(
                f"low={low} and high={high} do not lie between {held.min} and {held.max + 1}, as "
                f"those of dtype={dtype} do: choose a wider one"
            )
    return (_integers(key, shape, 63) % (end - least) + least).to(dtype)


def permutation(key: Tensor, num: int) -> Tensor:
    """The integers from 0 to ``num - 1`` in an order of which all are equally likely.

    Args:
        key: shape ``(2,)``.
        num: how many.

    Returns:
        int64 tensor of shape ``(num,)``.

    Raises:
        FpipeError: `key` is no key, or `num` no number of integers.

    Example:
        >>> from fpipe import random
        >>> random.permutation(random.key(0), 5).tolist()
        [1, 0, 4, 3, 2]
    """
    count = _count(num)
    return torch.sort(_integers(key, (count,), 63), stable=True).indices


def categorical(key: Tensor, logits: Tensor) -> Tensor:
    """One of several, each with a probability of its own.

    The greatest of `logits`, to each of which a number of the standard Gumbel distribution is
    added, is the one: Maddison, Tarlow and Minka, "A* sampling", NeurIPS 2014. Sums are taken in
    double precision; those that devices round otherwise differ in their last digits.

    Args:
        key: shape ``(2,)``.
        logits: shape ``(..., k)``: logarithms of the `k` probabilities, of whose sum nothing
            depends; -inf for what is impossible. For several draws of the same, expand it.

    Returns:
        int64 tensor of the shape ``(...)``: numbers from 0 to ``k - 1``.

    Raises:
        FpipeError: `key` is no key, or `logits` no floating-point tensor with a last dimension of
            at least 1.

    Example:
        >>> import torch
        >>> from fpipe import random
        >>> chances = torch.tensor([0.1, 0.0, 0.9])
        >>> random.categorical(random.key(0), chances.log().expand(6, 3)).tolist()
        [0, 2, 2, 2, 2, 2]
    """
    return perturbed(key, logits).argmax(-1)


def perturbed(key: Tensor, logits: Tensor) -> Tensor:
    """`logits` with independent numbers of the standard Gumbel distribution added.

    The order of those of one row is that of draws without replacement.

    Args:
        key: shape ``(2,)``; it is moved to the device of `logits`.
        logits: as for `categorical`.

    Returns:
        float64 tensor of the shape of `logits`.

    Raises:
        FpipeError: as for `categorical`.

    Example:
        >>> import torch
        >>> from fpipe import random
        >>> chances = torch.tensor([0.1, 0.2, 0.3, 0.4])
        >>> random.perturbed(random.key(0), chances.log()).topk(2).indices.tolist()
        [1, 0]
    """
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or not logits.shape[-1:]:
        raise FpipeError(f"logits={logits!r:.60} must be a floating-point tensor of shape (..., k)")
    if not logits.shape[-1]:
        raise FpipeError(f"logits has shape {tuple(logits.shape)}: there is nothing to choose from")
    drawn = middles(key.to(logits.device), logits.shape, torch.float32)
    return logits.double() - torch.log(-torch.log(drawn))


def dropout(key: Tensor, x: Tensor, p: float = 0.5) -> Tensor:
    """`x` with each element set to 0 with probability `p`, and the others times ``1 / (1 - p)``.

    As `torch.nn.functional.dropout`, of a key.

    Args:
        key: shape ``(2,)``; it is moved to the device of `x`.
        x: floating-point or complex tensor of any shape.
        p: from 0 to 1.

    Raises:
        FpipeError: `key` is no key, or `p` no probability.

    Example:
        >>> import torch
        >>> from fpipe import random
        >>> random.dropout(random.key(1), torch.ones(5), 0.5).tolist()
        [2.0, 0.0, 2.0, 2.0, 0.0]
    """
    check_key(key)
    _check_probability(p)
    if not isinstance(x, Tensor):
        raise FpipeError(f"x={x!r:.60} is {a_type(x)}: it must be a tensor")
    keep = bernoulli(key.to(x.device), 1 - p, x.shape)
    # A product, and no quotient: CUDA would take that of a number for a product, rounded twice.
    return torch.where(keep, x * (1 / (1 - p)) if p < 1 else x, 0)


def _words(key: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Two words for each place of `shape`, whose number is the counter."""
    check_key(key)
    _check_shape(shape)
    place = torch.arange(math.prod(shape), device=key.device).view(tuple(shape))
    return threefry2x32((key[0], key[1]), (place >> 32, place & MASK))


def _integers(key: Tensor, shape: Sequence[int], digits: int) -> Tensor:
    """Uniformly distributed numbers of so many binary digits, up to 64."""
    if digits <= 32:
        return bits(key, shape) >> 32 - digits
    high, low = _words(key, shape)
    return high << digits - 32 | low >> 64 - digits


_MANY = (
    ". torch.vmap draws from many keys; members of an ensemble get one, and each draws from "
    "fold_in(key, number) of a number in its part of the batch"
)


def is_key(value: object, *, single: bool = True) -> bool:
    """Whether a value has the form of a key, or of several."""
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.int64
        and value.shape[-1:] == (2,)
        and (value.dim() == 1 or not single)
    )


def check_key(key: Tensor, *, single: bool = True) -> None:
    """Refuse what is no key.

    Args:
        key: shape ``(2,)``, or ``(..., 2)`` where it need not be a `single` one.
        single: whether it must be one key.

    Raises:
        FpipeError: says what it is instead.
    """
    if not is_key(key, single=single):
        found = (
            f"a {str(key.dtype).removeprefix('torch.')} tensor of shape {tuple(key.shape)}"
            if isinstance(key, Tensor)
            else f"{key!r:.60}, {a_type(key)}"
        )
        raise FpipeError(
            f"key is {found}: it must be an int64 tensor of shape (2,), which "
            f"fpipe.random.key(seed) makes{_MANY if isinstance(key, Tensor) else ''}"
        )


def _count(num: int) -> int:
    count = plain_integer(num)
    if count is None or count < 0:
        raise FpipeError(f"num={num!r:.60} must be an integer, 0 or more")
    return int(count)


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse a dtype in which nothing is drawn."""
    if dtype not in _DTYPES:
        raise FpipeError(
            f"dtype={dtype} must be one of {', '.join(map(str, _DTYPES))}: draw in one of them, "
            "and convert"
        )


def _check_probability(p: float) -> None:
    try:
        fits = 0 <= p <= 1
    except TypeError:
        fits = False
    if not fits:
        raise FpipeError(f"p={p!r:.60} must be a probability, from 0 to 1")


def _check_integer(data: int | Tensor) -> None:
    if isinstance(data, Tensor):
        fits = not (data.is_floating_point() or data.is_complex())
    else:
        number = plain_integer(data)
        fits = number is not None and -(1 << 63) <= number < 1 << 63
    if not fits:
        raise FpipeError(
            f"data={data!r:.60} must be an integer of at most 64 bits with its sign, or a tensor "
            "of integers"
        )


def _check_shape(shape: Sequence[int]) -> None:
    try:
        fits = all(not isinstance(size, float) and size >= 0 for size in shape)
    except TypeError:
        fits = False
    if not fits:
        raise FpipeError(f"shape={shape!r:.60} must be a sequence of sizes, such as (2, 3)")
