"""Calls: what the ranks were called for, and the plan on which they agree.

read ──► header ──► all known ────────────────────────────────► plan
                      └── new shapes ── offers ── plan ── verdicts ─┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from fpipe import pytree
from fpipe.dtensors import placements_of
from fpipe.errors import PipelineError, error_text
from fpipe.execute.fault import refusal
from fpipe.execute.gathering import connected, gather_objects
from fpipe.execute.header import (
    CALLS,
    HISTORY,
    Header,
    check_calls,
    check_keys,
    digest,
    identity,
    start_headers,
)
from fpipe.execute.meshes import Facts, Rows, check_meshes, facts_of
from fpipe.execute.offer import (
    BatchShape,
    Offer,
    check_numbers,
    check_offers,
    check_verdicts,
    shared_parameters,
    unsendable,
    warn_of_other_copies,
    warn_of_other_numbers,
)
from fpipe.execute.requests import Reader, Request
from fpipe.execute.sample import Sample, numbers, same_numbers, sample, trace_of
from fpipe.inputs.keys import Words, as_number
from fpipe.inputs.params import Parameters
from fpipe.inputs.signature import Goal, Signature, TreeShape, batch_shapes
from fpipe.inputs.split_batch import SplitBatch
from fpipe.plan.plan import Latest, Plan
from fpipe.plan.planner import Planner
from fpipe.program.program import describe
from fpipe.program.step_timelines import ACTIVE
from fpipe.spec.definition import Definition
from fpipe.transport.group import GroupTransport

NOWHERE = torch.device("meta")
"""Stands for every rank's own device in what ranks compare."""


class Arguments(NamedTuple):
    """The arguments of this rank's call, read and checked.

    Attributes:
        params: with the parts of this rank's stages.
        parts: the batch, None where the rank was given none.
        shapes: the parameters of each of its stages.
        batch: the same without its data.
        key: of the step, None for none.
        whole: the batch, as stages take it.
        held: of one function, which leaves of its parameters have data here; else None.
        numbers: as in the header.
        scale: what the loss is multiplied with in the backward.
    """

    params: Parameters
    parts: SplitBatch | None
    shapes: Mapping[int, TreeShape]
    batch: BatchShape | None
    key: Words | None
    whole: Any
    held: tuple[bool, ...] | None
    numbers: int
    scale: float


class Call(NamedTuple):
    """A call of this rank, announced to the other ranks.

    Attributes:
        goal: what is asked for.
        arguments: of this rank, None if they are wrong.
        problem: why not.
        header: what the others are told of it.
        headers: waits for those of all ranks.
    """

    goal: Goal
    arguments: Arguments | None
    problem: Exception | None
    header: Header
    headers: Callable[[], list[Header]]

    @property
    def kind(self) -> tuple[int, int, int]:
        """The same for calls that end in the same plan, as far as this rank knows."""
        return self.header.call, self.header.batch, self.header.params


class Agreed(NamedTuple):
    """The run on which all ranks have agreed.

    Attributes:
        arguments: of this rank.
        plan: the same on all ranks.
        records: whether any rank records the step.
        offsets: of all ranks, in their headers: with the plan they tell which kernels run.
        proven: with which of them the plan has been run to its end; the same on all ranks.
        share: what the losses of this replica count in a mean over the rows of all replicas.
    """

    arguments: Arguments
    plan: Plan
    records: bool
    offsets: tuple[int, ...]
    proven: set[tuple[int, ...]]
    share: float = 1.0


@dataclass
class _Kept:
    """A plan that ranks have agreed on.

    Attributes:
        plan: the same on all of them.
        proven: with which offsets it has been run to its end.
        alike: all ranks have been given the same batches so far, bit by bit, as far as is known.
        facts: what other rows of the mesh must have alike.
    """

    plan: Plan
    proven: set[tuple[int, ...]]
    alike: bool
    facts: Facts


class Calls:
    """Reads what this rank is called with, and finds the plan that all ranks run.

    Args:
        planner: makes plans for the programs of this rank.
        reader: reads what this rank is called with.
        definition: of the pipeline.
        control: the group over which ranks agree.
        device: where this rank computes.
        setup: what must be the same on all ranks, as texts by name.
        transports: to the other ranks, opened for the programs of each plan.
        number: of the pipeline, among those of the group.
        pipeline: the name of the process group.
        rows: of the mesh, None if it has one.
        given_up: whether to wait no longer for processes of other rows, after so many seconds.
    """

    def __init__(
        self,
        planner: Planner,
        reader: Reader,
        definition: Definition,
        control: dist.ProcessGroup,
        *,
        device: torch.device,
        setup: Mapping[str, str],
        transports: Sequence[GroupTransport],
        number: int,
        pipeline: str,
        rows: Rows | None,
        given_up: Callable[[float], bool],
    ) -> None:
        self._planner = planner
        self._reader = reader
        self._schedule, self._data = definition.schedule, definition.data
        self._control = control
        self._rank = control.rank()
        self._stages = self._schedule.stages_of(self._rank)
        self._device = device
        self._setup = {name: digest(text) for name, text in setup.items()}
        self._transports = transports
        self._number = number
        self._pipeline = pipeline
        self._rows = rows
        self._given_up = given_up
        self._divided = int(self._data is not None)
        # All ranks agree on the same in the same order, and so forget the same.
        self._agreed: Latest[tuple[int, ...], _Kept] = Latest()
        # The plans that this rank expects, whatever the others do.
        self._expected: Latest[tuple[int, int, int], Plan] = Latest()

    def announce(self, request: Request, goal: Goal, name: str | None = None) -> Call:
        """Read what this rank was called with, and tell the others.

        `name` says what was called, if not the method of the goal.

        The frames from here outwards are behind the traceback of what is wrong with it. One that
        had a name for that when it is left would keep itself, the pipeline and the batch.
        """
        arguments, problem = self._attempt(request)
        try:
            header = self._header(arguments, name or f"pipe.{goal}")
            headers = start_headers(header, self._control, self._number)
            return Call(goal, arguments, problem, header, headers)
        finally:
            del problem

    def agree(self, call: Call) -> Agreed:
        """Find the plan that all ranks run, or make it if anything is new."""
        headers = call.headers()
        if self._rows is None or not any(header.divided for header in headers):
            return self._agree(call, headers)[0]
        self._rows.active = True
        try:
            agreed, facts = self._agree(call, headers)
        except PipelineError as problem:
            self._rows.check(None, problem, self._given_up)
            raise
        rows = self._rows.check(facts, None, self._given_up)
        if self._data is None or not agreed.plan.averages:
            return agreed
        if not sum(rows):
            raise refusal(None, "no replica has a row: leave out steps that have no data")
        return agreed._replace(share=facts.rows / sum(rows))

    def _agree(self, call: Call, headers: Sequence[Header]) -> tuple[Agreed, Facts]:
        """The plan that all ranks of this row run, and what other rows must have alike."""
        check_calls(headers)
        check_keys(headers)
        arguments = call.arguments
        # If any rank wants gradients of a value, all ranks run a step.
        called = headers[0].call
        if any(header.call == CALLS.index(HISTORY) for header in headers):
            called = CALLS.index("pipe.step")
            call = call._replace(goal="step")
        shapes = (called, *(word for h in headers for word in (h.batch, h.params)))
        if arguments is None or shapes not in self._agreed or any(h.failed for h in headers):
            signature = self._make_signature(call)
            assert arguments is not None
            # A failure is not kept: all ranks refuse such a call again.
            plan = self._make_plan(signature)
            alike = same_numbers([h.numbers for h in headers])
            program = plan.programs[self._rank]
            facts = facts_of(
                signature, plan, program, self._setup, partial(self._copies, plan, arguments.params)
            )
            self._agreed[shapes] = _Kept(plan, set(), alike, facts)
            self._compare_copies(plan, arguments.params)
        kept = self._agreed[shapes]
        if kept.alike and not same_numbers([h.numbers for h in headers]):
            check_numbers(gather_objects(self._sample(arguments), self._control))
            kept.alike = False  # they are rounded otherwise
        self._expected[call.kind] = kept.plan
        offsets = tuple(h.offsets for h in headers)
        records = any(h.records for h in headers)
        agreed = Agreed(arguments, kept.plan, records, offsets, kept.proven)
        facts, kept.facts = kept.facts, kept.facts._replace(copies=None)
        return agreed, facts

    def _attempt(self, request: Request) -> tuple[Arguments | None, Exception | None]:
        """The request, read, or why it cannot be used."""
        if request.problem is not None:
            return None, request.problem
        try:
            return self._read(request), None
        except Exception as error:
            return None, error

    def _header(self, arguments: Arguments | None, name: str) -> Header:
        if arguments is None:
            return Header(1, CALLS.index(name), 0, 0, 0, divided=self._divided)
        batch = 0 if arguments.batch is None else identity(arguments.batch)
        params = identity((*arguments.shapes.items(), arguments.held, self._planner.ambient()))
        records = int(ACTIVE.get() is not None)
        offsets = _offsets(arguments) if self._device.type == "cuda" else 0
        places = map(placements_of, arguments.params.specs)
        self._divided = int(self._data is not None or any(map(any, places)))
        return Header(
            0,
            CALLS.index(name),
            batch,
            params,
            records,
            as_number(arguments.key),
            offsets,
            arguments.numbers,
            self._divided,
        )

    def _read(self, request: Request) -> Arguments:
        params, batch = self._reader.params(request.params), request.batch
        parts, shapes = None, None
        if batch is not None:
            parts = self._reader.batch(batch)
            shapes = BatchShape(
                parts.rows,
                parts.kinds,
                tuple(shape.on(NOWHERE) for shape in batch_shapes(parts)),
            )
        described = params.shapes(NOWHERE)
        params_shapes = {stage: described[stage] for stage in self._stages}
        held = None
        if params.shared and self._stages:
            held = tuple(not leaf.is_meta for leaf in params.stages[0])
        # Arguments that a transform adds to the batch may differ from rank to rank.
        whole = parts is not None and self._reader.common(batch) is batch
        numbers = trace_of(parts) if parts is not None and whole else 0
        common = (params, parts, params_shapes, shapes, request.key, batch, held, numbers)
        return Arguments(*common, request.scale)

    def _sample(self, arguments: Arguments | None) -> Sample | None:
        """Numbers of the batch that this rank was given, None if it was given none."""
        if arguments is None or arguments.parts is None:
            return None
        return sample(self._reader.common(arguments.whole))

    def _make_signature(self, call: Call) -> Signature:
        """Exchange offers, and combine them into the signature of all ranks."""
        goal, arguments, problem = call.goal, call.arguments, call.problem
        offer = Offer(
            setup=self._setup,
            params={} if arguments is None else arguments.shapes,
            held=None if arguments is None else arguments.held,
            batch=None if arguments is None else arguments.batch,
            sample=self._sample(arguments),
            ambient=self._planner.ambient(),
            schedule=repr(self._schedule),
            problem=None if problem is None else error_text(problem),
        )
        if problem is None and (problem := unsendable(offer)) is not None:
            offer = offer._replace(params={}, batch=None, problem=error_text(problem))
        offers: list[Offer] = gather_objects(offer, self._control)
        check_offers(offers, self._rank, problem)
        warn_of_other_numbers(offers)
        rows, kinds, shapes = next(o.batch for o in offers if o.batch is not None)
        shared = shared_parameters(offers)
        return Signature(
            goal,
            tuple(
                (shared or offers[rank].params[stage]).on(self._device)
                for stage, rank in enumerate(self._schedule.placement)
            ),
            rows,
            kinds,
            tuple(shape.on(self._device) for shape in shapes),
            self._planner.ambient(),
        )

    def _make_plan(self, signature: Signature) -> Plan:
        """Make the plan, and see that all ranks made the same."""
        plan, text, problem = self._planned(signature)
        verdict = plan is not None, text
        try:
            verdicts = gather_objects(verdict, self._control)
            check_verdicts(verdicts, self._rank, problem)
        finally:
            del problem  # as in `announce`
        assert plan is not None
        for transport in self._transports:
            connected(partial(transport.open, plan.programs))
        return plan

    def _compare_copies(self, plan: Plan, params: Parameters) -> None:
        """Say so if ranks have different copies of a parameter that several read."""
        if not params.shared:  # each stage has its own
            return
        readers: dict[int, set[int]] = defaultdict(set)
        for (_, leaf), ranks in plan.readers.items():
            readers[leaf] |= ranks
        several = sorted(leaf for leaf, ranks in readers.items() if len(ranks) > 1)
        if several:
            paths = pytree.paths(params.spec)
            copies = {
                paths[leaf]: numbers(params.stages[0][leaf])
                for leaf in several
                if self._rank in readers[leaf]
            }
            warn_of_other_copies(gather_objects(copies, self._control))

    def _copies(self, plan: Plan, params: Parameters) -> Sample:
        """Numbers of the parameters that this rank reads and every replica has whole."""
        copies: Sample = {}
        for stage, leaf, _ in plan.programs[self._rank].bindings.params:
            if placements_of(params.specs[stage])[leaf] is None:
                path = pytree.paths(params.specs[stage])[leaf]
                where = path if params.shared else f"[{stage}]{path}"
                copies[where] = numbers(params.stages[stage][leaf])
        return copies

    def _planned(self, signature: Signature) -> tuple[Plan | None, str, Exception | None]:
        """The plan and its digest, or why there is none."""
        try:
            check_meshes(signature, self._pipeline)
            plan = self._planner(signature)
            # Not how much they hold: one rank may run uncompiled, to be looked at.
            texts = [describe(program, weighed=False) for program in plan.programs]
            return plan, digest("\n".join((*texts, plan.fingerprint))), None
        except Exception as error:
            return None, error_text(error), error

    def expected(self, call: Call) -> Plan | None:
        """The plan of the last call that was like this one as far as this rank knows, if any."""
        return self._expected.get(call.kind)


def _offsets(arguments: Arguments) -> int:
    """Where the arguments that lie on a device begin, in bytes after a multiple of `_ALIGNED`.

    torch has other kernels for those that do not begin at one.
    """
    groups = [arguments.params.stages[stage] for stage in arguments.shapes]
    if arguments.parts is not None:
        groups.extend(arguments.parts.leaves)
    offsets = tuple(
        leaf.storage_offset() * leaf.itemsize % _ALIGNED
        for leaves in groups
        for leaf in leaves
        if leaf.is_cuda
    )
    return identity(offsets) if any(offsets) else 0


_ALIGNED: Final = 16  # all memory that torch reserves on a device is; it reads so much at once
