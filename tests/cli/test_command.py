"""The command line as a user meets it: what it prints, what it writes, how it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from textwrap import dedent

import pytest

from fpipe import Cost, Schedule, schedules, simulate
from fpipe.cli import main
from fpipe.version import __version__

ROOT = Path(__file__).parents[2]
SMALL = ["--ranks", "2", "--microbatches", "4"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command that succeeds prints."""
    assert main(words) == 0
    captured = capsys.readouterr()
    assert not captured.err
    return captured.out


def refused_command(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a command says where the input is bad."""
    try:
        code = main(words)
    except SystemExit as exit:  # argparse leaves this way
        code = exit.code if isinstance(exit.code, int) else 1
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    (line,) = captured.err.splitlines()
    return line


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


# ── show ────────────────────────────────────────────────────────────────────────────────────────


def test_show_prints_a_grid(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "show", "ZBVZeroBubble", "-p", "2", "-m", "2") == dedent("""\
        zbv: 2 ranks, 4 stages, 2 microbatches
        time    0                   5                   10
        rank 0  0F0 0F1     3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0     0I1 0W1
        rank 1      1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1
        """)


@pytest.mark.parametrize("name", ["forward-only", "ForwardOnly"])
def test_the_family_of_evaluation_is_found_as_the_others_are(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Case and dashes matter to no other family, and the refusal did not even list this one.
    shown = run(capsys, "show", "forward_only", *SMALL)
    assert run(capsys, "show", name, *SMALL) == shown


def test_show_leaves_the_middle_of_a_long_grid_out_unless_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["show", "zbv", "--ranks", "4", "--microbatches", "64"]
    assert "left out" in run(capsys, *words)
    assert "left out" not in run(capsys, *words, "--all")


def test_show_takes_the_stages_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "show", "interleaved_1f1b", *SMALL, "--stages-per-rank", "3")
    assert out.startswith("interleaved_1f1b: 2 ranks, 6 stages, 4 microbatches\n")


def test_show_writes_every_form(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    zbv = schedules.zbv(ranks=2, microbatches=4)
    forms = ["svg", "html", "trace", "csv", "json", "text"]
    words = [word for form in forms for word in (f"--{form}", str(tmp_path / form))]
    out = run(capsys, "show", "zbv", *SMALL, *words)
    assert out == "".join(f"wrote {tmp_path / form}\n" for form in forms)
    for form in forms:
        written = (tmp_path / form).read_bytes().decode()
        assert written == getattr(zbv, f"to_{form}")()


def test_an_empty_path_is_no_request_to_print(capsys: pytest.CaptureFixture[str]) -> None:
    # As of a variable that the shell does not know: the grid was printed, and nothing was written.
    assert refused_command(capsys, "show", "zbv", *SMALL, "--svg", "").startswith(
        "fpipe show: error: "
    )


def test_show_converts_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    zbv = schedules.zbv(ranks=2, microbatches=4)
    zbv.to_csv(tmp_path / "a.csv")
    run(capsys, "show", str(tmp_path / "a.csv"), "--json", str(tmp_path / "a.json"))
    assert Schedule.from_json(tmp_path / "a.json") == zbv
    text = run(capsys, "show", str(tmp_path / "a.json"), "--text", "-")
    (tmp_path / "a.txt").write_text(text, "utf-8")
    assert Schedule.from_text(text) == zbv
    assert run(capsys, "show", str(tmp_path / "a.txt"), *SMALL).startswith("a: 2 ranks, 4 stages")


# ── simulate ────────────────────────────────────────────────────────────────────────────────────


def test_simulate_prints_a_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "simulate", "1f1b", *SMALL, "--cost", "10,12,8", "--comm", "2")
    assert out == dedent("""\
        one_f_one_b: 2 ranks, 2 stages, 4 microbatches
        time    0               50              100             150
        rank 0  FFFFFF........BBBBBBBFFFBBBBBBFFFF.BBBBBB....BBBBBB  idle 24.1 %  peak 2
        rank 1  ....FFFBBBBBBBFFFBBBBBB..FFFBBBBBBFFFBBBBBBB.......  idle 24.1 %  peak 1
        makespan 158, span 158, bubble 38, peak 2, bound 146, gap 8.2 %
        critical path, 10 actions: 0F0 1F0 1B0 0B0 0F2 1F2 1B2 1F3 1B3 0B3
        """)


def test_simulate_shortens_a_long_path(capsys: pytest.CaptureFixture[str]) -> None:
    last = run(capsys, "simulate", "zbv", "-p", "4", "-m", "8").splitlines()[-1]
    assert " ... " in last
    assert len(last) <= 80


def test_simulate_writes_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    out = run(capsys, "simulate", "zbv", *SMALL, "--cost", "1,1,1,3", "--html", str(path))
    assert out == f"wrote {path}\n"
    assert path.read_text("utf-8").startswith("<!doctype html>")


def test_cost_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"f": [1, 3], "i": 1, "w": 1, "comm": 5}), "utf-8")
    words = ["simulate", "gpipe", *SMALL, "--cost", str(path)]
    assert "makespan 33," in run(capsys, *words)
    assert "makespan 23," in run(capsys, *words, "--comm", "0")


def test_simulate_evaluation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "forward.txt"
    run(capsys, "show", "forward_only", *SMALL, "--text", str(path))
    out = run(capsys, "simulate", str(path))
    assert "no bound: stage 0 of forward_only has no whole backward" in out
    assert run(capsys, "compare", str(path)).splitlines()[1].endswith("-")


# ── compare ─────────────────────────────────────────────────────────────────────────────────────


def test_compare_sorts_by_makespan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", "8", "--microbatches", "32", "--cost", "10,12,8", "--comm", "1"]
    assert run(capsys, "compare", "1f1b", "zb_h1", "zbv", *words) == dedent("""\
        schedule     stages  makespan  bubble    idle  peak    gap
        zbv              16      1035      75   7.2 %     8  1.2 %
        zb_h1             8      1086     126  11.6 %     8  0.0 %
        one_f_one_b       8      1238     278  22.5 %     8  9.8 %
        """)


def test_compare_all_families_and_says_which_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = run(capsys, "compare", "--ranks", "2", "--microbatches", "5").splitlines()
    named = {line.split()[0] for line in lines[1:] if not line.startswith("left out")}
    left = {line.split()[2].rstrip(":") for line in lines if line.startswith("left out")}
    assert named | left == set(schedules.FAMILIES)
    assert "interleaved_1f1b" in left


def test_compare_leaves_out_what_holds_more_than_the_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["1f1b", "zb_h1", "zbv", "gpipe", "--ranks", "4", "--microbatches", "8", "--memory"]
    assert run(capsys, "compare", *words, "4").splitlines()[1:] == [
        "zbv               8      25.5     1.5   5.9 %     4   0.0 %",
        "zb_h1             4        27       3  11.1 %     4   0.0 %",
        "one_f_one_b       4        33       9  27.3 %     4  10.0 %",
        "left out gpipe: rank 0 holds 8, and --memory is 4",
    ]
    each = run(capsys, "compare", *words, "4,3,2,1").splitlines()
    assert each[1].startswith("one_f_one_b")
    assert "left out zb_h1: rank 1 holds 4, and --memory is 3" in each
    assert "--memory has 2 values and one_f_one_b 4 ranks" in refused_command(
        capsys, "compare", *words, "4,3"
    )
    for none in ("nan", "0", "4,4,4,0"):
        assert "must be a number above 0, or one for each rank" in refused_command(
            capsys, "compare", *words, none
        )


def test_compare_leaves_out_placements_that_the_cost_is_not_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "cost.json"
    path.write_text('{"f": [1, 2], "i": 1, "w": 1}')
    words = ("--ranks", "2", "--microbatches", "4", "--cost", str(path))
    lines = run(capsys, "compare", "1f1b", "zbv", "zb_h1", *words).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["zb_h1", "one_f_one_b"]
    assert lines[3] == (
        "left out zbv: cost.f has 2 values for a placement of 4 stages: give one value per stage, "
        "or one number for all"
    )
    line = refused_command(capsys, "compare", "zbv", "dualpipev", *words)
    assert "there is nothing to compare" in line
    path.write_text('{"f": 1, "i": 1, "w": 1, "memory": 3}')
    assert "not a cost, for it has memory: it must be" in refused_command(
        capsys, "compare", "1f1b", *words
    )


def test_search_starts_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.CSV"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    words = ["--ranks", "2", "--microbatches", "2", "--iterations", "0", "--start", str(path)]
    assert "searched: makespan" in run(capsys, "search", *words)
    assert "2 ranks, 2 stages, 2 microbatches" in run(capsys, "show", str(path))
    assert "start has 2 microbatches, and microbatches=4" in refused_command(
        capsys, "search", *words, "--microbatches", "4"
    )


def test_schedules_that_are_made_for_a_cost_are_made_for_this_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They were made for a cost of 1, 1, 1 and the memory of 1F1B, and compared by another."""
    words = ("--ranks", "4", "--microbatches", "8", "--cost", "10,12,8", "--comm", "5")
    lines = run(capsys, "compare", "zb_auto", "zb_h1", *words, "--memory", "8").splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["zb_auto", "zb_h1"]
    cost = Cost(10, 12, 8, comm=5)
    own = schedules.zb_auto(ranks=4, microbatches=8, memory=8, cost=cost)
    assert lines[1].split()[2] == f"{simulate(own, cost).makespan:g}"
    usual = schedules.zb_auto(ranks=4, microbatches=8, cost=cost)
    told = run(capsys, "simulate", "zb_auto", *words)
    assert f"makespan {simulate(usual, cost).makespan:g}," in told


def test_compare_takes_the_size_from_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.csv"
    schedules.zb_h2(ranks=2, microbatches=4).to_csv(path)
    lines = run(capsys, "compare", "gpipe", str(path)).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [str(path), "gpipe"]


def test_stages_per_rank_are_for_the_families_that_a_file_is_compared_with(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.csv"
    schedules.zb_h2(ranks=2, microbatches=4).to_csv(path)
    lines = run(capsys, "compare", str(path), "looped_bfs", "--stages-per-rank", "3").splitlines()
    assert {line.split()[1] for line in lines[1:]} == {"2", "6"}
    line = refused_command(capsys, "compare", str(path), "--stages-per-rank", "3")
    assert "has 1 stages per rank and --stages-per-rank is 3" in line


def test_compare_refuses_files_of_two_sizes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    one, other = tmp_path / "one.csv", tmp_path / "other.csv"
    schedules.gpipe(ranks=2, microbatches=4).to_csv(one)
    schedules.gpipe(ranks=2, microbatches=3).to_csv(other)
    line = refused_command(capsys, "compare", str(one), str(other))
    assert f"{other} has 2 ranks and 3 microbatches, and {one} has 2 and 4: compare" in line


def test_compare_takes_no_size_from_a_file_that_cannot_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # A family of so many microbatches was made before the file was looked at, in all of the memory.
    path = tmp_path / "huge.csv"
    path.write_text("0F0,0B0,0F100000000000,0B100000000000\n", "utf-8")
    line = refused_command(capsys, "compare", "gpipe", str(path))
    assert f"{path}: stage 0 has nothing on microbatch 1 (rank 0)" in line


# ── search, verify ──────────────────────────────────────────────────────────────────────────────


def test_actions_run_together_in_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "dualpipev", "--ranks", "2", "--microbatches", "8"]
    assert run(capsys, *words) != run(capsys, *words, "--pair", "0.7")
    assert "pair=2.0 must be above 0" in refused_command(capsys, *words, "--pair", "2")


def test_search_cuts_a_chain_of_layers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    Cost(f=[1, 1, 2, 2, 4], i=[1] * 5, w=[1] * 5).to_json(path)
    words = ["--cost", str(path), "--placement", "linear", "--iterations", "2", "--cut"]
    out = run(capsys, "search", *SMALL, *words)
    assert re.search(r"^cut: \d \d layers, on ranks 0 1$", out, re.MULTILINE)


def test_ranks_have_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "gpipe", *SMALL]
    assert run(capsys, *words) != run(capsys, *words, "--speed", "2,1")
    assert "cost.speed has 1 values for 2 ranks" in refused_command(capsys, *words, "--speed", "2")


def test_jitter_adds_means(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "compare", "gpipe", "zb_h1", *SMALL, "--jitter", "0.1,0,0.1,2")
    assert out.splitlines()[0].endswith("mean  spread")
    words = ["--jitter", "0.05", "--trials", "5"]
    assert ", mean " in run(capsys, "simulate", "gpipe", *SMALL, *words)
    words = ["--placement", "linear", "--iterations", "4", "--objective", "robust"]
    out = run(capsys, "search", *SMALL, *words, "--jitter", "0.1")
    assert "searched: robust" in out and "at 5 % jitter: mean" in out
    assert "--jitter has 5 numbers" in refused_command(
        capsys, "compare", *SMALL, "--jitter", "0,0,0,0,0"
    )


def test_search_chooses_what_is_computed_again(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--placement", "linear", "--memory", "1.2", "--iterations", "5", "--remat"]
    out = run(capsys, "search", *SMALL, *words, "--kept", "0.1", "--recompute", "0.5")
    assert re.search(r"^remat: full( (full|none))*$", out, re.MULTILINE)
    assert "cost.kept=None" in refused_command(capsys, "search", *SMALL, *words)


@pytest.mark.parametrize("suffix", ["csv", "json", "txt", "svg", "html"])
def test_search_writes_what_it_found(
    suffix: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / f"best.{suffix}"
    words = ["--iterations", "20", "--placement", "linear", "--memory", "2", "-o", str(path)]
    out = run(capsys, "search", *SMALL, *words)
    assert "searched: makespan" in out
    assert out.count("bound") == 1  # not that of the placement beside that of the search
    assert out.endswith(f"wrote {path}\n")
    if suffix in ("csv", "json", "txt"):
        assert "can run: 2 ranks, 2 stages, 4 microbatches" in run(capsys, "verify", str(path))


@pytest.mark.parametrize("placement", ["v", "looped", "0,1,0"])
def test_search_on_a_placement(placement: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "search", *SMALL, "--iterations", "0", "--placement", placement)
    assert f"{3 if ',' in placement else 4} stages" in out


def test_verify_says_what_is_owed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "forward.txt"
    path.write_text("0F0\n1F0\n", "utf-8")
    assert "it owes F+B or F+I+W" in refused_command(capsys, "verify", str(path))
    assert "can run" in run(capsys, "verify", str(path), "--requires", "F")
    assert "can run" in run(capsys, "verify", str(path), "--requires", "F,F")


def test_a_file_of_another_size_than_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "uneven.txt"
    path.write_text("0F0 1F0 1B0 0B0\n2F0 2B0\n", "utf-8")
    for stages in ("1", "2"):
        told = refused_command(capsys, "show", str(path), "--stages-per-rank", stages)
        assert f"has 1 or 2 stages per rank and --stages-per-rank is {stages}: leave" in told
    assert "F0" in run(capsys, "show", str(path), "--ranks", "2")


# ── what is refused ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "words, reason",
    [
        ("", "fpipe: error: the following arguments are required: COMMAND"),
        ("shew", "invalid choice: 'shew'"),
        ("show", "the following arguments are required: SCHEDULE"),
        ("show zvb -p 2 -m 4", "name='zvb' is not a schedule family. Did you mean 'zbv'?"),
        ("show zvb", "name='zvb' is not a schedule family"),
        ("show zbv", "zbv is a family: give --ranks and --microbatches"),
        ("show forward_only", "forward_only is a family: give --ranks and --microbatches"),
        (
            f"show gpipe -p 1 -m {10**18 - 1}",
            "show: error: out of memory: take fewer ranks, microbat",
        ),
        # The system ended it, when all memory was filled.
        ("simulate gpipe -p 1000000 -m 1000000", "simulate: error: out of memory: take fewer"),
        ("search -p 1000000 -m 1000000", "search: error: out of memory: take fewer ranks"),
        (f"show gpipe -p 1 -m {'9' * 19}", f"--microbatches: '{'9' * 19}' is too large: it has 19"),
        (f"show gpipe -p {'9' * 5000} -m 1", "9999 is too large: it has 5000 digits"),
        ("show zbv -p 0 -m 4", "--ranks: '0' must be a whole number, 1 or more"),
        ("show zbv -p 2 -m 4 --stages-per-rank 3", "stages_per_rank=3 does not fit"),
        # It named `fpipe --help`, which lists no options of a command.
        (
            "show zbv --wide 3",
            "fpipe show: error: unrecognized arguments: --wide 3 (try fpipe show",
        ),
        ("show none.csv", "fpipe show: error: none.csv: No such file or directory"),
        ("show ./none", "./none: the suffix must be one of .csv, .json, .txt"),
        ("show zbv -p 2 -m 4 --svg /no/where.svg", "/no/where.svg: No such file or directory"),
        # The disk may be full; it was said of standard output.
        ("show zbv -p 2 -m 4 --svg /dev/full", "show: error: /dev/full: No space left on device"),
        ("simulate zbv -p 2 -m 4 --cost 1,2", "--cost '1,2' has 2 numbers: it must be three or"),
        ("simulate zbv -p 2 -m 4 --cost 1,a,2", "--cost '1,a,2' must be three or four numbers"),
        ("simulate zbv -p 2 -m 4 --cost=-1,1,1", "cost f=-1.0 must be a finite number"),
        ("simulate zbv -p 2 -m 4 --comm x", "argument --comm: invalid float value: 'x'"),
        ("compare", "fpipe compare: error: give --ranks and --microbatches, or a file"),
        ("compare zbv", "zbv is a family: give --ranks and --microbatches"),
        ("search -p 2", "--microbatches is needed, or --start with a schedule"),
        ("search -m 2", "--ranks is needed, or --start with a schedule"),
        ("search -p 2 -m 4 -o nowhere/best.csv", "--output nowhere/best.csv: there is no such dir"),
        ("search -p 2 -m 4 -o best.png", "--output best.png: the suffix must be one of .csv"),
        ("search -p 2 -m 4 --placement w", "--placement 'w' must be linear, looped, v, wave"),
        ("search -p 2 -m 4 --memory 1,x", "'1,x' must be a number, or several with a comma"),
        ("search -p 2 -m 4 --memory 0.5", "admits no schedule"),
        ("search -p 2 -m 4 -o tests/a.csv/b.csv", "there is no such directory"),
        (f"search -p 2 -m 4 --placement {'9' * 5000}", "must be linear, looped, v, wave"),
        ("simulate zbv -p 2 -m 4 --cost 1e308,1,1", "cost f=1e+308 must be 0 or from 1e-100"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    words: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in refused_command(capsys, *words.split())


@pytest.mark.parametrize(
    "text, reason",
    [
        ("0F0,0B0\n1F0,oops\n", "row 2 (rank 1), column 2: text='oops' is not an action"),
        ("0F0,0B0\n1B0,1F0\n", "bad.csv: rank 1 runs 1B0 (actions[1][0]) before 1F0"),
    ],
)
def test_verify_refuses_a_bad_file(
    text: str, reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, "utf-8")
    assert reason in refused_command(capsys, "verify", str(path))


def test_a_file_of_another_size_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "a.csv"
    schedules.zbv(ranks=2, microbatches=4).to_csv(path)
    line = refused_command(capsys, "show", str(path), "--ranks", "3")
    assert "has 2 ranks and --ranks is 3: leave the option out" in line


def test_search_refuses_a_directory_before_it_searches(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").mkdir()
    line = refused_command(capsys, "search", *SMALL, "-o", str(tmp_path / "a.csv"))
    assert "a.csv: is a directory; give a file" in line


def test_errors_in_text_name_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text("0F0 oops", "utf-8")
    assert f"{path}: line 1, column 5: text='oops'" in refused_command(capsys, "verify", str(path))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"f": 1, "f": 2, "i": 1, "w": 1}', "cost.json: has the key 'f' twice"),
        ("[" * 100_000, "cost.json: not JSON: nested too deeply"),
        (f'{{"f": {"9" * 5000}, "i": 1, "w": 1}}', "cost.json: a number in it is too long"),
        (f'{{"f": {"9" * 400}, "i": 1, "w": 1}}', "cost f=inf must be a finite number"),
    ],
)
def test_a_cost_file_that_cannot_be_read_is_refused(
    text: str, reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text, "utf-8")
    assert reason in refused_command(capsys, "simulate", "zbv", *SMALL, "--cost", str(path))


@pytest.mark.parametrize("text", ["[]", '{"f": 1}', '{"f": 1, "i": 1, "w": 1, "x": 2}', "{"])
def test_a_bad_cost_file_is_refused(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text, "utf-8")
    line = refused_command(capsys, "simulate", "zbv", *SMALL, "--cost", str(path))
    assert "cost.json: not a cost" in line or "cost.json: not JSON" in line


# ── as a process ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("command", ["show", "simulate", "compare", "search", "verify"])
def test_help_ends_in_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert f"example:\n  fpipe {command} " in out
    example = out.partition(f"  fpipe {command} ")[2].splitlines()[0]
    assert example


def test_help_tells_what_every_family_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["show", "--help"])
    _, _, told = capsys.readouterr().out.partition("families:\n")
    names = {line.split()[0] for line in told.splitlines() if line[2:3].strip()}
    assert names == {*schedules.FAMILIES, "forward_only"}
    assert "  gpipe                    GPipe: all forwards, then all backwards.\n" in told


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"fpipe {__version__}\n"


def test_the_script_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"] == {"fpipe": "fpipe.cli:main"}


@pytest.mark.processes
def test_process_never_loads_torch() -> None:
    code = """
        import sys
        from fpipe.cli import main
        assert main("compare --ranks 2 --microbatches 4".split()) == 0
        assert main("show zbv --ranks 2 --microbatches 4 --svg - --html - --trace -".split()) == 0
        assert "torch" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m fpipe show zbv -p 16 -m 512 --html - | head -c 100"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.processes
def test_a_name_that_standard_output_cannot_encode_is_printed_all_the_same(tmp_path: Path) -> None:
    schedules.zbv(ranks=2, microbatches=2).to_csv(tmp_path / "é.csv")
    done = subprocess.run(
        [sys.executable, "-m", "fpipe", "show", str(tmp_path / "é.csv")],
        cwd=ROOT,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"\\xe9: 2 ranks")


@pytest.mark.parametrize(
    ("redirect", "outcome"),
    [
        (">/dev/full", (2, b"fpipe show: error: standard output: No space left on device\n")),
        (">&-", (0, b"")),
    ],
)
@pytest.mark.processes
def test_standard_output_that_takes_nothing(redirect: str, outcome: tuple[int, bytes]) -> None:
    command = f"{sys.executable} -m fpipe show zbv -p 2 -m 4 {redirect}"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == outcome


def test_times_of_whole_stage_work_are_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    work = ["--unshard", "2", "--reduce-grad", "3", "--update", "1"]
    out = run(capsys, "simulate", "gpipe", *SMALL, *work)
    assert "makespan 21" in out and "UPDATE" in out
    table = run(capsys, "compare", "gpipe", *SMALL, *work)
    assert table.splitlines()[1].split()[2] == "21"
    best = tmp_path / "best.txt"
    run(capsys, "search", *SMALL, *work, "--iterations", "5", "-o", str(best))
    assert "0REDUCE_GRAD" in best.read_text() and "0UPDATE" in best.read_text()


def test_the_time_of_a_transfer_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "simulate", "gpipe", *SMALL, "--transfer", "5")
    assert "makespan 46" in out


def test_links_and_sizes_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "gpipe", *SMALL, "--transfer", "5"]
    blocking = run(capsys, *words, "--blocking")
    assert "makespan 55" in blocking
    assert run(capsys, *words, "--shared", "--blocking") != blocking
    assert "makespan 86" in run(capsys, *words, "--message", "2")
    assert "makespan 86" in run(capsys, *words, "--message", "2,0")
    uneven = ["simulate", "gpipe", *SMALL, "--sizes", "1,2,1,2"]
    assert "makespan 24" in run(capsys, *uneven) and "peak 6" in run(capsys, *uneven)
    assert "peak 5" in run(capsys, *uneven, "--memory-sizes", "1,2,1,1")
    work = ["simulate", "gpipe", *SMALL, "--reduce-grad", "2", "--unshard", "4"]
    lane = run(capsys, *work)
    assert run(capsys, *work, "--no-collective-lane") != lane
