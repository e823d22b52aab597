"""Lowering: from a schedule and the code of its stages to one Program per rank.

actions ── tasks ──► who reads what ── mail ──► order of instructions ── slots ──► Program

Every value of a rank gets a slot, from the step that computes it to its last use.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fpipe.inputs.signature import UPDATING, Goal
from fpipe.program.communication_plan import DIRECT, Step, Windows, plan_mail, weave
from fpipe.program.offloading import Offloading, with_copies
from fpipe.program.program import (
    Bindings,
    Compute,
    Free,
    Instruction,
    Program,
    Recv,
    Results,
    Send,
    WaitRecv,
    WaitSend,
)
from fpipe.program.replica_layout import Replicas
from fpipe.program.tasks import Tasks, parameters_read, tasks_of
from fpipe.program.tied import tie
from fpipe.program.updating import Updates, with_updates
from fpipe.program.values import (
    BatchValue,
    Codes,
    Computed,
    ConstantValue,
    KeyValue,
    MomentsValue,
    MoveValue,
    ParamValue,
    Resolver,
    SeedValue,
    SumValue,
    Task,
    Value,
)
from fpipe.schedule import Schedule
from fpipe.spec.objective import SUM, Sink


@dataclass
class Ends:
    """The values that a rank holds when its program has ended.

    Attributes:
        grads: the sums of gradients.
        outputs: microbatch, number and value of each output.
        states: leaf and value of each part of the state that has changed.
        params: parameters that it is given, whether it computes with them or not.
        updates: parameters and their moments after the optimizer's step.
    """

    grads: list[tuple[SumValue, Value]] = field(default_factory=list)
    outputs: list[tuple[int, int, Value]] = field(default_factory=list)
    states: list[tuple[int, Value]] = field(default_factory=list)
    params: list[ParamValue] = field(default_factory=list)
    updates: list[tuple[SumValue, Computed]] = field(default_factory=list)

    @property
    def values(self) -> list[Value]:
        """All of them, each once."""
        summed = (value for _, value in self.grads)
        returned = (value for _, _, value in self.outputs)
        threaded = (value for _, value in self.states)
        updated = (value for _, value in self.updates)
        return list(dict.fromkeys((*summed, *returned, *threaded, *self.params, *updated)))


def assemble(rank: int, steps: Sequence[Step], ends: Ends, *, compiled: bool) -> Program:
    """The program of one rank.

    Kernels that are not `compiled` run in another process; the program is there to be read.
    """
    last_use: dict[Value, int] = {}
    for number, step in enumerate(steps):
        last_use.update(dict.fromkeys(step.reads, number))
    results = ends.values
    bound = [v for v in dict.fromkeys((*last_use, *results)) if not isinstance(v, Computed)]
    never = len(steps)
    last_use.update(dict.fromkeys((*results, *bound), never))
    slots = Slots(last_use)
    bindings = _bind(bound, steps, slots)
    instructions: list[Instruction] = []
    sizes: dict[tuple[int, int], int] = {}
    needs: dict[int, int] = {}
    for number, step in enumerate(steps):
        ending = [v for v in dict.fromkeys(step.reads) if slots.ends(v, number)]
        reads = tuple(slots[v] for v in step.reads)
        outputs = tuple(slots.make(v) for v in step.makes)
        at = len(instructions)
        sizes |= {
            (at, slot): spec.nbytes
            for slot, spec in zip(outputs, step.subject.specs, strict=False)
            if slot >= 0
        }
        if isinstance(step.subject, Task):
            task = step.subject
            call = task.call() if compiled else _elsewhere
            last = tuple(slots.release(v) for v in ending)
            instructions.append(Compute(call, reads, last, outputs, task.action))
            over = frozenset(last)
            handed = {slot: number for number, slot in enumerate(reads) if slot in over}
            needs[at] = task.footprint(frozenset(handed.values()))
            continue
        message = step.subject
        if step.kind is Recv:
            instructions.append(Recv(message))
        elif step.kind is WaitRecv:
            instructions.append(WaitRecv(message, outputs))
        elif step.kind is Send:
            instructions.append(Send(message, reads))
        else:
            assert step.kind is WaitSend
            instructions.append(WaitSend(message))
            if ending:
                instructions.append(Free(tuple(slots.release(v) for v in ending)))
    return Program(
        rank=rank,
        instructions=tuple(instructions),
        bindings=bindings,
        results=_results(ends, slots),
        num_slots=slots.count,
        sizes=sizes,
        needs=needs,
    )


def _elsewhere(inputs: list[Tensor]) -> Sequence[Tensor]:
    """Stands for a kernel that only another process runs."""
    raise AssertionError("this kernel belongs to a rank of another process")


def _results(ends: Ends, slots: Slots) -> Results:
    """Where a rank finds what it holds at the end."""
    grads: dict[str, list[tuple[int, int, int, int]]] = {"params": [], "batch": []}
    for total, value in ends.grads:
        grads[total.argument].append((total.stage, total.leaf, total.microbatch, slots[value]))
    return Results(
        grads=tuple(grads["params"]),
        batch_grads=tuple(grads["batch"]),
        outputs=tuple((microbatch, leaf, slots[value]) for microbatch, leaf, value in ends.outputs),
        states=tuple((leaf, slots[value]) for leaf, value in ends.states),
        updates=tuple((of.stage, of.leaf, slots[value]) for of, value in ends.updates),
    )


def _bind(bound: Iterable[Value], steps: Sequence[Step], slots: Slots) -> Bindings:
    """Slots for what is there before the program starts."""
    tensors: dict[int, Tensor] = {
        id(constant): constant
        for step in steps
        if isinstance(step.subject, Task)
        for constant in step.subject.constants
    }
    params, batch, constants, seeds, keys = [], [], [], [], []
    moments, move = [], []
    for value in bound:
        slot = slots.make(value)
        match value:
            case ParamValue(stage, leaf):
                params.append((stage, leaf, slot))
            case BatchValue(microbatch, leaf):
                batch.append((microbatch, leaf, slot))
            case ConstantValue(address):
                constants.append((tensors[address], slot))
            case SeedValue(microbatch):
                seeds.append((microbatch, slot))
            case KeyValue(microbatch, number):
                keys.append((microbatch, number, slot))
            case MomentsValue(stage, leaf):
                moments.append((stage, leaf, slot))
            case MoveValue():
                move.append((slot,))
    return Bindings(
        tuple(params),
        tuple(batch),
        tuple(constants),
        tuple(seeds),
        tuple(keys),
        tuple(moments),
        tuple(move),
    )


class Slots:
    """Hands out slot numbers, the smallest free one first.

    Args:
        last_use: for each value, the index of the last step that reads it; a value without an
            entry is read by nothing.
    """

    def __init__(self, last_use: dict[Value, int]) -> None:
        self._last_use = last_use
        self._slot: dict[Value, int] = {}
        self._free: list[int] = []
        self.count = 0

    def __getitem__(self, value: Value) -> int:
        return self._slot[value]

    def make(self, value: Value) -> int:
        """A slot for a new value; -1 if nothing reads it."""
        if value not in self._last_use:
            return -1
        if self._free:
            self._slot[value] = heapq.heappop(self._free)
        else:
            self._slot[value] = self.count
            self.count += 1
        return self._slot[value]

    def ends(self, value: Value, step: int) -> bool:
        """Whether nothing reads `value` after `step`."""
        return self._last_use[value] <= step

    def release(self, value: Value) -> int:
        """Take the slot of `value` back; returns its number."""
        slot = self._slot.pop(value)
        heapq.heappush(self._free, slot)
        return slot


def lower(
    schedule: Schedule,
    codes: Codes,
    windows: Windows = DIRECT,
    *,
    only: int | None = None,
    tied: bool = False,
    sink: Sink = SUM,
    replicas: Replicas | None = None,
    goal: Goal = "step",
    late: Collection[tuple[int, int]] = (),
    offloading: Offloading | None = None,
) -> tuple[Program, ...]:
    """Lower `schedule` to one program per rank.

    Args:
        schedule: a schedule that `fpipe.verify` accepts.
        codes: the code of each stage and microbatch.
        windows: how far communication may run ahead.
        only: the rank that this process runs, None for all; the kernels of the others are not
            compiled, and their programs are there to be read.
        tied: stages number the leaves of one tree of parameters, and may share some.
        sink: how gradients are collected, and who gets them.
        replicas: how replicas share parameters and add up gradients; None for no replicas.
        goal: ``"update"`` and ``"clip"`` update each stage where the schedule has its UPDATE.
        late: stage and leaf of parameters that are not updated within, for their gradients are not
            whole then.
        offloading: of parameters that live on the CPU; None where they lie on the devices.
    """
    resolve = Resolver(codes)
    present = schedule.num_microbatches if replicas is None else replicas.present
    if any(codes(stage, 0).updates for stage in range(schedule.num_stages)):
        resolve.follow_states(schedule.num_stages, present)
    tasks = tasks_of(schedule, codes, resolve, replicas, updates=goal in UPDATING)
    if tied:
        several = only is not None and schedule.num_ranks > 1
        tasks = tie(tasks, schedule, codes, sink, everywhere=several, replicas=replicas)
    if offloading is not None:
        tasks = with_copies(tasks, offloading, tied=tied)
    updates: Updates = {}
    if goal in UPDATING:
        tasks, updates = with_updates(tasks, schedule, late, settles=offloading is not None)
    ends = _ends_of(tasks, schedule, codes, resolve, sink, present)
    for total, updated in updates.items():
        rank = schedule.placement[total.stage]
        ends[rank].updates.append((total, updated))
        if goal == "update":
            ends[rank].grads.remove((total, tasks.sums[total]))
    if present < schedule.num_microbatches:
        # A replica without rows reads what the others do, as far as anyone asks.
        for read in parameters_read(schedule, codes, resolve).values():
            for value in read:
                ends[schedule.placement[value.stage]].params.append(value)
    results = [end.values for end in ends]
    mail = plan_mail(tasks.rows, schedule.placement, results)
    return tuple(
        assemble(
            rank,
            weave(rank, row, results[rank], mail, windows),
            ends[rank],
            compiled=only in (None, rank),
        )
        for rank, row in enumerate(tasks.rows)
    )


def _ends_of(
    tasks: Tasks, schedule: Schedule, codes: Codes, resolve: Resolver, sink: Sink, present: int
) -> list[Ends]:
    """The values that each rank holds after `present` microbatches."""
    ends = [Ends() for _ in schedule.actions]
    for total, value in tasks.sums.items():
        # Gradients by the batch are collected on the rank where the batch comes in.
        stage = 0 if total.argument == "batch" else total.stage
        ranks = range(schedule.num_ranks) if sink.everywhere else [schedule.placement[stage]]
        for rank in ranks:
            ends[rank].grads.append((total, value))
    # Microbatches of another size may make a leaf in another stage: a copy may be none there. All
    # go to one rank, which puts them together.
    homes: dict[int, int] = defaultdict(int)
    returned = [
        (microbatch, stage, number, name)
        for microbatch in range(present)
        for stage in range(schedule.num_stages)
        for number, name in codes(stage, microbatch).returned
    ]
    for _, stage, number, _ in returned:
        homes[number] = max(homes[number], stage)
    for microbatch, stage, number, name in returned:
        value = resolve(stage, microbatch, name)
        ends[schedule.placement[homes[number]]].outputs.append((microbatch, number, value))
    latest = max(0, present - 1)
    for stage in range(schedule.num_stages):
        for leaf, name in codes(stage, latest).updates.items():
            # A threaded state is small, and every rank holds it afterwards. Without a
            # microbatch it is the caller's.
            left = resolve(stage, latest, name) if present else ParamValue(stage, leaf)
            for end in ends:
                end.states.append((leaf, left))
    return ends
