"""Each process drives its own rank, over a process group.

    call ──► announced ── agreed ── executed ──► result, or the fault
                └─ ahead ─┘

While the header of a call is under way a rank computes what it can without messages, by the plan
of the last call that was like it. All of it is watched: when a rank is gone or silent, or an error
leaves messages half-way, the connections are given up, and every wait ends.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fpipe.dtensors import recall
from fpipe.errors import FpipeError, PipelineError, error_text
from fpipe.execute.ahead import Ahead
from fpipe.execute.calls import Call, Calls
from fpipe.execute.execution import Execution
from fpipe.execute.fault import Fault, Torn, check_problems, is_connection_error
from fpipe.execute.gathering import gather_objects
from fpipe.execute.header import (
    PROGRAMS,
    Addend,
    Marked,
    OtherPipeline,
    check_calls,
    check_keys,
    gather_headers,
    meet,
    of_number,
    sum_of,
)
from fpipe.execute.meshes import Rows, rows_of
from fpipe.execute.requests import Gather, Reader, Request
from fpipe.execute.run_result import RunResult
from fpipe.execute.watch import Watch
from fpipe.inputs.signature import Goal
from fpipe.plan.planner import Planner
from fpipe.program.interpreter import ConnectionLost
from fpipe.program.program import Program
from fpipe.spec.definition import Definition
from fpipe.spec.placing import carriers, device_of
from fpipe.transport.connect import Lines, lines_of, store_to_ask
from fpipe.transport.group import GroupTransport, StagedTransport, hindrances

log = logging.getLogger("fpipe")

T = TypeVar("T")


class MultiController:
    """Drives one rank of a pipeline in this process."""

    def __init__(
        self,
        planner: Planner,
        reader: Reader,
        definition: Definition,
        group: dist.ProcessGroup,
    ) -> None:
        self.planner = planner
        setup, device = definition.setup, device_of(group)
        self._rank = group.rank()
        self._process = os.getpid()
        self._steps = 0
        self._broken: Fault | None = None
        members = [str(rank) for rank in dist.get_process_group_ranks(group)]
        store = dist.PrefixStore("fpipe", dist.distributed_c10d._get_default_store())
        # Every rank makes its pipelines in the same order, so counting them names this one.
        named_group = f"{group.group_name}/{'-'.join(members)}"
        self._group_name = group.group_name
        self._number = store.add(f"pipelines/{named_group}/{self._rank}", 1)
        self._name = f"{named_group}/{self._number}"
        self._lines = lines_of(group, self._name, store, device)
        self._refuse_lost()
        # Headers, losses and objects are small and live on the CPU, whatever carries the values.
        self._control = group
        if carriers(group).get("cpu") != "gloo":
            self._control = self._lines.make("gloo", "control", range(group.size()))
        # None of these refers to this object: a cycle would keep threads, connections and code
        # until the garbage collector comes by.
        watch_store = dist.PrefixStore("fpipe", store_to_ask())
        dims = () if definition.data is None else definition.data.dims
        rows = self._rows = rows_of(group, store, self._lines.timeout, dims)
        self._watch = Watch(
            watch_store,
            members,
            self._rank,
            definition.timeout,
            partial(_ring, self._lines, self._rows),
            f"{self._lines.name}/lost",
            hosts=dist.get_rank() == 0,
            beside=lambda: None if rows is None else rows.topic(),
        )
        self._transports = [self._connected(GroupTransport, device)]
        hindered = False
        if device.type == "cuda":
            self._transports.append(self._connected(StagedTransport, device))
            settings = hindrances()
            setup = {**setup, **{name: str(is_set) for name, is_set in settings.items()}}
            hindered = any(settings.values())
            _warn_of(settings)
        self._execute = Execution(
            self._transports[-1 if hindered else 0],
            self._transports[-1],
            self._watch,
            self._control,
            definition,
            device,
            rows,
        )
        self._calls = Calls(
            planner,
            reader,
            definition,
            self._control,
            device=device,
            setup=setup,
            transports=self._transports,
            number=self._number,
            pipeline=self._group_name,
            rows=rows,
            given_up=self._watch.gives_up,
        )

    def _connected(self, kind: type[GroupTransport], device: torch.device) -> GroupTransport:
        direct = device.type == "cuda" and kind is GroupTransport
        backend, watch = "nccl" if direct else "gloo", self._watch
        make = partial(self._lines.make, backend, given_up=watch.gives_up)

        def connect(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
            return make(f"{backend}/{name}", ranks)

        return kind(self._rank, device, connect, watch.has_fault, watch.hears_of_fault)

    def run(self, request: Request, goal: Goal, name: str | None = None) -> RunResult:
        """Run this rank's program to its end, in step with the other ranks.

        Raises:
            PipelineError: on every rank, when any rank fails.
        """

        def work() -> RunResult:
            call = self._calls.announce(request, goal, name)
            try:
                return self._answer(call)
            finally:
                del call  # this frame is behind the traceback of an error in it: see `announce`

        try:
            return self._together(work)
        finally:
            request = Request()  # this frame is, too

    def _answer(self, call: Call) -> RunResult:
        """Agree with the other ranks, and run; what can be computed meanwhile is."""
        ahead = self._ahead(call)
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

    def _ahead(self, call: Call) -> Ahead | None:
        """Run by the plan that this call had before, while its header is under way."""
        plan = self._calls.expected(call)
        if plan is None or call.arguments is None or call.header.records:
            return None
        return self._execute.ahead(plan, call.arguments)

    def programs(self, request: Request, goal: Goal) -> tuple[Program, ...]:
        """The programs of all ranks for a training step; every rank must ask for them."""

        def work() -> tuple[Program, ...]:
            call = self._calls.announce(request, goal, PROGRAMS[goal])
            try:
                return self._calls.agree(call).plan.programs
            finally:
                del call

        try:
            return self._together(work)
        finally:
            request = Request()

    def add_up(self, call: str, deed: str, make: Callable[[], Addend]) -> Marked:
        """The sum of a number over all ranks, in their order, so that it has the same bits.

        Raises:
            Exception: what `make` raised on this rank.
            PipelineError: on every other rank then, with what it says; or a rank has another key
                than the others; or as `together`.
        """
        problem: Exception | None = None

        def work() -> Marked:
            nonlocal problem
            try:
                header = of_number(call, make())
            except Exception as error:
                header, problem = of_number(call, None), error
            headers = gather_headers(header, self._control, self._number)
            check_calls(headers)
            if any(header.failed for header in headers):
                text = None if problem is None else error_text(problem)
                texts = gather_objects(text, self._control)
                check_problems(deed, texts, self._rank, problem)
            check_keys(headers)
            return sum_of(headers)

        try:
            return self._together(work)
        except PipelineError:
            if problem is None:
                raise
            raise problem from None
        finally:
            del problem

    def together(self, call: str, work: Callable[[Gather], T]) -> T:
        """Do what all ranks do at once, under the watch, which ends it when one of them is lost.

        Raises:
            PipelineError: on every rank, when any rank does something else, raises or is lost.
        """

        def gather_all(value: Any) -> list[Any]:
            return gather_objects(value, self._control)

        def checked() -> T:
            meet(call, self._control, self._number)
            return work(gather_all)

        return self._together(checked)

    def _together(self, work: Callable[[], T]) -> T:
        """Do what all ranks do at once, under the watch."""
        if self._broken is not None:
            raise self._broken.error()
        self._refuse_lost()
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
            while self._lines.owed:
                self._lines.owed.pop(0)()
            return self._watched(work)
        finally:
            self._lines.busy.release()

    @contextmanager
    def telling(self, goal: Goal) -> Iterator[None]:
        """Within it a call is made; where it is refused before ranks are told, they are later.

        The others are in that call, or will be, so this rank takes part in it when it comes to its
        next one. At once it would wait for them, with an error at hand for its caller.
        """
        begun = self._lines.begun
        try:
            yield
        except PipelineError:
            raise
        except FpipeError as error:
            if self._lines.begun == begun:
                self._lines.begun += 1
                self._lines.owed.append(partial(_settle, weakref.ref(self), goal, str(error)))
            raise

    def settle(self, goal: Goal, refused: Exception) -> None:
        """Take part in a call that this rank has refused."""

        def work() -> None:
            self._calls.agree(self._calls.announce(Request(problem=refused), goal))

        with suppress(PipelineError):  # what this rank's caller knows, the others know now
            self._watched(work)
        if self._broken is not None:
            raise self._broken.error()

    def _refuse_lost(self) -> None:
        if self._lines.lost is not None:
            raise PipelineError(
                "another pipeline over the same process group has lost the connections, which are "
                f"those of all: {self._lines.lost}. Make a new process group and a new pipeline"
            )

    def _watched(self, work: Callable[[], T]) -> T:
        """Do it, and find out what has become of a rank that does not."""
        self._steps += 1
        self._lines.begun += 1
        if self._rows is not None:
            self._rows.active = False
        self._watch.begin(f"{self._name}/fault/{self._steps}")
        try:
            recall(self._group_name)
            return work()
        except OtherPipeline as error:
            self._steps -= 1  # ranks that have called another one do not count it here
            raise PipelineError(str(error), rank=error.rank) from None
        except PipelineError:
            raise  # the same on every rank
        except ConnectionLost as lost:
            raise self._give_up(self._watch.culprit(lost.peer, str(lost))) from lost
        except Torn as torn:
            cause = torn.failure.__cause__
            if is_connection_error(cause):
                # A collective of a piece broke: whoever left it first knows why.
                raise self._give_up(self._watch.culprit(None, str(cause))) from cause
            raise self._tear(torn.failure) from cause
        except Exception as error:
            raise self._tear(error) from error
        except BaseException as error:
            self._tear(error)
            raise
        finally:
            self._watch.end()

    def _tear(self, error: BaseException) -> PipelineError:
        """Messages are left half-way: what comes next could not be told from what came before."""
        if isinstance(error, PipelineError):
            fault = replace(Fault.of(error), breaks=True)
        else:
            fault = Fault(self._rank, f"rank {self._rank} failed: {error_text(error)}", breaks=True)
        self._broken = fault  # already, for who has interrupted this may do so again
        return self._give_up(self._watch.report(fault))

    def _give_up(self, fault: Fault) -> PipelineError:
        """The connections are lost: wake everyone, and be usable no more."""
        self._broken = replace(fault, breaks=True)
        self._lines.lost = fault.text
        _ring(self._lines, self._rows)
        for transport in self._transports:
            transport.forget()
        self._watch.linger()
        self._watch.close()
        return self._broken.error()


def _ring(lines: Lines, rows: Rows | None) -> None:
    """Break all groups in which a process may wait for this one."""
    lines.ring()
    if rows is not None:
        rows.ring()


def _settle(controller: weakref.ref[MultiController], goal: Goal, text: str) -> None:
    alive = controller()
    if alive is not None:
        alive.settle(goal, FpipeError(text))


def _warn_of(settings: Mapping[str, bool]) -> None:
    """Say so if no message may go from device to device."""
    hindering = [f"{name}={os.environ[name]}" for name, is_set in settings.items() if is_set]
    if hindering:
        log.warning(
            "%s keeps a device from computing while a message of NCCL waits, so that ranks would "
            "wait for each other for ever: all messages of this pipeline go by way of the CPU",
            " and ".join(hindering),
        )
