"""Keys of random numbers: make them, derive new ones, and check what a caller passes as one."""

from __future__ import annotations

import torch
from torch import Tensor

from fpipe.errors import FpipeError, a_type
from fpipe.random.threefry import MASK, threefry2x32
from fpipe.schedule.arguments import plain_integer
from fpipe.torch_internals import functorch


def key(seed: int, *, device: torch.device | str | None = None) -> Tensor:
    """Make a key from a seed.

    Args:
        seed: an integer of at most 64 bits.
        device: where the key lies, and with it the numbers that are drawn from it. Keep the key of
            a pipeline on the CPU.

    Returns:
        int64 tensor of shape ``(2,)``: the two words of the seed, each from 0 to 2³²−1.

    Raises:
        FpipeError: `seed` is not an integer, or is too large.

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
    """Derive a new key from a key and a number, such as that of a step, a layer or a microbatch.

    Args:
        key: int64, shape ``(2,)``, or ``(..., 2)`` for many keys.
        data: an integer, or a tensor of integers whose shape broadcasts with that of the keys.

    Returns:
        int64 tensor of shape ``(..., 2)``.

    Raises:
        FpipeError: `key` is not a key, or `data` is not an integer of at most 64 bits.

    Example:
        >>> from fpipe import random
        >>> random.fold_in(random.key(0), 1).tolist()
        [928981903, 3453687069]
    """
    check_key(key, single=False)
    number = _integer_on(key.device, data)
    counter = (number >> 32 & MASK, number & MASK)
    return torch.stack(threefry2x32((key[..., 0], key[..., 1]), counter), -1)


def split(key: Tensor, num: int = 2) -> Tensor:
    """Derive several keys from one: the key with index `i` is ``fold_in(key, i)``.

    Args:
        key: int64, shape ``(2,)``, or ``(..., 2)`` for many keys.
        num: the number of new keys, 0 or more.

    Returns:
        int64 tensor of shape ``(..., num, 2)``, which unpacks: ``first, second = split(key)``.

    Raises:
        FpipeError: `key` is not a key, or `num` is not a count.

    Example:
        >>> from fpipe import random
        >>> random.split(random.key(0)).tolist()
        [[1797259609, 2579123966], [928981903, 3453687069]]
    """
    check_key(key, single=False)
    return fold_in(key.unsqueeze(-2), torch.arange(check_count(num), device=key.device))


# ── checks ──────────────────────────────────────────────────────────────────────────────────────

_MANY_KEYS = (
    ". torch.vmap draws from many keys; members of an ensemble share one key, and each draws from "
    "fold_in(key, number) with a number from its slice of the batch"
)


def is_key(value: object, *, single: bool = True) -> bool:
    """Whether a value has the dtype and shape of a key, or of several if not `single`."""
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.int64
        and value.shape[-1:] == (2,)
        and (value.dim() == 1 or not single)
    )


def check_key(key: Tensor, *, single: bool = True) -> None:
    """Refuse a value that is not a key, or several keys of shape ``(..., 2)`` if not `single`.

    Raises:
        FpipeError: says what the value is instead.
    """
    if not is_key(key, single=single):
        description = (
            f"a {str(key.dtype).removeprefix('torch.')} tensor of shape {tuple(key.shape)}"
            if isinstance(key, Tensor)
            else f"{key!r:.60}, {a_type(key)}"
        )
        raise FpipeError(
            f"key is {description}: it must be an int64 tensor of shape (2,), which "
            f"fpipe.random.key(seed) makes{_MANY_KEYS if isinstance(key, Tensor) else ''}"
        )


def check_count(num: int) -> int:
    """The argument `num` as an integer.

    Raises:
        FpipeError: it is not an integer, or it is negative.
    """
    count = plain_integer(num)
    if count is None or count < 0:
        raise FpipeError(f"num={num!r:.60} must be an integer, 0 or more")
    return int(count)


def unwrapped(key: Tensor) -> Tensor | None:
    """The plain key beneath the levels of `torch.func.grad` and `jvp`.

    Returns:
        None if `torch.func.vmap` maps the key, so that each member has another one.
    """
    while functorch.is_gradtrackingtensor(key):
        key = functorch.get_unwrapped(key)
    return None if functorch.is_functorch_wrapped_tensor(key) else key


def _integer_on(device: torch.device, data: int | Tensor) -> Tensor:
    if isinstance(data, Tensor):
        if not (data.is_floating_point() or data.is_complex()):
            return data.to(device, torch.int64)
    else:
        number = plain_integer(data)
        if number is not None and -(1 << 63) <= number < 1 << 63:
            # Filled on the device, because a copy would wait for it.
            return torch.full((), number, dtype=torch.int64, device=device)
    raise FpipeError(
        f"data={data!r:.60} must be an integer of at most 64 bits with its sign, or a tensor "
        "of integers"
    )
