"""Where schedules come from and go to: families by name, files by their suffix."""

from __future__ import annotations

import argparse
import inspect
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any, Final, NamedTuple

from fpipe import schedules
from fpipe.cli.options import count
from fpipe.errors import ScheduleError
from fpipe.schedule.cost import Cost
from fpipe.schedule.exchange.files import load
from fpipe.schedule.exchange.text_form import parse_text
from fpipe.schedule.schedule import Schedule
from fpipe.schedule.timeline import Timeline

SUFFIXES: Final = (".csv", ".json", ".txt")
HELP: Final = (
    "a family by its name (those of torch too), or a file: .csv as torch.distributed.pipelining "
    "writes it, .json or .txt as fpipe does"
)
MOST: Final = 10**8
"""The most actions of one kind, each of which takes a hundred bytes or more."""
_EVALUATION: Final = "forward_only"  # no family of `schedules.get`, for it owes no gradients
_MAKERS: Final = (*schedules.FAMILIES.values(), schedules.forward_only)
FAMILIES: Final = (
    f"families: {', '.join(family.__name__ for family in _MAKERS)}\n"
    "(fpipe show --help says what each of them is)"
)


class Size(NamedTuple):
    """The size of a schedule of a family; None for an option that is absent."""

    ranks: int | None
    microbatches: int | None
    stages_per_rank: int | None


def described_families() -> str:
    """A line for each family: its name, and the first line of its docstring."""
    lines = ["families:"]
    for family in _MAKERS:
        summary = (inspect.getdoc(family) or "").partition("\n")[0]
        text = f"{family.__name__:25}{summary}"
        lines.append(fill(text, width=80, initial_indent="  ", subsequent_indent=" " * 27))
    return "\n".join(lines)


def add_size(parser: argparse.ArgumentParser) -> None:
    """Add the options for the size of a family."""
    parser.add_argument("-p", "--ranks", type=count, metavar="P", help="number of ranks")
    parser.add_argument(
        "-m", "--microbatches", type=count, metavar="M", help="number of microbatches"
    )
    parser.add_argument(
        "--stages-per-rank",
        type=count,
        metavar="V",
        help="stages on each rank, for families that take any number (default: 2; 1 for "
        "forward_only)",
    )


def size_of(options: argparse.Namespace) -> Size:
    """The values of the options of `add_size`."""
    return Size(options.ranks, options.microbatches, options.stages_per_rank)


def check_room(ranks: int, microbatches: int, stages_per_rank: int | None = None) -> None:
    """Raise a `MemoryError` early if so many actions would fill the memory of any machine."""
    if ranks * microbatches * (stages_per_rank or 1) > MOST:
        raise MemoryError


def is_file(source: str) -> bool:
    """Whether the source of a schedule is a file."""
    return source.lower().endswith(SUFFIXES) or "/" in source


def read(path: str) -> Schedule:
    """Read a schedule from a file, in the form that its suffix names.

    Raises:
        ScheduleError: the suffix is none of ours, or the file is malformed.
        OSError: it cannot be opened.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".csv":
        return Schedule.from_csv(path)
    if suffix == ".json":
        return Schedule.from_json(path)
    if suffix == ".txt":
        return Schedule(*parse_text(load(path), source=path))
    raise ScheduleError(f"{path}: the suffix must be one of {', '.join(SUFFIXES)}")


def schedule_of(
    source: str,
    size: Size,
    cost: Cost | None = None,
    memory: float | tuple[float, ...] | None = None,
) -> Schedule:
    """The schedule of a family or a file.

    A file must agree with the size. Cost and memory are for `zb_auto`.

    Raises:
        ScheduleError: the family is unknown, lacks a size or refuses it, or the file is malformed
            or has another size.
        OSError: a file cannot be opened.
    """
    if not is_file(source):
        return _family(source, size, {"cost": cost, "memory": memory})
    schedule = read(source)
    stages = Counter(schedule.placement)
    numbers = {stages[rank] for rank in range(schedule.num_ranks)}
    has = (schedule.num_ranks, schedule.num_microbatches, " or ".join(map(str, sorted(numbers))))
    for name, expected, value in zip(Size._fields, size, has, strict=True):
        if expected is not None and str(expected) != str(value):
            option = "--" + name.replace("_", "-")
            raise ScheduleError(
                f"{source} has {value} {name.replace('_', ' ')} and {option} is {expected}: "
                "leave the option out, or take another file"
            )
    return schedule


def _family(name: str, size: Size, extra: Mapping[str, Any]) -> Schedule:
    # An unknown name is the greater fault: it comes first, whatever the size.
    ranks, microbatches, stages = size
    evaluates = name.lower().replace("-", "_") in (_EVALUATION, _EVALUATION.replace("_", ""))
    if ranks is None or microbatches is None:
        if not evaluates:
            schedules.get(name, ranks=1, microbatches=1)
        raise ScheduleError(f"{name} is a family: give --ranks and --microbatches")
    check_room(ranks, microbatches, stages)
    if evaluates:
        return schedules.forward_only(
            ranks=ranks, microbatches=microbatches, stages_per_rank=stages or 1
        )
    accepted = {key: value for key, value in extra.items() if schedules.takes(name, key)}
    return schedules.get(
        name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages, **accepted
    )


def add_outputs(parser: argparse.ArgumentParser, forms: tuple[str, ...]) -> None:
    """Add an option for each form that can be written to a file."""
    for form in forms:
        parser.add_argument(
            f"--{form}",
            metavar="FILE",
            help=f"write {_FORMS[form]} to FILE (- for standard output)",
        )


def write_outputs(
    options: argparse.Namespace, forms: tuple[str, ...], drawn: Schedule | Timeline
) -> bool:
    """Write each form that has an option; return whether there was any."""
    chosen = [(form, path) for form in forms if (path := getattr(options, form)) is not None]
    for form, path in chosen:
        text = getattr(drawn, f"to_{form}")(None if path == "-" else path)
        if path == "-":
            print(text, end="")
        else:
            print(f"wrote {path}")
    return bool(chosen)


PICTURES: Final = ("svg", "html", "trace")
FILES: Final = ("csv", "json", "text")
_FORMS: Final = {
    "svg": "a picture",
    "html": "an interactive page",
    "trace": "a trace for https://ui.perfetto.dev",
    "csv": "the schedule as torch reads it",
    "json": "the schedule with its placement and name",
    "text": "the schedule as lines that people read",
}
