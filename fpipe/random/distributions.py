"""Draw random numbers from a key: each function maps a key and a shape to a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fpipe.errors import FpipeError, a_type
from fpipe.random.key_tensors import check_count, check_key
from fpipe.random.normal_quantile import normal_quantile
from fpipe.random.threefry import MASK, threefry2x32
from fpipe.schedule.arguments import plain_integer

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def bits(key: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Draw uniformly distributed 32-bit words.

    Args:
        key: int64, shape ``(2,)``.
        shape: of the result. Element `i`, counted flat, depends only on the key and on `i`.

    Returns:
        int64 tensor of numbers from 0 to 2³²−1.

    Raises:
        FpipeError: `key` is not a key, or `shape` is not a shape.

    Example:
        >>> from fpipe import random
        >>> random.bits(random.key(0)).item()
        4070199207
    """
    high, low = _words(key, shape)
    return high ^ low


def uniform(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw uniformly distributed numbers from 0, inclusive, to 1, exclusive.

    They are the multiples of the spacing that `dtype` has just below 1, all equally likely, and
    exactly the same on every device.

    Args:
        key: int64, shape ``(2,)``.
        shape: of the result.
        dtype: float16, bfloat16, float32 or float64.

    Returns:
        Tensor of this shape and dtype, on the device of the key.

    Raises:
        FpipeError: `key` is not a key, or `dtype` is another one.

    Example:
        >>> from fpipe import random
        >>> random.uniform(random.key(0), (2,)).tolist()
        [0.94766..., 0.97857...]
    """
    check_dtype(dtype)
    digits = 1 - int(math.log2(torch.finfo(dtype).eps))
    return _integers(key, shape, digits).to(dtype) * 2.0**-digits


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw numbers from the standard normal distribution.

    Each is the quantile of a uniform number of 32 binary digits (52 for float64), computed in
    double precision and rounded to `dtype`: exactly the same on every device, compiled or not. No
    number lies beyond ±6.34, or ±8.21 for float64. A program that `torch.export` makes of it needs
    fpipe where it runs.

    Args:
        key: int64, shape ``(2,)``.
        shape: of the result.
        dtype: float16, bfloat16, float32 or float64.

    Returns:
        Tensor of this shape and dtype, on the device of the key.

    Raises:
        FpipeError: `key` is not a key, or `dtype` is another one.

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
    """Draw numbers from a normal distribution without rounding them to `dtype`.

    Args:
        key: as for `normal`, as are `shape` and `dtype`, to which the caller rounds.
        mean: of the distribution.
        std: its standard deviation.

    Returns:
        float64 tensor, whatever `dtype` is.

    Example:
        >>> import torch
        >>> from fpipe.random.key_tensors import key
        >>> normal_doubles(key(0), (2,), torch.float32).exp()  # log-normal
        tensor([5.0665, 7.5781], dtype=torch.float64)
    """
    check_dtype(dtype)
    exact = dtype == torch.float64
    digits = 52 if exact else 32
    number = _integers(key, shape, digits)
    return normal_quantile(number, digits, exact=exact, mean=mean, std=std)


def middles(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Draw middles of 2³² equal intervals of (0, 1), or of 2⁵² for float64, all equally likely.

    They are arguments for the inverse of a distribution function, which may be infinite at 0 or 1.

    Args:
        key: as for `uniform`, as are `shape` and `dtype`, to which the caller rounds.

    Returns:
        float64 tensor, whatever `dtype` is. The middles are exact, and never 0 or 1.

    Example:
        >>> import torch
        >>> from fpipe.random.key_tensors import key
        >>> -middles(key(0), (2,), torch.float32).log()  # exponential
        tensor([0.0538, 0.0217], dtype=torch.float64)
    """
    digits = 52 if dtype == torch.float64 else 32
    return (_integers(key, shape, digits).double() + 0.5) * 2.0**-digits


def bernoulli(key: Tensor, p: float | Tensor = 0.5, shape: Sequence[int] | None = None) -> Tensor:
    """Draw booleans that are True with probability `p`.

    Args:
        key: int64, shape ``(2,)``.
        p: from 0 to 1: a number, rounded to a multiple of 2⁻³², or a floating-point tensor that
            broadcasts to `shape`, of which 24 binary digits count.
        shape: of the result; None for the shape of `p`.

    Returns:
        Bool tensor.

    Raises:
        FpipeError: `key` is not a key, or the number `p` is not a probability.

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
    """Draw uniformly distributed integers from `low`, inclusive, to `high`, exclusive.

    They are remainders of 63 random binary digits, so the probabilities of two integers differ by
    at most (high − low) / 2⁶³ of their value.

    Args:
        key: int64, shape ``(2,)``.
        low: the least integer.
        high: one more than the greatest.
        shape: of the result.
        dtype: of the result.

    Returns:
        Tensor of this shape and dtype, on the device of the key.

    Raises:
        FpipeError: `key` is not a key; `low` or `high` is not an integer of 64 bits, or no integer
            lies between them; or `dtype` cannot hold them.

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
        limits = torch.iinfo(dtype)
        if least < limits.min or end - 1 > limits.max:
            raise FpipeError(
                f"low={low} and high={high} do not lie between {limits.min} and {limits.max + 1}, "
                f"as those of dtype={dtype} do: choose a wider one"
            )
    return (_integers(key, shape, 63) % (end - least) + least).to(dtype)


def permutation(key: Tensor, num: int) -> Tensor:
    """Draw an order of the integers from 0 to ``num - 1``, all orders being equally likely.

    Args:
        key: int64, shape ``(2,)``.
        num: the number of integers.

    Returns:
        int64 tensor of shape ``(num,)``.

    Raises:
        FpipeError: `key` is not a key, or `num` is not a count.

    Example:
        >>> from fpipe import random
        >>> random.permutation(random.key(0), 5).tolist()
        [1, 0, 4, 3, 2]
    """
    return torch.sort(_integers(key, (check_count(num),), 63), stable=True).indices


def categorical(key: Tensor, logits: Tensor) -> Tensor:
    """Draw one of several categories, each with its own probability.

    The draw is the greatest of the `logits` after adding a standard Gumbel number to each
    (Maddison, Tarlow and Minka, "A* sampling", NeurIPS 2014). Sums are taken in double precision;
    on devices that round logarithms otherwise, their last digits differ.

    Args:
        key: int64, shape ``(2,)``.
        logits: floating-point, shape ``(..., k)``: logarithms of the `k` probabilities, up to a
            constant; -inf for a category that is impossible. Expand it to draw several times.

    Returns:
        int64 tensor of shape ``(...)``: numbers from 0 to ``k - 1``.

    Raises:
        FpipeError: `key` is not a key, or `logits` is not a floating-point tensor with a last
            dimension of at least 1.

    Example:
        >>> import torch
        >>> from fpipe import random
        >>> chances = torch.tensor([0.1, 0.0, 0.9])
        >>> random.categorical(random.key(0), chances.log().expand(6, 3)).tolist()
        [0, 2, 2, 2, 2, 2]
    """
    return perturbed(key, logits).argmax(-1)


def perturbed(key: Tensor, logits: Tensor) -> Tensor:
    """`logits` plus independent standard Gumbel numbers: their order is a draw without replacement.

    Args:
        key: int64, shape ``(2,)``; it is moved to the device of `logits`.
        logits: as for `categorical`, whose errors this raises.

    Returns:
        float64 tensor of the shape of `logits`.

    Example:
        >>> import torch
        >>> from fpipe.random.key_tensors import key
        >>> chances = torch.tensor([0.1, 0.2, 0.3, 0.4])
        >>> perturbed(key(0), chances.log()).topk(2).indices.tolist()
        [1, 0]
    """
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or not logits.shape[-1:]:
        raise FpipeError(f"logits={logits!r:.60} must be a floating-point tensor of shape (..., k)")
    if not logits.shape[-1]:
        raise FpipeError(f"logits has shape {tuple(logits.shape)}: there is nothing to choose from")
    drawn = middles(key.to(logits.device), logits.shape, torch.float32)
    return logits.double() - torch.log(-torch.log(drawn))


def dropout(key: Tensor, x: Tensor, p: float = 0.5) -> Tensor:
    """Set each element of `x` to 0 with probability `p`, and scale the others by ``1 / (1 - p)``.

    It is `torch.nn.functional.dropout` with a key (Srivastava et al., JMLR 15, 2014).

    Args:
        key: int64, shape ``(2,)``; it is moved to the device of `x`.
        x: floating-point or complex tensor of any shape.
        p: from 0 to 1.

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        FpipeError: `key` is not a key, `x` is not a tensor, or `p` is not a probability.

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
    # Multiply instead of dividing: CUDA turns a division by a number into a product, rounded twice.
    return torch.where(keep, x * (1 / (1 - p)) if p < 1 else x, 0)


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse a dtype in which nothing can be drawn.

    Raises:
        FpipeError: names the dtypes that can.
    """
    if dtype not in _DTYPES:
        raise FpipeError(
            f"dtype={dtype} must be one of {', '.join(map(str, _DTYPES))}: draw in one of them, "
            "and convert"
        )


def _words(key: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Two words for each place in `shape`; the counter is the flat index of the place."""
    check_key(key)
    _check_shape(shape)
    place = torch.arange(math.prod(shape), device=key.device).view(tuple(shape))
    return threefry2x32((key[0], key[1]), (place >> 32, place & MASK))


def _integers(key: Tensor, shape: Sequence[int], digits: int) -> Tensor:
    """Uniformly distributed integers of `digits` binary digits, up to 64."""
    if digits <= 32:
        return bits(key, shape) >> 32 - digits
    high, low = _words(key, shape)
    return high << digits - 32 | low >> 64 - digits


def _check_probability(p: float) -> None:
    try:
        fits = 0 <= p <= 1
    except TypeError:
        fits = False
    if not fits:
        raise FpipeError(f"p={p!r:.60} must be a probability, from 0 to 1")


def _check_shape(shape: Sequence[int]) -> None:
    try:
        fits = all(not isinstance(size, float) and size >= 0 for size in shape)
    except TypeError:
        fits = False
    if not fits:
        raise FpipeError(f"shape={shape!r:.60} must be a sequence of sizes, such as (2, 3)")
