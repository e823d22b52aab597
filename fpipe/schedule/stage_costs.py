"""The cost of each stage on one placement, also of stages that recompute, and of each hop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from fpipe.errors import ScheduleError
from fpipe.schedule.arguments import PerStage, values_of_stages
from fpipe.schedule.simulation.link_queues import Link


@dataclass(frozen=True)
class StageCosts:
    """A `Cost` on one placement: a value per stage, and one per boundary between stages.

    Attributes:
        f, i, w, b: times of each stage's actions.
        down: the least time of a hop from stage s to stage s + 1, at index s: its latency, and the
            transfer of the smallest microbatch.
        up: the same from stage s + 1 to stage s, at index s.
        activation: what F keeps.
        freed_by_i: the share of it that I frees; B or W frees the rest.
        memory_sizes: by which activations and transfers of each microbatch are multiplied. None
            where all are equal.
        unshard, reduce_grad: times of each stage's collectives.
        collective_lane: they run beside the rank.
        update: time of each stage's optimizer's step.
        down_links, up_links: the link of each of these hops, where transfers take any time.
        pair: the share of the sum of their times that an F and a B take together; None where none
            run together.
        shared: some link carries the messages of several ranks.
        blocking: a rank does nothing while a link carries its message.
    """

    f: tuple[float, ...]
    i: tuple[float, ...]
    w: tuple[float, ...]
    b: tuple[float, ...]
    down: tuple[float, ...]
    up: tuple[float, ...]
    activation: tuple[float, ...]
    freed_by_i: tuple[float, ...]
    memory_sizes: tuple[float, ...] | None
    unshard: tuple[float, ...] = ()
    reduce_grad: tuple[float, ...] = ()
    collective_lane: bool = True
    update: tuple[float, ...] = ()
    down_links: tuple[Link, ...] = ()
    up_links: tuple[Link, ...] = ()
    pair: float | None = None
    shared: bool = False
    blocking: bool = False

    @property
    def entangled(self) -> bool:
        """Whether actions of several ranks, or messages, move each other's starts in ways that
        tables of durations and delays do not tell."""
        return self.pair is not None or self.shared or self.blocking

    @property
    def links(self) -> tuple[Link, ...]:
        """The links of all hops; none where no transfer takes any time."""
        return self.down_links + self.up_links

    @cached_property
    def backward(self) -> tuple[float, ...]:
        """The least time of a whole backward of each stage: B, or I and W."""
        return tuple(min(b, i + w) for b, i, w in zip(self.b, self.i, self.w, strict=True))

    @cached_property
    def work(self) -> tuple[float, ...]:
        """The least time of all actions of each stage on a microbatch."""
        return tuple(f + backward for f, backward in zip(self.f, self.backward, strict=True))

    @cached_property
    def gradient(self) -> tuple[float, ...]:
        """The least time until each stage's backward hands its gradient on: that of I, or of B."""
        return tuple(map(min, self.b, self.i))

    @cached_property
    def deferred(self) -> tuple[float, ...]:
        """The memory that each stage holds between I and W."""
        pairs = zip(self.activation, self.freed_by_i, strict=True)
        return tuple(max(0.0, kept - freed) for kept, freed in pairs)

    @cached_property
    def earliest(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """When a microbatch can reach each stage, and its gradient, at the earliest.

        Both count from the start of the microbatch, as if it were the only one.
        """
        starts = [0.0]
        for forward, hop in zip(self.f, self.down, strict=False):
            starts.append(starts[-1] + forward + hop)
        returns = [starts[-1] + self.f[-1]]
        for gradient, hop in zip(self.gradient[:0:-1], self.up[::-1], strict=True):
            returns.append(returns[-1] + gradient + hop)
        return tuple(starts), tuple(returns[::-1])

    def tail_of(self, stage: int) -> float:
        """From the end of a stage's last input gradient to the end of the step; 0 for stage 0."""
        returns, gradient = self.earliest[1], self.gradient
        return returns[0] + self.backward[0] - returns[stage] - gradient[stage] if stage else 0.0


_TIMES: Final = ("f", "i", "w", "b", "update", "recompute")  # which ranks divide by their speed


def placed_values(
    values: Mapping[str, PerStage],
    placement: Sequence[int],
    ranks: int,
    speed: Sequence[float] | None,
) -> dict[str, tuple[float, ...]]:
    """A value for each stage of each of these arguments of a cost.

    Raises:
        ScheduleError: a sequence has not one value per stage, or there are too few speeds.

    Example:
        >>> placed_values({"f": 6, "activation": 2}, [0, 1, 1, 0], 2, speed=[1, 3])
        {'f': (3.0, 1.0, 1.0, 3.0), 'activation': (1.0, 1.0, 1.0, 1.0)}
    """
    if speed is not None and len(speed) < ranks:
        raise ScheduleError(
            f"cost.speed has {len(speed)} values for {ranks} ranks: give one per rank"
        )
    placed = {}
    for name, value in values.items():
        each = values_of_stages(name, value, len(placement), ranks)
        if speed is not None and name in _TIMES:
            each = tuple(time / speed[rank] for time, rank in zip(each, placement, strict=True))
        placed[name] = each
    return placed


def check_freed(kept: Sequence[float], freed: Sequence[float]) -> None:
    """Raise a `ScheduleError` where I would free more than F keeps."""
    for stage, (has, frees) in enumerate(zip(kept, freed, strict=True)):
        if frees > has * (1 + 1e-9):  # which may have been scaled otherwise
            raise ScheduleError(
                f"cost.freed_by_i is {frees:g} for stage {stage} and cost.activation is "
                f"{has:g}: I cannot free more than F keeps"
            )


def choices_of(remat: str | Sequence[str], stages: int) -> list[str]:
    """``"full"`` or ``"none"`` for each stage.

    Raises:
        ScheduleError: `remat` is neither of them, and has not one of them for each stage.
    """
    each = [remat] * stages if isinstance(remat, str) else list(remat)
    if len(each) != stages or not set(each) <= {"none", "full"}:
        raise ScheduleError(
            f"remat={remat!r:.60} must be 'none' or 'full', or one of these for each of the "
            f"{stages} stages"
        )
    return each


def recomputed(
    costs: StageCosts, choices: Sequence[str], more: Sequence[float], keeps: Sequence[float]
) -> dict[str, Any]:
    """The arguments of a cost with these choices, a value for each stage.

    The costs are those where no stage computes again. Then, the backward of each stage takes so
    much `more`, and its F keeps what `keeps` says.

    Raises:
        ScheduleError: a stage would keep more than where it does not compute again.
    """
    i, b, kept, freed = map(list, (costs.i, costs.b, costs.activation, costs.freed_by_i))
    for stage, choice in enumerate(choices):
        if choice == "none":
            continue
        if keeps[stage] > kept[stage] * (1 + 1e-9):
            raise ScheduleError(
                f"cost.kept is {keeps[stage]:g} for stage {stage} and cost.activation is "
                f"{kept[stage]:g}: a stage that computes again keeps no more than one that "
                "does not"
            )
        i[stage] += more[stage]
        b[stage] += more[stage]
        freed[stage] += keeps[stage] - kept[stage]
        kept[stage] = keeps[stage]
    return {"f": costs.f, "i": i, "w": costs.w, "b": b, "activation": kept, "freed_by_i": freed}
