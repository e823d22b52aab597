"""SVG pictures: whole, within their frame, and with a box and a number for every action."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fpipe import Cost, Schedule, ScheduleError, Timeline, schedules, search, simulate

SPACE = "{http://www.w3.org/2000/svg}"
SIZES = [("one_f_one_b", 4, 16), ("zbv", 4, 16), ("one_f_one_b", 16, 64), ("zbv", 16, 64)]


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def texts(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in parsed(svg).iter(f"{SPACE}text")]


def boxes(svg: str) -> list[tuple[float, float, float]]:
    """Left, right and top of every box."""
    paths = (path.get("d", "") for path in parsed(svg).iter(f"{SPACE}path"))
    found = [re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v[\d.]+h-[\d.]+z", path) for path in paths]
    return [(float(x), float(x) + float(w), float(y)) for path in found for x, y, w in path]


@pytest.mark.parametrize("name, ranks, microbatches", SIZES)
def test_every_action_is_a_box_with_its_number(name: str, ranks: int, microbatches: int) -> None:
    schedule = schedules.get(name, ranks=ranks, microbatches=microbatches)
    svg = schedule.to_svg()
    actions = [action for row in schedule.actions for action in row]
    drawn = boxes(svg)
    assert len(drawn) == len(actions)
    numbers = sum(text == "7" for text in texts(svg))
    assert numbers == sum(action.microbatch == 7 for action in actions)

    _, _, width, height = map(float, str(parsed(svg).get("viewBox")).split())
    assert all(0 < left < right < width and 0 < top < height for left, right, top in drawn)
    for top in {top for _, _, top in drawn}:
        lane = sorted(box for box in drawn if box[2] == top)
        assert all(one[1] <= other[0] for one, other in pairwise(lane))


def test_every_link_is_a_lane_of_messages() -> None:
    schedule = schedules.zbv(ranks=3, microbatches=4)
    cost = Cost(f=10, i=10, w=10, transfer=4)
    timeline = simulate(schedule, cost)
    svg = timeline.to_svg()
    names = ["0 → 1", "1 → 0", "1 → 2", "2 → 1"]
    assert [text for text in texts(svg) if "→" in text] == names
    assert "below: messages on links" in texts(svg)
    plain = simulate(schedule, replace(cost, transfer=0)).to_svg()
    assert len(boxes(svg)) == len(boxes(plain)) + len(timeline.transfers)
    assert not [text for text in texts(plain) if "→" in text or "links" in text]
    # No link carries two messages at one time; the bottom lane ends above the axis.
    for top in sorted({top for _, _, top in boxes(svg)})[-4:]:
        lane = sorted(box for box in boxes(svg) if box[2] == top)
        assert all(one[1] <= other[0] for one, other in pairwise(lane)) and len(lane) == 8
    half = simulate(schedule, replace(cost, shared=True)).to_svg()
    assert [text for text in texts(half) if "↔" in text] == ["0 ↔ 1", "1 ↔ 2"]
    host: Any = [[7, 7, 7], [7, 7, 7], [3, 3, 3]]
    hosts = simulate(schedule, replace(cost, shared=host)).to_svg()
    assert [text for text in texts(hosts) if "link " in text or "→" in text] == ["2 → 1", "link 7"]


def test_labels_of_a_small_picture() -> None:
    svg = simulate(schedules.zbv(ranks=2, microbatches=4), Cost(10, 12, 8, comm=1)).to_svg()
    written = texts(svg)
    for label in (
        "F forward",
        "I input gradient",
        "W weight gradient",
        "(lighter: a later stage of the rank)",
        "idle",
        "activations held, 0 to 2",
        "rank 0",
        "stages 0, 3",
        "rank 1",
        "stages 1, 2",
        "peak 2",
        "time",
    ):
        assert label in written
    assert any(text.startswith("zbv2 ranks, 4 stages, 4 microbatches") for text in written)
    assert "B full backward" not in written


@pytest.mark.parametrize("ranks, microbatches", [(1, 1), (2, 2), (2, 40)])
def test_legend_stays_inside(ranks: int, microbatches: int) -> None:
    svg = parsed(schedules.dualpipev(ranks=ranks, microbatches=microbatches).to_svg())
    width = float(str(svg.get("width")))
    legend = svg.find(f"{SPACE}g[@transform]")
    assert legend is not None
    scale = float(re.findall(r"scale\((.*)\)", str(legend.get("transform")))[0])
    for text in legend.iter(f"{SPACE}text"):
        assert scale * (float(str(text.get("x"))) + 5.5 * len(str(text.text))) <= width


@pytest.mark.parametrize("width", [None, 250, 620, 900])
@pytest.mark.parametrize(
    "name", ["one", "interleaved_zero_bubble (forward only)", "流水线 Pi" * 20]
)
def test_title_stays_inside(name: str, width: float | None) -> None:
    # It ended behind the edge of the picture, and what can be wrong with a schedule stood there.
    rows = Schedule.from_text("0F0 0B0\n1B0 1F0").actions
    svg = Schedule([0, 1], rows, name).to_svg(width=width)
    whole, left = float(str(parsed(svg).get("width"))), 84
    lines = [
        text for text in parsed(svg).iter(f"{SPACE}text") if text.find(f"{SPACE}tspan") is not None
    ]
    for line in lines:
        spans = ["".join(span.itertext()) for span in line]
        wide = sum(11 if letter > "\u2fff" else 5.2 for span in spans for letter in span)
        assert line.get("x") == str(left)
        assert left + wide <= whole
    assert [float(str(line.get("y"))) for line in lines] == sorted(
        {float(str(line.get("y"))) for line in lines}
    )
    told = "".join("".join(line.itertext()) for line in lines).replace(" ", "")
    assert told.startswith(name.replace(" ", ""))
    assert told.endswith("cannotrunasitstands:fpipe.verifysayswhy")
    if name == "one" and width == 900:
        assert len(lines) == 1


def test_width_is_obeyed_down_to_a_limit() -> None:
    schedule = schedules.gpipe(ranks=2, microbatches=4)
    assert parsed(schedule.to_svg(width=900)).get("width") == "900"
    with pytest.raises(ScheduleError, match="width=100 must be at least 250 pixels"):
        schedule.to_svg(width=100)
    with pytest.raises(ScheduleError, match="width='900' must be at least 250 pixels"):
        schedule.to_svg(width="900")  # type: ignore[arg-type]


def test_recorded_timeline_stands_beside_the_simulated_one(tmp_path: Path) -> None:
    simulated = simulate(schedules.zb_h1(ranks=2, microbatches=4), Cost(0.001, 0.001, 0.001))
    recorded = Timeline(simulated.schedule, simulated.events)
    path = tmp_path / "both.svg"
    svg = recorded.to_svg(path, beside=[simulated])
    assert path.read_text("utf-8") == svg
    written = texts(svg)
    assert sum(text == "rank 0" for text in written) == 2
    assert any("makespan 13 ms · recorded" in text for text in written)
    assert "time (ms)" in written


def test_units_are_named_where_they_may_differ() -> None:
    # "0 20 40 (ms)" stood above "0 0.02", and "0 to 2 or 2.097M" of neither said what of.
    schedule = schedules.zb_h1(ranks=2, microbatches=4)
    simulated = simulate(schedule, Cost(0.001, 0.001, 0.001, activation=2**20))
    recorded = Timeline(schedule, simulated.events)
    for one, other in ((simulated, recorded), (recorded, simulated)):
        written = texts(one.to_svg(beside=[other]))
        assert sum(text == "time (ms)" for text in written) == 2
        assert "activations held, 0 to 2 microbatches" in written
        assert "or 0 to 2.097M in the unit of its cost" in written
    assert "activations held, 0 to 2.097M" in texts(simulated.to_svg(beside=[simulated]))
    assert "activations held, 0 to 2" in texts(recorded.to_svg(beside=[recorded]))


def test_stuck_schedule_and_idle_rank_are_drawn() -> None:
    assert "cannot run as it stands" in Schedule.from_text("0F0 0B0\n1B0 1F0").to_svg()
    assert len(boxes(Schedule([0], [Schedule.from_text("0F0 0B0").actions[0], ()]).to_svg())) == 2
    assert boxes(Schedule([0], [()]).to_svg()) == []


def test_whole_stage_actions_are_drawn_in_grey() -> None:
    svg = Schedule.from_text("0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD").to_svg()
    assert len(boxes(svg)) == 5
    assert "REDUCE_GRAD, RESHARD, UNSHARD" in texts(svg)


def test_notebooks_show_a_picture_unless_it_is_huge() -> None:
    schedule = schedules.gpipe(ranks=2, microbatches=4)
    assert schedule._repr_svg_() == schedule.to_svg()
    timeline = simulate(schedule, Cost(1, 1, 1))
    assert timeline._repr_svg_() == timeline.to_svg()
    result = search(ranks=2, microbatches=2, cost=Cost(1, 1, 1), iterations=1)
    assert result._repr_svg_() == result.timeline.to_svg()
    huge = schedules.gpipe(ranks=2, microbatches=6000)
    assert huge._repr_svg_() is None
    assert simulate(huge, Cost(1, 1, 1))._repr_svg_() is None


def test_names_are_escaped() -> None:
    named = Schedule([0], Schedule.from_text("0F0 0B0").actions, name="<a & b>")
    assert any(text.startswith("<a & b>") for text in texts(named.to_svg()))
    # The unit was not, on the axis.
    timeline = simulate(named, Cost(1, 1, 1))
    assert "time (a<b)" in texts(timeline.to_svg(unit="a<b"))


@pytest.mark.parametrize("name", ["a\x00b", "\x1b[31m", "\x0b", "\udce9", "\ufffe", "<&>\"']]>"])
def test_any_name_makes_whole_xml(name: str, tmp_path: Path) -> None:
    schedule = Schedule.from_text("0F0 0B0")
    Schedule(schedule.placement, schedule.actions, name).to_svg(tmp_path / "a.svg")
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag == f"{SPACE}svg"


@pytest.mark.parametrize("width", [float("inf"), float("nan"), 1e9])
def test_what_is_no_width_is_refused(width: float) -> None:
    with pytest.raises(ScheduleError, match=r"must be at least 250 pixels, .* less than a million"):
        schedules.gpipe(ranks=2, microbatches=4).to_svg(width=width)


def test_a_rank_without_a_stage_says_so() -> None:
    # Its label was the word "stages", with none behind it.
    schedule = Schedule([0], [*schedules.gpipe(ranks=1, microbatches=2).actions, ()])
    assert "no stage" in texts(schedule.to_svg())
    assert "rank 1 (no stage)" in schedule.to_trace()


@pytest.mark.parametrize("microbatches", [9, 18, 99, 998, 9_998])
def test_the_word_time_stands_behind_the_last_number(microbatches: int) -> None:
    # The number is centred on its time, and a long one at the right end stood in the word.
    svg = schedules.forward_only(ranks=2, microbatches=microbatches).to_svg()
    scale = float(re.findall(r'font-size="([\d.]+)" style', svg)[0]) / 11
    written = list(parsed(svg).iter(f"{SPACE}text"))
    (word,) = (text for text in written if text.text == "time")
    last = [text for text in written if text.get("y") == word.get("y")][-2]
    half = (3.1 * len(str(last.text)) + 3) * scale  # a digit is 6.1 wide, and a space 3
    assert float(str(last.get("x"))) + half < float(str(word.get("x")))


def test_the_word_time_stands_at_its_own_axis() -> None:
    # It stood at the right end of the picture, which is that of the longest chart.
    schedule = schedules.gpipe(ranks=1, microbatches=2)
    long, short = (simulate(schedule, Cost(f, f, f)) for f in (10, 1))
    x = [
        float(str(text.get("x")))
        for text in parsed(long.to_svg(beside=[short])).iter(f"{SPACE}text")
        if text.text in ("time", "idle 0.0 %")
    ]
    assert abs(x[0] - x[1]) < 12
    assert abs(x[2] - x[3]) < 12


def test_names_of_ops_in_capitals_have_room_in_the_legend() -> None:
    # A capital is wider than what a letter was given, and the last name left the picture.
    svg = Schedule.from_text("0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD").to_svg()
    x = {text.text: float(str(text.get("x"))) for text in parsed(svg).iter(f"{SPACE}text")}
    assert x["idle"] - x["REDUCE_GRAD, RESHARD, UNSHARD"] > 29 * 7.2  # as it is in Helvetica


def test_what_is_drawn_beside_is_timelines() -> None:
    gpipe = schedules.gpipe(ranks=2, microbatches=2)
    timeline = simulate(gpipe, Cost(1, 1, 1))
    assert texts(timeline.to_svg(beside=[timeline])).count("rank 1") == 2
    for other in (timeline, [gpipe]):
        with pytest.raises(ScheduleError, match=r"beside=.* must be a sequence of timelines"):
            timeline.to_svg(beside=other)  # type: ignore[arg-type]
