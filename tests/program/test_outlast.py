"""A transport that is dropped waits for its last messages, but not for ever."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from fpipe.transport import group


class End:
    """The end of a step on a device, which has come when it was asked for so often."""

    def __init__(self, asked: float) -> None:
        self.left = asked

    def query(self) -> bool:
        self.left -= 1
        return self.left <= 0


class Broken:
    def query(self) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_until_the_device_has_come_to_the_end() -> None:
    ends: Any = [End(5), End(3)]
    group._outlast(ends)
    assert all(end.left <= 0 for end in ends)


def test_not_after_an_error_of_the_device() -> None:
    broken: Any = [Broken()]
    group._outlast(broken)


def test_not_for_ever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(group, "LINGERS", 0.05)
    never: Any = [End(float("inf"))]
    with caplog.at_level(logging.WARNING, logger="fpipe"):
        group._outlast(never)
    assert "has not come to the end of the last step" in caplog.text
