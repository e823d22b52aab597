"""The schedule itself: an immutable value, one tuple of actions per rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fpipe.errors import ScheduleError
from fpipe.schedule.action import Action, Op
from fpipe.schedule.grid import text_grid


@dataclass(frozen=True)
class Schedule:
    """Which rank runs which action, in which order.

    A schedule is pure data: it can be compared, hashed, printed, edited with
    `dataclasses.replace`, verified, simulated and run. Its constructor checks the form only;
    `fpipe.verify` proves that it can run.

    Attributes:
        placement: the rank of each stage, so ``len(placement)`` is the number of stages.
        actions: one tuple of `Action` per rank, in the order in which that rank runs them.
        name: for people; takes no part in equality or hash.

    Raises:
        ScheduleError: there is no rank or no stage, a placement names a rank that does not exist,
            or an entry is not an `Action`.

    Example:
        >>> from fpipe.schedule import Action, Schedule
        >>> parse = lambda text: [Action.parse(word) for word in text.split()]
        >>> schedule = Schedule(placement=[0, 1], actions=[parse("0F0 0B0"), parse("1F0 1B0")])
        >>> schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
        (2, 2, 1)
    """

    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    name: str = field(default="custom", compare=False)

    def __init__(
        self,
        placement: Iterable[int],
        actions: Iterable[Iterable[Action]],
        name: str = "custom",
    ) -> None:
        object.__setattr__(self, "placement", tuple(placement))
        object.__setattr__(self, "actions", tuple(tuple(row) for row in actions))
        object.__setattr__(self, "name", name)
        _check_form(self.placement, self.actions)

    @property
    def num_ranks(self) -> int:
        """Number of ranks: the length of `actions`."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Number of stages: the length of `placement`."""
        return len(self.placement)

    @cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches: one more than the greatest that an action names, or 0."""
        named = (a.microbatch for row in self.actions for a in row if a.microbatch is not None)
        return max(named, default=-1) + 1

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W."""
        return any(a.op in (Op.I, Op.W) for row in self.actions for a in row)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that the placement puts on `rank`, in order."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    @cached_property
    def _hash(self) -> int:
        return hash((self.placement, self.actions))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"<Schedule {self._summary}>"

    def __str__(self) -> str:
        """The schedule as a text grid (`fpipe.schedule.grid.text_grid` has choices)."""
        return f"{self._summary}\n{text_grid(self)}"

    @property
    def _summary(self) -> str:
        return (
            f"{self.name}: {self.num_ranks} ranks, {self.num_stages} stages, "
            f"{self.num_microbatches} microbatches"
        )


def _check_form(placement: Sequence[int], actions: Sequence[Sequence[Action]]) -> None:
    if not placement or not actions:
        raise ScheduleError(
            f"placement={tuple(placement)!r} with {len(actions)} ranks: "
            "a schedule needs at least one stage and one rank"
        )
    for stage, rank in enumerate(placement):
        if not isinstance(rank, int) or not 0 <= rank < len(actions):
            raise ScheduleError(
                f"placement[{stage}]={rank!r} must be a rank from 0 to {len(actions) - 1}, "
                f"because actions has {len(actions)} rows"
            )
    for rank, row in enumerate(actions):
        for position, action in enumerate(row):
            if not isinstance(action, Action):
                raise ScheduleError(
                    f"actions[{rank}][{position}]={action!r} must be a fpipe.Action; "
                    "fpipe.Action.parse('2F0') reads one from text"
                )
