"""An action of a schedule: `2F0` is the forward (F) of stage 2 on microbatch 0; rows of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from enum import StrEnum
from typing import Any, Final, NamedTuple

from fpipe.errors import ScheduleError, a_type
from fpipe.schedule.arguments import is_several, plain_integer


class Op(StrEnum):
    """The operation of an action. An `Op` equals its text: ``Op.F == "F"``.

    The names are those of torch.distributed.pipelining, so that files can be exchanged; UPDATE is
    fpipe's own.
    """

    F = "F"  # forward
    B = "B"  # full backward: I and W in one
    I = "I"  # input gradient  # noqa: E741
    W = "W"  # weight gradient
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"  # whole-stage: gather the parameters
    RESHARD = "RESHARD"  # whole-stage: free the gathered parameters
    REDUCE_GRAD = "REDUCE_GRAD"  # whole-stage: reduce the gradients over data-parallel ranks
    UPDATE = "UPDATE"  # whole-stage: the optimizer's step; torch has no such op


COMPUTE_OPS: Final = frozenset({Op.F, Op.B, Op.I, Op.W})
SHARDING_OPS: Final = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD})
WHOLE_STAGE_OPS: Final = SHARDING_OPS | {Op.UPDATE}

# Python does not parse numbers of thousands of digits, and no stage has such a number.
_TEXT = re.compile(r"(\d{1,18})([A-Z]+(?:_[A-Z]+)?)(\d{0,18})", re.ASCII)


class Action(NamedTuple):
    """One entry of a rank's list: do `op` of `stage` on `microbatch`.

    Attributes:
        stage: number of the stage, from 0.
        op: an `Op`, or its text (``"F"``, ``"B"``, ``"I"``, ``"W"``, …), which compares equal.
        microbatch: number of the microbatch, from 0; None for whole-stage actions
            (UNSHARD, RESHARD, REDUCE_GRAD, UPDATE).

    Example:
        >>> str(Action(2, Op.F, 0))
        '2F0'
        >>> Action.parse("2F0") == Action(2, Op.F, 0)
        True
    """

    stage: int
    op: Op
    microbatch: int | None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action from its text form, the inverse of ``str(action)``.

        Args:
            text: such as ``"2F0"`` or ``"1UNSHARD"``. Spaces around it are ignored, no others.

        Raises:
            ScheduleError: the text is not an action, whole and exactly.

        Example:
            >>> Action.parse("13W7")
            Action(stage=13, op=<Op.W: 'W'>, microbatch=7)
        """
        match = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or match[2] not in Op.__members__:
            raise ScheduleError(f"text={_short(text)} is not an action: it {_RULE}")
        op = Op[match[2]]
        if (op in WHOLE_STAGE_OPS) != (match[3] == ""):
            fault = "a microbatch" if match[3] else "no microbatch"
            raise ScheduleError(
                f"text={text!r:.60} is not an action: {op} with {fault}; it {_RULE}"
            )
        return cls(int(match[1]), op, int(match[3]) if match[3] else None)


_RULE: Final = (
    "must be a stage, an op and a microbatch, such as '2F0' "
    f"(ops: {', '.join(op.value for op in Op)}; whole-stage ops take no microbatch)"
)


def _short(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


_NUMBERS: Final = (int, type(None))  # the usual types of a microbatch


def in_order(name: str, values: Iterable[Any], of: str) -> tuple[Any, ...]:
    """Ordered values as a tuple.

    Raises:
        ScheduleError: they have no order; `of` says what they should be.
    """
    if isinstance(values, Mapping | Set) or not is_several(values):
        raise ScheduleError(
            f"{name}={values!r:.60} is {a_type(values)}: it must be a sequence with {of}, "
            "such as a list"
        )
    return tuple(values)


def check_form(placement: Sequence[int], actions: Sequence[Sequence[Action]]) -> None:
    """Raise a `ScheduleError` where a placement does not fit the rows."""
    if not placement or not actions:
        raise ScheduleError(
            f"placement={tuple(placement)!r:.60} with {len(actions)} ranks: "
            "a schedule needs at least one stage and one rank"
        )
    for stage, rank in enumerate(placement):
        if not isinstance(rank, int) or not 0 <= rank < len(actions):
            raise ScheduleError(
                f"placement[{stage}]={rank!r:.60} must be a rank from 0 to {len(actions) - 1}, "
                f"because actions has {len(actions)} rows"
            )


def plain_or_same(number: Any) -> Any:
    """An integer of any type, such as numpy's, as an int; other values stay, for the checks."""
    plain = plain_integer(number)
    return number if plain is None else int(plain)  # a bool is an integer that prints as a word


def plain_row(rank: int, row: tuple[Action, ...]) -> tuple[Action, ...]:
    """A row whose stages and microbatches are Python integers; an entry must be an action."""
    if all(
        type(action) is Action
        and type(action[0]) is int
        and type(action[1]) is Op
        and type(action[2]) in _NUMBERS
        for action in row
    ):
        return row
    return tuple(_plain_action(action, f"actions[{rank}][{at}]") for at, action in enumerate(row))


def _plain_action(action: object, place: str) -> Action:
    if not isinstance(action, Action):
        raise ScheduleError(
            f"{place}={action!r:.60} must be a fpipe.Action; fpipe.Action.parse('2F0') reads one "
            "from text"
        )
    stage, op, microbatch = plain_or_same(action.stage), action.op, plain_or_same(action.microbatch)
    if not isinstance(stage, int):
        fault = f"stage={stage!r:.60}: it must be the number of a stage"
    elif not isinstance(op, str) or op not in Op.__members__:
        fault = f"op={op!r:.60}: it must be one of {', '.join(Op)}"
    elif not isinstance(microbatch, int | None):
        fault = f"microbatch={microbatch!r:.60}: it must be a number, or None for a whole stage"
    else:
        return Action(stage, Op[op], microbatch)
    raise ScheduleError(f"{place} has {fault}")
