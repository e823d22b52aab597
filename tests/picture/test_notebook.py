"""What a notebook shows: pictures and tables that fit a page, each with a description in words."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

import fpipe
from fpipe import Cost, Schedule, schedules, search, simulate
from fpipe.modules.stage_shares import Balance, StageShare
from fpipe.schedule.picture.coordinates import LEFT, RIGHT
from fpipe.schedule.picture.page import BAND, LARGEST
from fpipe.schedule.picture.tables import table

PAGE = BAND + LEFT + RIGHT
VOID = {"img", "br"}


class Page(HTMLParser):
    """The elements of HTML, which must nest, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts += [data] if data.strip() else []

    def those(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def shown(value: object) -> Page:
    """What a notebook shows of a value; it fits any page, and has words."""
    page = Page(value._repr_html_())  # type: ignore[attr-defined]
    for picture in page.those("svg"):
        assert "max-width:100%" in str(picture["style"]) and "height:auto" in str(picture["style"])
        assert picture["role"] == "img" and picture["aria-label"]
    for region in page.those("div"):
        assert "max-width:100%" in str(region["style"]) and "overflow:auto" in str(region["style"])
        assert region["aria-label"]
    assert len(page.those("caption")) == len(page.those("table"))
    return page


def boxes(page: Page) -> int:
    return sum(len(re.findall(r"M[\d.]+ [\d.]+h", str(path["d"]))) for path in page.those("path"))


def test_a_short_schedule_is_one_picture() -> None:
    schedule = schedules.zb_h1(ranks=2, microbatches=8)
    (picture,) = shown(schedule).those("svg")
    assert picture["aria-label"] == (
        "zb_h1: 2 ranks, 2 stages, 8 microbatches, makespan 25, unit costs; "
        "rank 0 idle 4.0 %, peak 2; rank 1 idle 4.0 %, peak 2."
    )
    assert boxes(shown(schedule)) == sum(map(len, schedule.actions))


def test_a_long_schedule_is_broken_into_bands() -> None:
    schedule = schedules.zbv(ranks=4, microbatches=64)
    page = shown(schedule)
    (picture,) = page.those("svg")
    assert float(str(picture["width"])) == PAGE
    bands = page.texts.count("rank 0")
    assert bands > 3 and page.texts.count("rank 3") == bands
    assert page.texts.count("idle 0.8 %") == 4  # once for each rank
    # Every number can be read, and what crosses the end of a band is in both.
    assert boxes(page) >= sum(map(len, schedule.actions))
    times = [float(text) for text in page.texts if re.fullmatch(r"[\d.]+", text)]
    assert times.count(63) >= 24


def test_a_huge_schedule_is_shares_of_columns() -> None:
    schedule = schedules.gpipe(ranks=2, microbatches=6000)
    page = shown(schedule)
    (picture,) = page.those("svg")
    assert float(str(picture["width"])) == PAGE
    assert len(schedule._repr_html_()) < 1e6
    # All forwards come first: both ops fill whole columns.
    fills = {str(path.get("fill")) for path in page.those("path")}
    assert {"#56b4e9", "#d55e00"} <= fills
    assert 0 < boxes(page) < LARGEST
    many = schedules.one_f_one_b(ranks=128, microbatches=128)
    assert "peaks up to" in str(shown(many).those("svg")[0]["aria-label"])


def test_bands_of_a_timeline_with_one_long_action_are_few() -> None:
    cost = Cost(f=[1, 1000], i=1, w=1)
    page = shown(simulate(schedules.zb_h1(ranks=2, microbatches=4), cost))
    assert page.texts.count("rank 0") == 1


def test_a_schedule_that_cannot_run_is_shown() -> None:
    assert "cannot run as it stands" in "".join(shown(Schedule.from_text("0F0 0B0\n1B0 1F0")).texts)
    assert shown(Schedule([0], [()])).those("svg")


def test_names_are_escaped() -> None:
    named = Schedule([0], Schedule.from_text("0F0 0B0").actions, name='<a & "b">')
    (picture,) = shown(named).those("svg")
    assert str(picture["aria-label"]).startswith('<a & "b">: 1 rank')
    page = Page(table("<b>", ["x<y"], [["<i>", "&amp;"]], "<p>"))
    assert page.texts == ["<b>", "x<y", "<i>", "&amp;", "<p>"]


def test_pictures_of_one_page_have_patterns_of_their_own() -> None:
    one, other = (schedules.gpipe(ranks=2, microbatches=m) for m in (2, 3))
    names = [shown(schedule).those("pattern")[0]["id"] for schedule in (one, other)]
    assert len(set(names)) == 2
    assert f'fill="url(#{names[0]})"' in one._repr_html_()


def test_a_search_result_says_how_good_it_is() -> None:
    result = search(ranks=2, microbatches=4, cost=Cost(1, 1, 1), iterations=1)
    page = shown(result)
    assert page.those("svg") and "above that bound" in page.texts
    assert f"{result.gap:.1%}" in page.texts


def test_a_cost_is_a_table_with_a_row_for_each_stage() -> None:
    plain = shown(Cost(f=10, i=12, w=8, comm=1)).texts
    assert [plain[plain.index(name) + 1] for name in ("f", "i", "w", "comm")] == [
        *("10", "12", "8", "1")
    ]
    assert "unshard" not in plain
    cost = Cost(f=[1, 2.5], i=1, w=1, comm=[[0, 3], [4, 0]], sizes=[1, 0.5], speed=[1, 2])
    texts = shown(cost).texts
    assert texts[: texts.index("comm, between two ranks")] == [
        *("Cost of each stage", "stage", "f", "0", "1", "1", "2.5")
    ]
    assert {"to 1", "1, 0.5", "1, 2"} <= set(texts)


def test_bands_have_a_lane_for_each_link() -> None:
    cost = Cost(f=10, i=10, w=10, comm=1, transfer=4)
    page = shown(simulate(schedules.zb_h1(ranks=3, microbatches=40), cost))
    bands = page.texts.count("rank 0")
    assert bands > 1
    for name in ("0 → 1", "1 → 0", "1 → 2", "2 → 1"):
        assert page.texts.count(name) == bands
    assert sum("busy" in text for text in page.texts) == 4  # which is said of the whole step


def test_a_cost_shows_its_links_and_both_sizes() -> None:
    links: Any = {"transfer": 2, "shared": [[0, 5], [5, 0]], "blocking": True, "message": [64, 8]}
    texts = shown(Cost(f=[1, 2], i=1, w=1, sizes=[4, 1], memory_sizes=[2, 1], **links)).texts
    assert texts[texts.index("Cost of each stage") :][:4] == [
        *("Cost of each stage", "stage", "f", "message")
    ]
    assert "shared, between two ranks" in texts and "transfer, between two ranks" not in texts
    rows = {name: texts[texts.index(name) + 1] for name in ("sizes", "memory_sizes", "blocking")}
    assert rows == {"sizes": "4, 1", "memory_sizes": "2, 1", "blocking": "True"}
    plain = shown(Cost(f=1, i=1, w=1)).texts
    assert not {"message", "shared", "blocking", "memory_sizes"} & set(plain)
    used = simulate(schedules.gpipe(ranks=2, microbatches=2), Cost(f=1, i=1, w=1, transfer=1)).cost
    assert "has_transfers" not in shown(used).texts  # a cost that was used keeps what it computed


def test_a_balance_is_its_table() -> None:
    share = StageShare(0, "0", "5", 10**9, 8, 1.0, 4, 4, 2 * 10**6)
    balance = Balance(("5",), (share, share), (), "FLOP")
    texts = shown(balance).texts
    assert texts[1:8] == ["stage", "rank", "ends after", "share", "GFLOP", "params MB", "sends MB"]
    assert texts[-1] == str(balance).splitlines()[-1]


def test_a_recording_and_a_program_are_shown() -> None:
    schedule = schedules.zb_h1(ranks=2, microbatches=4)
    stages = [lambda w, x: x @ w, lambda w, x: x @ w]
    pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
    params, batch = [torch.eye(4), torch.eye(4)], torch.ones(8, 4)
    assert "Recorded: 0 steps" in shown(fpipe.record()).texts
    with fpipe.record() as recording:
        pipe.step(params, batch)
        pipe.step(params, batch)
    page = shown(recording)
    assert len(page.those("svg")) == 1 and "Recorded: 2 steps" in page.texts
    program = pipe.programs(params, batch)[0]
    page = shown(program)
    assert f"bytes held, at most {program.peak_bytes:,} bytes" in str(
        page.those("svg")[0]["aria-label"]
    )
    assert str(program) in page.texts
    counts = {name: page.texts[page.texts.index(name) + 1] for name in ("compute F", "send")}
    assert counts == {"compute F": "4", "send": "4"}


@pytest.mark.parametrize("value", [schedules.gpipe(ranks=1, microbatches=1), Cost(1, 1, 1)])
def test_text_forms_stay(value: object) -> None:
    shown(value)
    assert "<svg" not in repr(value) and "<table" not in str(value)
