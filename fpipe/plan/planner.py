"""Plans are made once for each signature, and kept."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fpipe.dtensors import placements_of, refuse_placements
from fpipe.errors import ScheduleError
from fpipe.inputs.ambient import Ambient, ambient
from fpipe.inputs.signature import (
    UPDATING,
    Goal,
    Signature,
    Spec,
    difference,
    in_words,
    is_differentiable,
    refuse_without_data,
    warn_of_other_rows,
)
from fpipe.live_line import working
from fpipe.pieces.piece import Piece
from fpipe.plan.codes import StageCode
from fpipe.plan.plan import Latest, Plan
from fpipe.plan.stage_compiler import CompiledStages, StageCompiler
from fpipe.program.lower import lower
from fpipe.program.offloading import Offloading
from fpipe.program.order import lower_for_group
from fpipe.program.program import Program
from fpipe.program.replica_layout import Replicas, gathered, replicas_of
from fpipe.program.values import Codes
from fpipe.schedule import Op, Schedule
from fpipe.schedule.families.evaluation import forwards_of
from fpipe.schedule.whole_stage import STEP
from fpipe.spec.definition import Definition
from fpipe.trace.isolation import held_back, one_at_a_time

log = logging.getLogger("fpipe")

MANY: Final = 32
"""So many traces for one goal are made without a word."""


class Planner:
    """Makes plans, and keeps them for the next calls with the same shapes.

    The stage compiler keeps traces and kernels, which cost most, for all plans: a dropped plan is
    made again in a moment.

    Args:
        stage_compiler: makes the code of the stages; other planners may use it too.
        definition: of the pipeline. The forwards of its schedule serve evaluation.
    """

    def __init__(self, stage_compiler: StageCompiler, definition: Definition) -> None:
        self._stage_compiler = stage_compiler
        self._definition = definition
        self._data = definition.data
        self._rank = None if definition.group is None else definition.group.rank()
        self._schedule = definition.schedule
        self._forwards = forwards_of(self._schedule)
        if self._data is not None:
            if not self._schedule.is_sharded:
                self._schedule = self._schedule.sharded()
            self._forwards = self._forwards.sharded(self._schedule.gathered_at_once or STEP)
        # Whoever names dimensions by leaf has looked at each.
        in_dims = definition.in_dims
        self._warns_of_rows = in_dims == 0 and isinstance(in_dims, int)
        self.plans: Latest[Signature, Plan] = Latest()
        self._readers: dict[tuple[int, int], set[int]] = {}
        self._traced: Counter[Goal] = Counter()

    def __call__(self, signature: Signature) -> Plan:
        """The plan for arguments of these shapes."""
        plan = self.plans.get(signature)
        if plan is None:
            with one_at_a_time():
                plan = self.plans.get(signature)
                if plan is None:
                    if torch.is_anomaly_enabled():
                        log.warning("anomaly mode of torch.autograd does not see into a pipeline")
                    # It would look for NaN in what is traced, which has no numbers; and modes
                    # of the caller's would take it for what runs.
                    anomalies = torch.autograd.set_detect_anomaly(False)
                    what = f"tracing and compiling a {signature.goal}"
                    with anomalies, _disable_current_modes(), working(what):
                        plan = self.plans[signature] = self._make(signature)
        return plan

    def ambient(self) -> Ambient:
        """The settings that a trace depends on beside its arguments, as they are now."""
        return ambient(self._definition.modes())

    def readers(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The ranks that read a parameter in any plan so far, by stage and leaf, in order."""
        items = list(self._readers.items())  # another thread may make a plan
        return {key: tuple(sorted(ranks)) for key, ranks in items}

    def structure(self) -> optree.PyTreeSpec | None:
        """That of the first stage's parameters in the last plan; None if there is no plan yet."""
        signatures = list(self.plans)
        return signatures[-1].params[0].spec if signatures else None

    def _make(self, signature: Signature) -> Plan:
        start = time.perf_counter()
        goal, kinds = signature.goal, signature.kinds
        refuse_without_data(signature)
        specs = [shape.spec for shape in signature.params]
        refuse_placements(specs, [shape.spec for shape in signature.batch])
        replicas = None if self._data is None else replicas_of(signature, self._data)
        local = signature
        if goal in UPDATING:
            signature = signature._replace(goal="step")
        if self._data is not None:
            signature = gathered(signature, self._data)
        traces = signature not in self._stage_compiler
        self._traced[goal] += traces
        log.info(
            "%s %s for microbatches of %s%s",
            "tracing" if traces else "planning",
            goal,
            _in_words(signature) if log.isEnabledFor(logging.INFO) else "",
            self._why(local, traces=traces),
        )
        if self._warns_of_rows and traces:
            warn_of_other_rows(signature)
        with held_back(), working(f"tracing a {goal}"):
            compiled = self._stage_compiler(signature)
        differentiates = signature.goal == "step"
        schedule = self._schedule if differentiates else self._forwards
        if goal in UPDATING and not schedule.has_updates:
            schedule = schedule.updated()
        # The microbatch that each stage runs forward last.
        finals = {a.stage: a.microbatch for row in schedule.actions for a in row if a.op == Op.F}

        def code_of(stage: int, microbatch: int) -> StageCode:
            codes = compiled.last if finals[stage] == microbatch else compiled.usual
            return codes[kinds[microbatch]][stage]

        if differentiates:
            _check_owed(schedule, code_of)
        stages, ops = range(schedule.num_stages), _ops_run(schedule)
        run_here = [stage for stage in stages if self._rank in (None, schedule.placement[stage])]
        here, everywhere = compiled.pieces(run_here, ops), compiled.pieces(stages, ops)
        late = self._late(local)
        lowered = partial(
            lower,
            schedule,
            code_of,
            only=self._rank,
            tied=self._definition.function,
            sink=self._definition.sink,
            replicas=replicas,
            goal=goal,
            late=late,
            offloading=self._offloading(local, replicas),
        )
        with (
            working(f"compiling a {goal}", partial(self._stage_compiler.count_to_compile, here)),
            self._stage_compiler.compiling(),
        ):
            programs = lowered() if self._rank is None else lower_for_group(lowered, schedule)
        plan = self._with_weights(
            schedule,
            programs,
            compiled,
            list(everywhere),
            signature,
            over_meshes=any(any(placements_of(spec)) for spec in specs),
            clips=goal == "clip" and self._data is None and not late,
        )
        log.info("ready for %s after %.1f s", goal, time.perf_counter() - start)
        has_sums = any(code_of(stage, 0).sums for stage in range(schedule.num_stages))
        traced = [stage for chain in compiled.chains for stage in chain.stages]
        if differentiates and not has_sums and not any(stage.joint.gradients for stage in traced):
            log.warning(
                "this step has no gradient: trainable= chooses no parameter, or the loss depends "
                "on none that it chooses"
            )
        elif differentiates and not (
            has_sums and any(not chain.is_constant for chain in compiled.chains)
        ):
            log.warning(
                "all gradients of this step are 0: the loss depends on nothing that it is "
                "differentiated by (detach(), torch.no_grad() or argmax in the loss, or in the "
                "last stage?)"
            )
        for parameter, ranks in plan.readers.items():
            self._readers.setdefault(parameter, set()).update(ranks)
        return plan

    def _late(self, signature: Signature) -> frozenset[tuple[int, int]]:
        """Stage and leaf of the DTensors whose gradients are whole only after the program.

        They are added up over dimensions of their mesh that hold no replicas of this pipeline.
        """
        dims = () if self._data is None else self._data.dims
        return frozenset(
            (stage, leaf)
            for stage, shape in enumerate(signature.params)
            for leaf, place in enumerate(placements_of(shape.spec))
            if place is not None and not set(place.dims[0] or ("",)) <= set(dims)
        )

    def _offloading(self, signature: Signature, replicas: Replicas | None) -> Offloading | None:
        """The parameters that live on the CPU; None where none do, or all ranks compute there."""
        offload = self._definition.offload
        if offload is None or not offload.copies:
            return None
        params = [
            [Spec(leaf.shape, leaf.dtype) for leaf in shape.leaves] for shape in signature.params
        ]
        repeated = frozenset() if replicas is None else frozenset(replicas.divided)
        return Offloading(offload.devices, offload.pins, params, repeated)

    def _why(self, signature: Signature, *, traces: bool) -> str:
        """The change since the last trace for the same goal, for the log."""
        before = [known for known in self.plans if known.goal == signature.goal]
        if not before:
            return ""
        if traces and self._traced[signature.goal] == MANY + 1:
            log.warning(
                "%d sets of shapes or modes have been traced for one pipeline, each of which is "
                "kept: pad batches to a few shapes (docs/stages.md); now another %s, because %s",
                MANY,
                signature.goal,
                difference(before[-1], signature),
            )
        return f", again ({len(before)} kept), because {difference(before[-1], signature)}"

    def _with_weights(
        self,
        schedule: Schedule,
        programs: tuple[Program, ...],
        compiled: CompiledStages,
        pieces: Sequence[Piece],
        signature: Signature,
        *,
        over_meshes: bool,
        clips: bool,
    ) -> Plan:
        rows = signature.rows
        chains = [compiled.chains[kind] for kind in signature.kinds]
        numbering = chains[0].numbering
        sink, mean = self._definition.sink, self._definition.reduction == "mean"
        # A microbatch counts by its rows.
        weighted = mean and sink.join is None
        total = max(1, sum(rows))
        shares = [size / total if weighted else 1.0 for size in rows]
        # Where there is no loss, the numbers are not read.
        none = torch.empty((), device="cpu")
        values = [c.value(c.results[0]) if c.results else none for c in chains]
        dtype = values[0].dtype if is_differentiable(values[0]) else None
        weights = torch.tensor(shares, dtype=dtype, device=values[0].device)
        seeds = tuple(
            weight * self._chosen(weight.new_ones(value.shape if numbering.heads else ()))
            for weight, value in zip(weights, values, strict=True)
        )
        shapes = ([chain.value(result).shape for result in chain.results] for chain in chains)
        return Plan(
            schedule=schedule,
            programs=programs,
            seeds=seeds,
            weights=weights,
            losses=chains[0].value(chains[0].results[1]).dim() if numbering.heads > 1 else 0,
            numbering=numbering,
            shapes=tuple(zip(*shapes, strict=True)),
            fingerprint="\n".join(sorted(piece.fingerprint for piece in pieces)),
            communicates=self._data is not None or any(piece.communicates for piece in pieces),
            rows=rows,
            sink=sink,
            frozen=compiled.frozen,
            data=self._data,
            averages=weighted,
            over_meshes=over_meshes,
            clips=clips,
        )

    def _chosen(self, ones: Tensor) -> Tensor:
        """The cotangents of a microbatch's losses."""
        cotangent = self._definition.loss_cotangent
        if cotangent is None or not ones.dim():
            return ones
        # The weights are over the last dimensions, the same for all that comes before.
        parts = ones.new_tensor(cotangent)
        return parts.expand(ones.numel() // parts.numel(), -1).reshape(ones.shape)


def _ops_run(schedule: Schedule) -> set[str]:
    """The ops whose pieces a schedule runs: a W without its I is the whole backward, B."""
    actions = [action for row in schedule.actions for action in row]
    halved = {(a.stage, a.microbatch) for a in actions if a.op == Op.I}
    whole = any(a.op == Op.W and (a.stage, a.microbatch) not in halved for a in actions)
    return {str(action.op) for action in actions} | ({str(Op.B)} if whole else set())


def _in_words(signature: Signature) -> str:
    """The rows of microbatches, and where they do not tell kinds apart a leaf that does."""
    sizes = signature.sizes()
    text = f"{' and '.join(map(str, sizes))} rows"
    leaves = zip(*(shape.leaves for shape in signature.batch), strict=True)
    unlike = next((column for column in leaves if len(set(column)) > 1), None)
    if len(set(sizes)) == len(sizes) or unlike is None:
        return text
    return f"{text}, {' and '.join(map(in_words, unlike))}"


def _check_owed(schedule: Schedule, codes: Codes) -> None:
    """Refuse a step whose schedule leaves out gradients that its stages have.

    Raises:
        ScheduleError: says which.
    """
    for stage, paid in enumerate(schedule.required_ops):
        stage_codes = [codes(stage, microbatch) for microbatch in range(schedule.num_microbatches)]
        for op, kind, owes in (
            ("I", "input", any(code.input_grads for code in stage_codes)),
            ("W", "weight", any(code.sums for code in stage_codes)),
        ):
            if owes and op not in paid:
                first = stage_codes[0].label
                raise ScheduleError(
                    f"schedule {schedule.name} has no {op} or B of {first}, which owes "
                    f"{kind} gradients in pipe.step: choose a schedule that has, or freeze what is "
                    "not trained (trainable=); pipe.value and pipe.forward need F alone"
                )
