"""CSV as torch.distributed.pipelining reads and writes it: a row per rank, an action per cell."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from fpipe.errors import ScheduleError
from fpipe.schedule.action import COMPUTE_OPS, Action, Op
from fpipe.schedule.exchange.files import Cell, Plain, implied_placement

MESSAGES: Final = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B})
_OVERLAP: Final = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def format_csv(
    placement: Sequence[int], actions: Sequence[Sequence[Action]], *, overlap: bool = False
) -> str:
    r"""Write rows as torch's ``_dump_csv`` writes them in its compute-only format.

    The file has no place for a placement: it must follow from the rows, as it does for every
    schedule in which each rank and each stage has work. UPDATE is left out, for torch has no such
    op.

    The arguments are those of `Schedule`, and `overlap` that of `Schedule.to_csv`.

    Raises:
        ScheduleError: a rank has no action, or the rows imply another placement.

    Example:
        >>> row = [Action(0, Op.F, 0), Action(0, Op.B, 0)]
        >>> format_csv([0], [row])
        '0F0,0B0\r\n'
    """
    actions = [[action for action in row if action.op != Op.UPDATE] for row in actions]
    for rank, row in enumerate(actions):
        if not row:
            raise ScheduleError(
                f"actions[{rank}] is empty, and CSV would lose it: to_json keeps every rank"
            )
    implied = implied_placement(
        [[Cell(action, position + 1) for position, action in enumerate(row)] for row in actions],
        partial(_where, "this schedule as CSV"),
    )
    if implied != tuple(placement):
        raise ScheduleError(
            f"placement={tuple(placement)!r:.60} cannot be told from the actions, which imply "
            f"{implied!r:.60}, and CSV holds actions alone: to_json keeps the placement"
        )
    text = io.StringIO(newline="")
    csv.writer(text).writerows(map(_overlapped, actions) if overlap else actions)
    return text.getvalue()


def _overlapped(row: Sequence[Action]) -> list[str]:
    """The cells of a row, with an F and the B of another stage after it in one cell."""
    cells: list[str] = []
    rest = iter(range(len(row)))
    for at in rest:
        action, following = row[at], row[at + 1] if at + 1 < len(row) else None
        if (
            action.op == Op.F
            and following is not None
            and following.op == Op.B
            and following.stage != action.stage
        ):
            cells.append(f"({action};{following})OVERLAP_F_B")
            next(rest)
        else:
            cells.append(str(action))
    return cells


def parse_csv(text: str, *, name: str = "custom", source: str = "csv") -> Plain:
    """Read what torch's ``_dump_csv`` writes, in its compute-only format or with messages.

    Empty cells (torch's idle steps) are skipped. ``(0F5;3B2)OVERLAP_F_B`` is read as its parts, in
    order: fpipe overlaps independent actions anyway. SEND_* and RECV_* are left out, because fpipe
    inserts them when it lowers a schedule.

    The placement is what the rows imply. Errors call the text `source`.

    Raises:
        ScheduleError: a cell is not an action, a row is empty, or the rows imply no placement. The
            text names row and column, counted from 1, and the reason.

    Example:
        >>> plain = parse_csv("0F0,,0B0\\n1RECV_F0,1F0,1B0\\n")
        >>> plain.placement, *map(str, plain.actions[1])
        ((0, 1), '1F0', '1B0')
    """
    where = partial(_where, source)
    rows: list[list[Cell]] = []
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for rank, row in enumerate(reader):
            cells = []
            for column, cell in enumerate(row, 1):
                try:
                    actions = list(_read(cell))
                except ScheduleError as error:
                    raise ScheduleError(f"{where(rank, column)}: {error}") from error
                cells += [Cell(action, column) for action in actions if action.op not in MESSAGES]
            if not cells:
                raise ScheduleError(
                    f"{source}: row {rank + 1} (rank {rank}) has no action: there is a row for "
                    "each rank and no other line; remove it if it is blank"
                )
            rows.append(cells)
    except csv.Error as error:
        raise ScheduleError(f"{source}: row {len(rows) + 1} is not CSV: {error}") from error
    if not rows:
        raise ScheduleError(f"{source}: the file is empty: it must have a row for each rank")
    placement = implied_placement(rows, where)
    return Plain(placement, tuple(tuple(cell.action for cell in row) for row in rows), name)


def _read(cell: str) -> Iterator[Action]:
    """The actions of a cell: none, one, or those that torch overlaps."""
    cell = cell.strip()
    if not cell:
        return
    if not cell.startswith("("):
        yield Action.parse(cell)
        return
    match = _OVERLAP.fullmatch(cell)
    if match is None:
        raise ScheduleError(
            f"text={cell!r:.60} is not an action: what is in brackets must be actions with ';' "
            "between and OVERLAP_F_B behind, such as '(0F5;3B2)OVERLAP_F_B'"
        )
    for word in match[1].split(";"):
        action = Action.parse(word)
        if action.op not in COMPUTE_OPS:
            raise ScheduleError(f"text={cell!r:.60} overlaps {action}, which does not compute")
        yield action


def _where(source: str, rank: int, column: int) -> str:
    return f"{source}: row {rank + 1} (rank {rank}), column {column}"
