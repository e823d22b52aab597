"""Over two processes, every transform gives what it gives in one, bit for bit.

Every schedule is in test_every_schedule.py, with a small model.
"""

from __future__ import annotations

from typing import Any

import pytest

from fpipe import schedules
from tests.distributed.crew import Crew, values
from tests.models import assert_identical
from tests.transforms.actors import make_ensemble, run, run_cut, wrong_vector


def test_an_ensemble_of_language_models(pair: Crew) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=3)
    parts = values(pair.run(run, "vmap", schedule))
    whole = run(None, "vmap", schedule)
    for rank, part in enumerate(parts):
        own = set(schedule.stages_of(rank))
        for found, expected in zip(part, whole, strict=True):
            compare(found, expected, own)


def compare(found: Any, expected: Any, own: set[int]) -> None:
    """Lists have one part per stage, of which a rank holds its own."""
    if not isinstance(expected, list):
        assert_identical(found, expected)
        return
    for stage, (mine, all_of_it) in enumerate(zip(found, expected, strict=True)):
        assert_identical(mine, all_of_it if stage in own else None)


def test_each_rank_makes_the_members_of_what_it_reads(pair: Crew) -> None:
    """One matrix is read on the first rank, the other on the second: the rest has no data."""
    schedule = schedules.zbv(ranks=2, microbatches=2)
    parts = values(pair.run(make_ensemble, schedule))
    params, whole = make_ensemble(None, schedule)
    for (made, found), own, other in zip(parts, "ab", "ba", strict=True):
        assert_identical(made[own], params[own])
        assert made[other].is_meta
        assert_identical(found.loss, whole.loss)
        assert_identical(found.grads, {own: whole.grads[own], other: None})


def test_gradients_of_the_batch_lie_on_the_first_stage(pair: Crew) -> None:
    schedule = schedules.zb_h1(ranks=2, microbatches=3)
    first, last = values(pair.run(run, "grad", schedule))
    whole = run(None, "grad", schedule)
    assert_identical(first.grads[0], whole.grads[0])
    assert whole.grads[0]["pixels"].abs().sum() > 0
    assert last.grads[0] is None
    compare(last.grads[1], whole.grads[1], {1})


@pytest.mark.parametrize("transform", ["vmap", "hvp", "rows of vmap", "norms", "grad"])
def test_two_ranks_of_a_cut_function(pair: Crew, transform: str) -> None:
    """Both matrices are read on both ranks, which get the whole gradients, bit for bit."""
    schedule = schedules.interleaved_zero_bubble(ranks=2, microbatches=4)
    parts = values(pair.run(run_cut, transform, schedule))
    loss, *wholes = run_cut(None, transform, schedule)
    for own_loss, *_ in parts:
        assert_identical(own_loss, loss)
    for rank, part in enumerate(parts):
        for number, expected in enumerate(wholes, 1):
            # The gradients of the batch lie where it comes in.
            elsewhere = (transform, number, rank) == ("grad", 2, 1)
            assert_identical(part[number], None if elsewhere else expected)


def test_a_wrong_argument_of_one_rank_is_known_on_all(pair: Crew) -> None:
    for failed, worked in values(pair.run(wrong_vector)):
        assert failed.error.rank == 1
        assert "vector[1]" in failed.error.text
        assert worked.failure is None
