"""How long to search: by the clock, or by a count that makes the result repeatable."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Budget:
    """Time or tries, and how much of them is used.

    Attributes:
        seconds: limit by the clock, where `iterations` is None.
        iterations: limit by evaluations. The clock then plays no part, so that a search with the
            same seed repeats itself on every machine.
        spent: evaluations made so far; a try that needed none counts as a small part of one.
        share: the part of the whole that may be used up, for one phase of the search.
    """

    seconds: float
    iterations: int | None = None
    spent: float = 0.0
    share: float = 1.0
    _start: float = field(default_factory=time.monotonic)

    def spend(self, amount: float = 1.0) -> None:
        """Count an evaluation."""
        self.spent += amount

    @property
    def progress(self) -> float:
        """The part of the whole budget that is used up, from 0 to 1."""
        if self.iterations is not None:
            return min(1.0, self.spent / self.iterations) if self.iterations else 1.0
        elapsed = time.monotonic() - self._start
        return min(1.0, elapsed / self.seconds) if self.seconds else 1.0

    @property
    def over(self) -> bool:
        """Whether the share is used up."""
        return self.progress >= self.share
