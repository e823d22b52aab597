"""One action with the time that it took."""

from __future__ import annotations

from typing import NamedTuple

from fpipe.schedule.action import Action


class Event(NamedTuple):
    """One action with the time it took: from `start` to `end` on `rank`."""

    rank: int
    action: Action
    start: float
    end: float
