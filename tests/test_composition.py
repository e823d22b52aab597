"""The page of what goes with what: its table is that of the features, and its cells are run."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Final

import pytest

from fpipe import schedules
from tests.composition import BEGIN, END, FEATURES, GROUPS, PAGE, holds

FAMILIES: Final = list(chain.from_iterable(GROUPS.values()))
TESTS: Final = Path(__file__).parent


def test_every_family_is_in_a_group() -> None:
    assert sorted(FAMILIES) == sorted(set(schedules.FAMILIES) - {"forward_only"})


@pytest.mark.parametrize("number", range(len(FEATURES)), ids=list(FEATURES))
def test_a_feature_gives_what_plain_torch_gives(number: int) -> None:
    """On one family each; all of them take minutes."""
    assert holds(list(FEATURES.values())[number], FAMILIES[number % len(FAMILIES)])


def test_the_page_has_a_row_for_every_feature() -> None:
    rows = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(FEATURES)
    wholes = [f"{len(families)} of {len(families)}" for families in GROUPS.values()]
    assert all(row.strip("| ").split(" | ")[1:] == wholes for row in rows)


def test_the_page_names_tests_that_exist() -> None:
    names = re.findall(r"`(\w+/test_\w+\.py)`", PAGE.read_text("utf-8"))
    assert names and [name for name in names if not (TESTS / name).exists()] == []
