"""Fixtures of the tests of transforms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.crew import Crew


@pytest.fixture(scope="module")
def pair() -> Iterator[Crew]:
    """Two processes."""
    with Crew(2) as two:
        yield two
