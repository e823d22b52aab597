"""Plans: everything about a step that depends on shapes alone, made once and kept."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from fpipe import tree
from fpipe.parameters import Parameters
from fpipe.runtime.interpreter import Run
from fpipe.runtime.program import Program
from fpipe.runtime.values import Codes
from fpipe.schedule import Op, Schedule
from fpipe.shapes import Goal, Signature, distinct
from fpipe.stage.chain import ChainTracer, assemble, live_leaves
from fpipe.stage.code import StageCode
from fpipe.stage.compiler import Compiler
from fpipe.stage.function import FunctionTracer
from fpipe.stage.joint import is_differentiable
from fpipe.stage.partition import Policy
from fpipe.stage.sink import Sink
from fpipe.stage.tracer import Traced

log = logging.getLogger("fpipe")

# torch cannot trace in two threads at one time.
_TRACING = threading.RLock()


@dataclass(frozen=True, eq=False)
class Plan:
    """Programs for one set of shapes, and how to read their results.

    Attributes:
        schedule: what they run.
        programs: one per rank.
        seeds: the cotangent of each microbatch's loss, in its shape and dtype.
        weights: the weight of each microbatch's loss.
        spec: structure of the last stage's output, or of the loss.
        fingerprint: equal for plans that compute the same.
        rows: of the batch.
        sink: how gradients and losses are collected.
    """

    schedule: Schedule
    programs: tuple[Program, ...]
    seeds: tuple[Tensor, ...]
    weights: Tensor
    spec: optree.PyTreeSpec
    fingerprint: str
    rows: int
    sink: Sink

    def total_loss(self, runs: Sequence[Run]) -> Tensor:
        """The weighted sum of the losses of the microbatches, or all of them."""
        losses = [leaves[0] for leaves in self._output_leaves(runs)]
        if self.sink.join is not None:
            return torch.cat(losses, self.sink.join)
        stacked = torch.stack(losses)
        if stacked.dim() == 1:
            return self.weights.dot(stacked)
        return torch.tensordot(self.weights, stacked, 1)

    @property
    def loss_shape(self) -> tuple[int, ...]:
        """The shape of `total_loss`."""
        shape = list(self.seeds[0].shape)
        if self.sink.join is not None:
            shape[self.sink.join] = sum(seed.shape[self.sink.join] for seed in self.seeds)
        return tuple(shape)

    def outputs(self, runs: Sequence[Run]) -> list[Any]:
        """The output of each microbatch, as a pytree."""
        return [tree.unflatten(self.spec, leaves) for leaves in self._output_leaves(runs)]

    def _output_leaves(self, runs: Sequence[Run]) -> list[list[Tensor]]:
        count = len(self.seeds)
        found: list[list[Any]] = [[None] * self.spec.num_leaves for _ in range(count)]
        for run in runs:
            for microbatch, leaf, slot in run.program.results.outputs:
                found[microbatch][leaf] = run.slots[slot]
        return found


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


def gradients(plan: Plan, runs: Sequence[Run], params: Parameters) -> list[Tensor | None]:
    """The gradient of each leaf of `params`, flat: zeros where the loss does not depend on it.

    None stands for a leaf that cannot have a gradient, and for one whose gradient belongs to ranks
    of other processes.
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
                grads.append(found[stage, index].to(leaf.dtype))
            elif index in elsewhere or not is_differentiable(leaf):
                grads.append(None)
            else:
                grads.append(torch.zeros_like(plan.sink.lifted(leaf, plan.rows)))
    return grads


def batch_gradients(runs: Sequence[Run], batch: Any, in_dims: Any) -> Any:
    """The gradient of each leaf of the batch, in its structure; None for one that cannot have one.

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
            found.append(torch.stack(rows).sum(0) if dim is None else torch.cat(rows, dim))
    return tree.unflatten(spec, found)


class Planner:
    """Makes plans, and keeps each for the next call with the same shapes.

    Args:
        tracer: traces the chain of stages.
        compiler: compiles their pieces.
        schedule: the training schedule; its forwards alone serve evaluation.
        policies: remat policy of every microbatch, and of each stage's last.
        mean: the loss is the mean over rows, so a microbatch counts by its rows.
        cotangent: what of the losses is differentiated, None for all of them.
        lower: makes the programs; it knows the transport.
        sink: how gradients and losses are collected.
    """

    def __init__(
        self,
        *,
        tracer: ChainTracer | FunctionTracer,
        compiler: Compiler,
        schedule: Schedule,
        policies: tuple[Policy, Policy],
        mean: bool,
        cotangent: tuple[float, ...] | None,
        lower: Callable[[Schedule, Codes], tuple[Program, ...]],
        sink: Sink,
    ) -> None:
        self._tracer = tracer
        self._compiler = compiler
        self._schedule = schedule
        self._forwards = forwards_of(schedule)
        self._policies = policies
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
        goal, params, rows, batch, _ = signature
        sizes = distinct(rows)
        log.info("tracing %s for microbatches of %s rows", goal, " and ".join(map(str, sizes)))
        chains = {
            size: self._tracer(params, shape, goal, size)
            for size, shape in zip(sizes, batch, strict=True)
        }
        usual, last = self._policies
        trained = live_leaves(chains.values())
        codes = {
            (size, policy): assemble(chain, trained, policy, self._compiler)
            for size, chain in chains.items()
            for policy in {usual, last}
        }
        schedule = self._schedule if goal == "step" else self._forwards
        finals = _last_forwards(schedule)

        def code_of(stage: int, microbatch: int) -> StageCode:
            policy = last if finals[stage] == microbatch else usual
            return codes[rows[microbatch], policy][stage]

        programs = self._lower(schedule, code_of)
        graphs = (
            piece.fingerprint
            for stages in codes.values()
            for code in stages
            for piece in code.pieces.values()
        )
        plan = self._with_weights(
            goal,
            schedule,
            programs,
            [chains[size].stages[-1] for size in rows],
            rows,
            "\n".join(sorted(graphs)),
        )
        log.info("ready for %s after %.1f s", goal, time.perf_counter() - start)
        return plan

    def _with_weights(
        self,
        goal: Goal,
        schedule: Schedule,
        programs: tuple[Program, ...],
        finals: Sequence[Traced],
        rows: Sequence[int],
        graphs: str,
    ) -> Plan:
        weighted = self._mean and self._sink.join is None
        shares = [size / sum(rows) if weighted else 1.0 for size in rows]
        values = [final.values[0] if final.values else torch.empty(()) for final in finals]
        dtype = values[0].dtype if is_differentiable(values[0]) else None
        weights = torch.tensor(shares, dtype=dtype, device=values[0].device)
        seeds = tuple(
            weight * self._chosen(weight.new_ones(() if goal == "forward" else value.shape))
            for weight, value in zip(weights, values, strict=True)
        )
        spec = finals[0].spec
        return Plan(schedule, programs, seeds, weights, spec, graphs, sum(rows), self._sink)

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
