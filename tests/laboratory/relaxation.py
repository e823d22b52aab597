"""A slow simulator of whole-stage work and links that shares no code with fpipe's: it raises starts
until none is too early."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fpipe import Action, Cost, Op, Schedule

_BESIDE = (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)
Place = tuple[int, ...]  # rank and position in its row; for a message, the reader's rank too


def relaxed(
    schedule: Schedule,
    cost: Cost,
    shaken: Callable[[int, Action, float], float] | None = None,
    pairs: Sequence[Place] = (),
) -> dict[Place, tuple[float, float]]:
    """Start and end of every action: the least that keep all rules.

    `shaken` is the time of an action on a rank, given the usual one. `pairs` are the places of F's
    that run together with the B behind them.
    """
    costs = cost.on(schedule.placement, schedule.num_ranks)
    times = {Op.F: costs.f, Op.I: costs.i, Op.W: costs.w, Op.B: costs.b}
    whole = {Op.UNSHARD: costs.unshard, Op.REDUCE_GRAD: costs.reduce_grad, Op.UPDATE: costs.update}
    places: dict[Place, Action] = {
        (rank, at): action
        for rank, row in enumerate(schedule.actions)
        for at, action in enumerate(row)
    }
    takes: dict[Place, float] = {}
    for place, (stage, op, number) in places.items():
        if number is None:
            takes[place] = whole[op][stage] if op in whole else 0.0
        else:
            takes[place] = times[op][stage] * (1 if cost.sizes is None else cost.sizes[number])
    if shaken is not None:
        takes = {place: shaken(place[0], places[place], time) for place, time in takes.items()}
    rules = list(_rules(places, schedule, cost))
    for rank, at in pairs:
        first, second = (rank, at), (rank, at + 1)
        assert cost.pair is not None
        takes[first] = takes[second] = cost.pair * (takes[first] + takes[second])
        rules = [rule for rule in rules if rule[0][:2] != first or rule[1] != second]
        rules += [(first, second, -takes[first]), (second, first, -takes[second])]
    messages = _messages(places, schedule)
    amounts = cost.memory_sizes or cost.sizes
    for message, (stage, op, number) in messages.items():
        takes[message] = cost.transfer_between(message[0], message[2]) * (
            1 if amounts is None or number is None else amounts[number]
        )
        takes[message] *= cost.message_of(stage if op == Op.F else stage - 1)
    made = dict.fromkeys(messages, 0.0)
    for _ in range(2 * len(messages) + 2):
        # Each time at least one more of the messages has its place in the queue of its link.
        queued = list(_queues(cost, sorted(messages, key=lambda each: (made[each], each)), takes))
        starts, settled = _least(takes, rules + queued)
        now = {message: starts[message[:2]] + takes[message[:2]] for message in messages}
        if settled and all(abs(now[each] - made[each]) < 1e-9 for each in messages):
            return {place: (starts[place], starts[place] + takes[place]) for place in places}
        made = now
    raise AssertionError("the rules go round in a circle")


def _least(
    takes: dict[Place, float], rules: Sequence[tuple[Place, Place, float]]
) -> tuple[dict[Place, float], bool]:
    """The least starts that keep all rules, and whether there are any."""
    starts = dict.fromkeys(takes, 0.0)
    for _ in range(len(takes) + 1):
        changed = False
        for before, after, delay in rules:
            least = starts[before] + takes[before] + delay
            if least > starts[after] + 1e-12:
                starts[after], changed = least, True
        if not changed:
            return starts, True
    return starts, False


def _queues(
    cost: Cost, messages: Sequence[Place], takes: dict[Place, float]
) -> Iterator[tuple[Place, Place, float]]:
    """Messages, in the order in which they are made, leave one after the other on each link."""
    last: dict[tuple[int, ...], Place] = {}
    for message in messages:
        if takes[message]:
            way = cost.way(message[0], message[2])
            if way in last:
                yield last[way], message, 0.0
            last[way] = message


def _rules(
    places: dict[Place, Action], schedule: Schedule, cost: Cost
) -> Iterator[tuple[Place, Place, float]]:
    """An action that has to end before another starts, and the delay between."""
    lane = cost.collective_lane
    where = {action: place for place, action in places.items() if action.microbatch is not None}
    for rank, row in enumerate(schedule.actions):
        for at, (stage, op, _) in enumerate(row):
            for earlier in range(at):
                other, kind, _ = row[earlier]
                both = kind in _BESIDE and op in _BESIDE and Op.RESHARD not in (kind, op)
                gathered = kind == Op.UNSHARD and op not in _BESIDE and op != Op.UPDATE
                reduced = kind == Op.REDUCE_GRAD and op in (Op.REDUCE_GRAD, Op.UPDATE)
                if (
                    not lane
                    or kind not in _BESIDE
                    or both
                    or (other == stage and (gathered or reduced))
                ):
                    yield (rank, earlier), (rank, at), 0.0
    for (stage, op, number), place in where.items():
        needs: list[Action] = []
        if op == Op.F and stage:
            needs = [Action(stage - 1, Op.F, number)]
        elif op in (Op.B, Op.I) and stage + 1 < schedule.num_stages:
            needs = [Action(stage + 1, each, number) for each in (Op.B, Op.I)]
        for need in needs:
            if need in where:
                source = where[need]
                if source[0] == place[0]:
                    yield source, place, 0.0
                else:
                    message = (*source, place[0])
                    yield source, message, 0.0
                    yield message, place, cost.hop(source[0], place[0])
    if cost.blocking:
        for message in _messages(places, schedule):
            for at in range(message[1] + 1, len(schedule.actions[message[0]])):
                yield message, (message[0], at), 0.0


def _messages(places: dict[Place, Action], schedule: Schedule) -> dict[Place, Action]:
    """The messages between ranks, by the place of their maker and the rank of their reader."""
    messages: dict[Place, Action] = {}
    for (rank, at), action in places.items():
        step = 1 if action.op == Op.F else -1 if action.op in (Op.B, Op.I) else 0
        reader = action.stage + step
        if step and 0 <= reader < schedule.num_stages and schedule.placement[reader] != rank:
            messages[rank, at, schedule.placement[reader]] = action
    return messages
