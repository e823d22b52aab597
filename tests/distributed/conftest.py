"""What the tests with processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.crew import Crew


@pytest.fixture(scope="package")
def crews() -> Iterator[list[Crew]]:
    """The crew in use, if there is one."""
    running: list[Crew] = []
    yield running
    for crew in running:
        crew.close()


@pytest.fixture
def crew(crews: list[Crew]) -> Crew:
    """Four processes for tests that leave them usable; a test takes as many as it needs."""
    if not crews or crews[0].closed:
        crews[:] = [Crew(4)]
    return crews[0]
