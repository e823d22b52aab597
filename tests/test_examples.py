"""Every file of examples/ runs, as a user would run it. A new example joins by existing."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests import warm

ROOT: Final = Path(__file__).parents[1]
EXAMPLES: Final = sorted((ROOT / "examples").glob("*.py"))
# tests/hosts/test_torchrun.py runs the demo, by itself and on two ranks.
ELSEWHERE: Final = "gpt"


@pytest.mark.processes
@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if path.stem != ELSEWHERE], ids=lambda path: path.stem
)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    # Elsewhere than in the checkout: an example needs the installed package and nothing beside it.
    done = warm.run(path, "--smoke", folder=tmp_path, scratch=tmp_path, timeout=120)
    assert done.code == 0, done.output
    assert done.output, "an example shows something"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_tells_its_command(path: Path) -> None:
    assert f"python examples/{path.name}" in path.read_text("utf-8").split('"""')[1]


def test_there_are_examples() -> None:
    assert EXAMPLES
