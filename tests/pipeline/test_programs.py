"""Random programs of views, writes and calls without gradients have the gradients of autograd."""

from __future__ import annotations

import pytest

from fpipe.pieces.partition import NAMES
from tests.programs import check_program, check_twice, draw

# Of torch's reentrant checkpoint, in programs that depend on no parameter there.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


@pytest.mark.parametrize("seed", range(12))
def test_gradients_are_those_of_autograd(seed: int) -> None:
    check_program(draw(seed), stages=bool(seed % 2), remat=NAMES[seed // 2 % len(NAMES)])


def test_most_programs_can_be_checked() -> None:
    outcomes = [check_program(draw(seed), stages=False) for seed in range(100, 106)]
    assert outcomes.count("equal") >= 4


@pytest.mark.parametrize("stages", [False, True], ids=["function", "stages"])
def test_second_derivatives_are_those_of_autograd(stages: bool) -> None:
    """What is computed within no_grad was no constant of them, without a word."""
    outcomes = [check_twice(draw(seed), stages=stages) for seed in range(18)]
    assert outcomes.count("equal") >= 3
