"""Divide a chain of parts into stages: exactly, under memory, on any placement.

Parts come in a row and stages are runs of them. A label of the search stands for one way to take
the first few stages; of two that end at the same part, one that is as good in everything makes the
other needless. Without a limit of memory this is the textbook's dynamic programming.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from math import inf
from typing import NamedTuple

from fpipe.errors import StageError


class Division(NamedTuple):
    """A chain that was divided.

    Attributes:
        ends: for each stage, how many parts it and all before it have.
        slowest: the biggest load of a stage.
        crossing: what crosses the boundaries between stages on different ranks.
    """

    ends: tuple[int, ...]
    slowest: float
    crossing: float


class _Label(NamedTuple):
    """One way to take the first few stages.

    Attributes:
        crossing: over the boundaries so far.
        slowest: the biggest load so far.
        memory: of each rank that comes again.
        ends: as in `Division`.
    """

    crossing: float
    slowest: float
    memory: tuple[float, ...]
    ends: tuple[int, ...]


def divide(
    loads: Sequence[float],
    widths: Sequence[float],
    placement: Sequence[int],
    *,
    memory: Callable[[int, int, int], float] = lambda stage, first, end: 0.0,
    limit: float = inf,
    slack: float = 0.0,
) -> Division:
    """The division whose slowest stage is fastest; among those, the one with narrowest boundaries.

    Args:
        loads: of each part.
        widths: what crosses the boundary after each part but the last.
        placement: the rank of each stage. Every stage has at least one part, and what crosses
            between two stages on one rank costs nothing.
        memory: ``(stage, first, end)`` to what a stage of these parts needs on its rank.
        limit: of the memory of a rank.
        slack: how much slower than necessary the slowest stage may be, as a fraction, if
            boundaries are narrower then.

    Raises:
        StageError: there are fewer parts than stages, or no division stays within the limit.
    """
    if len(loads) < len(placement):
        raise StageError(
            f"the module has {len(loads)} parts that can be told apart, fewer than the "
            f"{len(placement)} stages of the schedule: name more candidates, or choose a schedule "
            "with fewer stages"
        )
    search = partial(_search, loads, widths, placement, memory, limit)
    # A bound close to the optimum leaves few labels: it starts at the least that there can be.
    whole, spare = sum(loads), 0.1
    bound, fastest = 0.0, None
    while fastest is None and bound < whole:
        bound = min(max(whole / len(placement), *loads) * (1 + spare), whole)
        fastest = search(bound, narrow=False)
        spare *= 3
    if fastest is None:
        raise StageError(
            f"no division into {len(placement)} stages keeps every rank within memory={limit:.4g}: "
            "allow more, or take more ranks or more candidates"
        )
    found = search(fastest.slowest * (1 + slack), narrow=True)
    assert found is not None
    return found


def _search(
    loads: Sequence[float],
    widths: Sequence[float],
    placement: Sequence[int],
    memory: Callable[[int, int, int], float],
    limit: float,
    bound: float,
    *,
    narrow: bool,
) -> Division | None:
    """The best division whose stages are all within `bound`: the narrowest, or the fastest."""
    count, stages = len(loads), len(placement)
    before = [0.0, *accumulate(loads)]
    bound *= 1 + 1e-12  # a rounding error must not exclude the division that set the bound
    nothing = (0.0,) * (max(placement) + 1)
    reached: dict[int, list[_Label]] = {0: [_Label(0.0, 0.0, nothing, ())]}
    for stage, rank in enumerate(placement):
        left = stages - stage - 1
        again = rank in placement[stage + 1 :]
        hop = left and placement[stage + 1] != rank
        following: dict[int, list[_Label]] = {}
        for first, labels in reached.items():
            for end in range(first + 1 if left else count, count - left + 1):
                load = before[end] - before[first]
                if load > bound:
                    break
                need = memory(stage, first, end) if limit < inf else 0.0
                for label in labels:
                    used = label.memory[rank] + need
                    if used > limit:
                        continue
                    new = _Label(
                        label.crossing + (widths[end - 1] if hop else 0.0),
                        max(label.slowest, load),
                        tuple(used * again if r == rank else m for r, m in enumerate(label.memory)),
                        (*label.ends, end),
                    )
                    _keep(following.setdefault(end, []), new, narrow=narrow)
        reached = following
    best = min(
        reached.get(count, []),
        key=lambda label: label[:2] if narrow else (label.slowest, label.crossing),
        default=None,
    )
    return None if best is None else Division(best.ends, best.slowest, best.crossing)


def _keep(labels: list[_Label], new: _Label, *, narrow: bool) -> None:
    """Add a label unless another is as good in everything; drop those that it makes needless."""
    if not any(_covers(old, new, narrow=narrow) for old in labels):
        labels[:] = [old for old in labels if not _covers(new, old, narrow=narrow)]
        labels.append(new)


def _covers(one: _Label, other: _Label, *, narrow: bool) -> bool:
    """Whether `one` is as good as `other`, however they go on."""
    return (
        one.slowest <= other.slowest
        and (not narrow or one.crossing <= other.crossing)
        and all(a <= b for a, b in zip(one.memory, other.memory, strict=True))
    )
