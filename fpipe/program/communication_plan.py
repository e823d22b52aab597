"""The plan of communication: which values travel between ranks, when each rank sends and waits.

It decides when the memory of what was sent may be freed (`Windows`).

tasks of all ranks ──► mail: the messages of every channel, in order
tasks of a rank, mail ──► steps: instructions whose values have no slots yet
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fpipe.program.program import (
    Compute,
    Instruction,
    Message,
    Recv,
    Send,
    WaitRecv,
    WaitSend,
)
from fpipe.program.values import Computed, Task, Value
from fpipe.schedule import Action, Op


class Mail(NamedTuple):
    """All messages of a step.

    Attributes:
        sent: messages that each task's outputs leave in, by ``(rank, task index)``.
        received: the messages that each rank receives, per sending rank, in channel order.
        contents: the values of each message.
        carrier: the message that brings a value to a rank, by ``(rank, value)``.
    """

    sent: dict[tuple[int, int], list[Message]]
    received: dict[int, dict[int, list[Message]]]
    contents: dict[Message, tuple[Computed, ...]]
    carrier: dict[tuple[int, Computed], Message]


def plan_mail(
    tasks: Sequence[Sequence[Task]],
    placement: Sequence[int],
    results: Sequence[Iterable[Value]],
) -> Mail:
    """Find what must travel: every value that a rank reads and another rank computes."""
    readers: dict[Computed, set[int]] = defaultdict(set)
    for rank, (row, held) in enumerate(zip(tasks, results, strict=True)):
        for values in (*(task.inputs for task in row), held):
            for value in values:
                if isinstance(value, Computed) and placement[value.stage] != rank:
                    readers[value].add(rank)
    mail = Mail({}, defaultdict(lambda: defaultdict(list)), {}, {})
    for rank, row in enumerate(tasks):
        for index, task in enumerate(row):
            by_target: dict[int, list[Computed]] = defaultdict(list)
            for value in task.outputs:
                # A value that a later task computes again, for its own rank, is sent once.
                for target in readers.pop(value, ()):
                    by_target[target].append(value)
            for target, values in sorted(by_target.items()):
                _post(mail, rank, index, target, task, tuple(values))
    return mail


def _post(
    mail: Mail, rank: int, index: int, target: int, task: Task, values: tuple[Computed, ...]
) -> None:
    stage, op, microbatch = task.action
    kind = Op.SEND_F if op == Op.F else Op.SEND_B
    specs = dict(zip(task.outputs, task.specs, strict=False))
    channel = mail.received[target][rank]
    message = Message(
        number=len(channel),
        source=rank,
        target=target,
        action=Action(stage, kind, microbatch),
        specs=tuple(specs[value] for value in values),
    )
    channel.append(message)
    mail.sent.setdefault((rank, index), []).append(message)
    mail.contents[message] = values
    mail.carrier.update({(target, value): message for value in values})


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


BURST = 32
"""Receives of a channel that are posted at once ahead of their windows. To post one takes some 10
microseconds, and wakes the sender's thread: a burst wakes it once."""

BEFORE_BURSTS = 2
"""Tasks before the first bursts, unless one of them waits: what they send is waited for, too."""

DIRECT = Windows(send=0, receive=0)
"""For a transport that hands values over at once."""


class Step(NamedTuple):
    """An instruction before its values have slots: what it is, what it reads, what it makes."""

    kind: type[Instruction]
    subject: Task | Message
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]


def weave(
    rank: int, row: Sequence[Task], results: Sequence[Value], mail: Mail, windows: Windows
) -> list[Step]:
    """Put posts, waits and sends between the tasks of one rank."""
    reads = [*(task.inputs for task in row), results]
    posts = _post_times(rank, reads, mail, windows)
    arrived: set[Message] = set()
    under_way: dict[int, deque[Message]] = defaultdict(deque)
    nbytes: dict[int, int] = defaultdict(int)
    steps: list[Step] = []
    for index, values in enumerate(reads):
        steps += [Step(Recv, message, (), ()) for message in posts.get(index, ())]
        for message in _carriers(rank, values, mail):
            if message not in arrived:
                arrived.add(message)
                steps.append(Step(WaitRecv, message, (), mail.contents[message]))
        if index == len(row):
            break
        steps.append(Step(Compute, row[index], row[index].inputs, row[index].outputs))
        for message in mail.sent.get((rank, index), ()):
            steps.append(Step(Send, message, mail.contents[message], ()))
            channel = under_way[message.target]
            channel.append(message)
            nbytes[message.target] += message.nbytes
            while len(channel) > windows.send and nbytes[message.target] > windows.nbytes:
                done = channel.popleft()
                nbytes[message.target] -= done.nbytes
                steps.append(Step(WaitSend, done, mail.contents[done], ()))
    for channel in under_way.values():
        steps += [Step(WaitSend, message, mail.contents[message], ()) for message in channel]
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
    start_of_bursts = min([BEFORE_BURSTS, *first_read.values()])
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
                # The first two bursts at once, and each one after them when the one before it
                # begins to be read.
                begun = (number // BURST - 1) * BURST
                due = first_read[channel[begun]] if begun > 0 else start_of_bursts
                times[number] = min(times[number], max(room, due))
        for number in reversed(range(len(times) - 1)):
            times[number] = min(times[number], times[number + 1])
        for message, time in zip(channel, times, strict=True):
            posts[time].append(message)
    return posts
