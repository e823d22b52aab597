"""The rooms of the package: which layer each module stands in, and what it is.

    python -m tests.rooms --write

writes the list in docs/architecture.md anew: of each module the name and the first sentence of its
docstring. `tests/test_project.py` compares them.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from textwrap import wrap
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs/architecture.md"
BEGIN: Final = "<!-- written by python -m tests.rooms --write -->\n"
END: Final = "<!-- end -->\n"

# The list goes from the lowest layer to the highest, and so do the rooms of a layer, some of which
# stand beside others: a module imports only from its own rooms or from earlier ones.
LAYERS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "Foundations": (
        (
            "fpipe.dtensors",
            "fpipe.errors",
            "fpipe.live_line",
            "fpipe.microbatches",
            "fpipe.pytree",
            "fpipe.torch_internals",
            "fpipe.version",
        ),
    ),
    "Schedules, in pure Python: they never import torch": (
        (
            "fpipe.schedule.action",
            "fpipe.schedule.arguments",
            "fpipe.schedule.cost",
            "fpipe.schedule.dependencies",
            "fpipe.schedule.exchange",
            "fpipe.schedule.grid",
            "fpipe.schedule.picture",
            "fpipe.schedule.placements",
            "fpipe.schedule.scaled_costs",
            "fpipe.schedule.schedule",
            "fpipe.schedule.simulation",
            "fpipe.schedule.stage_costs",
            "fpipe.schedule.whole_stage",
        ),
        (
            "fpipe.schedule.bounds",
            "fpipe.schedule.families",
            "fpipe.schedule.verifier",
        ),
        ("fpipe.schedule.simulator", "fpipe.schedule.timeline"),
        ("fpipe.schedule.orders",),
        ("fpipe.schedule.phases",),
        ("fpipe.schedule.searching",),
        ("fpipe.schedule",),
        ("fpipe.schedules",),
        ("fpipe.cli",),
    ),
    "Inputs: what a call is given": (
        ("fpipe.inputs.host_memory", "fpipe.nn", "fpipe.random"),
        ("fpipe.inputs",),
        ("fpipe.checkpoint",),
    ),
    "Stages: from the user's functions to graphs": (
        ("fpipe.trace.overrides.standin",),
        ("fpipe.checks",),
        ("fpipe.graph",),
        ("fpipe.pieces", "fpipe.trace.overrides"),
        ("fpipe.spec",),
        ("fpipe.trace",),
        ("fpipe.divide",),
    ),
    "Programs: from graphs and a schedule to what each rank runs": (
        ("fpipe.plan.codes", "fpipe.plan.stage_compiler"),
        ("fpipe.program",),
        ("fpipe.transport",),
        ("fpipe.plan",),
    ),
    "Calls: who drives the ranks, and what surrounds a call": (
        ("fpipe.execute", "fpipe.losses", "fpipe.reductions"),
        ("fpipe.functional",),
        ("fpipe.autograd",),
        ("fpipe.engine",),
    ),
    "Pipelines: what users make": (
        ("fpipe.entry", "fpipe.parameters", "fpipe.pipelines"),
        ("fpipe.profiling",),
        ("fpipe.modules",),
    ),
    "Users: what they do with a pipeline": (
        ("fpipe.transforms",),
        ("fpipe.training",),
        ("fpipe",),
    ),
}
ROOMS: Final = tuple(rooms for layer in LAYERS.values() for rooms in layer)


def module_files() -> dict[str, Path]:
    """Every module of the package, by its dotted name."""
    names = {}
    for path in sorted((ROOT / "fpipe").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES: Final = module_files()


def within(name: str, packages: tuple[str, ...]) -> bool:
    """Whether a module is one of some packages, or in one of them."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def room_of(name: str) -> int:
    """The place of a module's room among all rooms."""
    if name in ("fpipe", "fpipe.__main__"):
        return len(ROOMS) - 1
    for number, packages in enumerate(ROOMS[:-1]):
        if within(name, packages):
            return number
    raise AssertionError(f"{name} stands in no room: give it one in LAYERS of tests/rooms.py")


def sentence_of(name: str) -> str:
    """The first paragraph of a module's docstring, which is a sentence, in one line."""
    text = ast.get_docstring(ast.parse(MODULES[name].read_text("utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def listed() -> str:
    """The list of architecture.md: a block for each layer, a line or two for each module."""
    blocks = []
    start = 0
    for title, rooms in LAYERS.items():
        numbers = range(start, start + len(rooms))
        start += len(rooms)
        names = [name for name in MODULES if room_of(name) in numbers]
        blocks.append(f"{title}:\n\n" + "".join(map(_line, sorted(names, key=_order))))
    return "\n".join(blocks)


def _order(name: str) -> tuple[int, list[tuple[bool, str]]]:
    """Modules by room; in a folder its own modules before its folders."""
    *folders, own = name.split(".")[1:] or ["fpipe"]
    is_folder = MODULES[name].name == "__init__.py"
    return room_of(name), [*((True, folder) for folder in folders), (is_folder, own)]


def _line(name: str) -> str:
    *folders, own = name.split(".")[1:] or ["fpipe"]
    is_folder = MODULES[name].name == "__init__.py"
    left = "/".join([*folders, own]) + ("/" if is_folder else "")
    width = 34
    lines = wrap(sentence_of(name), 62)
    if len(left) >= width:
        lines.insert(0, "")
    shown = [
        f"    {left if not at else '':<{width}}{line}".rstrip() for at, line in enumerate(lines)
    ]
    return "".join(f"{line}\n" for line in shown)


def page_with(text: str) -> str:
    """architecture.md with this list."""
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Print the list, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="into docs/architecture.md")
    if parser.parse_args().write:
        PAGE.write_text(page_with(listed()), "utf-8")
    else:
        print(listed())


if __name__ == "__main__":
    main()
