"""Plans: everything about a step that depends on shapes alone, made once and kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from fpipe import tree
from fpipe.errors import BatchError
from fpipe.microbatch import Microbatches
from fpipe.runtime.interpreter import Run
from fpipe.runtime.lower import lower
from fpipe.runtime.program import Program
from fpipe.schedule import Op, Schedule
from fpipe.stage.chain import Abstract, ChainTracer, Goal, ambient, assemble
from fpipe.stage.code import StageCode
from fpipe.stage.compiler import Compiler
from fpipe.stage.partition import Policy

log = logging.getLogger("fpipe")


@dataclass(frozen=True)
class Parameters:
    """The caller's parameters, flat and free of autograd history.

    Attributes:
        spec: structure of the whole.
        specs: structure of each stage's part.
        stages: leaves of each stage.
    """

    spec: optree.PyTreeSpec
    specs: tuple[optree.PyTreeSpec, ...]
    stages: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def read(cls, params: Any, num_stages: int) -> Parameters:
        """Flatten `params`, a sequence with one pytree per stage.

        Raises:
            BatchError: `params` is no such sequence, or a leaf is no tensor.
        """
        leaves, spec = tree.flatten(params)
        if not isinstance(params, list | tuple) or spec.num_children != num_stages:
            raise BatchError(
                f"params is a {type(params).__name__} with {spec.num_children} entries: it must be "
                f"a list or tuple of {num_stages} pytrees, one per stage (None for a stage without "
                "parameters)"
            )
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                raise BatchError(
                    f"params{tree.paths(spec)[index]}={leaf!r:.60} is a {type(leaf).__name__}: "
                    "every leaf of the parameters must be a tensor (bind other values to the stage "
                    "with functools.partial)"
                )
        flat = [leaf.detach() if leaf.requires_grad else leaf for leaf in leaves]
        specs = tuple(spec.children())
        stages, start = [], 0
        for part in specs:
            stages.append(tuple(flat[start : start + part.num_leaves]))
            start += part.num_leaves
        return cls(spec, specs, tuple(stages))


@dataclass(frozen=True, eq=False)
class Plan:
    """Programs for one set of shapes, and how to read their results.

    Attributes:
        programs: one per rank.
        seeds: the weight of each microbatch's loss, a scalar in its dtype.
        weights: all of `seeds` in one tensor.
        spec: structure of the last stage's output, or of the loss.
    """

    programs: tuple[Program, ...]
    seeds: tuple[Tensor, ...]
    weights: Tensor
    spec: optree.PyTreeSpec

    def total_loss(self, runs: Sequence[Run]) -> Tensor:
        """The weighted sum of the losses of the microbatches."""
        losses = [leaves[0] for leaves in self._output_leaves(runs)]
        return torch.dot(torch.stack(losses), self.weights)

    def outputs(self, runs: Sequence[Run]) -> list[Any]:
        """The output of each microbatch, as a pytree."""
        return [tree.unflatten(self.spec, leaves) for leaves in self._output_leaves(runs)]

    def _output_leaves(self, runs: Sequence[Run]) -> list[list[Tensor]]:
        count = len(self.seeds)
        found: list[list[Tensor]] = [[None] * self.spec.num_leaves for _ in range(count)]  # type: ignore[list-item]
        for program, run in zip(self.programs, runs, strict=True):
            for microbatch, leaf, slot in program.results.outputs:
                value = run.slots[slot]
                assert value is not None
                found[microbatch][leaf] = value
        return found

    def gradients(self, runs: Sequence[Run], params: Parameters) -> list[Tensor | None]:
        """The gradient of each parameter leaf, flat."""
        found: dict[tuple[int, int], Tensor] = {}
        for program, run in zip(self.programs, runs, strict=True):
            for stage, leaf, slot in program.results.grads:
                value = run.slots[slot]
                assert value is not None
                found[stage, leaf] = value
        grads: list[Tensor | None] = []
        for stage, leaves in enumerate(params.stages):
            for index, leaf in enumerate(leaves):
                if (stage, index) in found:
                    grads.append(found[stage, index].to(leaf.dtype))
                elif leaf.is_floating_point() or leaf.is_complex():
                    grads.append(torch.zeros_like(leaf))
                else:
                    grads.append(None)
        return grads


class Planner:
    """Makes plans, and keeps each for the next call with the same shapes.

    Args:
        tracer: traces the chain of stages.
        compiler: compiles their pieces.
        schedule: the training schedule; its forwards alone serve evaluation.
        policies: remat policy of every microbatch, and of each stage's last.
        mean: the loss is the mean over rows, so a microbatch counts by its rows.
    """

    def __init__(
        self,
        *,
        tracer: ChainTracer,
        compiler: Compiler,
        schedule: Schedule,
        policies: tuple[Policy, Policy],
        mean: bool,
    ) -> None:
        self._tracer = tracer
        self._compiler = compiler
        self._schedule = schedule
        self._forwards = forwards_of(schedule)
        self._policies = policies
        self._mean = mean
        self._plans: dict[Any, Plan] = {}

    def __call__(self, params: Parameters, parts: Microbatches, goal: Goal) -> Plan:
        """The plan for arguments of these shapes, strides, dtypes and devices."""
        key = (
            goal,
            params.specs,
            tuple(tuple(map(_shape, leaves)) for leaves in params.stages),
            parts.spec,
            tuple(map(_shape, parts.leaves[0])),
            parts.rows,
            ambient(),
            torch.get_num_threads(),
        )
        if key not in self._plans:
            self._plans[key] = self._make(params, parts, goal)
        return self._plans[key]

    def _make(self, params: Parameters, parts: Microbatches, goal: Goal) -> Plan:
        start = time.perf_counter()
        rows = sorted(set(parts.rows))
        log.info("tracing %s for microbatches of %s rows", goal, " and ".join(map(str, rows)))
        abstract = [
            self._tracer.abstract(leaves, spec)
            for leaves, spec in zip(params.stages, params.specs, strict=True)
        ]
        chains = {
            rows: self._tracer(abstract, self._batch(parts, rows), goal) for rows in set(parts.rows)
        }
        usual, last = self._policies
        codes = {
            (rows, policy): assemble(chain, policy, self._compiler)
            for rows, chain in chains.items()
            for policy in {usual, last}
        }
        schedule = self._schedule if goal == "step" else self._forwards
        finals = _last_forwards(schedule)

        def code_of(stage: int, microbatch: int) -> StageCode:
            policy = last if finals[stage] == microbatch else usual
            return codes[parts.rows[microbatch], policy][stage]

        programs = lower(schedule, code_of)
        plan = self._read(programs, chains[parts.rows[0]].stages[-1], parts)
        log.info("ready for %s after %.1f s", goal, time.perf_counter() - start)
        return plan

    def _batch(self, parts: Microbatches, rows: int) -> Abstract:
        return self._tracer.abstract(parts.leaves[parts.rows.index(rows)], parts.spec)

    def _read(self, programs: tuple[Program, ...], final: Any, parts: Microbatches) -> Plan:
        total = sum(parts.rows) if self._mean else 1
        shares = [rows / total if self._mean else 1.0 for rows in parts.rows]
        value = final.values[0] if final.values else torch.empty(())
        dtype = value.dtype if value.is_floating_point() or value.is_complex() else None
        weights = torch.tensor(shares, dtype=dtype, device=value.device)
        return Plan(programs, tuple(weights.unbind()), weights, final.spec)


def forwards_of(schedule: Schedule) -> Schedule:
    """The forwards of a schedule alone, in their order: a schedule for evaluation."""
    rows = [[action for action in row if action.op == Op.F] for row in schedule.actions]
    return Schedule(schedule.placement, rows, name=f"{schedule.name} (forward only)")


def _last_forwards(schedule: Schedule) -> dict[int, int | None]:
    """The microbatch that each stage runs forward last."""
    return {a.stage: a.microbatch for row in schedule.actions for a in row if a.op == Op.F}


def _shape(leaf: Tensor) -> tuple[Any, ...]:
    return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
