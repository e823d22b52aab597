"""Short stand-ins for long values, the same in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from functools import lru_cache


@lru_cache(maxsize=256)
def identity(value: Hashable) -> int:
    """A positive integer that stands for a value that prints, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big") + 1


def digest(text: str) -> str:
    """A short stand-in for a long text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
