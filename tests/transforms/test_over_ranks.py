"""Over two processes, every transform gives what it gives in one, bit for bit.

Every schedule is in test_every_schedule.py, with a small model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import grad

from fpipe import schedules
from tests.cut_model import make_network
from tests.distributed.crew import Crew, values
from tests.models import assert_identical, assert_same
from tests.transforms.actors import (
    CUT,
    differentiate,
    families_of,
    freeze,
    make_ensemble,
    members_on_one_rank,
    norm_of_product,
    outputs_by_row,
    run,
    run_cut,
    shorter,
    unknown_derivatives,
    wrong_vector,
)


def test_ensemble_of_language_models_equals_one_process(pair: Crew) -> None:
    schedule = schedules.zb_h1(ranks=2, microbatches=3)
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


def test_rank_without_stacked_arguments_needs_axis_size(pair: Crew) -> None:
    first, last = values(pair.run(members_on_one_rank))
    whole = members_on_one_rank(None)
    for part in (first, last):
        assert_identical(part.loss, whole.loss)
    assert_identical(first.grads[0], whole.grads[0])
    assert last.grads == [None, None]


def test_gradients_of_the_batch_lie_on_the_first_stage(pair: Crew) -> None:
    schedule = schedules.zb_h1(ranks=2, microbatches=3)
    first, last = values(pair.run(run, "grad", schedule))
    whole = run(None, "grad", schedule)
    assert_identical(first.grads[0], whole.grads[0])
    assert whole.grads[0]["pixels"].abs().sum() > 0
    assert last.grads[0] is None
    compare(last.grads[1], whole.grads[1], {1})


def test_second_derivatives_over_ranks_are_refused(pair: Crew) -> None:
    params, batch = make_network()
    expected = grad(lambda a: shorter({**params, "a": a}, batch))(params["a"])
    parts = values(pair.run(differentiate))
    for _, (twice, by_batch, forward) in parts:
        assert "a pipeline over processes was differentiated twice" in twice
        assert "differentiated by batch when its step had ended without that" in by_batch
        assert "torch.func.jvp" in forward
    for found, _ in parts:
        torch.testing.assert_close(found, expected)


# The stages that read each matrix, by the number of all stages.
READERS = {2: {"a": (0, 1), "b": (0, 1)}, 4: {"a": (0, 3), "b": (1, 2)}}


@pytest.mark.parametrize("transform", CUT)
def test_cut_function_over_ranks_on_every_schedule(pair: Crew, transform: str) -> None:
    """The whole gradient of a matrix is on all ranks that read it; on V-shaped ones that is one."""
    pair.start(run_cut, transform)
    wholes = run_cut(None, transform)
    for rank, parts in enumerate(values(pair.collect())):
        for family, part, whole in zip(families_of(transform), parts, wholes, strict=True):
            placement = schedules.get(family, ranks=2, microbatches=3).placement
            here = {
                name: rank in {placement[stage] for stage in stages}
                for name, stages in READERS[len(placement)].items()
            }
            for number, (found, expected) in enumerate(zip(part, whole, strict=True)):
                if isinstance(expected, dict):
                    expected = {name: g if here[name] else None for name, g in expected.items()}
                elif (transform, number, rank) == ("grad", 2, 1):
                    expected = None  # the gradients of the batch lie where it comes in
                assert_identical(found, expected)


def test_outputs_of_rows_over_ranks(pair: Crew) -> None:
    """A forward has no loss, whose shape by rows was read."""
    first, last = values(pair.run(outputs_by_row))
    assert first == [None] * 3
    assert_identical(last, outputs_by_row(None))


def test_global_norm_of_a_product(pair: Crew) -> None:
    whole = norm_of_product(None)
    for found in values(pair.run(norm_of_product)):
        torch.testing.assert_close(found, whole)


def test_wrong_vector_of_one_rank_is_an_error_on_all(pair: Crew) -> None:
    """A vector that moves nothing was once refused on its rank alone, and the other rank waited."""
    for short, *nothing, worked in values(pair.run(wrong_vector)):
        assert "vector[1]" in short.error.text
        for failed in (short, *nothing):
            assert failed.error.rank == 1
        for failed in nothing:
            assert "vector=None moves nothing" in failed.error.text
        assert worked.failure is None


def test_value_of_which_only_some_ranks_require_a_gradient(pair: Crew) -> None:
    """Ranks of a frozen stage require none: all run a step, and count their pipelines alike."""
    whole = freeze(None)
    for rank, parts in enumerate(values(pair.run(freeze))):
        for part, (required, loss, slope) in zip(parts, whole, strict=True):
            own = required and rank == 1
            assert part[0] == own
            assert_identical(part[1:], (loss, slope if own else None))


def test_derivatives_for_one_rank_alone(pair: Crew) -> None:
    """One once left the others waiting, another ran a pipeline that they had not counted."""
    here, there = values(pair.run(unknown_derivatives))
    for refused, value in zip(here[:2], there[:2], strict=True):
        assert "over processes the loss of pipe.value has a derivative by the parameters alone" in (
            refused.error.text
        )
        assert value.failure is None
    for _, _, slopes, directly in (here, there):
        assert slopes.failure is directly.failure is None
    assert_same(here[2].value, here[3].value)
