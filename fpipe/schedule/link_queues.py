"""Links between ranks, and the messages that queue on them."""

from __future__ import annotations

from collections.abc import Iterable
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


class Queues:
    """The messages on the links of a placement in one run: each link carries one at a time.

    A link is one rank's to another, so its messages come in the order of that rank's row.

    Example:
        >>> from fpipe import Cost
        >>> costs = Cost(f=1, i=1, w=1, comm=2, transfer=5).on([0, 1])
        >>> queues = Queues(costs.links)
        >>> [queues.send(costs.down_links[0], made, 1) for made in (1.0, 2.0)]
        [8.0, 13.0]
    """

    def __init__(self, links: Iterable[Link]) -> None:
        self.free = [0.0] * (1 + max((link.number for link in links), default=0))

    def send(self, link: Link, made: float, size: float) -> float:
        """The arrival of a message that was made at this time, for a microbatch of this size."""
        if not link.transfer:
            return made + link.latency
        end = max(made, self.free[link.number]) + link.transfer * size
        self.free[link.number] = end
        return end + link.latency
