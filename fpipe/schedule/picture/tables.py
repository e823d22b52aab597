"""Values as they show themselves in a notebook: tables, folded text, and a curve, as HTML.

No colour of text is set in a table, so that the page's own theme shows. Costs are shown by it, so
it knows no chart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from fpipe.schedule.picture.captions import marked_up, short

_BOX: Final = 'style="max-width:100%;overflow:auto;max-height:36em" tabindex="0"'


def table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[object]], note: str = ""
) -> str:
    """A table as HTML. A long one has a bar to scroll, a wide one breaks its words.

    Args:
        caption: says what the table shows, above it.
        header: the names of the columns.
        rows: the cells, the first of each a heading; numbers are aligned to the right.
        note: below the table.

    Example:
        >>> table("Loads", ["stage", "ms"], [["0", 1.5]]).count("<th scope=")
        3
    """
    head = "".join(f'<th scope="col" {_align("")}>{marked_up(name)}</th>' for name in header)
    lines = []
    for name, *cells in rows:
        line = f'<th scope="row" {_align("")}>{marked_up(_text(name))}</th>'
        line += "".join(f"<td {_align(cell)}>{marked_up(_text(cell))}</td>" for cell in cells)
        lines.append(f"<tr>{line}</tr>")
    title = marked_up(caption)
    below = f"<p>{marked_up(note)}</p>" if note else ""
    return (
        f'<div {_BOX} role="region" aria-label="{title}"><table style="margin:0">'
        f'<caption style="text-align:left;caption-side:top;white-space:nowrap">{title}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>{below}"
    )


def folded(summary: str, text: str) -> str:
    """Text that is shown when a reader opens it."""
    title = marked_up(summary)
    return (
        f'<details><summary>{title}</summary><pre {_BOX} role="region" aria-label="{title}">'
        f"{marked_up(text)}</pre></details>"
    )


def curve(amounts: Sequence[float], description: str, above: str, below: str) -> str:
    """A picture of amounts, one beside the other, as an area over a line.

    The text `above` says what the highest is, and `below` what goes from left to right.
    """
    wide, tall, top = 900.0, 90.0, 20.0
    most, count = max(amounts, default=0) or 1, max(len(amounts), 1)
    # The most of what one pixel shows.
    columns = min(count, int(wide))
    steps = []
    for column in range(columns):
        first = column * count // columns
        end = max((column + 1) * count // columns, first + 1)
        level = top + tall * (1 - max(amounts[first:end], default=0) / most)
        steps.append(f"V{level:.1f}H{(column + 1) * wide / columns:.1f}")
    bottom, height = top + tall, top + tall + 20
    text = 'fill="#333" font-size="12" font-family="sans-serif"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:g}" height="{height:g}" '
        f'viewBox="0 0 {wide:g} {height:g}" style="max-width:100%;height:auto" role="img" '
        f'aria-label="{marked_up(description)}"><rect width="{wide:g}" height="{height:g}" '
        f'fill="#fff"/><path fill="#56b4e9" stroke="#333" '
        f'd="M0 {bottom:g}{"".join(steps)}V{bottom:g}z"/>'
        f'<text x="4" y="14" {text}>{marked_up(above)}</text>'
        f'<text x="4" y="{bottom + 14:g}" {text}>{marked_up(below)}</text></svg>'
    )


def _text(cell: object) -> str:
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        return str(cell)
    return f"{cell:,}" if isinstance(cell, int) else short(cell)


def _align(cell: object) -> str:
    side = "right" if isinstance(cell, int | float) else "left"
    return f'style="text-align:{side};overflow-wrap:anywhere"'


_SHOWN_ALWAYS: Final = ("f", "i", "w", "comm", "activation")
_BY_PAIR: Final = ("comm", "transfer", "shared")
_LISTED: Final = ("sizes", "memory_sizes", "speed")


def cost_tables(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The arguments of a cost as tables, in HTML: a row for each stage, or one for each number.

    Values that are as by default are not worth a row.
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
