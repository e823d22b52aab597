"""Documentation runs: every Python block of the README and of docs/."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.documents import DOCUMENTS, FRAMEWORKS, ROOT, python_blocks, run_document


@pytest.mark.processes
@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if path.name not in FRAMEWORKS],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_documentation_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # an example may write files
    run = subprocess.run

    def run_warm(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Ranks of torchrun begin as forks of a process that has imported torch."""
        if "torch.distributed.run" not in command:
            return run(command, **options)
        count = int(command[command.index("--nproc-per-node") + 1])
        ranks = warm.run_ranks(
            Path(command[-1]), count, folder=tmp_path, scratch=tmp_path, timeout=120
        )
        output = "".join(rank.output for rank in ranks)
        return subprocess.CompletedProcess(command, max(abs(r.code) for r in ranks), output)

    monkeypatch.setattr(subprocess, "run", run_warm)
    run_document(path)


def test_python_blocks_finds_every_block() -> None:
    text = "# t\n\n```python\na = 1\n```\n\n```text\nno\n```\n\n  ```python\n  b = a\n  ```\n"
    assert python_blocks(text) == [(4, "a = 1\n"), (12, "b = a\n")]
    assert python_blocks("```{code-cell} ipython3\n:tags: [x]\na\n```\n") == [(2, "\na\n")]


def test_a_cell_writes_the_file_that_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [(first, code)] = python_blocks("```{code-cell} ipython3\n%%writefile a.py\nb = 'c'\n```\n")
    exec(code, {})
    assert first == 2 and Path("a.py").read_text("utf-8") == "b = 'c'\n"


def test_python_blocks_refuses_a_block_that_would_be_skipped() -> None:
    with pytest.raises(AssertionError, match="line 1: write ```python, not ```py"):
        python_blocks("```py\na = 1\n```\n")
