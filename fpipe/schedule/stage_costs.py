"""The cost of each stage on one placement, and of each hop between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fpipe.schedule.link_queues import Link


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
