"""The first hour, in short: its tasks run, and it knows every command of the README."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.first_hour.hour import COMMANDS, ROOT, TASKS, readme_commands, readme_program

README = (ROOT / "README.md").read_text("utf-8")
QUICK = ["t03_hugging_face", "t04_schedules", "t06_training", "t07_transforms", "t08_errors"]


@pytest.mark.parametrize(
    "name", [*QUICK, pytest.param("t02_own_module", marks=pytest.mark.inductor)]
)
def test_task_runs(name: str, tmp_path: Path) -> None:
    done = warm.run(TASKS / f"{name}.py", folder=tmp_path, scratch=tmp_path, timeout=200)
    assert done.code == 0, done.output
    assert done.output, "a newcomer sees something"


def test_two_processes(tmp_path: Path) -> None:
    # As under torchrun, which itself takes seconds: tests/hosts starts that.
    task = TASKS / "t05_two_processes.py"
    every = warm.run_ranks(task, 2, folder=tmp_path, scratch=tmp_path, timeout=200)
    for rank, done in enumerate(every):
        assert done.code == 0, done.output
        assert f"rank {rank} of 2: loss" in done.output


def test_a_notebook_shows_all(tmp_path: Path) -> None:
    pytest.importorskip("nbconvert", reason="executes a notebook: pip install nbconvert ipykernel")
    pytest.importorskip("ipykernel", reason="executes a notebook: pip install nbconvert ipykernel")
    command = [sys.executable, str(TASKS / "t10_notebook.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_there_are_ten_tasks() -> None:
    # The first is the code of the README, the ninth the command line.
    numbers = [int(path.name[1:3]) for path in sorted(TASKS.glob("*.py"))]
    assert numbers == [2, 3, 4, 5, 6, 7, 8, 10]


def test_every_command_of_the_readme_is_run() -> None:
    commands = readme_commands(README)
    assert commands and not [command for command in commands if command not in COMMANDS]


def test_the_program_of_the_readme_holds_its_blocks() -> None:
    text = "# t\n\n```python\na = 1\n```\n\n```text\nno\n```\n\n```python\nb = a\n```\n"
    assert readme_program(text) == "a = 1\n\nb = a\n"
    assert "zb_h1" in readme_program(README)


def test_readme_commands_finds_blocks_and_words() -> None:
    text = "    make demo     # quick\n    x = 1\n\nOr `fpipe show zbv`, `python -m a.b --c`.\n"
    assert readme_commands(text) == ["make demo", "fpipe show zbv", "python -m a.b --c"]
