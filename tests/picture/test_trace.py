"""The trace opens in Perfetto: every event is one that the format knows, and arrows hit slices."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fpipe import Cost, Timeline, schedules, simulate


def traced(timeline: Timeline, **arguments: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(timeline.to_trace(**arguments))["traceEvents"]
    return found


ZBV = simulate(schedules.zbv(ranks=3, microbatches=6), Cost(10, 12, 8, comm=1))


def test_a_slice_for_every_action() -> None:
    slices = [event for event in traced(ZBV) if event["ph"] == "X"]
    found = [(event["pid"], event["name"], event["ts"], event["dur"]) for event in slices]
    assert found == [
        (event.rank, str(event.action), event.start * 1000, (event.end - event.start) * 1000)
        for row in ZBV.events
        for event in row
    ]
    assert slices[1]["args"] == {
        "stage": 0,
        "op": "forward",
        "microbatch": 1,
        "waited for": "0F0",
    }


def test_an_arrow_for_every_transfer_from_slice_to_slice() -> None:
    events = traced(ZBV)
    slices = [event for event in events if event["ph"] == "X"]

    def slice_at(arrow: dict[str, Any]) -> str:
        (hit,) = (
            event["name"]
            for event in slices
            if event["pid"] == arrow["pid"]
            and event["ts"] <= arrow["ts"] < event["ts"] + event["dur"]
        )
        return str(hit)

    starts = {event["id"]: slice_at(event) for event in events if event["ph"] == "s"}
    ends = {event["id"]: slice_at(event) for event in events if event["ph"] == "f"}
    assert Counter((starts[number], ends[number]) for number in starts) == Counter(
        (str(transfer.source), str(transfer.target)) for transfer in ZBV.transfers
    )


def test_a_process_for_every_rank_and_a_counter_of_memory() -> None:
    events = traced(ZBV)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0 (stages 0, 5)", "rank 1 (stages 1, 4)", "rank 2 (stages 2, 3)"]
    for rank in range(3):
        counter = [
            (event["ts"] / 1000, event["args"]["held"])
            for event in events
            if event["ph"] == "C" and event["pid"] == rank
        ]
        assert counter == [(time, amount) for time, amount in ZBV.memory(rank)]


@pytest.mark.parametrize(
    "unit, scale", [(None, 1e3), ("s", 1e6), ("ms", 1e3), ("us", 1), ("furlong", 1e3)]
)
def test_times_are_microseconds(unit: str | None, scale: float) -> None:
    first = next(event for event in traced(ZBV, unit=unit) if event["ph"] == "X")
    assert first["dur"] == 5 * scale


def test_a_recorded_timeline_is_in_seconds(tmp_path: Path) -> None:
    recorded = Timeline(ZBV.schedule, ZBV.events)
    path = tmp_path / "trace.json"
    text = recorded.to_trace(path)
    assert path.read_text("utf-8") == text
    assert next(event for event in traced(recorded) if event["ph"] == "X")["dur"] == 5e6
    assert json.loads(text)["otherData"]["note"] == "recorded"


def test_a_schedule_has_a_trace_of_unit_costs() -> None:
    found = json.loads(schedules.gpipe(ranks=1, microbatches=1).to_trace())
    assert [event["dur"] for event in found["traceEvents"] if event["ph"] == "X"] == [1000, 2000]


# ── what Perfetto's importer of this format asks for ────────────────────────────────────────────
#
# Its trace processor is a binary that is fetched at first use, so the rules are held here as they
# stand in the format's description and in the importer (json_trace_parser): an event that breaks
# one is dropped there, or counted as an error, without a word on the screen.

KNOWN = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
    "f": {"ph", "bp", "name", "cat", "id", "pid", "tid", "ts"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
}
TRACES = [
    ZBV,
    simulate(schedules.dualpipev(ranks=2, microbatches=6), Cost(1, 1, 1, comm=0.3)),
    simulate(schedules.gpipe(ranks=2, microbatches=3), Cost(1 / 3, 0, 1 / 7)),  # I takes no time
    simulate(schedules.one_f_one_b(ranks=1, microbatches=2), Cost(1, 1, 1)),
]


@pytest.mark.parametrize("timeline", TRACES, ids=lambda timeline: timeline.schedule.name)
def test_every_event_is_one_that_perfetto_reads(timeline: Timeline) -> None:
    document = json.loads(timeline.to_trace(), parse_constant=pytest.fail)  # no NaN, no Infinity
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        assert event.keys() == KNOWN[event["ph"]], event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["name"], str) and isinstance(event.get("args", {}), dict)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "C":  # a counter's values are numbers
            assert all(type(value) in (int, float) for value in event["args"].values())


@pytest.mark.parametrize("timeline", TRACES, ids=lambda timeline: timeline.schedule.name)
def test_every_track_has_a_name_and_slices_that_do_not_overlap(timeline: Timeline) -> None:
    events = traced(timeline)
    named = {(event["pid"], event["name"]) for event in events if event["ph"] == "M"}
    for rank in range(timeline.schedule.num_ranks):
        assert {
            (rank, "process_name"),
            (rank, "process_sort_index"),
            (rank, "thread_name"),
        } <= named
        # Perfetto nests what overlaps, and drops what cannot be nested.
        row = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
        for before, behind in pairwise(row):
            assert before["ts"] + before["dur"] <= behind["ts"] + 1e-3


@pytest.mark.parametrize("timeline", TRACES, ids=lambda timeline: timeline.schedule.name)
def test_every_arrow_has_one_start_and_one_end_that_bind_to_slices(timeline: Timeline) -> None:
    events = traced(timeline)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    arrows = [event for event in events if event["ph"] in ("s", "f")]
    assert len(arrows) == len(starts) + len(ends) and starts.keys() == ends.keys()
    for number, start in starts.items():
        end = ends[number]
        # Start and end are one flow where cat, name and id agree; without bp=e the end would bind
        # to the next slice that begins, not to the one that begins at its time.
        assert (start["cat"], start["name"]) == (end["cat"], end["name"]) and end["bp"] == "e"
        assert start["ts"] <= end["ts"]
        for arrow in (start, end):
            assert any(
                (slice_["pid"], slice_["tid"]) == (arrow["pid"], arrow["tid"])
                and slice_["ts"] <= arrow["ts"] <= slice_["ts"] + slice_["dur"]
                for slice_ in events
                if slice_["ph"] == "X"
            )
