"""docs/schedules.md and choosing.md are true: commands, pictures and tables are made anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.search import choosing
from fpipe import Cost, schedules, simulate
from fpipe.cli import main
from fpipe.schedule.simulator import with_whole_stage

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "schedules.md").read_text("utf-8")
CHOOSING = (DOCS / "choosing.md").read_text("utf-8")
ELSEWHERE = frozenset(re.findall(r"pictures/[a-z_0-9]+\.svg", CHOOSING))


@pytest.fixture(autouse=True, scope="module")
def best_of_each_world() -> Iterator[None]:
    """The families of a world are compared once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "best_of", cache(choosing.best_of))
        yield


@pytest.mark.parametrize("page", [PAGE, CHOOSING], ids=["schedules", "choosing"])
def test_commands_print_and_draw_what_the_page_shows(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "pictures").mkdir()
    blocks = re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for block in blocks:
        for command, output in re.findall(
            r"^\$ fpipe (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE
        ):
            assert main(command.split()) == 0
            assert capsys.readouterr().out == output, command

    shown = set(re.findall(r"!\[.*?\]\((pictures/.*?)\)", page))
    drawn = {f"pictures/{path.name}" for path in (tmp_path / "pictures").iterdir()}
    kept = {f"pictures/{path.name}" for path in (DOCS / "pictures").iterdir()}
    assert shown == drawn == (kept - ELSEWHERE if page is PAGE else set(ELSEWHERE))
    for name in drawn:
        assert (tmp_path / name).read_bytes() == (DOCS / name).read_bytes(), (
            f"docs/{name} is out of date: run the commands at the end of the page in docs/"
        )


def test_table_lists_every_family_with_what_simulation_gives() -> None:
    rows = re.findall(r"^\| `(\w+)` .*\| ([\d.]+|–) \| ([\d.]+|–) \|$", PAGE, re.MULTILINE)
    assert {name for name, _, _ in rows} == {*schedules.FAMILIES, "forward_only"}
    for name, bubble, peak in rows:
        make = getattr(schedules, name)
        timeline = simulate(make(ranks=4, microbatches=8), Cost(1, 1, 1))
        assert min(timeline.bubble) == float(bubble), name
        assert peak == "–" or max(timeline.peak) == float(peak), name


def test_what_wins_where_is_what_simulation_and_search_give() -> None:
    """The families of every world, and the searches of those that take a moment."""
    shown = {line.split(" | ")[0].removeprefix("| "): line for line in CHOOSING.splitlines()}
    quick = ("memory 2", "memory 3", "… which occupy")
    for world in choosing.WORLDS:
        searched = world.name.startswith(quick)
        line = choosing.row(world, iterations=200 if searched else 0)
        assert shown[world.name] == line if searched else shown[world.name].startswith(line[:-1])
    assert set(shown) >= {world.name for world in choosing.WORLDS}


def test_the_flips_that_the_page_tells() -> None:
    """A tail, a slow cut and stalls each change which placement is best."""

    def winner(name: str) -> str:
        (world,) = (each for each in choosing.WORLDS if each.name.startswith(name))
        best = choosing.best_of(world)
        return min(best, key=lambda kind: best[kind].mean)

    assert winner("nothing else") == winner("reductions of 120") == "looped"
    assert winner("… which occupy the rank") == winner("updates of 60") == "V"
    assert winner("one slow cut") == winner("one in fifty stalls") == "linear"
    assert winner("each action varies") == "V"
    # As a latency one slow cut seems to do less harm to a V than it does as a link.
    cut: Any = [[14 if {a, b} == {1, 2} else 0 for b in range(4)] for a in range(4)]
    makespans = [
        simulate(schedules.get(name, ranks=4, microbatches=12), cost).makespan
        for cost in (Cost(10, 10, 10, comm=cut), Cost(10, 10, 10, transfer=cut))
        for name in ("zb_h1", "zbv")
    ]
    assert makespans == [518, 486, 518, 540]
    assert "    comm 518.0 486.0\n    transfer 518.0 540.0\n" in CHOOSING
    # Of two stages a rank alone: the V is as good without reductions, and loses with them.
    for reduction, (v, loop) in ((0, (388, 391)), (120, (495, 483))):
        cost = Cost(10, 10, 10, comm=1, reduce_grad=reduction)
        for name, expected in (("zbv", v), ("interleaved_zero_bubble", loop)):
            family = with_whole_stage(schedules.get(name, ranks=4, microbatches=12), cost)
            assert simulate(family, cost).makespan == expected
