"""Marks of real steps put together: where actions stand that had nothing to compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest

from fpipe import Action, Schedule, Timeline
from fpipe.profiling import hops
from fpipe.program.step_timelines import Clock, aligned, record, timeline_of

SPLIT = "0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1F1 1I0 1W0 1I1 1W1"
LINEAR_START: Sequence[Mapping[str, tuple[float, float]]] = (
    {"0F0": (10, 11), "0F1": (11, 12), "0W0": (16, 17), "0W1": (20, 21)},
    {
        "1F0": (11.5, 12.5),
        "1F1": (12.5, 13.5),
        "1I0": (13.5, 15),
        "1W0": (15, 16),
        "1I1": (16, 18),
        "1W1": (18, 19),
    },
)
"""A first stage that is `x @ w`: its I has nothing to compute, and its W waits for the message."""


def put_together(text: str, marks: Sequence[Mapping[str, tuple[float, float]]]) -> Timeline:
    """A timeline of actions that ran when `marks` say, by their names."""
    rows = [{Action.parse(name): mark for name, mark in row.items()} for row in marks]
    return timeline_of(Schedule.from_text(text), rows)


def times(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {str(e.action): (e.start, e.end) for row in timeline.events for e in row}


def test_what_computed_nothing_stands_behind_what_it_would_have_read() -> None:
    # It stood behind the action before it, so that values arrived before they were sent.
    timeline = put_together(SPLIT, LINEAR_START)
    assert times(timeline)["0I0"] == (5, 5)
    assert times(timeline)["0I1"] == (8, 8)
    assert len(timeline.transfers) == 4
    assert all(transfer.sent <= transfer.arrives for transfer in timeline.transfers)
    for row in timeline.events:
        assert all(one.end <= other.start for one, other in pairwise(row))
    assert [str(event.action) for event in timeline.events[0]] == SPLIT.split("\n")[0].split()


def test_what_computed_nothing_keeps_its_turn_and_has_then_read_nothing() -> None:
    rows = "0F0 0F1 0I0 0I1 0W0 0W1\n1F0 1F1 1I0 1W0 1I1 1W1"
    timeline = put_together(rows, LINEAR_START)
    assert times(timeline)["0I0"] == (5, 5)
    assert times(timeline)["0I1"] == (6, 6)  # 1I1 ends at 8, but the rank is at 0W0 by then
    read = [(str(t.source), str(t.target)) for t in timeline.transfers]
    assert read == [("1I0", "0I0"), ("0F0", "1F0"), ("0F1", "1F1")]


def testhops_end_where_something_was_computed() -> None:
    # The I of the first stage counted as the reader: hops were -3 and -1.
    assert hops(put_together(SPLIT, LINEAR_START)) == [1, 2]


def test_a_recording_says_how_much_it_holds() -> None:
    recording = record()
    assert repr(recording) == "<fpipe.record: 0 timelines>"
    recording.timelines.append(put_together(SPLIT, LINEAR_START))
    assert repr(recording) == "<fpipe.record: 1 timeline>"


@pytest.mark.parametrize("first", ["0UNSHARD 0F0", "0F0 0UNSHARD"])
def test_whole_stage_actions_stand_behind_the_action_before_them(first: str) -> None:
    timeline = put_together(f"{first} 0B0 0REDUCE_GRAD", ({"0F0": (3, 4), "0B0": (6, 9)},))
    found = times(timeline)
    assert found["0UNSHARD"] == ((0, 0) if first.startswith("0U") else (1, 1))
    assert found["0REDUCE_GRAD"] == (6, 6)


def test_hosts_whose_clocks_count_from_elsewhere() -> None:
    """All that one of them ran stood hours behind the rest, and nothing took time between them."""
    rows = [{Action.parse(name): mark for name, mark in row.items()} for row in LINEAR_START]
    here, other = Clock("first", 50.0), Clock("second", 3650.0)
    apart = {action: (start - 3600, end - 3600) for action, (start, end) in rows[1].items()}
    assert aligned([(here, rows[0]), (other, apart)]) == rows
    assert aligned([(here, rows[0]), (here._replace(ahead=50.1), rows[1])]) == rows
    assert Clock.here().host == Clock.here().host
