"""Ranks that are given batches of one shape and other numbers are told so, once."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe import schedules
from fpipe.controller.sample import other_batches, sample
from tests.distributed import actors
from tests.distributed.actors import Group
from tests.distributed.crew import Crew, values
from tests.models import apply, assert_same


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def warned(group: Group, apart: bool) -> list[str]:
    """What is logged in two steps, the labels of rank 1 being shuffled or not."""
    assert group is not None
    model = actors.model_of("mlp", 2, 6)
    pipe = actors.pipeline(group, model, schedules.gpipe(ranks=2, microbatches=2))
    batch = dict(model.batch)
    if apart and group.rank() == 1:
        batch["y"] = batch["y"].flip(0)
    kept = Kept()
    logging.getLogger("fpipe").addHandler(kept)
    try:
        for _ in range(2):
            pipe.step(pipe.local(model.params), batch)
    finally:
        logging.getLogger("fpipe").removeHandler(kept)
    return kept.messages


def test_loaders_of_two_seeds_are_noticed(crew: Crew) -> None:
    for messages in values(crew.run(warned, True, ranks=range(2))):
        (text,) = messages
        assert text.startswith("rank 1 has other numbers in batch['y'] than rank 0: all ranks")
    assert values(crew.run(warned, False, ranks=range(2))) == [[], []]


def warned_of_a_cotangent(group: Group) -> list[str]:
    """What is logged where rank 1 alone has the numbers of the cotangent, which it alone reads."""
    assert group is not None
    model = actors.model_of("mlp", 2, 6)
    pipe = fpipe.vjp(actors.pipeline(group, model, schedules.gpipe(ranks=2, microbatches=2)))
    out = apply(model.stages, model.params, model.batch)
    kept = Kept()
    logging.getLogger("fpipe").addHandler(kept)
    try:
        pipe.step(pipe.local(model.params), model.batch, out * group.rank())
    finally:
        logging.getLogger("fpipe").removeHandler(kept)
    return kept.messages


def test_a_cotangent_is_not_compared(crew: Crew) -> None:
    assert values(crew.run(warned_of_a_cotangent, ranks=range(2))) == [[], []]


ROWS = torch.arange(4096 * 8).reshape(4096, 8).cos()


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (ROWS.clone(), False),
        (ROWS + 1e-4 * ROWS.roll(1), False),  # prepared on another processor
        (ROWS.flip(0), True),
        (torch.cat([ROWS[:, :1], ROWS[:, 1:].flip(0)], 1), True),  # every row begins alike
        (torch.zeros_like(ROWS), True),
        (torch.empty_like(ROWS, device="meta"), False),
        (ROWS.T.contiguous().T, False),
    ],
)
def test_what_differs(other: Tensor, differs: bool) -> None:
    mask = torch.ones(3, dtype=torch.bool)
    batches = [{"mask": mask, "x": leaf} for leaf in (ROWS, other)]
    found = other_batches([None, *(sample(batch) for batch in batches)])
    assert found == (("['x']", 1, 2) if differs else None)


@pytest.mark.parametrize(
    "leaf",
    [
        torch.tensor([1.0, torch.nan, torch.inf]),
        torch.tensor([1 + 2j]).conj(),
        torch.empty(0, 3),
        torch.tensor(3),
        torch.ones(5, dtype=torch.float8_e5m2),
    ],
)
def test_every_kind_of_leaf(leaf: Tensor) -> None:
    assert other_batches([sample([leaf]), sample([leaf.clone()])]) is None


def fed_apart(group: Group) -> fpipe.Step:
    """Rank 0 has the inputs, the last rank the labels, and the one between them nothing."""
    model = actors.model_of("mlp", 3, 6)
    pipe = actors.pipeline(group, model, schedules.one_f_one_b(ranks=3, microbatches=2))
    if group is None:
        return pipe.step(model.params, model.batch)
    reads: dict[int, str] = {0: "x", 2: "y"}
    own = reads.get(group.rank())
    batch = {n: v if n == own else v.to("meta") for n, v in model.batch.items()}
    return pipe.step(pipe.local(model.params), batch if own else None)


def test_each_rank_may_have_only_what_it_reads(crew: Crew) -> None:
    expected = fed_apart(None)
    parts = values(crew.run(fed_apart, ranks=range(3)))
    for rank, part in enumerate(parts):
        assert part.loss.equal(expected.loss)
        assert_same(part.grads[rank], expected.grads[rank])
