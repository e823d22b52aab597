"""The HTML page holds all it needs, and answers hover, zoom and keys in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fpipe import Cost, Schedule, schedules, simulate

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def data(html: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    found: dict[str, Any] = json.loads(text)
    return found


def test_page_needs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    html = schedules.zbv(ranks=2, microbatches=4).to_html(path)
    assert path.read_text("utf-8") == html
    assert not re.findall(r"(?:src|href)=|@import|url\(|https?:", html.replace('"url(#idle)"', ""))
    assert not re.findall(r"@[A-Z]+@", html)


def test_data_of_the_page() -> None:
    timeline = simulate(schedules.one_f_one_b(ranks=2, microbatches=2), Cost(1, 1, 1, comm=0.5))
    found = data(timeline.to_html(beside=[timeline]))
    assert len(found["charts"]) == 2
    chart = found["charts"][0]
    assert [op["name"] for op in found["ops"]] == ["F", "B"]
    # stage, op, microbatch, start, end, style, rank and index of what it waited for, its arrival
    assert chart["rows"][1][0] == [1, 0, 0, 1.5, 2.5, 0, 0, 0, 1.5]
    assert chart["memory"][0][0] == [0, 1]


def test_parts_of_a_lane_and_links_in_the_data() -> None:
    rows = "0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD 0REDUCE_GRAD\n1F0 1B0 1F1 1B1"
    cost = Cost(f=2, i=1, w=1, pair=0.5, unshard=4, transfer=3)
    chart = data(simulate(Schedule.from_text(rows), cost).to_html())["charts"][0]
    parts = [box[9:] for box in chart["rows"][0]]
    assert parts == [[3], [], [1], [2], [], [], []]  # beside, whole, upper and lower half
    assert [link["name"] for link in chart["links"]] == ["0 → 1", "1 → 0"]
    assert chart["links"][0]["messages"][0] == [0, 1, 1, 6, 9]  # 0F0 to rank 1, from 6 to 9


def test_a_name_cannot_end_the_script() -> None:
    name = "</script><b>"
    html = Schedule([0], Schedule.from_text("0F0 0B0").actions, name=name).to_html()
    assert data(html)["charts"][0]["name"] == name
    assert "</script><b>" not in html


HALVES = """
<script>{
const said = [];
const { left, top } = canvas.getBoundingClientRect();
const chart = data.charts[0];
function over(time, y) {
  const place = { clientX: left + toX(time), clientY: top + y };
  canvas.dispatchEvent(new PointerEvent("pointermove", place));
  said.push(tip.textContent.split("\\n").slice(0, 2).join("; "));
}
const upper = chart.rows[0].find((box) => box[PART] === 1);
const middle = (upper[START] + upper[END]) / 2;
over(middle, laneY(chart, 0) + 3);
over(middle, laneY(chart, 0) + LANE - 3);
over(1, laneY(chart, 0) + LANE + 3);
const { messages } = chart.links[0];
over((messages[0][SENT] + messages[0][OFF]) / 2, linkY(chart, 0) + 3);
over(0.1, linkY(chart, 1) + 3);
const at = (time, y) => [...pen.getImageData(
  toX(time) * devicePixelRatio, y * devicePixelRatio, 1, 1).data].slice(0, 3);
hovered = null;
draw();
const near = upper[START] + 0.05 * (upper[END] - upper[START]);
said.push(at(near, laneY(chart, 0) + 2), at(near, laneY(chart, 0) + LANE - 2));
const out = document.createElement("pre");
out.id = "said";
out.textContent = JSON.stringify(said);
document.body.append(out);
}</script>
"""


DRIVE = """
<script>{
const said = [];
const { left, top } = canvas.getBoundingClientRect();
const range = () => document.getElementById("range").textContent;
function act(Kind, type, x, y, more = {}) {
  canvas.dispatchEvent(new Kind(type, { clientX: left + x, clientY: top + y, ...more }));
}
const { rows } = data.charts[0];
const box = rows[1][0];
act(PointerEvent, "pointermove", toX((box[3] + box[4]) / 2), laneY(data.charts[0], 1) + 5);
said.push(tip.hidden ? "hidden" : tip.textContent);
act(PointerEvent, "pointermove", toX(0.1), laneY(data.charts[0], 1) + 5);
said.push(tip.textContent);
said.push(range());
act(WheelEvent, "wheel", toX(0), 50, { deltaY: -100 });
said.push(range());
act(PointerEvent, "pointerdown", 300, 50);
act(PointerEvent, "pointermove", 200, 50);
act(PointerEvent, "pointerup", 200, 50);
said.push(view.from > 0 ? "moved" : "stayed");
canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "0" }));
said.push(range());
said.push(number(7e30), number(2.5e9), number(1 / 3));
for (const name of ["messages", "critical"]) document.getElementById(name).click();
const out = document.createElement("pre");
out.id = "said";
out.textContent = JSON.stringify(said);
document.body.append(out);
}</script>
"""


TITLES = """
<script>{
document.body.style.width = "400px";
draw();
const spans = data.charts.flatMap((chart) => chart.title.map(
  ([line, x, y, style]) => [line, y, LEFT + x + wide(line, style) <= width],
));
const out = document.createElement("pre");
out.id = "said";
out.textContent = JSON.stringify(spans);
document.body.append(out);
}</script>
"""


def said(html: str, folder: Path) -> Any:
    """What a page with a script of ours writes in a browser."""
    path = folder / "page.html"
    path.write_text(html, "utf-8")
    switches = ["headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-sync"]
    switches += ["disable-background-networking", "disable-component-update", "disable-quic"]
    switches += [f"user-data-dir={folder}/profile", "window-size=1200,400", "dump-dom"]
    done = subprocess.run(
        [str(BROWSER), *(f"--{switch}" for switch in switches), path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    (text,) = re.findall(r'<pre id="said">(.*?)</pre>', done.stdout) or [done.stderr]
    return json.loads(text)


@pytest.mark.processes
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_pairs_collectives_and_messages_have_places_of_their_own(tmp_path: Path) -> None:
    """A B that runs together with an F was drawn over it, and a gather over what ran beside it."""
    rows = "0UNSHARD 0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    cost = Cost(f=2, i=1, w=1, pair=0.5, unshard=4, transfer=3)
    html = simulate(Schedule.from_text(rows), cost).to_html().replace("</html>", HALVES)
    forward, backward, gather, message, free, above, below = said(html, tmp_path)
    assert forward.startswith("0F1: forward") and backward.startswith("0B0: full backward")
    assert gather.startswith("0UNSHARD: UNSHARD, stage 0")
    assert message == "0F0 from rank 0 to rank 1; on the link from 6 to 9"
    assert free == "link 1 → 0; free at 0.1"
    assert above == [0x56, 0xB4, 0xE9] and below == [0xD5, 0x5E, 0x00]


@pytest.mark.processes
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_title_stays_inside_a_narrow_page(tmp_path: Path) -> None:
    # What can be wrong with a schedule was cut off behind the makespan.
    stuck = Schedule.from_text("schedule interleaved_zero_bubble\n0F0 0B0\n1B0 1F0")
    assert said(stuck.to_html() + TITLES, tmp_path) == [
        ["interleaved_zero_bubble", 22, True],
        ["2 ranks, 2 stages, 1 microbatch · makespan 3", 39, True],
        ["cannot run as it stands: fpipe.verify says why", 56, True],
    ]


@pytest.mark.processes
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_page_in_a_browser(tmp_path: Path) -> None:
    timeline = simulate(schedules.one_f_one_b(ranks=2, microbatches=2), Cost(1, 1, 1, comm=0.5))
    assert said(timeline.to_html() + DRIVE, tmp_path) == [
        "1F0: forward, stage 1, microbatch 0, rank 1\nstart 1.5, end 2.5, takes 1\n"
        "waited for 0F0 from rank 0, which was there at 1.5\n"
        "the rank was idle for 1.5 before\nrank 1 holds 1 of activations",
        "rank 1\nat 0.1\nholds 0 of activations",
        "time 0 to 10",
        "time 0 to 8.187",
        "moved",
        "time 0 to 10",
        "7e+30",  # as Python's pictures have it; it was 7000000000000000000T
        "2.5G",
        "0.3333",
    ]


def test_a_name_that_reads_like_a_mark_of_the_template_stays_a_name() -> None:
    schedule = Schedule.from_text("schedule @DATA@@STYLE@\n0F0 0B0")
    html = schedule.to_html()
    assert "<title>@DATA@@STYLE@</title>" in html
    assert data(html)["charts"][0]["name"] == "@DATA@@STYLE@"
