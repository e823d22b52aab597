"""One rank runs its program in step with the others, and all of them learn how it ended.

    load ── advance ─────────► loss and status from and to all ranks ──► result
                └─ failed ── report ── drain ──┘                    └──► the fault

A rank that fails goes through the rest of its program without computing, so that nobody is left
waiting and the channels stay usable.
"""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist

from fpipe import pytree
from fpipe.errors import PipelineError, StageError, error_text
from fpipe.execute.ahead import Ahead, prelude
from fpipe.execute.calls import Agreed, Arguments
from fpipe.execute.fault import Fault, Torn
from fpipe.execute.gathering import (
    count_to_send,
    gather,
    gather_objects,
    norm_of_ranks,
    squares_to_send,
)
from fpipe.execute.meshes import Rows, agree_on_states
from fpipe.execute.run_result import LossSum, RunResult, loss_sum
from fpipe.execute.watch import Watch
from fpipe.inputs.ambient import without_autocast
from fpipe.inputs.host_memory import CPU
from fpipe.inputs.params import Parameters
from fpipe.inputs.split_batch import SplitBatch
from fpipe.plan.plan import Plan
from fpipe.program.instrument import observed
from fpipe.program.interpreter import ConnectionLost, Interrupted, Run, load
from fpipe.program.program import Compute, Free, Program, Recv, Send, WaitRecv, WaitSend
from fpipe.program.step_timelines import ACTIVE, Clock, Marks, aligned, timeline_of
from fpipe.spec.definition import Definition
from fpipe.transport.group import GroupTransport


class Execution:
    """Runs the programs of one rank.

    Args:
        transport: to the other ranks.
        first: the one for kernels that have not yet been run to the end of a step.
        watch: hears of their faults, and tells them of those of this one.
        control: the group over which they tell each other how a step ended.
        definition: of the pipeline.
        device: where it computes.
        rows: of a mesh, which may share DTensors; None without a mesh, or where it has one row.
    """

    def __init__(
        self,
        transport: GroupTransport,
        first: GroupTransport,
        watch: Watch,
        control: dist.ProcessGroup,
        definition: Definition,
        device: torch.device,
        rows: Rows | None = None,
    ) -> None:
        self._rows = rows
        self._transport = transport
        self._first = first
        self._watch = watch
        self._control = control
        self._rank = control.rank()
        self._definition = definition
        self._copies_params = definition.copies_params
        self._stages = list(definition.schedule.stages_of(self._rank))
        self._device = device

    def ahead(self, plan: Plan, arguments: Arguments) -> Ahead | None:
        """Compute by a plan that is expected, up to the first message; None if there is nothing."""
        # Dropped work is computed again; the other processes join its collectives only once.
        if plan.communicates:
            return None
        program = observed(plan.programs[self._rank], None)
        until = prelude(program)
        if not until:
            return None
        with torch.no_grad(), without_autocast():
            try:
                run = self._load(program, plan, arguments)
            except Exception:
                return None  # it fails again when all ranks are there to hear of it
            return Ahead(plan, run, until, self._device)

    def __call__(self, agreed: Agreed, ahead: Ahead | None) -> RunResult:
        """Run the agreed plan, from where it has been run ahead to.

        Raises:
            PipelineError: a rank failed, and all of them have come to the end of their programs.
            ConnectionLost: a rank is gone.
        """
        arguments, plan, records, offsets, proven, share = agreed
        transport = self._transport if offsets in proven else self._first
        marks: Marks | None = {} if records else None
        recording = ACTIVE.get()
        alone = recording is not None and recording.alone
        run = ahead.run if ahead else Run(observed(plan.programs[self._rank], marks, alone=alone))
        failure: PipelineError | None = None
        total: LossSum | None = None
        squares = [0.0] * (count_to_send(arguments.params) if plan.clips else 0)
        begun = False
        transport.begin()
        with torch.no_grad(), without_autocast():
            try:
                if ahead is None:
                    run = self._load(run.program, plan, arguments, share)
                begun = True
                if ahead is not None:
                    ahead.join(transport)
                run.advance(transport)
                total = _share_of(loss_sum(plan, [run]), share)
                if plan.clips:
                    squares = squares_to_send(self._result(plan, run, arguments, total))
            except ConnectionLost:
                raise
            except Interrupted:
                failure = self._reported()
                drain(run, transport)
            except Exception as error:
                if self._is_shared(plan):
                    raise Torn(error) from error.__cause__
                if begun and _is_torn(run, error):
                    raise error.__cause__ or error from None
                failure = self._blame(error)
                drain(run, transport)
            try:
                total, rows = self._finish(plan, total, squares, failed=failure is not None)
                if plan.data is not None and failure is None:
                    agree_on_states(plan.data, run)
            except PipelineError:
                transport.end()  # this rank has come to its own
                raise
        transport.end()
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # with its traceback this frame would keep itself, and the pipeline
        proven.add(offsets)
        if records:
            everyone = gather_objects((Clock.here(), marks), self._control)
            if recording is not None:
                recording.timelines.append(timeline_of(plan.schedule, aligned(everyone)))
        result = self._result(plan, run, arguments, total)
        if plan.clips:
            result.norm = norm_of_ranks(rows, arguments.params)
        return result

    def _result(
        self, plan: Plan, run: Run, arguments: Arguments, total: LossSum | None
    ) -> RunResult:
        params, batch = arguments.params, arguments.whole
        return RunResult(self._definition, self._rank, plan, [run], params, batch, total)

    def _is_shared(self, plan: Plan) -> bool:
        """Whether processes of other rows wait for this one in collectives of its pieces.

        Which of a piece are over when it raises is not known, so it cannot be gone through.
        """
        return plan.communicates and self._rows is not None and self._rows.active

    def _load(self, program: Program, plan: Plan, arguments: Arguments, share: float = 1.0) -> Run:
        if program.bindings.batch and arguments.parts is None:
            raise PipelineError(
                f"rank {self._rank} was given batch=None, but its stages {self._stages} read "
                "the batch: pass it on this rank too",
                rank=self._rank,
            )
        self._check_params(program, arguments.params)
        if arguments.parts is not None and any(leaf.is_meta for leaf in arguments.parts.leaves[0]):
            self._check_batch(program, arguments.parts)
        run = load(
            program,
            plan.seeds,
            arguments.params,
            arguments.parts,
            self._device,
            arguments.key,
            brings_params=not self._copies_params,
        )
        factor = share * arguments.scale
        if factor != 1.0:
            for _, slot in program.bindings.seeds:
                run.slots[slot] = run.slots[slot] * factor
        return run

    def _check_params(self, program: Program, params: Parameters) -> None:
        """Refuse parameters that do not lie where this rank computes, or where they live."""
        copies = self._copies_params
        states = params.state_leaves(has_state=self._definition.has_state)
        for stage, leaf, _ in program.bindings.params:
            device = params.stages[stage][leaf].device
            if device == self._device and (not copies or leaf in states or device == CPU):
                continue
            if device == CPU and copies:
                continue
            place = (
                "the meta device and has no data: pipe.init and pipe.load make those that a rank "
                "reads (or, of a vector, it is None)"
                if device.type == "meta"
                else f"{device}, and offload_policy keeps parameters on the CPU: "
                "pipe.place(params) puts them there"
                if copies
                else f"{device} while the rank computes on {self._device}, where its process group "
                "moves values: move it there (NCCL moves those of CUDA, of the device that "
                "init_process_group(device_id=) or torch.cuda.set_device has chosen before the "
                "pipeline is made)"
            )
            path = pytree.paths(params.specs[stage])[leaf]
            raise PipelineError(
                f"rank {self._rank} reads the parameter {path} in its stage {stage}, but what it "
                f"was given lies on {place}",
                rank=self._rank,
                stage=stage,
            )

    def _check_batch(self, program: Program, parts: SplitBatch) -> None:
        """Refuse a batch that has no data where this rank reads it."""
        for microbatch, leaf, _ in program.bindings.batch:
            if parts.leaves[microbatch][leaf].is_meta:
                raise PipelineError(
                    f"rank {self._rank} reads batch{pytree.paths(parts.spec)[leaf]}, but what it "
                    "was given lies on the meta device and has no data: pipe.programs takes such "
                    "tensors; a step takes real ones",
                    rank=self._rank,
                )

    def _blame(self, error: Exception) -> PipelineError:
        """Tell all ranks what failed here."""
        cause = error.__cause__
        if not isinstance(error, PipelineError):
            cause = error
            error = PipelineError(f"rank {self._rank} failed: {error_text(error)}", rank=self._rank)
        fault = Fault.of(error)
        self._watch.report(fault)
        failure = fault.error()
        failure.__cause__ = cause
        return failure

    def _reported(self) -> PipelineError:
        """The failure that another rank reported."""
        fault = self._watch.await_fault()
        if fault is None:
            fault = Fault(None, "a rank failed and could not tell why", breaks=False)
        return fault.error()

    def _finish(
        self, plan: Plan, total: LossSum | None, squares: list[float], *, failed: bool
    ) -> tuple[LossSum | None, list[list[float]]]:
        """Give every rank the loss, and know whether all ranks came to their end.

        Where the plan clips, each also sends the squares of its gradients: those of all are
        returned.
        """
        size, several = prod(plan.loss_shape), plan.weight_shape
        length = 1 + size + (0 if several is None else prod(several))
        word = torch.zeros(length, dtype=torch.float64, device="cpu")
        word[0] = failed
        if total is not None:
            word[1 : 1 + size] = total.loss.flatten()
            if total.weight is not None:
                word[1 + size :] = total.weight.flatten()
        word = torch.cat([word, torch.tensor(squares, dtype=torch.float64, device="cpu")])
        words = gather(word, self._control)
        word = words[:, :length].sum(0)
        if plan.data is not None and self._rows is not None:
            word = self._rows.add_up(word)
        if word[0] > 0 and not failed:
            raise self._reported()
        rows: list[list[float]] = words[:, length:].tolist()
        if not plan.numbering.heads:
            return None, rows
        # Nobody waits for the device: a copy of pageable memory has read it when it returns.
        word = word.to(self._device, non_blocking=True)
        loss = word[1 : 1 + size].reshape(plan.loss_shape).to(plan.weights.dtype)
        weight = None if several is None else word[1 + size :].reshape(several)
        return LossSum(loss, weight), rows


def _share_of(total: LossSum | None, share: float) -> LossSum | None:
    """The part that this replica has in the loss of all of them."""
    return total if total is None or share == 1.0 else total._replace(loss=total.loss * share)


def _is_torn(run: Run, error: Exception) -> bool:
    """Whether a message may have been left half-way, by what the handler of a signal has raised.

    One that is sent again in the drain would be taken for the next one. Memory is asked for, and
    values are looked at, before anything moves.
    """
    rest = run.program.instructions[run.next :]
    moves = bool(rest) and not isinstance(rest[0], Compute | Free)
    return moves and not isinstance(error.__cause__, torch.OutOfMemoryError | StageError)


def drain(run: Run, transport: GroupTransport) -> None:
    """Go through the rest of a program, from the instruction that failed, moving messages only."""
    run.slots[:] = [None] * len(run.slots)
    for instruction in run.program.instructions[run.next :]:
        if isinstance(instruction, Send):
            transport.send_blank(instruction.message)
        elif isinstance(instruction, Recv):
            transport.post(instruction.message)
        elif isinstance(instruction, WaitRecv):
            transport.take(instruction.message)
        elif isinstance(instruction, WaitSend):
            transport.wait_sent(instruction.message)
    run.next = len(run.program.instructions)
