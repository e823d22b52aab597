"""Which hyperparameters each parameter has: the defaults, those of its group, those of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from fpipe.errors import FpipeError, a_type

Path = tuple[Any, ...]
Which = str | Callable[[Path], bool]
Groups = Mapping[str, Mapping[str, Any] | None] | Sequence[tuple[Which, Mapping[str, Any] | None]]


class Group:
    """Parameters that have hyperparameters of their own.

    Args:
        which: a name of a parameter or a pattern of `fnmatch` over names, such as ``"*.bias"``; or
            a function of a leaf's path, a tuple of keys and indices.
        hyper: what replaces the defaults; None for parameters that no step changes.
    """

    def __init__(self, which: Which, hyper: Mapping[str, Any] | None) -> None:
        self.which = which
        self.hyper = None if hyper is None else dict(hyper)

    def holds(self, name: str, path: Path) -> bool:
        """Whether a parameter of this name and path belongs to the group."""
        if isinstance(self.which, str):
            return fnmatchcase(name, self.which)
        return bool(self.which(path))


def read_groups(groups: Groups | None) -> tuple[Group, ...]:
    """The groups in the order in which they are asked; the first that holds a parameter has it.

    Raises:
        FpipeError: `groups` is neither a mapping nor a sequence of pairs.
    """
    if groups is None:
        return ()
    pairs = list(groups.items()) if isinstance(groups, Mapping) else groups
    read = []
    for pair in pairs:
        well = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not well or not (isinstance(pair[0], str) or callable(pair[0])):
            raise FpipeError(
                f"groups has {pair!r:.80}: it must map names, or patterns of fnmatch, to "
                'hyperparameters ({"*.bias": {"weight_decay": 0.0}}), or be a list of such pairs, '
                "whose first may also be a function of a leaf's path"
            )
        which, hyper = pair
        if hyper is not None and not isinstance(hyper, Mapping):
            raise FpipeError(
                f"groups gives {which!r:.60} {a_type(hyper)}: it must be a mapping of "
                "hyperparameters, or None for parameters that no step changes"
            )
        read.append(Group(which, hyper))
    return tuple(read)


def group_of(groups: Sequence[Group], name: str, path: Path) -> int | None:
    """The number of the first group that holds a parameter, None for no group."""
    for number, group in enumerate(groups):
        if group.holds(name, path):
            return number
    return None
