"""The site: every page is reached, every link leads somewhere, every public name has its place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

import fpipe

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
PAGES: Final = sorted(DOCS.rglob("*.md"))
MODULES: Final = frozenset({"losses", "nn", "random", "reductions", "schedules"})

TOCTREE: Final = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE: Final = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def entries(page: Path) -> list[Path]:
    """The pages that a page's table of contents lists."""
    lists = TOCTREE.findall(page.read_text("utf-8"))
    names = [line.strip() for text in lists for line in text.splitlines()]
    return [page.parent / f"{name}.md" for name in names if name and not name.startswith(":")]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = CODE.sub("", page.read_text("utf-8"))
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_page_is_reached_once() -> None:
    reached, waiting = [DOCS / "index.md"], [DOCS / "index.md"]
    while waiting:
        below = entries(waiting.pop())
        reached += below
        waiting += below
    assert sorted(reached) == PAGES


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = CODE.sub("", page.read_text("utf-8"))
    lost = []
    for link in LINK.findall(text):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert not lost


def test_every_row_of_your_issue_names_a_test_or_says_that_there_is_none() -> None:
    page = DOCS / "your-issue.md"
    rows = [line for line in page.read_text("utf-8").splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    for row in rows:
        _, _, _, answer, test, _ = map(str.strip, row.split("|"))
        if answer == "not yet":
            continue
        match = re.fullmatch(r"\[(.*)\]\((.*)\)", test)
        assert match, row
        name = match[1].replace(" ", "_")
        text = (page.parent / match[2]).read_text("utf-8")
        assert f"def test_{name}(" in text, row


def test_the_reference_has_every_public_name_once() -> None:
    pages = [path.read_text("utf-8") for path in sorted((DOCS / "reference").glob("*.md"))]
    documented = re.findall(r"^\.\. auto\w+:: fpipe\.([\w.]+)$", "\n".join(pages), re.MULTILINE)
    assert sorted(documented) == sorted(fpipe.__all__)
    assert set(documented) > MODULES


@pytest.mark.parametrize("page", [path for path in PAGES if "how-to" in path.parts], ids=str)
def test_a_how_to_page_is_purpose_example_and_limits(page: Path) -> None:
    text = page.read_text("utf-8")
    if page.name != "index.md":
        assert re.match(r"# .+\n\n[A-Z][^\n]+", text), "a sentence of purpose comes first"
        assert "```python" in text or "```text" in text, "then an example"
        assert "\n|---|" in text, "then a table of limits"
        assert len(text.split()) < 600, "it can be read in two minutes"
