"""What was made last, under the keys that it was made for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

KEPT: Final = 256


class Latest(dict[K, V]):
    """A dict of the entries that were put in last, or again; those before them are forgotten.

    Processes that put in the same keys in the same order forget the same.

    Args:
        kept: how many there are at most.

    Example:
        >>> found = Latest(2)
        >>> for key in "abac":
        ...     found[key] = key.upper()
        >>> found
        {'a': 'A', 'c': 'C'}
    """

    def __init__(self, kept: int = KEPT) -> None:
        super().__init__()
        self._kept = kept

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        while len(self) > self._kept:
            del self[next(iter(self))]
