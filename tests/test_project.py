"""The project's own rules: layers, public names, documentation that runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from io import StringIO
from itertools import chain
from pathlib import Path
from textwrap import dedent
from typing import Final

import pytest

import fpipe
from tests import rooms
from tests.rooms import MODULES, ROOT, room_of, within

# What `import fpipe` promises. A name is added here in the commit that makes it public.
PUBLIC_MODULES: Final = frozenset({"losses", "nn", "random", "reductions", "schedules"})
PUBLIC_ON_TORCH: Final = frozenset(
    {
        "Clipped",
        "Directional",
        "ExampleNorms",
        "ExampleNormsAux",
        "ForwardAux",
        "Hvp",
        "HvpAux",
        "Jvp",
        "ModulePipeline",
        "NormPipeline",
        "Pipeline",
        "Stage",
        "Step",
        "StepAux",
        "StepState",
        "StepStateAux",
        "TrainState",
        "TrainStep",
        "TrainStepAux",
        "TrainStepState",
        "TrainStepStateAux",
        "Trainer",
        "balance",
        "clip_by_global_norm",
        "cut",
        "from_module",
        "ggnvp",
        "grad",
        "global_norm",
        "hvp",
        "jvp",
        "load_buffers",
        "losses",
        "per_example_grads",
        "per_example_norms",
        "pipeline",
        "profile",
        "nn",
        "random",
        "reductions",
        "step",
        "train",
        "use",
        "vjp",
        "vmap",
    }
)
PUBLIC_PURE: Final = frozenset(
    {
        "Action",
        "Balance",
        "BatchError",
        "Cost",
        "FpipeError",
        "Jitter",
        "Microbatches",
        "Op",
        "PipelineError",
        "Schedule",
        "ScheduleError",
        "SearchResult",
        "StageError",
        "Timeline",
        "lower_bound",
        "progress",
        "record",
        "search",
        "simulate",
        "verify",
    }
)

NEVER_TORCH: Final = ("fpipe.errors", "fpipe.schedule", "fpipe.schedules", "fpipe.cli")


def imports_of(name: str) -> frozenset[str]:
    """The dotted names that a module's text imports, those within functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} line {node.lineno}: a relative import; write it whole"
            for alias in node.names:
                # `from fpipe.schedule import action` imports a module, `import Action` a name.
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else str(node.module))
    return frozenset(found)


GRAPH: Final = {name: imports_of(name) for name in MODULES}


def run_python(code: str) -> None:
    """Run code in a fresh interpreter; fail with what it printed."""
    command = [sys.executable, "-W", "error", "-c", dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


# ── layers ──────────────────────────────────────────────────────────────────────────────────────


def test_import_graph_has_no_cycle() -> None:
    inside = {name: imported & MODULES.keys() for name, imported in GRAPH.items()}
    try:
        TopologicalSorter(inside).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


def test_no_module_has_more_than_450_lines() -> None:
    lines = {name: len(path.read_text("utf-8").splitlines()) for name, path in MODULES.items()}
    assert not {name: count for name, count in lines.items() if count > 450}


@pytest.mark.parametrize("name", MODULES)
def test_module_imports_only_from_rooms_above_it(name: str) -> None:
    for imported in GRAPH[name] & MODULES.keys():
        assert room_of(imported) <= room_of(name), f"{name} must not import {imported}"


def test_architecture_lists_every_module_as_its_docstring_says() -> None:
    page = rooms.PAGE.read_text("utf-8")
    assert rooms.page_with(rooms.listed()) == page, "run python -m tests.rooms --write"


@pytest.mark.parametrize("name", [name for name in MODULES if within(name, NEVER_TORCH)])
def test_schedule_side_never_names_torch(name: str) -> None:
    assert not [imported for imported in GRAPH[name] if within(imported, ("torch",))]


@pytest.mark.processes
def test_schedule_side_loads_without_torch() -> None:
    names = [name for name in MODULES if within(name, NEVER_TORCH)]
    run_python(f"""
        import importlib, sys
        for name in {names!r}:
            importlib.import_module(name)
            assert "torch" not in sys.modules, name
    """)


# ── names ───────────────────────────────────────────────────────────────────────────────────────

VAGUE: Final = frozenset({"asked", "found", "given", "made", "own", "part", "told"})
# How often a room still binds one of them; the other rooms never do. It only goes down. (In modules
# a `Part` of a module is a part.)
VAGUE_LEFT: Final = {
    "fpipe": 1,
    "fpipe.modules": 17,
    "fpipe.pieces": 4,
    "fpipe.schedule.bounds": 1,
}


def bindings_of(path: Path) -> list[str]:
    """The names of variables that a module binds, one entry for each binding."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    return [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def test_a_variable_bears_a_noun_that_says_what_it_is() -> None:
    left: Counter[str] = Counter()
    for path in MODULES.values():
        room = ".".join(path.relative_to(ROOT).parent.parts)
        left[room] += sum(name in VAGUE for name in bindings_of(path))
    assert {room: count for room, count in left.items() if count > VAGUE_LEFT.get(room, 0)} == {}


# A sentence has its subject first. In the search some are left.
RIDDLE: Final = re.compile(r"(?:^|[.:;]\s+|\n\s*\n\s*)((?:Of|What)\s[^.]*)")
RIDDLES_LEFT: Final = 4


def texts_of(path: Path) -> Iterator[str]:
    """The docstrings and comments of a module; comment lines that follow each other are one."""
    source = path.read_text("utf-8")
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text
    comments: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield " ".join(comments)
                comments = []
            comments.append(token.string.lstrip("# "))
            last = token.start[0]
    yield " ".join(comments)


def test_sentences_begin_with_their_subject() -> None:
    riddles = [
        f"{path.name}: {riddle}"
        for path in MODULES.values()
        for text in texts_of(path)
        for riddle in RIDDLE.findall(text)
    ]
    assert len(riddles) <= RIDDLES_LEFT, riddles


# ── public names ────────────────────────────────────────────────────────────────────────────────


def test_public_names_are_pinned() -> None:
    assert set(fpipe.__all__) == PUBLIC_PURE | PUBLIC_ON_TORCH | PUBLIC_MODULES
    assert len(fpipe.__all__) == len(set(fpipe.__all__))


def public_callables() -> Iterator[tuple[str, str, str]]:
    """Public functions, classes and their own methods: name, docstring, and where else to look."""
    for name in sorted(fpipe.__all__):
        value = getattr(fpipe, name)
        members = {name: value}
        if name in PUBLIC_MODULES:
            members = {f"{name}.{part}": getattr(value, part) for part in value.__all__}
        for label, member in members.items():
            if not callable(member):
                continue
            whole = inspect.getdoc(member) or ""
            is_record = isinstance(member, type) and issubclass(member, tuple | Exception | StrEnum)
            if not is_record:
                yield label, whole, ""
            for part, method in vars(member).items() if isinstance(member, type) else ():
                function = getattr(method, "__func__", method)
                if inspect.isfunction(function) and not part.startswith("_") and not is_record:
                    siblings = "".join(
                        inspect.getdoc(other) or "" for other in vars(member).values()
                    )
                    yield f"{label}.{part}", inspect.getdoc(function) or "", whole + siblings


def test_public_names_have_an_example() -> None:
    # That of a class or of another method will do, if it calls the method.
    without = [
        name
        for name, text, elsewhere in public_callables()
        if ">>>" not in text and f".{name.rpartition('.')[2]}(" not in elsewhere
    ]
    assert not without


def test_public_names_exist_and_are_listed() -> None:
    for name in fpipe.__all__:
        assert hasattr(fpipe, name), name
        assert name in dir(fpipe), name


def test_module_never_bears_the_name_of_another_public_thing() -> None:
    # Importing fpipe.step would set the attribute `step` of fpipe to that module.
    for name in (PUBLIC_PURE | PUBLIC_ON_TORCH) - PUBLIC_MODULES:
        assert f"fpipe.{name}" not in MODULES
    assert {f"fpipe.{name}" for name in PUBLIC_MODULES} <= MODULES.keys()


def needs_torch(name: str) -> bool:
    """Whether a module imports torch, by itself or by way of others."""
    seen, waiting = {name}, [name]
    while waiting:
        imported = GRAPH[waiting.pop()]
        if any(within(other, ("torch",)) for other in imported):
            return True
        waiting += (imported & MODULES.keys()) - seen
        seen |= imported
    return False


@pytest.mark.processes
def test_import_loads_torch_only_when_a_name_needs_it() -> None:
    pure, on_torch = (
        sorted((PUBLIC_PURE | PUBLIC_MODULES) - PUBLIC_ON_TORCH),
        sorted(PUBLIC_ON_TORCH),
    )
    run_python(f"""
        import sys
        import fpipe
        for name in {pure!r}:
            getattr(fpipe, name)
            assert "torch" not in sys.modules, name
        fpipe.{on_torch[0]}
        assert "torch" in sys.modules
    """)
    # The first has loaded it for all others, so each is looked at by its imports.
    homes = {name: fpipe._LAZY.get(name, f"fpipe.{name}") for name in on_torch}
    assert [name for name, home in homes.items() if not needs_torch(home)] == []


# Each takes between a quarter of a second and several seconds, which every start would pay.
SLOW_IMPORTS: Final = (
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.testing",
    "transformers",
)


@pytest.mark.processes
def test_making_a_pipeline_imports_nothing_slow_before_its_first_trace() -> None:
    run_python(f"""
        import sys
        import torch
        by_torch = set(sys.modules)
        import fpipe
        fpipe.pipeline, fpipe.from_module
        loaded = [name for name in {SLOW_IMPORTS!r} if name in sys.modules and name not in by_torch]
        assert not loaded, loaded
    """)


@pytest.mark.processes
def test_command_line_runs_without_torch() -> None:
    run_python("""
        import sys
        from fpipe.cli import main
        try:
            main(["--help"])
        except SystemExit as end:
            assert not end.code, end.code
        assert "torch" not in sys.modules
    """)


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(fpipe, "no_such_name")  # noqa: B009 (a type checker refuses the plain form)


# ── text ────────────────────────────────────────────────────────────────────────────────────────


def project_texts() -> list[Path]:
    folders = ("fpipe", "tests", "examples", "benchmarks", "docs", ".ci")
    inside = chain.from_iterable((ROOT / folder).rglob("*") for folder in folders)
    kinds = {".py", ".md", ".toml", ".txt", ".cff", ""}
    return sorted(
        path
        for path in chain(ROOT.iterdir(), inside)
        if path.is_file() and path.suffix in kinds and "__pycache__" not in path.parts
    )


def test_no_work_is_left_as_a_note_in_the_code() -> None:
    # Spelled apart, so that this file passes its own test.
    marks = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in project_texts()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if marks.search(line)
    ]
    assert not found


def test_installed_under_the_version() -> None:
    assert metadata.version("fpipe-torch") == fpipe.__version__


def test_citation_names_the_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"version: {fpipe.__version__}\n" in citation
    assert f"license: {project['license']}\n" in citation


def test_changelog_and_citation_date_the_version_alike() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest = re.search(r"^## \[(\d.*)\] - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    assert newest is not None and newest[1] == fpipe.__version__
    assert f"date-released: {newest[2]}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_doctests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "triton" in imports_of(name):
        pytest.importorskip("triton", reason="needs Triton, which torch for the CPU comes without")
    # doctest begins each example's debugger anew, which asks the disk for every file that it knows.
    monkeypatch.setattr("linecache.checkcache", lambda filename=None: None)
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0  # doctest's own report is in the captured output
