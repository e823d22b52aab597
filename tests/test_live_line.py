"""What takes long is shown: on one live line, or in a line for each piece of work."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fpipe
from fpipe import live_line, schedules
from fpipe.live_line import advance, working


class Terminal(io.StringIO):
    """What a user sees: the last state of each line."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        return [line.rsplit("\r", 1)[-1].rstrip() for line in self.getvalue().split("\n")]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time, which a test sets; what takes long is shown."""
    now = [0.0]
    monkeypatch.setattr("fpipe.live_line.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(live_line, "_shown", True)
    yield now


def some_work(now: list[float]) -> None:
    with working("all"):
        with working("compiling", lambda: 4):
            for part in "FBIW":
                advance(f"{part} of stage 0")
                now[0] += 2.0
        with working("short"):
            advance()
            now[0] += 0.5


def test_a_terminal_has_one_line_in_the_end(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    some_work(clock)
    assert terminal.screen() == ["fpipe: all: 8.5 s", ""]
    states = [state.rstrip() for state in terminal.getvalue().split("\r")]
    # The first part tells nothing of the others: it starts what all use.
    assert "fpipe: compiling, 2 of 4, B of stage 0, 2 s" in states
    assert "fpipe: compiling, 3 of 4, I of stage 0, 4 s, about 4 s left" in states


def test_a_file_has_a_line_for_each_piece_of_work(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    some_work(clock)
    assert file.getvalue() == "fpipe: compiling: 8.0 s, 4 parts\nfpipe: all: 8.5 s\n"


@pytest.mark.parametrize("way", ["call", "environment", "rank"])
def test_nothing_is_shown(clock: list[float], monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(live_line, "_shown", None)
    if way == "call":
        fpipe.progress(False)
    elif way == "environment":
        monkeypatch.setenv("FPIPE_PROGRESS", "0")
    else:
        monkeypatch.setenv("FPIPE_PROGRESS", "1")
        monkeypatch.setenv("RANK", "1")
    some_work(clock)
    assert terminal.getvalue() == ""


def test_what_is_short_is_not_shown(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with working("short", lambda: 2):
        advance()
        clock[0] += 0.9
        advance()
    assert terminal.getvalue() == ""


def test_a_part_that_takes_long_is_shown_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(live_line, "_shown", True)
    monkeypatch.setattr(live_line, "DELAY", 0.01)
    monkeypatch.setattr(live_line, "EVERY", 0.01)
    with working("compiling", lambda: 2):
        advance("F of stage 0")
        end = time.monotonic() + 10
        while terminal.getvalue().count("1 of 2, F of stage 0") < 3 and time.monotonic() < end:
            time.sleep(0.01)
    assert terminal.getvalue().count("fpipe: compiling, 1 of 2, F of stage 0, 0 s") >= 3
    assert len(terminal.screen()) == 2
    assert not [thread for thread in threading.enumerate() if "fpipe live" in thread.name]


class OutStream(io.StringIO):
    """The standard error of a notebook."""


class Output:
    """The output of a cell, as IPython's displays it."""

    def __init__(self) -> None:
        self.states: list[str] = []

    def update(self, data: dict[str, str], raw: bool) -> None:
        self.states.append(data["text/plain"])


def test_a_notebook_has_one_output_that_is_replaced(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, output = OutStream(), Output()

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Output:
        assert not output.states and raw and display_id
        output.update(data, raw)
        return output

    shows = SimpleNamespace(display=display)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=shows))
    monkeypatch.setitem(sys.modules, "IPython.display", shows)
    monkeypatch.setattr("sys.stderr", stream)
    some_work(clock)
    assert "fpipe: compiling, 3 of 4, I of stage 0, 4 s, about 4 s left" in output.states
    assert output.states[-1] == "fpipe: all: 8.5 s"
    assert stream.getvalue() == ""


def test_a_first_step_says_what_is_traced_and_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(live_line, "_shown", True)
    monkeypatch.setattr(live_line, "DELAY", 0.0)
    monkeypatch.setattr(live_line, "EVERY", 0.0)
    schedule = schedules.zb_h1(ranks=2, microbatches=2)

    def first(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w)

    def second(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x * w

    pipe = fpipe.pipeline([first, second], lambda y, _: y.mean(), schedule, compile=False)
    arguments: Any = [torch.ones(2, 2), torch.ones(())], torch.ones(4, 2)
    pipe.step(*arguments)
    shown = terminal.getvalue()
    assert "fpipe: tracing a step, 2, stage 1 (" in shown
    found = re.findall(r"compiling a step, (\d+) of (\d+), (\w\+?) of stage", shown)
    counts = [*dict.fromkeys(found)]  # a state may be drawn again
    assert counts and counts[-1][0] == counts[-1][1] == str(len(counts))
    assert terminal.screen()[-2].startswith("fpipe: tracing and compiling a step: ")
    before = len(shown)
    pipe.step(*arguments)
    assert len(terminal.getvalue()) == before


def test_a_search_says_how_good_its_best_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(live_line, "_shown", True)
    monkeypatch.setattr(live_line, "DELAY", 0.0)
    monkeypatch.setattr(live_line, "EVERY", 0.0)
    cost = fpipe.Cost(f=1, i=1, w=1)
    fpipe.search(ranks=2, microbatches=4, cost=cost, iterations=20)
    assert re.search(r"fpipe: searching, \d+, best [\d.]+, 0 s", terminal.getvalue())
    assert terminal.screen()[-2].startswith("fpipe: searching: ")
