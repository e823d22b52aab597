"""A chart as a trace that Perfetto (https://ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from fpipe.schedule.picture.chart_data import Chart
from fpipe.schedule.picture.legend import MEANING

_MICROSECONDS: Final[Mapping[str, float]] = MappingProxyType(
    {"s": 1e6, "ms": 1e3, "us": 1.0, "µs": 1.0}
)
_UNNAMED: Final = 1e3  # a unit without a name is shown as a millisecond


def trace(chart: Chart) -> str:
    """Write a chart in the Trace Event Format, as a JSON object.

    A process per rank (its pid), a slice per action (``2F0``), an arrow from the end of a value's
    source to the start of its reader, and a counter of the activations that the rank holds.
    Times are microseconds where the chart's unit is "s", "ms" or "us"; a time in any other unit is
    shown as so many milliseconds.

    Arrows bind to the slices that are open at their times, hence ``bp``; all events of a rank are
    on one thread, and do not overlap there. Collectives in a lane beside the rank are on another,
    and so are the messages on each link of the rank that takes time to carry them. The tests check
    every event against the rules of Perfetto's importer.

    The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    events = [
        *_names(chart),
        *_slices(chart),
        *_links(chart),
        *_arrows(chart),
        *_memory(chart),
    ]
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    about = json.dumps({"schedule": chart.name, "placement": chart.placement, "note": chart.note})
    return f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n{lines}\n]}}\n'


TraceEvent = dict[str, Any]


def _names(chart: Chart) -> Iterator[TraceEvent]:
    for rank in range(len(chart.rows)):
        stages = ", ".join(map(str, chart.stages_of(rank)))
        named = f"stages {stages}" if stages else "no stage"
        for name, args in (
            ("process_name", {"name": f"rank {rank} ({named})"}),
            ("process_sort_index", {"sort_index": rank}),
            ("thread_name", {"name": "actions"}),
        ):
            yield {"ph": "M", "name": name, "pid": rank, "tid": 0, "args": args}
        if any(box.beside for box in chart.rows[rank]):
            name, args = "thread_name", {"name": "collectives"}
            yield {"ph": "M", "name": name, "pid": rank, "tid": 1, "args": args}


def _slices(chart: Chart) -> Iterator[TraceEvent]:
    for rank, row in enumerate(chart.rows):
        for box in row:
            stage, op, microbatch = box.action
            meaning = MEANING.get(op, str(op))
            args: dict[str, Any] = {"stage": stage, "op": meaning, "microbatch": microbatch}
            if box.waited is not None:
                args["waited for"] = str(chart.rows[box.waited[0]][box.waited[1]].action)
            yield {
                "ph": "X",
                "name": str(box.action),
                "cat": str(op),
                "pid": rank,
                "tid": int(box.beside),
                "ts": _time(chart, box.start),
                "dur": _time(chart, box.end - box.start),
                "args": args,
            }


def _links(chart: Chart) -> Iterator[TraceEvent]:
    """A thread for each link, named after the rank that it leads to, and a slice per message."""
    for source, target in sorted({(each.source, each.target) for each in chart.carried}):
        args = {"name": f"link to rank {target}"}
        yield {"ph": "M", "name": "thread_name", "pid": source, "tid": 2 + target, "args": args}
    for each in chart.carried:
        yield {
            "ph": "X",
            "name": str(each.action),
            "cat": "link",
            "pid": each.source,
            "tid": 2 + each.target,
            "ts": _time(chart, each.start),
            "dur": _time(chart, each.end - each.start),
            "args": {"to rank": each.target},
        }


def _arrows(chart: Chart) -> Iterator[TraceEvent]:
    for number, (source, target) in enumerate(chart.messages):
        maker, reader = chart.rows[source[0]][source[1]], chart.rows[target[0]][target[1]]
        # An arrow belongs to the slice that is open at its time; at its end a slice is closed.
        sent = maker.end - (maker.end - maker.start) / 100
        common = {"name": "sends", "cat": "message", "id": number, "tid": 0}
        yield {"ph": "s", **common, "pid": source[0], "ts": _time(chart, sent)}
        yield {"ph": "f", "bp": "e", **common, "pid": target[0], "ts": _time(chart, reader.start)}


def _memory(chart: Chart) -> Iterator[TraceEvent]:
    for rank, steps in enumerate(chart.memory):
        for time, amount in steps:
            yield {
                "ph": "C",
                "name": "activations",
                "pid": rank,
                "tid": 0,
                "ts": _time(chart, time),
                "args": {"held": amount},
            }


def _time(chart: Chart, time: float) -> float:
    return round(time * _MICROSECONDS.get(chart.unit, _UNNAMED), 4)
