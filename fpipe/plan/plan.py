"""Plans: everything about a step that depends on shapes alone, and the last of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor

from fpipe.program.program import Program
from fpipe.schedule import Schedule
from fpipe.spec.data import Data
from fpipe.spec.objective import Sink
from fpipe.spec.user_functions import Numbering


@dataclass(frozen=True, eq=False)
class Plan:
    """Programs for one set of shapes, and how to read their results.

    Attributes:
        schedule: what they run.
        programs: one per rank.
        seeds: the cotangent of each microbatch's loss, in its shape and dtype.
        weights: the weight of each microbatch's loss.
        losses: how many dimensions of the loss count losses with a weight of their own.
        numbering: how the values that come back from each microbatch are numbered.
        shapes: of each of them, by its number, in every microbatch.
        fingerprint: equal for plans that compute the same.
        communicates: whether stages have collectives of their own.
        rows: of each microbatch.
        sink: how gradients and losses are collected.
        frozen: stage and leaf of the parameters that are not trained.
        data: which dimensions of the mesh hold replicas, None without replicas.
        averages: the loss is the mean over the rows of all microbatches, and of all replicas.
        over_meshes: a parameter is a DTensor.
        clips: the norm of all gradients is wanted, and ranks tell each other theirs with the loss.
    """

    schedule: Schedule
    programs: tuple[Program, ...]
    seeds: tuple[Tensor, ...]
    weights: Tensor
    losses: int
    numbering: Numbering
    shapes: tuple[tuple[torch.Size, ...], ...]
    fingerprint: str
    communicates: bool
    rows: tuple[int, ...]
    sink: Sink
    frozen: frozenset[tuple[int, int]]
    data: Data | None = None
    averages: bool = False
    over_meshes: bool = False
    clips: bool = False

    @property
    def readers(self) -> dict[tuple[int, int], set[int]]:
        """The ranks that read a parameter, by stage and leaf."""
        ranks: dict[tuple[int, int], set[int]] = {}
        for program in self.programs:
            for stage, leaf, _ in program.bindings.params:
                ranks.setdefault((stage, leaf), set()).add(program.rank)
        return ranks

    @property
    def last_rank(self) -> int:
        """The rank of the last stage, which has the loss."""
        return self.schedule.placement[-1]

    @property
    def loss_shape(self) -> tuple[int, ...]:
        """The shape of the loss of the batch; () where there is none."""
        shape = list(self.seeds[0].shape)
        if self.numbering.heads and self.sink.join is not None:
            shape[self.sink.join] = sum(seed.shape[self.sink.join] for seed in self.seeds)
        return tuple(shape)

    @property
    def weight_shape(self) -> tuple[int, ...] | None:
        """The shape of what they are divided by; None for nothing."""
        return None if self.numbering.heads < 2 else self.loss_shape[: self.losses]


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

KEPT: Final = 256


class Latest(dict[K, V]):
    """A dict of the entries that were put in last, or again; those before them are forgotten.

    Processes that put in the same keys in the same order forget the same.

    Args:
        kept: how many there are at most.

    Example:
        >>> found = Latest(2)
        >>> for key in "abac":
        ...     found[key] = key.upper()
        >>> found
        {'a': 'A', 'c': 'C'}
    """

    def __init__(self, kept: int = KEPT) -> None:
        super().__init__()
        self._kept = kept

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        while len(self) > self._kept:
            del self[next(iter(self))]
