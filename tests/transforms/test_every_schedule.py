"""Every transform on every schedule: in float64 what torch.func gives of the unpipelined model.

In one process, compiled by Inductor and not; over two processes bit for bit what one process gives.
Families and transforms join by existing: the tests run over `fpipe.schedules.FAMILIES` and
`TRANSFORMS`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from fpipe import Schedule, schedules
from tests.distributed.crew import Crew, values
from tests.models import assert_identical, assert_same
from tests.transforms import grid
from tests.transforms.grid import MICROBATCHES, TRANSFORMS, bare, check_transform, run

FAMILIES = list(schedules.FAMILIES)
every_schedule = pytest.mark.parametrize("family", FAMILIES)
every_transform = pytest.mark.parametrize("name", TRANSFORMS)
# A loss that is differentiated twice was differentiated once; what is made of two transforms is
# compiled in test_declared.py, where each loss has a weight of its own, and test_cut_function.py,
# which has the norms too; what goes by both adds the gradients by the batch, which "grad" has, to
# what "hvp" has; and a call that torch.func maps runs the kernels of "vmap".
ELSEWHERE = {
    "value with history",
    "torch.func.vmap",
    "vmap of hvp",
    "per_example_norms",
    "per_example_norms of vmap",
    "per_example_grads of vmap",
    "hvp by both",
}
COMPILED = [name for name in TRANSFORMS if name not in ELSEWHERE]


def on_two_ranks(family: str) -> Schedule:
    return schedules.get(family, ranks=2, microbatches=MICROBATCHES)


def of_two_stages(family: str) -> Schedule:
    """Schedules of as many stages, so that one set of kernels serves all families.

    A stage in the middle has other kernels, which `COMPILED_OVER_RANKS` has.
    """
    two = on_two_ranks(family)
    return two if two.num_stages == 2 else schedules.get(family, ranks=1, microbatches=MICROBATCHES)


@every_transform
@every_schedule
def test_transform_on_a_schedule_equals_torch_func(family: str, name: str) -> None:
    check_transform(name, on_two_ranks(family))


@pytest.mark.inductor
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_transform_equals_torch_func(name: str) -> None:
    """One after the other, for the kernels are compiled once.

    Zeros without memory, which forward mode makes, once ended the process where I and W are apart.
    """
    for family in FAMILIES:
        check_transform(name, of_two_stages(family), bare, True)


# ── over two processes ──────────────────────────────────────────────────────────────────────────


# These are refused there.
OVER_RANKS = [name for name in TRANSFORMS if not name.startswith("torch.func")]


def over_ranks(name: str) -> list[Schedule]:
    """Schedules of two stages and of four for transforms in turns: what each rank must trace."""
    stages = 2 if OVER_RANKS.index(name) % 2 else 4
    return [two for two in map(on_two_ranks, FAMILIES) if two.num_stages == stages]


def on_schedules(group: dist.ProcessGroup | None, name: str) -> list[Any]:
    return [run(group, name, schedule) for schedule in over_ranks(name)]


def compare(rank: int, schedule: Schedule, found: Any, whole: Any) -> None:
    """A rank has the gradients of its own stages, and by the batch on that of the first stage."""
    for part, expected in zip(found, whole, strict=True):
        if isinstance(expected, list):
            own = schedule.stages_of(rank)
            expected = [leaf if stage in own else None for stage, leaf in enumerate(expected)]
        elif isinstance(expected, dict) and rank != schedule.placement[0]:
            expected = None
        assert_identical(part, expected)


@pytest.mark.parametrize("name", OVER_RANKS)
def test_transform_over_two_ranks_equals_one_process(pair: Crew, name: str) -> None:
    pair.start(on_schedules, name)
    wholes = on_schedules(None, name)
    for rank, parts in enumerate(values(pair.collect())):
        for schedule, part, whole in zip(over_ranks(name), parts, wholes, strict=True):
            compare(rank, schedule, part, whole)


# With B and with I and W. Two kinds: kernels know no ranks, and uncompiled all kinds run over ranks
# above. One has stages in the middle, the other the kernels that `COMPILED` has too.
COMPILED_OVER_RANKS = {
    "per_example_grads": ["one_f_one_b", "zb_h1"],
    "hvp": ["interleaved_1f1b", "zbv"],
}


def compiled_over_ranks(group: dist.ProcessGroup | None, name: str) -> list[Any]:
    families = COMPILED_OVER_RANKS[name]
    return [run(group, name, on_two_ranks(family), bare, True) for family in families]


@pytest.mark.inductor
@pytest.mark.parametrize("name", COMPILED_OVER_RANKS)
def test_compiled_transform_over_two_ranks(pair: Crew, name: str) -> None:
    # First, so that the ranks find what it has compiled in Inductor's cache.
    wholes = compiled_over_ranks(None, name)
    for rank, parts in enumerate(values(pair.run(compiled_over_ranks, name))):
        for family, part, whole in zip(COMPILED_OVER_RANKS[name], parts, wholes, strict=True):
            compare(rank, on_two_ranks(family), part, whole)


# ── random numbers ──────────────────────────────────────────────────────────────────────────────


def dropping(weight: Tensor, x: Tensor) -> Tensor:
    return torch.dropout(x @ weight, 0.5, train=True)


def ensembles(group: dist.ProcessGroup | None, randomness: str) -> list[tuple[Tensor, list[Any]]]:
    """Losses and products ⟨grads, params⟩ of two equal members on every schedule.

    The model is linear in the parameters of each stage, so such a product is the loss, if the same
    numbers were drawn forwards and backwards.
    """
    torch.manual_seed(3)
    pipes, params, found = {}, {}, []
    x = torch.linspace(1, 2, 48, dtype=torch.float64).sqrt().view(6, 8)
    for num_stages, schedule in grid.BASES.items():
        pipe = fpipe.pipeline(
            [dropping] * num_stages, lambda y, _: y.mean(), schedule, compile=False, group=group
        )
        pipes[num_stages] = fpipe.vmap(pipe, randomness=randomness)
        weight = torch.rand(8, 8, dtype=torch.float64).expand(2, 8, 8)
        params[num_stages] = [weight] * num_stages
    for family in FAMILIES:
        schedule = on_two_ranks(family)
        pipe = pipes[schedule.num_stages].with_schedule(schedule)
        own = pipe.local(params[schedule.num_stages])
        loss, grads = pipe.step(own, x)
        products = [(g * p).sum((1, 2)) for g, p in zip(grads, own, strict=True) if p is not None]
        found.append((loss, products))
    return found


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_random_numbers_are_drawn_once(pair: Crew, randomness: str) -> None:
    for found in (ensembles(None, randomness), *values(pair.run(ensembles, randomness))):
        for loss, products in found:
            assert bool(loss[0] == loss[1]) is (randomness == "same")
            assert products
            for product in products:
                assert_same(product, loss)
