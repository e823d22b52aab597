"""docs/schedules.md is true: its commands, pictures and table are made anew and compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fpipe import Cost, schedules, simulate
from fpipe.cli import main

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "schedules.md").read_text("utf-8")


def test_commands_print_and_draw_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for block in blocks:
        for command, output in re.findall(
            r"^\$ fpipe (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE
        ):
            assert main(command.split()) == 0
            assert capsys.readouterr().out == output, command

    shown = set(re.findall(r"!\[.*?\]\((pictures/.*?)\)", PAGE))
    drawn = {f"pictures/{path.name}" for path in (tmp_path / "pictures").iterdir()}
    kept = {f"pictures/{path.name}" for path in (DOCS / "pictures").iterdir()}
    assert shown == drawn == kept
    for name in drawn:
        assert (tmp_path / name).read_bytes() == (DOCS / name).read_bytes(), (
            f"docs/{name} is out of date: run the commands at the end of docs/schedules.md in docs/"
        )


def test_table_lists_every_family_with_what_simulation_gives() -> None:
    rows = re.findall(r"^\| `(\w+)` .*\| ([\d.]+|–) \| ([\d.]+|–) \|$", PAGE, re.MULTILINE)
    assert {name for name, _, _ in rows} == {*schedules.FAMILIES, "forward_only"}
    for name, bubble, peak in rows:
        make = getattr(schedules, name)
        timeline = simulate(make(ranks=4, microbatches=8), Cost(1, 1, 1))
        assert min(timeline.bubble) == float(bubble), name
        assert peak == "–" or max(timeline.peak) == float(peak), name
