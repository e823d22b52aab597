"""The programs of the README and of docs/: how tests find and run them."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
HOW_TO: Final = ROOT / "docs" / "how-to"
DOCUMENTS: Final = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

FRAMEWORKS: Final = {
    "hugging-face-trainer.md": ("transformers", "accelerate"),
    "lightning.md": ("pytorch_lightning",),
    "peft.md": ("transformers", "peft"),
}
"""Pages of how-to whose programs need another package: tests/test_frameworks.py runs them."""

# A block that is not to be run is no ```python block: ```text and ```pycon say so to the reader.
FENCE: Final = re.compile(r"^ *```(\S[^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Each ```python block of a Markdown text: the number of its first line, and its code."""
    blocks = []
    for match in FENCE.finditer(text):
        language = match[1].strip()
        first = text.count("\n", 0, match.start(2)) + 1
        if language == "{code-cell} ipython3":  # of a tutorial, which Sphinx executes
            code = re.sub(r"^:.*$", "", match[2], flags=re.MULTILINE)
            blocks.append((first, written(dedent(code))))
        elif language.lower().startswith("py") and language != "pycon":
            assert language == "python", f"line {first - 1}: write ```python, not ```{language}"
            blocks.append((first, dedent(match[2])))
    return blocks


def written(code: str) -> str:
    """A cell of a notebook without IPython; ``%%writefile NAME`` writes the cell to a file."""
    magic, _, rest = code.partition("\n")
    if not magic.startswith("%%writefile "):
        return code
    return f"__import__('pathlib').Path({magic.split()[1]!r}).write_text({rest!r}, 'utf-8')\n"


def run_document(path: Path) -> dict[str, Any]:
    """Run the blocks of a file in order in one namespace, as its reader would type them."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for first, code in python_blocks(path.read_text("utf-8")):
        # Blank lines ahead make a traceback name the line of the document.
        exec(compile("\n" * (first - 1) + code, str(path), "exec"), namespace)
    return namespace
