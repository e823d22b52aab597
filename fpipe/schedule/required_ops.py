"""The ops that a schedule must run for each stage: F, with or without I and W."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from fpipe.errors import ScheduleError, a_type
from fpipe.schedule.action import Op
from fpipe.schedule.dependencies import Reads
from fpipe.schedule.schedule import Schedule

Owed = tuple[frozenset[Op], ...]
Requires = str | Sequence[str | Collection[str]]

LEGAL: Final[Mapping[frozenset[str], tuple[frozenset[str], ...]]] = MappingProxyType(
    {
        frozenset("F"): (frozenset("F"),),
        frozenset("FI"): (frozenset("FI"), frozenset("FB")),
        frozenset("FW"): (frozenset("FW"), frozenset("FB"), frozenset("FIW")),
        frozenset("FIW"): (frozenset("FB"), frozenset("FIW")),
    }
)
"""Required ops of a stage, and the ops on one microbatch that satisfy them; see `fpipe.verify`."""


def owed_by_stage(requires: Requires | None, reads: Reads) -> Owed:
    """`requires` as one set of ops per stage.

    Args:
        requires: as `fpipe.verify` takes it.
        reads: per stage, the stages whose output it reads.

    Raises:
        ScheduleError: `requires` is not a sequence with one entry per stage, an entry is not F
            with or without I and W, or a stage owes a gradient that no stage after it passes back.

    Example:
        >>> [" ".join(sorted(owed)) for owed in owed_by_stage(["F", "FW"], ((), (0,)))]
        ['F', 'F W']
    """
    if requires is None:
        requires = "FIW"
    if isinstance(requires, str):
        requires = [requires] * len(reads)
    if not isinstance(requires, Sequence):
        raise ScheduleError(
            f"requires={requires!r:.60} is {a_type(requires)}: give one entry per stage, "
            "such as 'FIW', or one string for them all"
        )
    if len(requires) != len(reads):
        raise ScheduleError(
            f"requires has {len(requires)} entries and the schedule {len(reads)} stages: give one "
            "entry per stage, or one string for them all"
        )
    owed = tuple(_entry(stage, entry) for stage, entry in enumerate(requires))
    for reader, sources in enumerate(reads):
        for stage in sources:
            if len(owed[stage]) > 1 and Op.I not in owed[reader]:
                raise ScheduleError(
                    f"requires[{stage}]={requires[stage]!r} owes a gradient, which comes from the "
                    f"input gradient of stage {reader}, and requires[{reader}]="
                    f"{requires[reader]!r} has no I: add it there, or owe F alone at stage {stage}"
                )
    return owed


def owed_by_actions(schedule: Schedule) -> list[str]:
    """The required ops of each stage, inferred from its actions, as `fpipe.verify` takes them."""
    ops: defaultdict[tuple[int, int | None], set[str]] = defaultdict(set)
    for row in schedule.actions:
        for stage, op, microbatch in row:
            ops[stage, microbatch].add(op)
    forms: list[set[str]] = [set() for _ in schedule.placement]
    for (stage, _), has in ops.items():
        forms[stage].add("B" if Op.B in has else "".join(op for op in "IW" if op in has))
    owed = []
    passed = False  # whether the stage before owes a gradient, which this one then passes back
    for form in forms:
        # One microbatch with I alone shows that B elsewhere stands for I; the same holds for W.
        halves = form & {"I", "W"} or form & {"B", "IW"}
        i = passed or any(half != "W" for half in halves)
        w = any(half != "I" for half in halves)
        passed = i or w
        owed.append("F" + "I" * i + "W" * w)
    return owed


def _entry(stage: int, entry: str | Collection[str]) -> frozenset[Op]:
    ops = list(entry) if isinstance(entry, Collection) else []
    if Op.F not in ops or not all(op in (Op.F, Op.I, Op.W) for op in ops):
        raise ScheduleError(
            f"requires[{stage}]={entry!r:.60} must be one of 'F', 'FI', 'FW' and 'FIW': forward, "
            "input gradient, weight gradient (B is I and W in one, so it is not owed as such)"
        )
    return frozenset(Op(op) for op in ops)
