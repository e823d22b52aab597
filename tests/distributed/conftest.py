"""What the tests with processes share."""

from __future__ import annotations

import pytest

from tests.distributed.crew import Crew

_running: list[Crew] = []


@pytest.fixture
def crew() -> Crew:
    """Four processes for tests that leave them usable; a test takes as many as it needs."""
    if not _running or _running[0].closed:
        _running[:] = [Crew(4)]
    return _running[0]


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the processes after the last test of this folder.

    Each has a hundred threads of gloo's, which wake a hundred times a second: together they would
    take a tenth of a core from all tests that follow.
    """
    if nextitem is None or nextitem.path.parent != item.path.parent:
        while _running:
            _running.pop().close()
