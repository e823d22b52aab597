"""The first hour with fpipe: from a bare clone into a fresh environment, ten tasks, the README.

    python tests/first_hour/hour.py                   the whole hour; it needs nothing but Python
    python tests/first_hour/hour.py --skip-commands   the ten tasks alone

The checkout is cloned, so what is not committed is not seen; pip installs into an environment that
has nothing. Each task is a program as a newcomer would write it (tasks/), run in an empty folder;
what it prints is shown as a newcomer sees it, with how long it took. Then every command of the
README is run in the clone, benchmarks with one round and in small. The last line says what failed.
"""

from __future__ import annotations

import argparse
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Final

ROOT: Final = Path(__file__).parents[2]
TASKS: Final = Path(__file__).parent / "tasks"
LINES: Final = 24  # of what a task prints are shown; of more, those in the middle are left out

TINY: Final = "--rounds 1 --uncompiled"
BLOCKS: Final = f"{TINY} --depth 1 --width 64 --length 8 --rows 1 --microbatches 2"

# The commands of the README, and what is run in their stead where they take long, or nothing where
# a machine may lack what they need.
COMMANDS: Final[Mapping[str, str | None]] = {
    "make demo": "make demo",
    "make demo PROCESSES=2": "make demo PROCESSES=2",
    # The suite has a run of its own: its quarter of an hour would be most of this one.
    "make test": "make lint",
    "make device": None,
    "make docs": "make docs",
    "fpipe show zbv --ranks 4 --microbatches 8": "fpipe show zbv --ranks 4 --microbatches 8",
    "fpipe compare --ranks 4 --microbatches 8": "fpipe compare --ranks 4 --microbatches 8",
    "fpipe search --ranks 4 --microbatches 8": "fpipe search --ranks 4 --microbatches 8",
    "python -m benchmarks.overhead.run": "python -m benchmarks.overhead.run --rounds 1",
    "python -m benchmarks.overhead.run --ranks 2": (
        "python -m benchmarks.overhead.run --ranks 2 --rounds 1"
    ),
    "python -m benchmarks.split.run": f"python -m benchmarks.split.run {BLOCKS}",
    "python -m benchmarks.split.run --blas": f"python -m benchmarks.split.run --blas {BLOCKS}",
    "python -m benchmarks.split.run --device cuda --rounds 20": None,
    "python -m benchmarks.efficiency.run": f"python -m benchmarks.efficiency.run {TINY}",
    "python -m benchmarks.efficiency.run --awake": None,  # of Linux alone, as root
    "python -m benchmarks.remat.run": f"python -m benchmarks.remat.run {BLOCKS}",
    "python -m benchmarks.ensemble.run": (
        f"python -m benchmarks.ensemble.run {TINY} --length 4 --rows 2 --microbatches 2 --members 2"
    ),
}


def readme_commands(text: str) -> list[str]:
    """The commands that a README tells its reader to run, without those that install."""
    pattern = r"(?:^    |`)((?:make|fpipe|python -m) [^`\n#]*[^`\n# ])"
    matches = re.findall(pattern, text, re.MULTILINE)
    commands = [match.strip() for match in matches if "…" not in match]  # not to be typed
    return [*dict.fromkeys(commands)]


def readme_program(text: str) -> str:
    """The Python blocks of a README as one program, as its reader would type them."""
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return "\n".join(map(dedent, blocks))


class Hour:
    """What has been run, and what of it failed."""

    def __init__(self, folder: Path) -> None:
        self.places = {str(folder): "~", str(ROOT): "<checkout>", sys.executable: "python3"}
        self.start = time.monotonic()
        self.failed: list[str] = []

    def named(self, text: str) -> str:
        """Text without the places of this machine, so that logs of two can be compared."""
        for path, name in self.places.items():
            text = text.replace(path, name)
        return text

    def run(self, title: str, command: str, folder: Path, path: Path | None = None) -> None:
        """Run a command of the shell, and print what a newcomer sees.

        Args:
            title: says what is tried.
            command: of the shell.
            folder: in which it runs.
            path: a folder of programs that come before all others.
        """
        print(f"\n## {title}\n\n    $ {self.named(command)}", flush=True)
        search = f'export PATH={shlex.quote(str(path))}:"$PATH"; ' if path else ""
        begun = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", f"{search}{command}"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = done.stdout.rstrip().splitlines()
        if len(lines) > LINES:
            half = LINES // 2
            lines[half:-half] = [f"… {len(lines) - 2 * half} lines …"]
        for line in lines:
            print(f"    {self.named(line)[:160]}".rstrip())
        seconds = time.monotonic() - begun
        outcome = "" if done.returncode == 0 else f", FAILED with exit code {done.returncode}"
        print(f"\n{seconds:.1f} s{outcome}", flush=True)
        if done.returncode:
            self.failed.append(title)


def main() -> None:
    """Run the hour."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--skip-commands", action="store_true", help="run the ten tasks alone")
    skips = parser.parse_args().skip_commands
    readme = (ROOT / "README.md").read_text("utf-8")
    print(f"# The first hour\n\nPython {platform.python_version()}, {platform.system()}")
    with tempfile.TemporaryDirectory(prefix="first-hour-") as name:
        folder = Path(name)
        hour = Hour(folder)
        clone, environment, own = folder / "fpipe", folder / "environment", folder / "own"
        own.mkdir()
        programs = environment / "bin"
        hour.run("Clone", f"git clone -q {shlex.quote(str(ROOT))} fpipe", folder)
        hour.run("An environment", f"{sys.executable} -m venv environment", folder)
        install = "python -m pip install -qq --disable-pip-version-check"
        hour.run("Install torch", f"{install} -r constraints.txt", clone, programs)
        hour.run("Install fpipe", f"{install} .", clone, programs)
        extra = "numpy 'transformers>=5,<6' nbconvert ipykernel"
        hour.run("Install what two tasks need beside it", f"{install} {extra}", own, programs)

        (own / "t01_readme.py").write_text(readme_program(readme), "utf-8")
        hour.run("1. The code of the README", "python t01_readme.py", own, programs)
        for number, path in enumerate(sorted(TASKS.glob("*.py")), 2):
            number += number > 8  # the ninth is the command line
            purpose = path.read_text("utf-8").split('"""')[1].partition("\n")[0]
            launcher = "torchrun --standalone --nproc-per-node 2"
            start = launcher if "torchrun" in purpose else "python"
            hour.run(
                f"{number}. {purpose}", f"{start} ../fpipe/{path.relative_to(ROOT)}", own, programs
            )
            if number == 8:
                line = "fpipe show zbv --ranks 4 --microbatches 8 --svg zbv.svg && fpipe --help"
                hour.run("9. The command line", line, own, programs)
        if not skips:
            for command in readme_commands(readme):
                if instead := COMMANDS[command]:
                    hour.run(f"README: `{command}`", instead, clone, programs)
    minutes = (time.monotonic() - hour.start) / 60
    print(f"\n{minutes:.0f} minutes; failed: {', '.join(hour.failed) or 'nothing'}")
    sys.exit(bool(hour.failed))


if __name__ == "__main__":
    main()
