"""Lowering: from a schedule and the code of its stages to one Program per rank.

    actions ── tasks ──► who reads what ── mail ──► order of instructions ── slots ──► Program

Posts of receive buffers, sends and waits are woven between the tasks; then each value gets a slot
from where it is made to where it is last read.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from fpipe.runtime.messages import Mail, plan_mail
from fpipe.runtime.program import (
    Bindings,
    Compute,
    Free,
    Instruction,
    Message,
    Program,
    Recv,
    Results,
    Send,
    WaitRecv,
    WaitSend,
)
from fpipe.runtime.slots import Slots
from fpipe.runtime.tasks import Task, tasks_of
from fpipe.runtime.tied import tie
from fpipe.runtime.values import (
    BatchValue,
    Codes,
    Computed,
    ConstantValue,
    KeyValue,
    ParamValue,
    Resolver,
    SeedValue,
    SumValue,
    Value,
)
from fpipe.schedule import Schedule
from fpipe.stage.declared.sink import SUM, Sink


class Windows(NamedTuple):
    """How far communication may run ahead of computation.

    Attributes:
        send: messages per channel that may be on their way while their values stay alive.
        receive: tasks between posting a receive buffer and needing its values.
        nbytes: more may run ahead on a channel as long as they hold no more bytes than this in
            all. Where messages are small, what costs time is to wait for the other rank.
    """

    send: int
    receive: int
    nbytes: int = 0


AHEAD_AT_START = 16
"""Receives of a channel that are posted ahead of their windows before the first task: to post one
takes some 20 microseconds, and the first message should not wait for those of a whole step."""

AHEAD_PER_TASK = 2
"""And before each task after it."""

DIRECT = Windows(send=0, receive=0)
"""For a transport that hands values over at once."""


def lower(
    schedule: Schedule,
    codes: Codes,
    windows: Windows = DIRECT,
    runs_here: Callable[[int], bool] = lambda rank: True,
    *,
    tied: bool = False,
    sink: Sink = SUM,
) -> tuple[Program, ...]:
    """Lower `schedule` to one program per rank.

    Args:
        schedule: a schedule that `fpipe.verify` accepts.
        codes: the code of each stage and microbatch.
        windows: how far communication may run ahead.
        runs_here: which ranks run in this process; the kernels of the others are not compiled, and
            their programs are there to be read.
        tied: stages number the leaves of one tree of parameters, and may share some.
        sink: how gradients are collected, and who gets them.
    """
    resolve = Resolver(codes)
    tasks = tasks_of(schedule, codes, resolve)
    if tied:
        several = not all(map(runs_here, range(schedule.num_ranks)))
        tasks = tie(tasks, schedule, codes, sink, everywhere=several)
    results: list[dict[Value, None]] = [{} for _ in schedule.actions]
    grads: list[list[tuple[SumValue, Value]]] = [[] for _ in schedule.actions]
    outputs: list[list[tuple[int, int, Value]]] = [[] for _ in schedule.actions]
    for total, value in tasks.sums.items():
        # What belongs to the batch is gathered where the batch comes in.
        stage = 0 if total.argument == "batch" else total.stage
        ranks = range(schedule.num_ranks) if sink.everywhere else [schedule.placement[stage]]
        for rank in ranks:
            grads[rank].append((total, value))
            results[rank][value] = None
    for microbatch in range(schedule.num_microbatches):
        for stage, rank in enumerate(schedule.placement):
            for number, name in codes(stage, microbatch).returned:
                value = resolve(stage, microbatch, name)
                outputs[rank].append((microbatch, number, value))
                results[rank][value] = None
    states: list[tuple[int, Value]] = []
    latest = schedule.num_microbatches - 1
    for stage in range(schedule.num_stages):
        for leaf, name in codes(stage, latest).updates.items():
            states.append((leaf, resolve(stage, latest, name)))
    # What is threaded through the microbatches is small, and the same for every rank afterwards.
    for own in results:
        own.update((value, None) for _, value in states)
    mail = plan_mail(tasks.rows, schedule.placement, results)
    return tuple(
        _assemble(
            rank,
            _weave(rank, row, list(results[rank]), mail, windows),
            results[rank],
            grads[rank],
            outputs[rank],
            states,
            compiled=runs_here(rank),
        )
        for rank, row in enumerate(tasks.rows)
    )


class _Step(NamedTuple):
    """An instruction before its values have slots: what it is, what it reads, what it makes."""

    kind: type[Instruction]
    subject: Task | Message
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]


def _weave(
    rank: int, row: Sequence[Task], results: Sequence[Value], mail: Mail, windows: Windows
) -> list[_Step]:
    """Put posts, waits and sends between the tasks of one rank."""
    reads = [*(task.inputs for task in row), results]
    posts = _post_times(rank, reads, mail, windows)
    arrived: set[Message] = set()
    under_way: dict[int, deque[Message]] = defaultdict(deque)
    nbytes: dict[int, int] = defaultdict(int)
    steps: list[_Step] = []
    for index, values in enumerate(reads):
        steps += [_Step(Recv, message, (), ()) for message in posts.get(index, ())]
        for message in _carriers(rank, values, mail):
            if message not in arrived:
                arrived.add(message)
                steps.append(_Step(WaitRecv, message, (), mail.contents[message]))
        if index == len(row):
            break
        steps.append(_Step(Compute, row[index], row[index].inputs, row[index].outputs))
        for message in mail.sent.get((rank, index), ()):
            steps.append(_Step(Send, message, mail.contents[message], ()))
            channel = under_way[message.target]
            channel.append(message)
            nbytes[message.target] += message.nbytes
            while len(channel) > windows.send and nbytes[message.target] > windows.nbytes:
                done = channel.popleft()
                nbytes[message.target] -= done.nbytes
                steps.append(_Step(WaitSend, done, mail.contents[done], ()))
    for channel in under_way.values():
        steps += [_Step(WaitSend, message, mail.contents[message], ()) for message in channel]
    return steps


def _carriers(rank: int, values: Sequence[Value], mail: Mail) -> list[Message]:
    """The messages that bring `values` to a rank."""
    carriers = [mail.carrier.get((rank, v)) for v in values if isinstance(v, Computed)]
    return [message for message in carriers if message is not None]


def _post_times(
    rank: int, reads: Sequence[Sequence[Value]], mail: Mail, windows: Windows
) -> dict[int, list[Message]]:
    """Before which task to post each message, in channel order."""
    first_read: dict[Message, int] = {}
    for index, values in enumerate(reads):
        for message in _carriers(rank, values, mail):
            first_read.setdefault(message, index)
    posts: dict[int, list[Message]] = defaultdict(list)
    for channel in mail.received[rank].values():
        times = [max(0, first_read[message] - windows.receive) for message in channel]
        # A message also fits once those before it that would not fit beside it have been read.
        start = nbytes = 0
        for number, message in enumerate(channel):
            nbytes += message.nbytes
            while nbytes > windows.nbytes:
                nbytes -= channel[start].nbytes
                start += 1
            if start <= number:
                room = first_read[channel[start - 1]] + 1 if start else 0
                slowly = (number - AHEAD_AT_START) // AHEAD_PER_TASK + 1
                times[number] = min(times[number], max(room, slowly))
        for number in reversed(range(len(times) - 1)):
            times[number] = min(times[number], times[number + 1])
        for message, time in zip(channel, times, strict=True):
            posts[time].append(message)
    return posts


def _assemble(
    rank: int,
    steps: Sequence[_Step],
    results: dict[Value, None],
    grads: Sequence[tuple[SumValue, Value]],
    outputs: Sequence[tuple[int, int, Value]],
    states: Sequence[tuple[int, Value]],
    *,
    compiled: bool,
) -> Program:
    """Give every value of one rank a slot, and write the instructions down."""
    last_use: dict[Value, int] = {}
    for number, step in enumerate(steps):
        last_use.update(dict.fromkeys(step.reads, number))
    bound: dict[Value, None] = {
        v: None for v in (*last_use, *results) if not isinstance(v, Computed)
    }
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
        made = tuple(slots.make(v) for v in step.makes)
        place = len(instructions)
        if isinstance(step.subject, Task):
            task = step.subject
            call = task.call() if compiled else _elsewhere
            last = tuple(slots.release(v) for v in ending)
            instructions.append(Compute(call, reads, last, made, task.action))
            weights = [spec.nbytes for spec in task.specs]
            handed = {slot: number for number, slot in enumerate(reads) if slot in last}
            needs[place] = task.footprint(frozenset(handed.values()))
        else:
            message = step.subject
            weights = [spec.nbytes for spec in message.specs]
            if step.kind is Send:
                instructions.append(Send(message, reads))
            elif step.kind is WaitRecv:
                instructions.append(WaitRecv(message, made))
            elif step.kind is Recv:
                instructions.append(Recv(message))
            else:
                instructions.append(WaitSend(message))
                if ending:
                    instructions.append(Free(tuple(slots.release(v) for v in ending)))
        sizes.update(
            {(place, slot): size for slot, size in zip(made, weights, strict=False) if slot >= 0}
        )
    return Program(
        rank=rank,
        instructions=tuple(instructions),
        bindings=bindings,
        results=Results(
            grads=tuple(
                (total.stage, total.leaf, total.microbatch, slots[value])
                for total, value in grads
                if total.argument == "params"
            ),
            batch_grads=tuple(
                (total.stage, total.leaf, total.microbatch, slots[value])
                for total, value in grads
                if total.argument == "batch"
            ),
            outputs=tuple((microbatch, leaf, slots[value]) for microbatch, leaf, value in outputs),
            states=tuple((leaf, slots[value]) for leaf, value in states),
        ),
        num_slots=slots.count,
        sizes=sizes,
        needs=needs,
    )


def _elsewhere(inputs: list[Tensor]) -> Sequence[Tensor]:
    """Stands for a kernel that only another process runs."""
    raise AssertionError("this kernel belongs to a rank of another process")


def _bind(bound: dict[Value, None], steps: Sequence[_Step], slots: Slots) -> Bindings:
    """Slots for what is there before the program starts."""
    tensors: dict[int, Tensor] = {
        id(constant): constant
        for step in steps
        if isinstance(step.subject, Task)
        for constant in step.subject.constants
    }
    params, batch, constants, seeds, keys = [], [], [], [], []
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
            case KeyValue(microbatch, stage):
                keys.append((microbatch, stage, slot))
    return Bindings(tuple(params), tuple(batch), tuple(constants), tuple(seeds), tuple(keys))
