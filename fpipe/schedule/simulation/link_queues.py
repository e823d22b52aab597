"""Links between ranks, and the messages that queue on them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple


class Link(NamedTuple):
    """The way of a message from one rank to another, on a link that carries one after the other.

    Attributes:
        number: which of the links of the placement it is; hops that share one have one number.
        latency: from the end of a transfer to its arrival.
        transfer: the time for which a message of a microbatch of size 1 occupies it; 0 for a hop
            within a rank.
    """

    number: int
    latency: float
    transfer: float


def links_on(
    ways: Sequence[Hashable],
    latencies: Sequence[float],
    transfers: Sequence[float],
    sources: Sequence[int],
) -> tuple[tuple[Link, ...], bool]:
    """The links of hops, and whether some link carries the messages of several ranks.

    A way is a name of the link of a hop, and a source the rank that sends.
    """
    numbers = {way: number for number, way in enumerate(dict.fromkeys(ways))}
    links = tuple(map(Link, map(numbers.__getitem__, ways), latencies, transfers))
    senders = {
        (link.number, source) for link, source in zip(links, sources, strict=True) if link.transfer
    }
    return links, len({number for number, _ in senders}) < len(senders)


class Queues:
    """The messages on the links of a placement in one run: each link carries one at a time.

    Messages are to be sent in the order in which they are made. On a link that ranks do not share,
    those of one rank are, in the order of its row.

    Example:
        >>> from fpipe import Cost
        >>> costs = Cost(f=1, i=1, w=1, comm=2, transfer=5).on([0, 1])
        >>> queues = Queues(costs.links)
        >>> [queues.send(costs.down_links[0], made, 1) for made in (1.0, 2.0)]
        [(6.0, 8.0), (11.0, 13.0)]
    """

    def __init__(self, links: Iterable[Link]) -> None:
        self.free = [0.0] * (1 + max((link.number for link in links), default=0))

    def send(self, link: Link, ready: float, size: float) -> tuple[float, float]:
        """When the transfer of a message ends, and when it arrives."""
        if not link.transfer:
            return ready, ready + link.latency
        end = max(ready, self.free[link.number]) + link.transfer * size
        self.free[link.number] = end
        return end, end + link.latency
