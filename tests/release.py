"""Build the wheel and the sdist, and use both as those who download them do.

    python -m tests.release          the tests of the sdist that take seconds
    python -m tests.release --all    all of them, as `make test` runs them

Each goes into a fresh virtual environment, beside the torch of constraints.txt. The wheel runs the
ten lines of the README and the command line in an empty folder; the sdist runs its tests where it
is unpacked.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
SHORT: Final = ("tests/schedule", "tests/exchange", "tests/test_pytree.py")


def run(*words: str | Path, where: Path) -> None:
    """Run a command, or end with what it returned."""
    print("$", *words, flush=True)
    subprocess.run([str(word) for word in words], cwd=where, check=True)


def environment(folder: Path) -> Path:
    """The folder of programs of a new virtual environment."""
    venv.create(folder, with_pip=True, clear=True)
    return folder / "bin"


def install(programs: Path, what: str, *options: str, where: Path) -> None:
    """What pip installs, beside the torch of constraints.txt."""
    constraints = ROOT / "constraints.txt"
    pip = (programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "-c", constraints, *options, what, where=where)


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the sdist; the wheel is built from the sdist."""
    programs = environment(folder / "builder")
    install(programs, "build", where=folder)
    run(programs / "python", "-m", "build", "--outdir", folder / "dist", ROOT, where=folder)
    [wheel] = (folder / "dist").glob("*.whl")
    [sdist] = (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


def ten_lines() -> str:
    """The first program of the README, which ends by saying that it worked."""
    text = (ROOT / "README.md").read_text("utf-8")
    program = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert program is not None
    return (
        f"{program[1]}\nassert value.isfinite() and len(grads) == 2\nprint('loss', float(value))\n"
    )


def use_wheel(wheel: Path, folder: Path) -> None:
    """The ten lines and the command line, with nothing but the wheel and what it asks for."""
    programs, empty = environment(folder / "user"), folder / "empty"
    empty.mkdir()
    install(programs, str(wheel), where=empty)
    run(programs / "python", "-m", "pip", "check", where=empty)
    (empty / "ten_lines.py").write_text(ten_lines(), "utf-8")
    run(programs / "python", "ten_lines.py", where=empty)
    run(programs / "fpipe", "show", "zbv", "--ranks", "4", "--microbatches", "8", where=empty)
    size = ("--ranks", "2", "--microbatches", "4")
    run(programs / "fpipe", "search", *size, "--seconds", "1", "-o", "best.csv", where=empty)
    run(programs / "fpipe", "show", "best.csv", where=empty)


def use_sdist(sdist: Path, folder: Path, tests: Sequence[str] | None) -> None:
    """Its tests; None for `make test`."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    [source] = folder.glob("fpipe_torch-*")
    if tests is None:
        run("make", "test", f"PYTHON={sys.executable}", where=source)
        return
    programs = environment(folder / "tester")
    install(programs, ".[test]", where=source)
    run(programs / "python", "-m", "pytest", *tests, where=source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="all tests of the sdist")
    parser.add_argument("--output", type=Path, help="a folder for both files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, sdist = build(folder)
        use_wheel(wheel, folder)
        use_sdist(sdist, folder, None if arguments.all else SHORT)
        if arguments.output is not None:
            arguments.output.mkdir(parents=True, exist_ok=True)
            for file in (wheel, sdist):
                shutil.copy(file, arguments.output)
    print("both can be used")


if __name__ == "__main__":
    main()
