"""Rows of actions from their text form."""

from __future__ import annotations

from fpipe import Action


def parse_row(text: str) -> list[Action]:
    """The actions of a rank, such as ``"0F0 0B0"``."""
    return [Action.parse(word) for word in text.split()]
