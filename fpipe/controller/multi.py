"""Each process drives its own rank, over a process group.

    call ── plan ── run ── loss and status ──► result, or the fault

While the header of a call is under way a rank computes what it can without messages, by the plan
of the last call that was like it.

A rank that fails goes through the rest of its program without computing, so that nobody is left
waiting and the channels stay usable; only when a rank is gone are the connections given up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fpipe import tree
from fpipe.controller.agreement import (
    OtherPipeline,
    connected,
    gather,
    gather_headers,
    gather_objects,
    meet,
    named,
    of_number,
    sum_of,
)
from fpipe.controller.ahead import Ahead, prelude
from fpipe.controller.calls import Agreed, Call, Calls, Given
from fpipe.controller.controller import Enter, Finished, Gather, load
from fpipe.controller.fault import Fault
from fpipe.controller.keys import Words
from fpipe.controller.single import without_autocast
from fpipe.controller.watch import Watch
from fpipe.errors import PipelineError
from fpipe.parameters import Parameters
from fpipe.plan import Plan
from fpipe.planner import Planner
from fpipe.recording import Marks, active, timeline_of
from fpipe.runtime.connect import Lines, carriers
from fpipe.runtime.drain import drain
from fpipe.runtime.group import GroupTransport
from fpipe.runtime.instrument import observed
from fpipe.runtime.interpreter import Run
from fpipe.runtime.program import Compute, Free, Program
from fpipe.runtime.transport import ConnectionLost, Interrupted
from fpipe.schedule import Schedule
from fpipe.shapes import Goal
from fpipe.total import Total

T = TypeVar("T")


class MultiController:
    """Drives one rank of a pipeline in this process.

    Args:
        planner: makes plans for the programs of this rank.
        read: flattens the caller's parameters, of which other ranks' parts may be missing.
        schedule: of all ranks.
        in_dims: how batches are split.
        group: the ranks of the pipeline.
        device: where this rank computes.
        timeout: seconds of silence after which a rank is faulty.
        setup: what must be the same on all ranks, as texts by name.
        read_key: checks the caller's key.
    """

    def __init__(
        self,
        planner: Planner,
        read: Callable[[Any], Parameters],
        schedule: Schedule,
        in_dims: Any,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: float,
        setup: Mapping[str, str],
        read_key: Callable[[Any], Words | None],
    ) -> None:
        self._planner = planner
        self._read_key = read_key
        self._group = group
        self._rank = group.rank()
        self._process = os.getpid()
        self._stages = schedule.stages_of(self._rank)
        self._device = device
        self._steps = 0
        self._broken: Fault | None = None
        members = [str(rank) for rank in dist.get_process_group_ranks(group)]
        store = dist.PrefixStore("fpipe", dist.distributed_c10d._get_default_store())
        # Every rank makes its pipelines in the same order, so counting them names this one.
        self._number = store.add(f"pipelines/{'-'.join(members)}/{self._rank}", 1)
        self._name = f"{'-'.join(members)}/{self._number}"
        self._lines = Lines(group, dist.PrefixStore(self._name, store))
        # Headers, losses and objects are small and live on the CPU, whatever carries the values.
        self._control = group
        if carriers(group).get("cpu") != "gloo":
            self._control = self._lines.make("gloo", "control", range(group.size()))
        separate = partial(self._lines.make, "nccl") if device.type == "cuda" else None
        # None of these refers to this object: a cycle would keep threads, connections and code
        # until the garbage collector comes by.
        self._watch = Watch(store, members, self._rank, timeout, self._lines.ring)
        self._transport = GroupTransport(group, device, separate, self._watch.has_fault)
        self._calls = Calls(
            planner,
            read,
            schedule,
            in_dims,
            self._control,
            self._rank,
            device,
            setup,
            self._transport.open,
            self._number,
        )

    def run(self, enter: Enter, goal: Goal, key: Any = None) -> Finished:
        """Run this rank's program to its end, in step with the other ranks.

        Raises:
            PipelineError: on every rank, when any rank fails.
        """

        def work() -> Finished:
            call = self._calls.announce(enter, goal, lambda: self._read_key(key))
            ahead = self._run_ahead(call)
            try:
                agreed = self._calls.agree(call)
            except BaseException:
                if ahead is not None:
                    ahead.drop()
                raise
            if ahead is not None and (ahead.plan is not agreed.plan or agreed.records):
                ahead.drop()
                ahead = None
            return self._execute(agreed, ahead)

        return self._together(work)

    def programs(self, enter: Enter) -> tuple[Program, ...]:
        """The programs of all ranks for a training step; every rank must ask for them."""

        def work() -> tuple[Program, ...]:
            call = self._calls.announce(enter, "step", lambda: None, "pipe.programs")
            return self._calls.agree(call).plan.programs

        return self._together(work)

    def add_up(self, value: float) -> float:
        """The sum of a number over all ranks, in their order, so that it has the same bits."""

        def work() -> float:
            own = of_number(value)
            return sum_of(connected(lambda: gather_headers(own, self._control, self._number)))

        return self._together(work)

    def together(self, call: str, work: Callable[[Gather], T]) -> T:
        """Do what all ranks do at once, under the watch, which ends it when one of them is lost.

        Raises:
            PipelineError: on every rank, when any rank does something else, raises or is lost.
        """

        def gather_all(value: Any) -> list[Any]:
            return connected(lambda: gather_objects(value, self._control))

        def checked() -> T:
            meet(call, self._control, self._number)
            return work(gather_all)

        return self._together(checked)

    def readers(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The ranks that read a parameter, by stage and leaf, as far as was planned."""
        return self._planner.readers()

    def _together(self, work: Callable[[], T]) -> T:
        """Do what all ranks do at once, under the watch."""
        if self._broken is not None:
            raise self._broken.error()
        if os.getpid() != self._process:
            raise PipelineError(
                f"this process, {os.getpid()}, is a fork of {self._process}, which made the "
                f"pipeline as rank {self._rank} and alone has its connections: call the pipeline "
                "there"
            )
        # Messages of two calls would be taken for one another.
        if not self._lines.busy.acquire(blocking=False):
            raise PipelineError(
                f"rank {self._rank} called a pipeline while another call over the same process "
                "group is under way, in another thread or in what it runs: a group carries one "
                "call at a time, so give each thread a group of its own (dist.new_group)",
                rank=self._rank,
            )
        try:
            return self._watched(work)
        finally:
            self._lines.busy.release()

    def _watched(self, work: Callable[[], T]) -> T:
        """Do it, and find out what has become of a rank that does not."""
        self._steps += 1
        self._watch.begin(f"{self._name}/fault/{self._steps}")
        try:
            return work()
        except OtherPipeline as error:
            self._steps -= 1  # ranks that have called another one do not count it here
            raise PipelineError(str(error), rank=error.rank) from None
        except PipelineError:
            raise  # the same on every rank
        except ConnectionLost as lost:
            raise self._give_up(self._watch.culprit(lost.peer, str(lost))) from lost
        except Exception as error:
            raise self._tear(error) from error
        except BaseException as error:
            self._tear(error)
            raise
        finally:
            self._watch.end()

    # ── execution ──────────────────────────────────────────────────────────────────────────────

    def _run_ahead(self, call: Call) -> Ahead | None:
        """Compute by the plan that this call had before, up to the first message."""
        plan = self._calls.expected(call)
        # What is dropped is computed again, but the processes in its collectives do so once.
        if plan is None or plan.communicates or call.given is None or call.header.records:
            return None
        program = observed(plan.programs[self._rank], None)
        until = prelude(program)
        if not until:
            return None
        with torch.no_grad(), without_autocast():
            try:
                run = self._load(program, plan, call.given)
            except Exception:
                return None  # it fails again when all ranks are there to hear of it
            return Ahead(plan, run, until, self._device)

    def _execute(self, agreed: Agreed, ahead: Ahead | None) -> Finished:
        given, plan, records = agreed
        marks: Marks | None = {} if records else None
        run = ahead.run if ahead else Run(observed(plan.programs[self._rank], marks))
        failure: PipelineError | None = None
        total: Total | None = None
        begun = False
        with torch.no_grad(), without_autocast():
            try:
                if ahead is None:
                    run = self._load(run.program, plan, given)
                begun = True
                if ahead is not None:
                    ahead.join(self._transport)
                run.advance(self._transport)
                total = plan.total([run])
            except ConnectionLost:
                raise
            except Interrupted:
                failure = self._reported()
                drain(run, self._transport)
            except Exception as error:
                if begun and _is_torn(run, error):
                    raise error.__cause__ or error from None
                failure = self._blame(error)
                drain(run, self._transport)
            total = self._finish(plan, total, failed=failure is not None)
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # with its traceback this frame would keep itself, and the pipeline
        if records:
            everyone = connected(lambda: gather_objects(marks, self._control))
            recording = active()
            if recording is not None:
                recording.timelines.append(timeline_of(plan.schedule, everyone))
        return Finished(given.params, plan, [run], total, given.whole)

    def _load(self, program: Program, plan: Plan, given: Given) -> Run:
        if program.bindings.batch and given.parts is None:
            raise PipelineError(
                f"rank {self._rank} was given batch=None, but its stages {list(self._stages)} read "
                "the batch: pass it on this rank too",
                rank=self._rank,
            )
        self._check_params(program, given.params)
        return load(program, plan, given.params, given.parts, self._device, given.key)

    def _check_params(self, program: Program, params: Parameters) -> None:
        """Refuse parameters that do not lie where this rank computes."""
        for stage, leaf, _ in program.bindings.params:
            device = params.stages[stage][leaf].device
            if device == self._device:
                continue
            place = (
                "the meta device and has no data: pipe.init and pipe.load make those that a rank "
                "reads"
                if device.type == "meta"
                else f"{device} while the rank computes on {self._device}, where its process group "
                "moves values: move it there (NCCL moves those of CUDA, of the device that "
                "torch.cuda.set_device has chosen before the pipeline is made)"
            )
            path = tree.paths(params.specs[stage])[leaf]
            raise PipelineError(
                f"rank {self._rank} reads the parameter {path} in its stage {stage}, but what it "
                f"was given lies on {place}",
                rank=self._rank,
                stage=stage,
            )

    def _blame(self, error: Exception) -> PipelineError:
        """Tell all ranks what failed here."""
        cause = error.__cause__
        if not isinstance(error, PipelineError):
            cause = error
            error = PipelineError(f"rank {self._rank} failed: {named(error)}", rank=self._rank)
        fault = Fault.of(error)
        self._watch.report(fault)
        failure = fault.error()
        failure.__cause__ = cause
        return failure

    def _reported(self) -> PipelineError:
        """What failed on another rank."""
        fault = self._watch.await_fault()
        if fault is None:
            fault = Fault(None, "a rank failed and could not tell why", breaks=False)
        return fault.error()

    def _finish(self, plan: Plan, total: Total | None, *, failed: bool) -> Total | None:
        """Give every rank the loss, and know whether all ranks came to their end."""
        size, several = prod(plan.loss_shape), plan.weight_shape
        length = 1 + size + (0 if several is None else prod(several))
        word = torch.zeros(length, dtype=torch.float64, device="cpu")
        word[0] = failed
        if total is not None:
            word[1 : 1 + size] = total.loss.flatten()
            if total.weight is not None:
                word[1 + size :] = total.weight.flatten()
        word = connected(lambda: gather(word, self._control)).sum(0)
        if word[0] > 0 and not failed:
            raise self._reported()
        if not plan.layout.heads:
            return None
        loss = word[1 : 1 + size].reshape(plan.loss_shape).to(self._device, plan.weights.dtype)
        weight = None if several is None else word[1 + size :].reshape(several).to(self._device)
        return Total(loss, weight)

    def _tear(self, error: BaseException) -> PipelineError:
        """Messages are left half-way: what comes next could not be told from what came before."""
        fault = Fault(self._rank, f"rank {self._rank} failed: {named(error)}", breaks=True)
        self._broken = fault  # already, for who has interrupted this may do so again
        return self._give_up(self._watch.report(fault))

    def _give_up(self, fault: Fault) -> PipelineError:
        """The connections are lost: wake everyone, and be usable no more."""
        self._broken = replace(fault, breaks=True)
        self._lines.ring()
        self._transport.forget()
        self._watch.close()
        return self._broken.error()


def _is_torn(run: Run, error: Exception) -> bool:
    """Whether a message may have been left half-way, by what the handler of a signal has raised.

    One that is sent again in the drain would be taken for the next one. Memory is asked for before
    anything moves.
    """
    rest = run.program.instructions[run.next :]
    moves = bool(rest) and not isinstance(rest[0], Compute | Free)
    return moves and not isinstance(error.__cause__, torch.OutOfMemoryError)
