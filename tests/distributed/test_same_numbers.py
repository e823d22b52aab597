"""Ranks with a batch of other numbers, or another copy of a parameter, are told so, once."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fpipe
from fpipe import schedules
from fpipe.execute.sample import ROUNDING, sample, unlike
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


@contextmanager
def kept() -> Iterator[list[str]]:
    """What is logged within."""
    handler = Kept()
    logging.getLogger("fpipe").addHandler(handler)
    try:
        yield handler.messages
    finally:
        logging.getLogger("fpipe").removeHandler(handler)


def warned(group: Group, apart: bool) -> list[str]:
    """What is logged in two steps, the labels of rank 1 being shuffled or not."""
    assert group is not None
    model, pipe = actors.recorded(group, "mlp", schedules.gpipe(ranks=2, microbatches=2), 6)
    batch = dict(model.batch)
    if apart and group.rank() == 1:
        batch["y"] = batch["y"].flip(0)
    with kept() as messages:
        for _ in range(2):
            pipe.step(pipe.local(model.params), batch)
    return messages


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
    with kept() as messages:
        pipe.step(pipe.local(model.params), model.batch, out * group.rank())
    return messages


def test_a_cotangent_is_not_compared(crew: Crew) -> None:
    assert values(crew.run(warned_of_a_cotangent, ranks=range(2))) == [[], []]


class Tied(nn.Module):
    """The first stage and the last read one parameter, and each another of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(x)))


def trained_apart(group: Group, of: str) -> tuple[list[str], list[str]]:
    """What is logged in steps, and when all parameters are put together.

    Args:
        group: of two ranks.
        of: which seed or optimizer differs between them.
    """
    assert group is not None
    torch.manual_seed(group.rank() if of == "tied" else 0)
    module = Tied()
    if of == "untied" and group.rank():
        nn.init.zeros_(module.middle.weight)  # which rank 0 alone reads
    pipe = fpipe.from_module(
        module,
        schedule=schedules.one_f_one_b(ranks=2, microbatches=2),
        cuts=["middle"],
        loss=lambda y, _: y.square().mean(),
        compile=False,
        group=group,
    )
    params = {name: p.detach() for name, p in module.named_parameters()}
    rate = 0.2 if of == "optimizer" and group.rank() else 0.1
    with kept() as stepped:
        for _ in range(2):
            grads = pipe.step(params, {"x": torch.arange(8).view(4, 2)}).grads
            params = {n: p if grads[n] is None else p - rate * grads[n] for n, p in params.items()}
    with kept() as loaded:
        pipe.load_into(module, params)
    return stepped, loaded


def test_copies_of_two_seeds_are_noticed(crew: Crew) -> None:
    """A model was trained whose first and last layer were not tied, and another one was saved."""
    for stepped, loaded in values(crew.run(trained_apart, "tied", ranks=range(2))):
        for (text,) in (stepped, loaded):
            assert text.startswith("rank 1 has other numbers in params['embed.weight'] than rank 0")
    for stepped, loaded in values(crew.run(trained_apart, "optimizer", ranks=range(2))):
        assert stepped == []
        assert "params['embed.weight']" in loaded[0]
    assert values(crew.run(trained_apart, "untied", ranks=range(2))) == [([], [])] * 2


def without_group(group: Group) -> list[str]:
    """What is logged where a pipeline of all ranks is made without their group, and one of one."""
    count = dist.get_world_size()
    model = actors.model_of("mlp", count, 6)
    with kept() as messages:
        actors.pipeline(None, model, schedules.gpipe(ranks=count, microbatches=2))
        one = schedules.looped_bfs(ranks=1, microbatches=2, stages_per_rank=count)
        actors.pipeline(None, model, one)
    return messages


def test_a_group_that_is_forgotten_is_noticed(crew: Crew) -> None:
    """Each process trained the whole model, and nothing told."""
    for (text,) in values(crew.run(without_group)):
        assert re.match(r"a pipeline of all (\d) ranks in each of \1 processes: for one over", text)


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
    found = unlike([None, *(sample(batch) for batch in batches)], ROUNDING)
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
    assert unlike([sample([leaf]), sample([leaf.clone()])], ROUNDING) is None


def fed_apart(group: Group) -> fpipe.Step:
    """Rank 0 has the inputs, the last rank the labels, and the one between them nothing."""
    model, pipe = actors.recorded(group, "mlp", schedules.one_f_one_b(ranks=3, microbatches=2), 6)
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
