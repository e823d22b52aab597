"""Measure the costs of stages and of links, in the terms of the simulator and the search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe import pytree
from fpipe.entry import pipeline
from fpipe.errors import FpipeError, PipelineError
from fpipe.inputs.split_batch import split
from fpipe.live_line import advance, working
from fpipe.pipelines import Pipeline, check_is_pipeline, engine_of
from fpipe.program.program import Compute, Free, Program, Send, WaitRecv
from fpipe.program.step_timelines import record
from fpipe.schedule import Action, Op
from fpipe.schedule.arguments import plain_count
from fpipe.schedule.cost import Cost
from fpipe.schedule.families.evaluation import all_forwards_first
from fpipe.schedule.timeline import Timeline
from fpipe.spec.placing import device_of


def profile(
    pipe: Pipeline, params: Any, *arguments: Any, key: Tensor | None = None, steps: int = 5
) -> Cost:
    """Measure the cost of each stage and of a hop by running real steps.

    Two plain schedules run on the pipeline's own placement and number of microbatches: all forwards
    and then all backwards, once whole and once split, so that every kind of action is measured
    whatever the pipeline's own schedule uses. They hold the residuals of all microbatches.

    Args:
        pipe: a pipeline, in one process or over a process group (then every rank calls this).
        params: as for `Pipeline.step`.
        arguments: the batch, after a state if there is one, as for `Pipeline.step`.
        key: as for `Pipeline.step`.
        steps: how many steps of each schedule are measured, after one that is not.

    Returns:
        A `fpipe.Cost` with one value per stage: medians of the times of F, I, W and B in seconds,
        the bytes that a forward keeps until its backward, and how many of them I frees (negative
        if it hands more to W), taken from the microbatch that keeps most for its size; with
        ``remat="except_last"`` that is the last. With ``data=``, ``unshard`` and ``reduce_grad``
        are the times of the collectives of each stage, once a step.

        ``message`` has the bytes that each stage hands to the next. Over a process group
        ``transfer`` is the seconds that a link takes for a byte, measured by messages of 64 bytes
        and of 4 MiB between the ranks of the pipeline, each alone; ``comm`` is what else passes
        from the end of an action to the start of one on another rank that waited for it, the
        median, between hosts as exact as the times of day that these have. Both are 0 in one
        process. To plan for another network, replace them.

        Where the batch is `fpipe.Microbatches` of different shapes, ``sizes`` are the times that
        they took, and ``memory_sizes`` the bytes that they keep, each divided by the mean. Stages
        may differ in that, so a simulated peak is at least the real one, and may be more:
        ``pipe.programs`` has that.

    Raises:
        FpipeError: `pipe` is no pipeline, or `steps` no positive integer.
        PipelineError: over a process group, `steps` is none on some rank, or not the same on all.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=4)
        >>> stage, loss = (lambda w, x: x @ w), (lambda y, _: y.square().mean())
        >>> pipe = fpipe.pipeline([stage, stage], loss, schedule, compile=False)
        >>> cost = fpipe.profile(pipe, [torch.eye(8), torch.eye(8)], torch.ones(16, 8))
        >>> len(cost.f), cost.activation  # stage 0 keeps its batch, which is the caller's
        (2, (0.0, 256.0))
    """
    check_is_pipeline("pipe", pipe, "fpipe.profile")
    _check_steps(pipe, steps)
    kinds = _kinds(pipe, params, arguments)
    times: dict[Action, list[float]] = defaultdict(list)
    delays: list[float] = []
    programs: list[Program] = []
    for halved in (False, True):
        ranks, microbatches = pipe.schedule.num_ranks, pipe.schedule.num_microbatches
        probe = pipe.with_schedule(
            all_forwards_first(pipe.schedule.placement, microbatches, halved, ranks)
        )
        what = "measuring I and W" if halved else "measuring F and B"
        with record(alone=True) as recording, working(what, lambda: steps + 1):
            for _ in range(steps + 1):
                advance()
                probe.step(params, *arguments, key=key)
        for timeline in recording.timelines[1:]:
            for row in timeline.events:
                for event in row:
                    times[event.action].append(event.end - event.start)
            delays += hops(timeline)
        if halved:
            programs += probe.programs(params, *arguments)
    stages = range(pipe.schedule.num_stages)
    sizes = _sizes(times, kinds)
    durations: dict[tuple[int, Op], list[float]] = defaultdict(list)
    for (stage, op, microbatch), seconds in times.items():
        size = 1.0 if microbatch is None else sizes[microbatch]
        durations[stage, op] += [each / size for each in seconds]
    held: dict[tuple[int, int], tuple[float, float]] = {}
    sent: dict[tuple[int, int], float] = {}
    for program in programs:
        held |= residual_bytes(program)
        for crossing, amount in message_bytes(program).items():
            sent[crossing] = max(amount, sent.get(crossing, 0.0))
    totals = [sum(kept for (_, m), (kept, _) in held.items() if m == n) for n in range(len(kinds))]
    amounts = _shares(totals, kinds) if any(totals) else sizes
    kept: dict[int, tuple[float, float]] = {}
    for (stage, microbatch), (amount, freed) in held.items():
        unit = amount / amounts[microbatch], freed / amounts[microbatch]
        kept[stage] = max(unit, kept.get(stage, (0.0, 0.0)))
    # Where a stage hands on within its rank nothing tells how much: as much as others, at most.
    most = max((amount / amounts[m] for (_, m), amount in sent.items()), default=0.0)
    messages = [
        max((amount / amounts[m] for (s, m), amount in sent.items() if s == stage), default=most)
        for stage in stages
    ]

    def each(op: Op) -> list[float]:
        # An action that has nothing to compute, as the backward of a frozen start, costs nothing.
        return [median(durations[stage, op] or [0.0]) for stage in stages]

    definition = engine_of(pipe).definition
    links = LinkTimes(0.0, 0.0)
    if definition.group is not None and most:
        links = measured_links(
            definition.group, pipe.schedule.placement, steps=steps, timeout=definition.timeout
        )
    latency = links.latency
    if definition.group is not None and delays:
        # That of real actions, which do more than to hand on, where the transfers leave any.
        usual = median(delays) - links.per_byte * median(messages[:-1] or [0.0])
        latency = usual if usual > 0 else latency
    replicas, uneven = definition.data is not None, len(set(kinds)) > 1
    return Cost(
        f=each(Op.F),
        i=each(Op.I),
        w=each(Op.W),
        b=each(Op.B),
        comm=latency,
        transfer=links.per_byte,
        message=messages,
        activation=[kept.get(stage, (0.0, 0.0))[0] for stage in stages],
        freed_by_i=[kept.get(stage, (0.0, 0.0))[1] for stage in stages],
        sizes=sizes if uneven else None,
        memory_sizes=amounts if uneven else None,
        unshard=each(Op.UNSHARD) if replicas else 0,
        reduce_grad=each(Op.REDUCE_GRAD) if replicas else 0,
    )


def _kinds(pipe: Pipeline, params: Any, arguments: Sequence[Any]) -> tuple[int, ...]:
    """The kinds of the caller's own microbatches: one process may know them and another not."""
    definition, microbatches = engine_of(pipe).definition, pipe.schedule.num_microbatches

    def own() -> tuple[int, ...] | None:
        try:
            _, batch = definition.convention.enter(params, *arguments)
            apart = pytree.number_of_parts(batch) is not None
            return split(batch, definition.in_dims, microbatches).kinds if apart else None
        except Exception:
            return None  # the first step says what is wrong with it

    every = engine_of(pipe).together("fpipe.profile", lambda gather: gather(own()))
    known = [kinds for kinds in every if kinds is not None]
    return known[0] if known else (0,) * microbatches


def _sizes(times: Mapping[Action, Sequence[float]], kinds: Sequence[int]) -> tuple[float, ...]:
    """The time of a microbatch of each one's kind, divided by the mean over all."""
    if len(set(kinds)) == 1:
        return (1.0,) * len(kinds)
    taken = [0.0] * len(kinds)
    for action, seconds in times.items():
        if action.microbatch is not None:
            taken[action.microbatch] += median(seconds)
    return _shares(taken, kinds)


def _shares(amounts: Sequence[float], kinds: Sequence[int]) -> tuple[float, ...]:
    """The amount of a microbatch of each one's kind, divided by the mean over all."""
    alike = [
        mean(amount for amount, other in zip(amounts, kinds, strict=True) if other == kind)
        for kind in kinds
    ]
    usual = mean(alike)
    return tuple(amount / usual if amount else 1.0 for amount in alike)  # 0: nothing to measure


def _check_steps(pipe: Pipeline, steps: Any) -> None:
    """Refuse what is no number of steps, and ranks of which some would wait for others' steps."""
    number = plain_count(steps)
    right = number is not None
    shown = f"{number if right else steps!r:.60}"
    everyone = engine_of(pipe).together("fpipe.profile", lambda gather: gather((right, shown)))
    if everyone == [(True, everyone[0][1])] * len(everyone):
        return
    if pipe.rank is None:
        raise FpipeError(f"steps={steps!r:.60} must be an integer, 1 or more")
    ranks: dict[str, list[str]] = defaultdict(list)
    for rank, (_, value) in enumerate(everyone):
        ranks[value].append(str(rank))
    listed = "; ".join(
        f"steps={value} on rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
        for value, numbers in ranks.items()
    )
    raise PipelineError(
        f"fpipe.profile was given {listed}: it must be the same integer, 1 or more, on all ranks"
    )


def message_bytes(program: Program) -> dict[tuple[int, int], float]:
    """The bytes of each message that a rank sends, by the stage before the boundary that it crosses
    and by its microbatch; of a value and its gradient the larger."""
    result: dict[tuple[int, int], float] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Send):
            stage, op, microbatch = instruction.message.action
            key = (stage if op == Op.SEND_F else stage - 1, microbatch or 0)
            result[key] = max(float(instruction.message.nbytes), result.get(key, 0.0))
    return result


def residual_bytes(program: Program) -> dict[tuple[int, int], tuple[float, float]]:
    """The bytes that F keeps for its backward, and those of them that I frees, by stage and
    microbatch.

    A value counts for the stage and microbatch whose backward uses it last, wherever it was made:
    the input of a stage is kept for it too. A value that I makes for W counts as not freed, and so
    does a gradient that W still reads, whether the next stage is on this rank or on another.
    """
    kept: Mapping[tuple[int, int | None], list[float]] = defaultdict(lambda: [0.0, 0.0])
    born: dict[int, tuple[float, Op | None]] = {}
    for index, instruction in enumerate(program.instructions):
        match instruction:
            case Compute(last_use=ending, outputs=outputs, action=action):
                for slot in ending:
                    size, op = born.pop(slot, (0, None))
                    unit = kept[action.stage, action.microbatch]
                    if op == Op.F and action.op != Op.F:
                        unit[0] += size
                        unit[1] += size if action.op == Op.I else 0
                    elif op in (Op.I, Op.SEND_B) and action.op == Op.W:
                        unit[1] -= size
                filled, maker = outputs, action.op
            case WaitRecv(message, slots):
                filled, maker = slots, Op.F if message.action.op == Op.SEND_F else Op.SEND_B
            case Free(slots):
                for slot in slots:
                    born.pop(slot, None)
                continue
            case _:
                continue
        for slot in filled:
            if slot >= 0:
                born[slot] = (program.sizes[index, slot], maker)
    return {
        (stage, microbatch or 0): (size, min(freed, size))
        for (stage, microbatch), (size, freed) in kept.items()
    }


_FEW: Final = 16  # numbers of four bytes in a message
_MANY: Final = 1 << 20


class LinkTimes(NamedTuple):
    """Seconds from the end of an action to the arrival of a message: `latency`, and for each byte
    `per_byte`."""

    latency: float
    per_byte: float


def measured_links(
    group: dist.ProcessGroup, placement: Sequence[int], *, steps: int, timeout: float
) -> LinkTimes:
    """Send messages of 64 bytes and of 4 MiB along a placement and back, and compare.

    Each message is alone, and the fastest of each size counts. Every rank of the group calls this,
    with as many steps, before which there is one that is not measured.
    """
    schedule = all_forwards_first(placement, 1, split=False, ranks=group.size())
    stages = [_carry] * len(placement)
    pipe = pipeline(stages, _mean, schedule, compile=False, group=group, timeout=timeout)
    device = device_of(group)
    params = pipe.local([torch.ones((), device=device) for _ in placement])
    times = []
    for numbers in (_FEW, _MANY):
        batch = torch.ones(1, numbers, device=device)
        with record(alone=True) as recording:
            for _ in range(steps + 1):
                pipe.step(params, batch)
        delays = [delay for timeline in recording.timelines[1:] for delay in hops(timeline)]
        times.append(max(0.0, min(delays, default=0.0)))  # all else that runs only adds
    few, many = times
    return LinkTimes(few, max(0.0, many - few) / (4 * (_MANY - _FEW)))


def _carry(weight: Tensor, x: Tensor) -> Tensor:
    return x * weight


def _mean(y: Tensor, _: Tensor) -> Tensor:
    return y.mean()


def hops(timeline: Timeline) -> list[float]:
    """How long each value took to a rank that was waiting for it.

    An action that had nothing to compute took no time and read nothing; W then reads what I would
    have.
    """
    delays = []
    rows = [[event for event in row if event.end > event.start] for row in timeline.events]
    ended = {event.action: event.end for row in rows for event in row}
    placement = timeline.schedule.placement
    for row in rows:
        for before, event in pairwise(row):
            stage, op, microbatch = event.action
            if op == Op.W and Action(stage, Op.I, microbatch) in ended:
                continue
            source = stage - 1 if op == Op.F else stage + 1
            if not 0 <= source < len(placement) or placement[source] == event.rank:
                continue
            sent = [
                ended[action]
                for kind in ((Op.F,) if op == Op.F else (Op.B, Op.I))
                if (action := Action(source, kind, microbatch)) in ended
            ]
            if sent and sent[0] >= before.end:
                delays.append(event.start - sent[0])
    return delays
