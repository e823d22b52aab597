"""Messages: which values go from which rank to which, in which order on each channel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fpipe.program.program import Message
from fpipe.program.task import Task
from fpipe.program.values import Computed, Value
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
    """Find what must travel: every value that a rank reads and another rank computes.

    Args:
        tasks: the tasks of each rank.
        placement: the rank of each stage.
        results: the values that each rank holds at the end.
    """
    readers: dict[Computed, set[int]] = defaultdict(set)
    for rank, row in enumerate(tasks):
        for task in row:
            for value in task.inputs:
                if isinstance(value, Computed) and placement[value.stage] != rank:
                    readers[value].add(rank)
    for rank, values in enumerate(results):
        for value in values:
            if isinstance(value, Computed) and placement[value.stage] != rank:
                readers[value].add(rank)
    mail = Mail({}, defaultdict(lambda: defaultdict(list)), {}, {})
    for rank, row in enumerate(tasks):
        for index, task in enumerate(row):
            by_target: dict[int, list[Computed]] = defaultdict(list)
            for value in task.outputs:
                # What a later task computes again, for its own rank, has been sent.
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
