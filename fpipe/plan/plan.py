"""Plans: everything about a step that depends on shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.inputs.batch import merge
from fpipe.inputs.params import Parameters
from fpipe.inputs.signature import memory_of
from fpipe.plan.total import Total
from fpipe.program.interpreter import Run
from fpipe.program.program import Program
from fpipe.schedule import Schedule
from fpipe.spec.data import Data
from fpipe.spec.objective import Sink
from fpipe.spec.returns import Numbering


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
    clips: bool = False

    def total(self, runs: Sequence[Run]) -> Total | None:
        """What the losses of the microbatches come to; None where `runs` have none."""
        if not self.numbering.heads or not any(run.program.rank == self.last_rank for run in runs):
            return None
        columns = self._columns(runs, 0, self.numbering.heads)
        # A replica may have fewer rows than there are microbatches.
        losses, *weights = ([own for own in column if own is not None] for column in columns)
        if not losses:
            none = torch.zeros(self.loss_shape, dtype=self.weights.dtype)
            shape = self.weight_shape
            return Total(none, None if shape is None else torch.zeros(shape, dtype=torch.float64))
        if self.sink.join is not None:
            weight = torch.cat(weights[0], self.sink.join).double() if weights else None
            return Total(torch.cat(losses, self.sink.join), weight)
        weight = torch.stack(weights[0]).double().sum(0) if weights else None
        stacked = torch.stack(losses)
        if stacked.dim() == 1:
            return Total(self.weights[: len(losses)].dot(stacked), weight)
        return Total(torch.tensordot(self.weights[: len(losses)], stacked, 1), weight)

    @property
    def readers(self) -> dict[tuple[int, int], set[int]]:
        """The ranks that read a parameter, by stage and leaf."""
        found: dict[tuple[int, int], set[int]] = {}
        for program in self.programs:
            for stage, leaf, _ in program.bindings.params:
                found.setdefault((stage, leaf), set()).add(program.rank)
        return found

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

    def outputs(self, runs: Sequence[Run], out_dims: Any, name: str) -> Any:
        """The outputs or aux of all microbatches, merged; None for leaves of other processes."""
        start, spec = self.numbering
        end = start + spec.num_leaves
        columns = self._columns(runs, start, end)
        return merge(columns, self.shapes[start:end], spec, out_dims, name)

    def state(self, runs: Sequence[Run], params: Parameters, batch: Any) -> list[Tensor]:
        """The leaves of the state that the last microbatch has left; `params` has those given.

        Each has memory of its own, though what a function returns may be what it was given, and
        lies where the given one does.
        """
        given, slots = params.stages[0], dict(runs[0].program.results.states)
        taken = {memory_of(leaf) for leaf in (*given, *pytree.flatten(batch)[0])}
        values: list[Tensor] = []
        for leaf in range(params.spec.children()[0].num_leaves, len(given)):
            value = runs[0].slots[slots[leaf]] if leaf in slots else given[leaf]
            value = value.to(given[leaf].device)
            values.append(value.clone() if memory_of(value) in taken else value)
            taken.add(memory_of(values[-1]))
        return values

    def _columns(self, runs: Sequence[Run], start: int, end: int) -> list[list[Any]]:
        """For each of the numbered values, those of all microbatches."""
        columns: list[list[Any]] = [[None] * len(self.seeds) for _ in range(start, end)]
        for run in runs:
            for microbatch, number, slot in run.program.results.outputs:
                if start <= number < end:
                    columns[number - start][microbatch] = run.slots[slot]
        return columns
