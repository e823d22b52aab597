"""Links between ranks that carry one message at a time: simulation, search, bounds, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fpipe
from fpipe import Cost, Schedule, ScheduleError, lower_bound, schedules, search, simulate
from fpipe.schedule.orders.evaluator import make_evaluator
from fpipe.schedule.orders.list_scheduler import list_schedule, plain_policy
from fpipe.schedule.orders.problem import make_problem, to_order, to_schedule
from fpipe.schedule.simulator import with_whole_stage
from tests.laboratory.relaxation import relaxed
from tests.laboratory.test_whole_stage import cases, every_row


@st.composite
def linked(draw: st.DrawFn) -> tuple[Schedule, Cost]:
    """A schedule, and a cost of which links carry one message at a time."""
    schedule, cost = draw(cases())
    entries = st.integers(0, 5)
    ranks = schedule.num_ranks
    table = st.lists(
        st.lists(entries, min_size=ranks, max_size=ranks), min_size=ranks, max_size=ranks
    )
    transfer: Any = draw(st.one_of(entries, table))
    if draw(st.booleans()):
        cost = replace(cost, unshard=0, reduce_grad=0, update=0)
    if draw(st.booleans()):
        return schedule, replace(cost, transfer=transfer)
    numbers = st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks)
    shared: Any = draw(st.booleans() | st.lists(numbers, min_size=ranks, max_size=ranks))
    stages, count = schedule.num_stages, schedule.num_microbatches
    message: Any = draw(
        st.sampled_from([1, 2]) | st.lists(st.integers(0, 2), min_size=stages, max_size=stages)
    )
    sizes: Any = draw(st.none() | st.lists(st.integers(1, 3), min_size=count, max_size=count))
    return schedule, replace(
        cost, transfer=transfer, shared=shared, message=message, memory_sizes=sizes,
        blocking=draw(st.booleans()),
    )  # fmt: skip


@settings(max_examples=70)
@given(case=linked())
def test_simulation_agrees_with_one_that_relaxes_rules(case: tuple[Schedule, Cost]) -> None:
    schedule, cost = case
    timeline = simulate(schedule, cost)
    expected = relaxed(schedule, cost)
    assert {
        (rank, at): (event.start, event.end)
        for rank, row in enumerate(timeline.events)
        for at, event in enumerate(row)
    } == expected
    starts = {event.action: event.start for row in timeline.events for event in row}
    for message in timeline.transfers:
        assert message.arrives <= starts[message.target] + 1e-9
        assert message.arrives - message.sent >= cost.hop(message.source_rank, message.target_rank)
    for before, after in zip(timeline.critical_path, timeline.critical_path[1:], strict=False):
        assert before.end <= after.start + 1e-9


@settings(max_examples=70)
@given(case=linked())
def test_an_order_has_the_value_of_its_schedule(case: tuple[Schedule, Cost]) -> None:
    schedule, cost = case
    problem = make_problem(schedule.placement, schedule.num_microbatches, cost, None, "makespan")
    order = to_order(problem, schedule)
    played = list_schedule(problem, plain_policy(schedule.num_stages))
    assert played is not None
    evaluator = make_evaluator(problem)
    assert evaluator.times(order.rows, order.fused)[0] == pytest.approx(problem.played(order).value)
    value, ends = evaluator.times(played.rows, played.fused)
    assert value <= played.value + 1e-9
    evaluator.critical(replace(played, value=value), ends)
    if not cost.has_whole_stage:
        timeline = simulate(to_schedule(problem, order, "own"), cost)
        assert problem.played(order).value == pytest.approx(timeline.makespan)


@settings(max_examples=50)
@given(case=linked())
def test_no_schedule_is_below_the_bound(case: tuple[Schedule, Cost]) -> None:
    schedule, cost = case
    timeline = simulate(schedule, cost)
    assert timeline.bound <= timeline.makespan + 1e-9
    plain = replace(cost, unshard=0, reduce_grad=0, update=0)
    count = schedule.num_microbatches
    assert lower_bound(schedule.placement, count, plain) <= timeline.makespan + 1e-9
    # By the formulas: what effort adds in scarce memory may be less, for there is more to look at.
    formulas = lower_bound(schedule.placement, count, plain, effort=0)
    assert formulas <= timeline.bound + 1e-9
    assert lower_bound(schedule.placement, count, plain, objective="span") <= timeline.span + 1e-9


def test_messages_wait_for_those_before_them() -> None:
    gpipe = schedules.gpipe(ranks=2, microbatches=3)
    timeline = simulate(gpipe, Cost(f=1, i=1, w=1, comm=2, transfer=5))
    assert [event.start for event in timeline.events[1][:3]] == [8, 13, 18]
    back = [message for message in timeline.transfers if message.source_rank == 1]
    assert [(message.sent, message.arrives) for message in back] == [(21, 28), (23, 33), (25, 38)]
    uneven = simulate(gpipe, Cost(f=1, i=1, w=1, transfer=5, sizes=[1, 2, 1]))
    assert [event.start for event in uneven.events[1][:3]] == [6, 16, 21]


def test_a_link_goes_one_way_and_joins_two_ranks() -> None:
    table = [[0, 5], [0, 0]]
    timeline = simulate(schedules.zbv(ranks=2, microbatches=2), Cost(1, 1, 1, transfer=table))
    there = [m.arrives - m.sent for m in timeline.transfers if m.source_rank == 0]
    back = [m.arrives - m.sent for m in timeline.transfers if m.source_rank == 1]
    assert min(there) == 5 < max(there) and not any(back)


def pairs() -> Iterator[Schedule]:
    for rows in product(every_row(0), every_row(1)):
        yield Schedule([0, 1], rows)


def test_both_ways_may_share_a_link() -> None:
    gpipe = schedules.gpipe(ranks=2, microbatches=2)
    alone = simulate(gpipe, Cost(f=1, i=1, w=1, transfer=9))
    shared = simulate(gpipe, Cost(f=1, i=1, w=1, transfer=9, shared=True))
    # 0F1 is on the link from 10 to 19, and 1B0, which nothing else holds up, goes behind it.
    late = {str(each.source): (each.sent, each.arrives) for each in shared.transfers}
    assert late == {"0F0": (1, 10), "0F1": (2, 19), "1B0": (22, 31), "1B1": (24, 40)}
    assert alone.makespan == shared.makespan == 42
    busy = Cost(f=1, i=1, w=1, transfer=9, shared=True)
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    early = Schedule([0, 1], [[fpipe.Action.parse(word) for word in row] for row in rows])
    late = {str(each.source): (each.sent, each.arrives) for each in simulate(early, busy).transfers}
    assert late["1B0"] == (13, 28)  # made while 0F1 is on the link, until 19
    assert simulate(early, replace(busy, shared=False)).transfers[-1].arrives < 40


def test_links_are_shared_by_their_numbers() -> None:
    """All that leaves ranks 0 and 1 is on one link, and all that leaves 2 and 3 on another."""
    host: Any = [[rank // 2] * 4 for rank in range(4)]
    cost = Cost(f=1, i=1, w=1, transfer=4)
    zb = schedules.zb_h1(ranks=4, microbatches=6)
    every: list[Any] = [False, host, [[7] * 4] * 4]
    own, one, two = (simulate(zb, replace(cost, shared=shared)).makespan for shared in every)
    assert own < one < two
    assert simulate(zb, replace(cost, shared=host)).bound >= 2 * 6 * 4 * 1.5  # 3 of 6 hops
    # A link of each rank's own, for all its messages, is nobody else's.
    own_links: Any = [[rank] * 4 for rank in range(4)]
    costs = replace(cost, shared=own_links).on(zb.placement)
    assert not costs.shared and len({link.number for link in costs.links}) == 4


def test_a_send_may_occupy_its_rank() -> None:
    gpipe = schedules.gpipe(ranks=2, microbatches=2)
    cost = Cost(f=1, i=1, w=1, comm=3, transfer=2, blocking=True)
    timeline = simulate(gpipe, cost)
    assert [event.start for event in timeline.events[0]] == [0, 3, 17, 21]
    assert [event.start for event in timeline.events[1]] == [6, 9, 10, 14]
    assert [message.arrives for message in timeline.transfers] == [17, 21, 6, 9]
    assert timeline.bubble == (17, 17)  # nothing is computed meanwhile
    path = [str(event.action) for event in timeline.critical_path]
    assert path == ["0F0", "0F1", "1F1", "1B0", "1B1", "0B1"]
    with_latency = replace(cost, transfer=0, comm=5)  # which occupies nobody
    assert simulate(gpipe, with_latency).makespan < timeline.makespan == 23


def test_messages_of_stages_differ() -> None:
    cost = Cost(f=1, i=1, w=1, transfer=2, message=[3, 1, 9])
    timeline = simulate(schedules.gpipe(ranks=3, microbatches=1), cost)
    times = {str(each.source): each.arrives - each.sent for each in timeline.transfers}
    assert times == {"0F0": 6, "1F0": 2, "2B0": 2, "1B0": 6}
    four = Cost(f=1, i=1, w=1, message=[1, 2, 3, 4])
    assert four.merged(2).message == (2, 4)
    each: dict[str, Any] = dict.fromkeys(("f", "i", "w", "activation"), [1] * 4)
    layers = Cost(**each, transfer=1, message=[9, 1, 9, 9])
    result = search(
        ranks=2, microbatches=3, cost=layers, placement="linear", cut=True, iterations=20
    )
    assert result.cut == (2, 2) and result.timeline.cost is not None
    assert result.timeline.cost.message == (1, 9)
    with pytest.raises(ScheduleError, match=r"cost\.message has 2 values for a placement of 3"):
        Cost(1, 1, 1, message=[1, 2]).on([0, 1, 2])


WORLDS: list[tuple[dict[str, Any], float | None]] = [
    ({}, None),
    ({}, 1.5),
    ({"shared": True}, 1.5),
    ({"blocking": True}, None),
    ({"shared": True, "blocking": True}, 1.5),
    ({"shared": True, "reduce_grad": 4, "update": 2}, None),
    ({"blocking": True, "unshard": 3, "reduce_grad": 4}, 1.5),
    ({"shared": True, "sizes": [1, 2], "memory_sizes": [2, 1], "reduce_grad": 4}, None),
    ({"shared": True, "sizes": [1, 2], "memory_sizes": [2, 1], "reduce_grad": 4}, 1.5),
]


@pytest.mark.parametrize(("world", "memory"), WORLDS)
def test_a_search_finds_the_best_of_all(world: dict[str, Any], memory: float | None) -> None:
    cost = Cost(f=[3, 2], i=[1, 4], w=[2, 3], comm=1, transfer=[[0, 4], [6, 0]], **world)
    memory = None if memory is None else memory * max(cost.memory_sizes_of(2))
    values = []
    for schedule in pairs():
        try:
            timeline = simulate(with_whole_stage(schedule, cost), cost)
        except ScheduleError:
            continue  # which waits for itself
        if memory is None or max(timeline.peak) <= memory:
            values.append(timeline.makespan)
    result = search(
        ranks=2, microbatches=2, cost=cost, memory=memory, placement="linear", iterations=100
    )
    assert result.value == min(values) == simulate(result.schedule, cost).makespan
    assert result.bound <= min(values)
    assert lower_bound([0, 1], 2, cost, memory) <= min(values)


def test_a_slow_link_decides_the_placement() -> None:
    """A V sends twice as many messages over each cut as one stage a rank."""
    cost = Cost(f=10, i=10, w=10)
    fast = search(ranks=4, microbatches=12, cost=cost, memory=8, iterations=50)
    assert len(fast.schedule.placement) == 8
    cut = [[28 if {a, b} == {1, 2} else 0 for b in range(4)] for a in range(4)]
    slow = Cost(f=10, i=10, w=10, transfer=cut)
    chosen = search(ranks=4, microbatches=12, cost=slow, memory=8, iterations=50)
    assert len(chosen.schedule.placement) == 4
    assert chosen.value < simulate(fast.schedule, slow).makespan
    assert chosen.value >= chosen.bound > lower_bound([0, 1, 2, 3], 12, cost)


def test_the_bound_of_a_busy_link_can_be_met() -> None:
    cost = Cost(f=1, i=1, w=1, transfer=10)
    timeline = simulate(schedules.zb_h1(ranks=2, microbatches=8), cost)
    assert timeline.bound >= 8 * 10 + 10  # all messages one way, and the last one back
    assert timeline.gap < 0.5


def test_a_trace_has_a_lane_for_each_link() -> None:
    cost = Cost(f=1, i=1, w=1, comm=2, transfer=5)
    timeline = simulate(schedules.gpipe(ranks=2, microbatches=3), cost)
    events = json.loads(timeline.to_trace(unit="ms"))["traceEvents"]
    lanes = {(e["pid"], e["args"]["name"]): e["tid"] for e in events if e["name"] == "thread_name"}
    there = lanes[0, "link to rank 1"]
    messages = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (0, there)]
    assert [(e["name"], e["ts"], e["dur"]) for e in messages] == [
        ("0F0", 1000, 5000),
        ("0F1", 6000, 5000),
        ("0F2", 11000, 5000),
    ]
    assert (1, "link to rank 0") in lanes and (1, "link to rank 1") not in lanes
    plain = simulate(timeline.schedule, replace(cost, transfer=0)).to_trace()
    assert "link to rank" not in plain


def test_transfers_are_written_and_read(tmp_path: Path) -> None:
    cost = Cost(f=1, i=1, w=1, transfer=[[0, 2], [3, 0]])
    cost.to_json(tmp_path / "cost.json")
    assert Cost.from_json(tmp_path / "cost.json") == cost
    assert json.loads(cost.to_json())["transfer"] == [[0, 2], [3, 0]]
    assert "transfer" not in Cost(f=1, i=1, w=1).to_json()


def test_links_of_every_kind_are_written_and_read(tmp_path: Path) -> None:
    cost = Cost(f=1, i=1, w=1, transfer=2, message=[1, 2], shared=[[0, 1], [1, 0]], blocking=True)
    cost.to_json(tmp_path / "cost.json")
    assert Cost.from_json(tmp_path / "cost.json") == cost
    assert not {"message", "shared", "blocking"} & json.loads(Cost(1, 1, 1).to_json()).keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shared": "half"}, r"cost shared='half' must be True, False, or a square table"),
        ({"shared": [[0, 1]]}, r"cost shared=\[\[0, 1\]\] must be True, False, or a square table"),
        ({"shared": [[0, 1], [0.5, 0]]}, r"cost shared\[1\]\[0\]=0\.5 must be an integer"),
        ({"blocking": 1}, "cost blocking=1 must be True or False"),
        ({"message": -1}, "cost message=-1 must be a finite number"),
    ],
)
def test_a_link_that_makes_no_sense_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Cost(f=1, i=1, w=1, **arguments)
    with pytest.raises(ScheduleError, match=r"cost\.shared is a table of 1 ranks"):
        Cost(1, 1, 1, shared=[[0]]).on([0, 1])


@pytest.mark.parametrize("value", [-1, [[0, 1]], "fast"])
def test_a_transfer_takes_a_time_or_a_table_of_them(value: Any) -> None:
    with pytest.raises(ScheduleError, match="transfer"):
        Cost(f=1, i=1, w=1, transfer=value)


def test_a_table_has_every_rank() -> None:
    with pytest.raises(ScheduleError, match=r"cost.transfer is a table of 1 ranks"):
        simulate(schedules.gpipe(ranks=2, microbatches=2), Cost(1, 1, 1, transfer=[[0]]))
    assert fpipe.Cost(1, 1, 1, transfer=2).transfer_between(0, 1) == 2
