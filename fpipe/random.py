"""Random numbers as functions of a key: the same key gives the same numbers, anywhere.

A key is a tensor of two 32-bit words. What is drawn from it depends on the key and on the place in
the result alone, so nothing is advanced, and nothing changes when it is computed twice, elsewhere
or in another order. Use a key once; make new ones of it with `split` and `fold_in`.

The generator is Threefry2x32 (`fpipe.threefry`), on the counters of the places. `key`, `split`,
`fold_in` and `bits` agree with ``jax.random`` (``jax_threefry_partitionable``, its default). All of
it is integer arithmetic in plain tensor operations: the same bits on every device, compiled or not,
and under `torch.func.vmap`, `vjp` and `jvp`. Words are held in int64, because torch has no addition
and no shift of uint32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fpipe.errors import FpipeError
from fpipe.schedule.arguments import plain_integer
from fpipe.threefry import MASK, threefry2x32

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
    if not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 64:
        raise FpipeError(f"seed={seed!r:.60} must be an integer of at most 64 bits")
    return torch.tensor([seed >> 32 & MASK, seed & MASK], dtype=torch.int64, device=device)


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
    number = torch.as_tensor(data, device=key.device)
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
    count = plain_integer(num)
    if count is None or count < 0:
        raise FpipeError(f"num={num!r:.60} must be an integer, 0 or more")
    return fold_in(key.unsqueeze(-2), torch.arange(count, device=key.device))


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
    _check_dtype(dtype)
    digits = 1 - int(math.log2(torch.finfo(dtype).eps))
    return _integers(key, shape, digits).to(dtype) * 2.0**-digits


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of the standard normal distribution.

    The inverse of its distribution function is taken in double precision and rounded to `dtype`.
    Devices and compilers differ in the last digits of a double, so float64 results may differ there
    too; narrower ones differ in about one number of 10⁸.

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
    _check_dtype(dtype)
    digits = 52 if dtype == torch.float64 else 32
    # The middles of 2ⁿ equal parts of (-1, 1): exact in a double, and never an end.
    middles = (_integers(key, shape, digits).double() + 0.5) * 2.0 ** (1 - digits) - 1
    return (torch.erfinv(middles) * math.sqrt(2)).to(dtype)


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


def dropout(key: Tensor, x: Tensor, p: float = 0.5) -> Tensor:
    """`x` with each element set to 0 with probability `p`, and the others divided by ``1 - p``.

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
        raise FpipeError(f"x={x!r:.60} is a {type(x).__name__}: it must be a tensor")
    keep = bernoulli(key.to(x.device), 1 - p, x.shape)
    return torch.where(keep, x / (1 - p) if p < 1 else x, 0)


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


def check_key(key: Tensor, *, single: bool = True) -> None:
    """Refuse what is no key.

    Args:
        key: shape ``(2,)``, or ``(..., 2)`` where it need not be a `single` one.
        single: whether it must be one key.

    Raises:
        FpipeError: says what it is instead.
    """
    if (
        not isinstance(key, Tensor)
        or key.dtype != torch.int64
        or key.shape[-1:] != (2,)
        or (single and key.dim() != 1)
    ):
        found = (
            f"a {str(key.dtype).removeprefix('torch.')} tensor of shape {tuple(key.shape)}"
            if isinstance(key, Tensor)
            else f"{key!r:.60}, a {type(key).__name__}"
        )
        raise FpipeError(
            f"key is {found}: it must be an int64 tensor of shape (2,), which "
            "fpipe.random.key(seed) makes. torch.vmap draws from many keys; members of an ensemble "
            "get one, and each draws from fold_in(key, number) of a number in its part of the batch"
        )


def _check_dtype(dtype: torch.dtype) -> None:
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
