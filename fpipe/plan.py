"""Plans: everything about a step that depends on shapes alone, made once and kept."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe import tree
from fpipe.microbatch import merge_columns
from fpipe.parameters import Parameters
from fpipe.runtime.interpreter import Run
from fpipe.runtime.program import Program
from fpipe.runtime.values import Codes
from fpipe.schedule import Op, Schedule
from fpipe.shapes import Signature, difference, distinct, refuse_without_data
from fpipe.stage.code import StageCode
from fpipe.stage.joint import is_differentiable
from fpipe.stage.returns import Layout
from fpipe.stage.sink import Sink
from fpipe.stage.workshop import Made, Workshop

log = logging.getLogger("fpipe")

# torch cannot trace in two threads at one time.
_TRACING = threading.RLock()


class Total(NamedTuple):
    """The losses of all microbatches, put together.

    Attributes:
        loss: the weighted sum of them, or all of them.
        weight: what loss and gradients are to be divided by, one number for each of several losses;
            None for nothing.
    """

    loss: Tensor
    weight: Tensor | None

    @property
    def mean(self) -> Tensor:
        """The loss of the batch."""
        if self.weight is None:
            return self.loss
        return divided(self.loss, self.weight).to(self.loss.dtype)


@dataclass(frozen=True, eq=False)
class Plan:
    """Programs for one set of shapes, and how to read their results.

    Attributes:
        schedule: what they run.
        programs: one per rank.
        seeds: the cotangent of each microbatch's loss, in its shape and dtype.
        weights: the weight of each microbatch's loss.
        losses: how many dimensions of the loss count losses with a weight of their own.
        layout: how the values that come back from each microbatch are numbered.
        fingerprint: equal for plans that compute the same.
        rows: of the batch.
        sink: how gradients and losses are collected.
        frozen: stage and leaf of the parameters that are not trained.
    """

    schedule: Schedule
    programs: tuple[Program, ...]
    seeds: tuple[Tensor, ...]
    weights: Tensor
    losses: int
    layout: Layout
    fingerprint: str
    rows: int
    sink: Sink
    frozen: frozenset[tuple[int, int]]

    def total(self, runs: Sequence[Run]) -> Total | None:
        """What the losses of the microbatches come to; None where `runs` have none."""
        if not self.layout.heads or not any(run.program.rank == self.last_rank for run in runs):
            return None
        losses, *weights = self._columns(runs, 0, self.layout.heads)
        if self.sink.join is not None:
            weight = torch.cat(weights[0], self.sink.join).double() if weights else None
            return Total(torch.cat(losses, self.sink.join), weight)
        weight = torch.stack(weights[0]).double().sum(0) if weights else None
        stacked = torch.stack(losses)
        if stacked.dim() == 1:
            return Total(self.weights.dot(stacked), weight)
        return Total(torch.tensordot(self.weights, stacked, 1), weight)

    @property
    def last_rank(self) -> int:
        """The rank of the last stage, which has the loss."""
        return self.schedule.placement[-1]

    @property
    def loss_shape(self) -> tuple[int, ...]:
        """The shape of the loss of the batch."""
        shape = list(self.seeds[0].shape)
        if self.sink.join is not None:
            shape[self.sink.join] = sum(seed.shape[self.sink.join] for seed in self.seeds)
        return tuple(shape)

    @property
    def weight_shape(self) -> tuple[int, ...] | None:
        """The shape of what they are divided by; None for nothing."""
        return None if self.layout.heads < 2 else self.loss_shape[: self.losses]

    def outputs(self, runs: Sequence[Run], out_dims: Any, name: str) -> Any:
        """The outputs or aux of all microbatches, merged; None for leaves of other processes."""
        start, spec = self.layout
        columns = self._columns(runs, start, start + spec.num_leaves)
        return merge_columns(columns, spec, out_dims, name)

    def state(self, runs: Sequence[Run], params: Parameters, batch: Any) -> list[Tensor]:
        """The leaves of the state that the last microbatch has left; `params` has those given.

        Each has memory of its own, though what a function returns may be what it was given.
        """
        given, slots = params.stages[0], dict(runs[0].program.results.states)
        taken = {_memory(leaf) for leaf in (*given, *tree.flatten(batch)[0])}
        values: list[Tensor] = []
        for leaf in range(params.spec.children()[0].num_leaves, len(given)):
            value = runs[0].slots[slots[leaf]] if leaf in slots else given[leaf]
            values.append(value.clone() if _memory(value) in taken else value)
            taken.add(_memory(values[-1]))
        return values

    def _columns(self, runs: Sequence[Run], start: int, end: int) -> list[list[Any]]:
        """For each of the numbered values, those of all microbatches."""
        columns: list[list[Any]] = [[None] * len(self.seeds) for _ in range(start, end)]
        for run in runs:
            for microbatch, number, slot in run.program.results.outputs:
                if start <= number < end:
                    columns[number - start][microbatch] = run.slots[slot]
        return columns


def _memory(value: Tensor) -> int:
    """Equal for tensors that share their memory."""
    return value.untyped_storage().data_ptr()


def collected(plan: Plan, runs: Sequence[Run]) -> dict[tuple[int, int], Tensor]:
    """What the sinks hold, by stage and leaf; those that are not summed are concatenated."""
    parts: dict[tuple[int, int], dict[int, Any]] = {}
    for run in runs:
        for stage, leaf, microbatch, slot in run.program.results.grads:
            parts.setdefault((stage, leaf), {})[microbatch] = run.slots[slot]
    if plan.sink.join is None:
        return {key: part[-1] for key, part in parts.items()}
    return {
        key: torch.cat([part[microbatch] for microbatch in sorted(part)], plan.sink.join)
        for key, part in sorted(parts.items())
    }


def gradients(
    plan: Plan, runs: Sequence[Run], params: Parameters, weight: Tensor | None
) -> list[Tensor | None]:
    """The gradient of each leaf of `params`, flat: zeros where the loss does not depend on it.

    They are divided by `weight`, if there is one.

    None stands for a leaf that is not trained or cannot have a gradient, and for one whose gradient
    belongs to ranks of other processes, or of the state, which comes with the parameters.
    """
    found = {
        (0 if params.shared else stage, leaf): value
        for (stage, leaf), value in collected(plan, runs).items()
    }
    elsewhere = {
        leaf
        for program in plan.programs
        for _, leaf, *_ in program.results.grads
        if params.shared and (0, leaf) not in found
    }
    grads: list[Tensor | None] = []
    for stage, leaves in enumerate(params.stages[:1] if params.shared else params.stages):
        for index, leaf in enumerate(leaves):
            if (stage, index) in found:
                grads.append(divided(found[stage, index], weight).to(leaf.dtype))
            elif index in elsewhere or (stage, index) in plan.frozen or not is_differentiable(leaf):
                grads.append(None)
            else:
                grads.append(torch.zeros_like(plan.sink.lifted(leaf, plan.rows)))
    return grads


def divided(value: Tensor, weight: Tensor | None) -> Tensor:
    """A loss or a gradient over its weight; where there are several, they come first in both."""
    if weight is None:
        return value
    weight = weight.to(value.device)
    if not weight.dim():
        return value / weight
    wide = weight.to(torch.promote_types(value.dtype, torch.float32))
    return value / wide.reshape(*wide.shape, *(1 for _ in value.shape[wide.dim() :]))


def batch_gradients(runs: Sequence[Run], batch: Any, in_dims: Any, weight: Tensor | None) -> Any:
    """The gradient of each leaf of the batch, in its structure; None for one that cannot have one.

    They are divided by `weight`, if there is one.

    A leaf that several stages read gets the sum of their parts; one that is split, its rows in
    order; and one that is not, the sum over all microbatches.
    """
    leaves, spec = tree.flatten(batch)
    dims = tree.broadcast_prefix("in_dims", in_dims, batch, "batch")
    parts: dict[int, dict[int, Any]] = {}
    for run in runs:
        for _, leaf, microbatch, slot in sorted(run.program.results.batch_grads):
            own = parts.setdefault(leaf, {})
            part = run.slots[slot]
            own[microbatch] = own[microbatch] + part if microbatch in own else part
    found: list[Tensor | None] = []
    for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        rows = [part for _, part in sorted(parts.get(index, {}).items())]
        if not is_differentiable(leaf):
            found.append(None)
        elif not rows:
            found.append(torch.zeros_like(leaf))
        else:
            whole = torch.stack(rows).sum(0) if dim is None else torch.cat(rows, dim)
            found.append(divided(whole, weight).to(leaf.dtype))
    return tree.unflatten(spec, found)


class Planner:
    """Makes plans, and keeps each for the next call with the same shapes.

    Args:
        workshop: makes the code of the stages; other planners may use it too.
        schedule: the training schedule; its forwards alone serve evaluation.
        mean: the loss is the mean over rows, so a microbatch counts by its rows.
        cotangent: what of the losses is differentiated, None for all of them.
        lower: makes the programs; it knows the transport.
        sink: how gradients and losses are collected.
    """

    def __init__(
        self,
        *,
        workshop: Workshop,
        schedule: Schedule,
        mean: bool,
        cotangent: tuple[float, ...] | None,
        lower: Callable[[Schedule, Codes], tuple[Program, ...]],
        sink: Sink,
    ) -> None:
        self._workshop = workshop
        self._schedule = schedule
        self._forwards = forwards_of(schedule)
        self._mean = mean
        self._cotangent = cotangent
        self._lower = lower
        self._sink = sink
        self._plans: dict[Signature, Plan] = {}

    def __call__(self, signature: Signature) -> Plan:
        """The plan for arguments of these shapes."""
        if signature not in self._plans:
            with _TRACING:
                if signature not in self._plans:
                    self._plans[signature] = self._make(signature)
        return self._plans[signature]

    def __contains__(self, signature: Signature) -> bool:
        return signature in self._plans

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return self._schedule.placement

    def readers(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The ranks that read a parameter in any plan so far, by stage and leaf, in order."""
        found: dict[tuple[int, int], set[int]] = {}
        for plan in self._plans.values():
            for program in plan.programs:
                for stage, leaf, _ in program.bindings.params:
                    found.setdefault((stage, leaf), set()).add(program.rank)
        return {key: tuple(sorted(ranks)) for key, ranks in found.items()}

    def _make(self, signature: Signature) -> Plan:
        start = time.perf_counter()
        goal, _, rows, _, _ = signature
        refuse_without_data(signature)
        log.info(
            "%s %s for microbatches of %s rows%s",
            "planning" if signature in self._workshop else "tracing",
            goal,
            " and ".join(map(str, distinct(rows))),
            self._why(signature),
        )
        made = self._workshop(signature)
        schedule = self._schedule if goal == "step" else self._forwards
        finals = _last_forwards(schedule)

        def code_of(stage: int, microbatch: int) -> StageCode:
            codes = made.last if finals[stage] == microbatch else made.usual
            return codes[rows[microbatch]][stage]

        plan = self._with_weights(schedule, self._lower(schedule, code_of), made, rows)
        log.info("ready for %s after %.1f s", goal, time.perf_counter() - start)
        return plan

    def _why(self, signature: Signature) -> str:
        """What is new since the last trace for the same goal, for the log."""
        before = [known for known in self._plans if known.goal == signature.goal]
        if not before:
            return ""
        return f", again ({len(before)} kept), because {difference(before[-1], signature)}"

    def _with_weights(
        self,
        schedule: Schedule,
        programs: tuple[Program, ...],
        made: Made,
        rows: Sequence[int],
    ) -> Plan:
        chains = [made.chains[size] for size in rows]
        layout = chains[0].layout
        weighted = self._mean and self._sink.join is None
        shares = [size / sum(rows) if weighted else 1.0 for size in rows]
        # Where there is no loss, the numbers are not read.
        none = torch.empty((), device="cpu")
        values = [c.value(c.results[0]) if c.results else none for c in chains]
        dtype = values[0].dtype if is_differentiable(values[0]) else None
        weights = torch.tensor(shares, dtype=dtype, device=values[0].device)
        seeds = tuple(
            weight * self._chosen(weight.new_ones(value.shape if layout.heads else ()))
            for weight, value in zip(weights, values, strict=True)
        )
        return Plan(
            schedule,
            programs,
            seeds,
            weights,
            chains[0].value(chains[0].results[1]).dim() if layout.heads > 1 else 0,
            layout,
            "\n".join(sorted(made.fingerprints())),
            sum(rows),
            self._sink,
            made.frozen,
        )

    def _chosen(self, ones: Tensor) -> Tensor:
        """What of a microbatch's losses is differentiated."""
        if self._cotangent is None or not ones.dim():
            return ones
        # The weights are over the last dimensions, the same for all that comes before.
        parts = ones.new_tensor(self._cotangent)
        return parts.expand(ones.numel() // parts.numel(), -1).reshape(ones.shape)


def forwards_of(schedule: Schedule) -> Schedule:
    """The forwards of a schedule alone, in their order: a schedule for evaluation."""
    rows = [[action for action in row if action.op == Op.F] for row in schedule.actions]
    return Schedule(schedule.placement, rows, name=f"{schedule.name} (forward only)")


def _last_forwards(schedule: Schedule) -> dict[int, int | None]:
    """The microbatch that each stage runs forward last."""
    return {a.stage: a.microbatch for row in schedule.actions for a in row if a.op == Op.F}
