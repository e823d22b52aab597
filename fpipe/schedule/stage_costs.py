"""The cost of each stage on one placement, and of each hop between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Link(NamedTuple):
    """A way of messages from one rank to another, which carries one after the other.

    Attributes:
        number: which of the links of the placement it is; a rank has one to each other rank.
        latency: from the end of a transfer to its arrival.
        transfer: the time for which a message of a microbatch of size 1 occupies it; 0 for a hop
            within a rank.
    """

    number: int
    latency: float
    transfer: float


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
        sizes: of each microbatch; times and activations are multiplied by it. None where all are
            equal.
        unshard, reduce_grad: times of each stage's collectives.
        collective_lane: they run beside the rank.
        update: time of each stage's optimizer's step.
        down_links, up_links: the link of each of these hops, where transfers take any time.
        pair: the share of the sum of their times that an F and a B take together; None where none
            run together.
    """

    f: tuple[float, ...]
    i: tuple[float, ...]
    w: tuple[float, ...]
    b: tuple[float, ...]
    down: tuple[float, ...]
    up: tuple[float, ...]
    activation: tuple[float, ...]
    freed_by_i: tuple[float, ...]
    sizes: tuple[float, ...] | None
    unshard: tuple[float, ...] = ()
    reduce_grad: tuple[float, ...] = ()
    collective_lane: bool = True
    update: tuple[float, ...] = ()
    down_links: tuple[Link, ...] = ()
    up_links: tuple[Link, ...] = ()
    pair: float | None = None

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


class Queues:
    """The messages on the links of a placement in one run: each link carries one at a time.

    A link is one rank's to another, so its messages come in the order of that rank's row.

    Example:
        >>> from fpipe import Cost
        >>> costs = Cost(f=1, i=1, w=1, comm=2, transfer=5).on([0, 1])
        >>> queues = Queues(costs)
        >>> [queues.send(costs.down_links[0], made, 1) for made in (1.0, 2.0)]
        [8.0, 13.0]
    """

    def __init__(self, costs: StageCosts) -> None:
        links = (*costs.down_links, *costs.up_links)
        self.free = [0.0] * (1 + max((link.number for link in links), default=0))

    def send(self, link: Link, made: float, size: float) -> float:
        """The arrival of a message that was made at this time, for a microbatch of this size."""
        if not link.transfer:
            return made + link.latency
        end = max(made, self.free[link.number]) + link.transfer * size
        self.free[link.number] = end
        return end + link.latency
