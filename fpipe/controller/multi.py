"""Each process drives its own rank, over a process group.

    header ── all known ──────────────────────────► run ── loss and status ──► result, or the fault
       └── new shapes ── offers ── plan ── verdicts ─┘

While the header is under way a rank computes what it can without messages, by the plan of the last
step that was called alike.

A rank that fails goes through the rest of its program without computing, so that nobody is left
waiting and the channels stay usable; only when a rank is gone are the connections given up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fpipe import tree
from fpipe.controller.agreement import (
    CALLS,
    Header,
    Offer,
    check_calls,
    check_keys,
    check_offers,
    check_verdicts,
    digest,
    gather,
    gather_headers,
    gather_objects,
    identity,
    of_number,
    start_headers,
    sum_of,
)
from fpipe.controller.ahead import Ahead, prelude
from fpipe.controller.controller import Finished, load
from fpipe.controller.fault import Fault
from fpipe.controller.keys import Words, as_number
from fpipe.controller.single import without_autocast
from fpipe.controller.watch import Watch
from fpipe.errors import PipelineError
from fpipe.microbatch import Microbatches, split
from fpipe.parameters import Parameters
from fpipe.plan import Plan, Planner, Total
from fpipe.recording import Marks, active, timeline_of
from fpipe.runtime.connect import carriers, connect, ring
from fpipe.runtime.drain import drain
from fpipe.runtime.group import GroupTransport
from fpipe.runtime.instrument import observed
from fpipe.runtime.interpreter import Run
from fpipe.runtime.program import Program
from fpipe.runtime.transport import ConnectionLost, Interrupted
from fpipe.schedule import Schedule
from fpipe.shapes import Goal, Signature, TreeShape, ambient, batch_shapes

T = TypeVar("T")

NOWHERE = torch.device("meta")
"""Stands for every rank's own device in what ranks compare."""


class Given(NamedTuple):
    """What this rank was called with, read and checked.

    Attributes:
        params: with the parts of this rank's stages.
        parts: the batch, None where the rank was given none.
        shapes: the parameters of each of its stages.
        batch: the batch's shapes.
        key: of the step, None for none.
    """

    params: Parameters
    parts: Microbatches | None
    shapes: Mapping[int, TreeShape]
    batch: tuple[TreeShape, ...] | None
    key: Words | None


class Call(NamedTuple):
    """What this rank was called for, under way to the others.

    Attributes:
        goal: what is asked for.
        given: what this rank was called with, None if it cannot be used.
        problem: why not.
        header: what the others are told of it.
        headers: waits for those of all ranks.
    """

    goal: Goal
    given: Given | None
    problem: Exception | None
    header: Header
    headers: Callable[[], list[Header]]

    @property
    def kind(self) -> tuple[int, int, int]:
        """The same for calls that end in the same plan, as far as this rank knows."""
        return self.header.call, self.header.batch, self.header.params


class Agreed(NamedTuple):
    """What all ranks are about to run.

    Attributes:
        given: what this rank was called with.
        plan: the same on all ranks.
        records: whether any rank records the step.
    """

    given: Given
    plan: Plan
    records: bool


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
        self._read_params = read
        self._read_key = read_key
        self._schedule = schedule
        self._in_dims = in_dims
        self._group = group
        self._rank = group.rank()
        self._stages = schedule.stages_of(self._rank)
        self._device = device
        self._setup = {name: digest(text) for name, text in setup.items()}
        self._agreed: dict[tuple[int, ...], Plan] = {}
        self._expected: dict[tuple[int, int, int], Plan] = {}
        self._steps = 0
        self._draining = False
        self._broken: Fault | None = None
        members = [str(rank) for rank in dist.get_process_group_ranks(group)]
        store = dist.PrefixStore("fpipe", dist.distributed_c10d._get_default_store())
        # Every rank makes its pipelines in the same order, so counting them names this one.
        number = store.add(f"pipelines/{'-'.join(members)}/{self._rank}", 1)
        self._name = f"{'-'.join(members)}/{number}"
        carried = carriers(group)
        # Headers, losses and objects are small and live on the CPU, whatever carries the values.
        self._control = group
        if carried.get("cpu") != "gloo":
            self._control = self._connect("gloo", store, "control", range(group.size()))
        separate = partial(self._connect, "nccl", store) if device.type == "cuda" else None
        self._transport = GroupTransport(group, device, separate, self._interrupted)
        self._watch = Watch(store, members, self._rank, timeout, self._ring)

    def run(self, params: Any, batch: Any, goal: Goal, key: Any = None) -> Finished:
        """Run this rank's program to its end, in step with the other ranks.

        Raises:
            PipelineError: on every rank, when any rank fails.
        """

        def work() -> Finished:
            call = self._announce(params, batch, goal, lambda: self._read_key(key))
            ahead = self._run_ahead(call)
            return self._execute(self._agree(call), ahead)

        return self._together(work)

    def programs(self, params: Any, batch: Any) -> tuple[Program, ...]:
        """The programs of all ranks for a training step; every rank must ask for them."""
        return self._together(
            lambda: self._agree(self._announce(params, batch, "step", lambda: None)).plan.programs
        )

    def add_up(self, value: float) -> float:
        """The sum of a number over all ranks, in their order, so that it has the same bits."""
        return self._together(
            lambda: sum_of(_connected(lambda: gather_headers(of_number(value), self._control)))
        )

    def readers(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The ranks that read a parameter, by stage and leaf, as far as was planned."""
        return self._planner.readers()

    def _together(self, work: Callable[[], T]) -> T:
        """Do what all ranks do at once, under the watch."""
        if self._broken is not None:
            raise self._broken.error()
        self._steps += 1
        self._watch.begin(f"{self._name}/fault/{self._steps}")
        try:
            return work()
        except PipelineError:
            raise  # the same on every rank
        except ConnectionLost as lost:
            raise self._give_up(self._watch.culprit(lost.peer, str(lost))) from lost
        except BaseException as error:
            # Messages are left half-way: what comes next could not be told from what came before.
            fault = Fault(self._rank, f"rank {self._rank} failed: {_named(error)}", breaks=True)
            broken = self._give_up(self._watch.report(fault))
            if isinstance(error, Exception):
                raise broken from error
            raise
        finally:
            self._watch.end()

    # ── agreement ──────────────────────────────────────────────────────────────────────────────

    def _announce(
        self, params: Any, batch: Any, goal: Goal, key: Callable[[], Words | None]
    ) -> Call:
        """Read what this rank was called with, and tell the others."""
        given: Given | None = None
        problem: Exception | None = None
        try:
            given = self._read(params, batch, key())
        except Exception as error:
            problem = error
        header = _header(given, goal)
        headers = _connected(lambda: start_headers(header, self._control))
        return Call(goal, given, problem, header, lambda: _connected(headers))

    def _agree(self, call: Call) -> Agreed:
        """Find the plan that all ranks run, or make it if anything is new."""
        headers = call.headers()
        check_calls(headers)
        check_keys(headers)
        given = call.given
        shapes = (headers[0].call, *(word for h in headers for word in (h.batch, h.params)))
        if given is None or shapes not in self._agreed or any(h.failed for h in headers):
            signature = self._make_signature(given, call.problem, call.goal)
            assert given is not None
            # Kept only when made: what any rank refused is refused again, by all of them.
            self._agreed[shapes] = self._make_plan(signature)
        plan = self._expected[call.kind] = self._agreed[shapes]
        return Agreed(given, plan, any(h.records for h in headers))

    def _read(self, params: Any, batch: Any, key: Words | None) -> Given:
        own = self._read_params(params)
        parts, shapes = None, None
        if batch is not None:
            parts = split(batch, self._in_dims, self._schedule.num_microbatches)
            shapes = tuple(shape.on(NOWHERE) for shape in batch_shapes(parts))
        params_shapes = {
            stage: TreeShape.of(own.specs[stage], own.stages[stage]).on(NOWHERE)
            for stage in self._stages
        }
        return Given(own, parts, params_shapes, shapes, key)

    def _make_signature(
        self, given: Given | None, problem: Exception | None, goal: Goal
    ) -> Signature:
        """Exchange offers, and put together what all ranks were given."""
        offer = Offer(
            setup=self._setup,
            params={} if given is None else given.shapes,
            rows=None if given is None or given.parts is None else given.parts.rows,
            batch=None if given is None else given.batch,
            ambient=ambient()[:-1],
            problem=None if problem is None else _named(problem),
        )
        offers: list[Offer] = _connected(lambda: gather_objects(offer, self._control))
        check_offers(offers, self._rank, problem)
        reader = next(o for o in offers if o.batch is not None)
        assert reader.rows is not None and reader.batch is not None
        return Signature(
            goal,
            tuple(
                offers[rank].params[stage].on(self._device)
                for stage, rank in enumerate(self._schedule.placement)
            ),
            reader.rows,
            tuple(shape.on(self._device) for shape in reader.batch),
            ambient(),
        )

    def _make_plan(self, signature: Signature) -> Plan:
        """Make the plan, and see that all ranks made the same."""
        problem: Exception | None = None
        text = ""
        try:
            plan = self._planner(signature)
            text = digest("\n".join((*map(str, plan.programs), plan.fingerprint)))
        except Exception as error:
            problem = error
            text = _named(error)
        verdicts = _connected(lambda: gather_objects((problem is None, text), self._control))
        check_verdicts(verdicts, self._rank, problem)
        _connected(lambda: self._transport.open(plan.programs))
        return plan

    # ── execution ──────────────────────────────────────────────────────────────────────────────

    def _run_ahead(self, call: Call) -> Ahead | None:
        """Compute by the plan that this call had before, up to the first message."""
        plan = self._expected.get(call.kind)
        if plan is None or call.given is None or call.header.records:
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
            return Ahead(plan, run, until)

    def _execute(self, agreed: Agreed, ahead: Ahead | None) -> Finished:
        given, plan, records = agreed
        marks: Marks | None = {} if records else None
        run = Run(observed(plan.programs[self._rank], marks))
        failure: PipelineError | None = None
        total: Total | None = None
        with torch.no_grad(), without_autocast():
            try:
                if ahead is None or ahead.plan is not plan or records:
                    run = self._load(run.program, plan, given)
                else:
                    run = ahead.run
                    ahead.join(self._transport)
                run.advance(self._transport)
                total = plan.total([run])
            except ConnectionLost:
                raise
            except Interrupted:
                failure = self._reported()
                self._drain(run)
            except Exception as error:
                failure = self._blame(error)
                self._drain(run)
            total = self._finish(plan, total, failed=failure is not None)
        if failure is not None:
            raise failure
        if records:
            everyone = _connected(lambda: gather_objects(marks, self._control))
            recording = active()
            if recording is not None:
                recording.timelines.append(timeline_of(plan.schedule, everyone))
        return Finished(given.params, plan, [run], total)

    def _load(self, program: Program, plan: Plan, given: Given) -> Run:
        if program.bindings.batch and given.parts is None:
            raise PipelineError(
                f"rank {self._rank} was given batch=None, but its stages {list(self._stages)} read "
                "the batch: pass it on this rank too",
                rank=self._rank,
            )
        if given.params.shared:
            self._refuse_without_data(program, given.params)
        return load(program, plan, given.params, given.parts, self._device, given.key)

    def _refuse_without_data(self, program: Program, params: Parameters) -> None:
        for stage, leaf, _ in program.bindings.params:
            if params.stages[stage][leaf].is_meta:
                path = tree.paths(params.spec)[leaf]
                raise PipelineError(
                    f"rank {self._rank} reads the parameter {path} in its stage {stage}, but what "
                    "it was given lies on the meta device and has no data: pipe.init and pipe.load "
                    "make those that a rank reads",
                    rank=self._rank,
                    stage=stage,
                )

    def _blame(self, error: Exception) -> PipelineError:
        """Tell all ranks what failed here."""
        cause = error.__cause__
        if not isinstance(error, PipelineError):
            cause = error
            error = PipelineError(f"rank {self._rank} failed: {_named(error)}", rank=self._rank)
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

    def _drain(self, run: Run) -> None:
        self._draining = True
        try:
            drain(run, self._transport)
        finally:
            self._draining = False

    def _finish(self, plan: Plan, total: Total | None, *, failed: bool) -> Total | None:
        """Give every rank the loss, and know whether all ranks came to their end."""
        size, heads = prod(plan.loss_shape), plan.layout.heads
        word = torch.zeros(1 + size + (heads > 1), dtype=torch.float64)
        word[0] = failed
        if total is not None:
            word[1 : 1 + size] = total.loss.flatten()
            if total.weight is not None:
                word[1 + size] = total.weight
        word = _connected(lambda: gather(word, self._control)).sum(0)
        if word[0] > 0 and not failed:
            raise self._reported()
        if not heads:
            return None
        loss = word[1 : 1 + size].reshape(plan.loss_shape).to(self._device, plan.weights.dtype)
        return Total(loss, word[1 + size].to(self._device) if heads > 1 else None)

    def _interrupted(self) -> bool:
        return self._watch.fault is not None and not self._draining

    def _give_up(self, fault: Fault) -> PipelineError:
        """The connections are lost: wake everyone, and be usable no more."""
        self._broken = replace(fault, breaks=True)
        self._ring()
        self._transport.forget()
        self._watch.close()
        return self._broken.error()

    def _ring(self) -> None:
        self._transport.ring()
        if self._control is not self._group:
            ring(self._control)

    def _connect(
        self, backend: str, store: dist.Store, name: str, ranks: Sequence[int]
    ) -> dist.ProcessGroup:
        """A group for some of the ranks."""
        own = dist.PrefixStore(f"{self._name}/{name}", store)
        return connect(backend, own, ranks.index(self._rank), len(ranks), dist.default_pg_timeout)


def _connected(operation: Callable[[], T]) -> T:
    """Run an operation of all ranks; its failure is a lost connection."""
    try:
        return operation()
    except RuntimeError as error:
        raise ConnectionLost(None, str(error)) from error


def _header(given: Given | None, goal: Goal) -> Header:
    if given is None:
        return Header(1, CALLS.index(f"pipe.{goal}"), 0, 0, 0)
    batch = 0
    if given.parts is not None:
        batch = identity((given.parts.rows, given.batch))
    own = identity((*given.shapes.items(), ambient()))
    records = int(active() is not None)
    return Header(0, CALLS.index(f"pipe.{goal}"), batch, own, records, as_number(given.key))


def _named(error: BaseException) -> str:
    """The error's kind and text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
