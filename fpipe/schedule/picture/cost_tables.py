"""A cost in a notebook: a table of what each stage has, of pairs of ranks, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fpipe.schedule.picture.tables import table

_SHOWN_ALWAYS: Final = ("f", "i", "w", "comm", "activation")
_BY_PAIR: Final = ("comm", "transfer", "shared")
_LISTED: Final = ("sizes", "memory_sizes", "speed")


def cost_tables(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The arguments of a cost as tables, in HTML: a row for each stage, or one for each number.

    Args:
        arguments: all of them, by name.
        defaults: values that are not worth a row.
    """
    values = {
        name: value
        for name, value in arguments.items()
        if value is not None and (name in _SHOWN_ALWAYS or (value and value != defaults.get(name)))
    }
    several = {name: value for name, value in values.items() if isinstance(value, tuple)}
    stages = {
        name: value
        for name, value in several.items()
        if name not in _LISTED and name not in _BY_PAIR
    }
    html = ""
    if stages:
        rows = zip(range(len(next(iter(stages.values())))), *stages.values(), strict=True)
        each = ([str(stage), *numbers] for stage, *numbers in rows)
        html += table("Cost of each stage", ["stage", *stages], each)
    for name in _BY_PAIR:
        if name in several:
            between = several[name]
            header = ["from rank", *(f"to {rank}" for rank in range(len(between)))]
            lines = ([str(rank), *numbers] for rank, numbers in enumerate(between))
            html += table(f"{name}, between two ranks", header, lines)
    others: list[tuple[str, object]] = [
        (name, ", ".join(f"{number:g}" for number in value) if name in _LISTED else value)
        for name, value in values.items()
        if name not in stages and not (name in _BY_PAIR and name in several)
    ]
    title = "Cost of all stages" if stages else "Cost: times and activations of 1/p of a model"
    return html + (table(title, ["", "value"], others) if others else "")
