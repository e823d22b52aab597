"""Slots: give each value of a program a register for as long as anything reads it."""

from __future__ import annotations

import heapq

from fpipe.program.values import Value


class Slots:
    """Hands out slot numbers, the smallest free one first.

    Args:
        last_use: for each value, the index of the last step that reads it; a value without an
            entry is read by nothing.
    """

    def __init__(self, last_use: dict[Value, int]) -> None:
        self._last_use = last_use
        self._slot: dict[Value, int] = {}
        self._free: list[int] = []
        self.count = 0

    def __getitem__(self, value: Value) -> int:
        return self._slot[value]

    def make(self, value: Value) -> int:
        """A slot for a new value; -1 if nothing reads it."""
        if value not in self._last_use:
            return -1
        if self._free:
            self._slot[value] = heapq.heappop(self._free)
        else:
            self._slot[value] = self.count
            self.count += 1
        return self._slot[value]

    def ends(self, value: Value, step: int) -> bool:
        """Whether nothing reads `value` after `step`."""
        return self._last_use[value] <= step

    def release(self, value: Value) -> int:
        """Take the slot of `value` back; returns its number."""
        slot = self._slot.pop(value)
        heapq.heappush(self._free, slot)
        return slot
