"""Parameters that are made leaf by leaf, and only those that this process holds.

    shapes ── which leaves are read here? ──► make(those)    others stay bare shapes

What is made of a leaf depends on its name alone, so it is the same wherever that leaf lies.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fpipe import random
from fpipe.errors import BatchError

Make = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""From meta tensors of the shapes and dtypes of some leaves to the leaves, all by name."""

InitFn = Callable[[Tensor, str, Tensor], Tensor]
"""``(key, name, like) -> leaf``: `like` is a meta tensor of its shape and dtype."""


def names_of(spec: optree.PyTreeSpec) -> list[str]:
    """A name for each leaf: the keys and indices of its path, joined by dots.

    Raises:
        BatchError: two leaves have the same.

    Example:
        >>> from fpipe import tree
        >>> names_of(tree.structure([{"w": 1, "norm.bias": 2}, (3,)]))
        ['0.norm.bias', '0.w', '1.0']
    """
    names = [".".join(map(str, path)) for path in spec.paths()]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise BatchError(
            f"shapes has two leaves whose paths read {twice[0]!r} when they are joined by dots: "
            "rename one of their keys"
        )
    return names


def key_of(key: Tensor, name: str) -> Tensor:
    """The key of a leaf: the same for one name everywhere.

    Example:
        >>> from fpipe import random
        >>> key_of(random.key(0), "layers.0.weight").tolist()
        [2062000697, 3691598895]
    """
    digest = hashlib.sha256(name.encode()).digest()
    return random.fold_in(key, int.from_bytes(digest[:4], "big"))


def drawn(init_fn: InitFn, key: Tensor) -> Make:
    """What makes each leaf of a key of its own.

    Raises:
        FpipeError: `key` is no key.
    """
    random.check_key(key)

    def make(wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: _checked(name, init_fn(key_of(key, name), name, like), like)
            for name, like in wanted.items()
        }

    return make


def fill(
    leaves: Sequence[Tensor],
    names: Sequence[str],
    held: Callable[[int], bool],
    make: Make,
    device: torch.device | None,
) -> list[Tensor]:
    """Real leaves where they are held, and meta tensors elsewhere.

    Args:
        leaves: on any device: their shapes and dtypes count.
        names: of them.
        held: whether a leaf is, by its number.
        make: makes those.
        device: where they are moved to, None to leave them where they were made.
    """
    likes = [torch.empty_like(leaf, device="meta") for leaf in leaves]
    wanted = {names[index]: like for index, like in enumerate(likes) if held(index)}
    made = make(wanted)
    return [
        like if name not in wanted else made[name] if device is None else made[name].to(device)
        for name, like in zip(names, likes, strict=True)
    ]


def _checked(name: str, value: Any, like: Tensor) -> Tensor:
    found = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        if not value.is_meta and (value.shape, value.dtype) == (like.shape, like.dtype):
            return value.detach()
        found = f"{_in_words(value)} on {value.device}"
    raise BatchError(
        f"init_fn made {found} of {name!r}, which is {_in_words(like)}: it must return a tensor "
        "with data, of that shape and dtype"
    )


def _in_words(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
