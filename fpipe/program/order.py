"""Prove, on the programs of all ranks together, that they run to their end.

Two things are shown before anything runs: on each channel messages are received in the order in
which they are sent; and no ranks wait for each other in a circle, even if a send is only done once
its receive has been posted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from fpipe.errors import ScheduleError
from fpipe.program.communication_plan import Windows
from fpipe.program.program import (
    Compute,
    Instruction,
    Message,
    Program,
    Recv,
    Send,
    WaitRecv,
    WaitSend,
    memory_curve,
)
from fpipe.schedule import Schedule

Place = tuple[int, int]
"""A rank and the index of one of its instructions."""

RUN_AHEAD = 1 << 18
"""Bytes of messages that may always be under way on a channel beyond the windows."""

SHARE = 1 / 64
"""As much of the peak as may be under way on a channel: a message that must wait for its receiver,
which computes, makes its sender wait too."""


def lower_for_group(
    lower: Callable[[Windows], tuple[Program, ...]], schedule: Schedule
) -> tuple[Program, ...]:
    """Lower a schedule for processes that each run one rank, and prove that they come to an end.

    Buffers are bounded by windows, and by a share of what the step holds anyway. A schedule whose
    messages cross so that small windows would make ranks wait for each other gets bigger ones.

    Args:
        lower: makes the programs whose communication runs ahead so far.
        schedule: that it lowers.

    Raises:
        ScheduleError: the programs would not come to an end.
    """

    def within(window: int, nbytes: int) -> tuple[Program, ...]:
        return lower(Windows(window, window, nbytes))

    programs = within(2, RUN_AHEAD)
    # The same on all ranks, whichever of them are compiled.
    peak = max(max(memory_curve(program, running=False), default=0) for program in programs)
    nbytes = max(RUN_AHEAD, int(SHARE * peak))
    if nbytes > RUN_AHEAD:
        programs = within(2, nbytes)
    for window in (8, sum(map(len, schedule.actions))):
        if not find_circle(programs):
            break
        programs = within(window, nbytes)
    prove(programs)
    return programs


def prove(programs: Sequence[Program]) -> None:
    """Prove that `programs`, one per rank, run to their end.

    Raises:
        ScheduleError: on a channel the orders differ, or ranks wait in a circle; names the actions.
    """
    _check_channels(programs)
    circle = find_circle(programs)
    if circle:
        what = "; ".join(_waits(programs, place) for place in circle)
        raise ScheduleError(
            f"these ranks would wait for each other for ever: {what}. Put the action that is "
            "waited for earlier in its rank's row"
        )


def find_circle(programs: Sequence[Program]) -> list[Place]:
    """Places that wait for each other, or an empty list if every program can end."""
    sent: dict[Message, Place] = {}
    posted: dict[Message, Place] = {}
    for program in programs:
        for index, instruction in enumerate(program.instructions):
            if isinstance(instruction, Send):
                sent[instruction.message] = (program.rank, index)
            elif isinstance(instruction, Recv):
                posted[instruction.message] = (program.rank, index)
    done = [0] * len(programs)
    waiting: dict[Place, int] = {}
    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        instructions = programs[rank].instructions
        while done[rank] < len(instructions):
            need = _needs(instructions[done[rank]], sent, posted)
            if need is not None and done[need[0]] <= need[1]:
                waiting[need] = rank
                break
            freed = waiting.pop((rank, done[rank]), None)
            if freed is not None:
                ready.append(freed)
            done[rank] += 1
    stuck = [
        rank for rank, program in enumerate(programs) if done[rank] < len(program.instructions)
    ]
    return _follow(programs, done, stuck, sent, posted) if stuck else []


def _needs(
    instruction: Instruction, sent: dict[Message, Place], posted: dict[Message, Place]
) -> Place | None:
    """The instruction of another rank that must have run before this one can end."""
    if isinstance(instruction, WaitRecv):
        return sent[instruction.message]
    if isinstance(instruction, WaitSend):
        return posted[instruction.message]
    return None


def _follow(
    programs: Sequence[Program],
    done: Sequence[int],
    stuck: Sequence[int],
    sent: dict[Message, Place],
    posted: dict[Message, Place],
) -> list[Place]:
    """Walk from one stuck rank to the rank that it waits for, until a rank comes again."""
    path: list[int] = []
    rank = stuck[0]
    while rank not in path:
        path.append(rank)
        need = _needs(programs[rank].instructions[done[rank]], sent, posted)
        assert need is not None
        rank = need[0]
    return [(r, done[r]) for r in path[path.index(rank) :]]


def _check_channels(programs: Sequence[Program]) -> None:
    sends: dict[tuple[int, int], list[Message]] = defaultdict(list)
    posts: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for program in programs:
        for instruction in program.instructions:
            if isinstance(instruction, Send | Recv):
                message = instruction.message
                channels = sends if isinstance(instruction, Send) else posts
                channels[message.source, message.target].append(message)
    for channel in sorted(sends.keys() | posts.keys()):
        for number in range(max(len(sends[channel]), len(posts[channel]))):
            pair = [row[channel][number : number + 1] for row in (sends, posts)]
            if pair[0] != pair[1]:
                named = [str(side[0].action) if side else "nothing" for side in pair]
                raise ScheduleError(
                    f"on the channel from rank {channel[0]} to rank {channel[1]} message {number} "
                    f"is sent as {named[0]} but received as {named[1]}"
                )


def _waits(programs: Sequence[Program], place: Place) -> str:
    rank, index = place
    instruction = programs[rank].instructions[index]
    before = next(
        (str(i.action) for i in programs[rank].instructions[index:] if isinstance(i, Compute)),
        "its end",
    )
    if isinstance(instruction, WaitRecv):
        message = instruction.message
        return f"rank {rank} waits before {before} for {message.action} of rank {message.source}"
    assert isinstance(instruction, WaitSend)
    message = instruction.message
    return f"rank {rank} waits before {before} for rank {message.target} to take {message.action}"
