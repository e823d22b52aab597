"""What every family makes of its arguments."""

from __future__ import annotations

from fpipe.errors import ScheduleError
from fpipe.schedule.integer import plain_integer


def plain_counts(**counts: int) -> tuple[int, ...]:
    """The counts as Python's own integers, in their order; the keyword is the name to report.

    Raises:
        ScheduleError: one is no integer, a bool or less than 1.

    Example:
        >>> plain_counts(ranks=4, microbatches=8)
        (4, 8)
    """
    found = []
    for name, count in counts.items():
        plain = plain_integer(count)
        if plain is None or isinstance(plain, bool) or plain < 1:
            raise ScheduleError(f"{name}={count!r} must be an integer, 1 or more")
        found.append(plain)
    return tuple(found)


def round_size(*, ranks: int, microbatches: int) -> int:
    """Microbatches in a round of an interleaved schedule: how many a stage takes before the next.

    There are ``max(1, microbatches // ranks)`` rounds, so a round is at least as long as the
    pipeline wherever there are microbatches enough (https://github.com/pytorch/pytorch/pull/129597).

    Raises:
        ScheduleError: the microbatches do not divide into rounds of one size.

    Example:
        >>> round_size(ranks=4, microbatches=10)  # two rounds
        5
    """
    rounds = max(1, microbatches // ranks)
    size, rest = divmod(microbatches, rounds)
    if rest:
        # Both are rounds of one size: either the number of rounds stays, or there is one more.
        above = min(rounds * (size + 1), (rounds + 1) * ranks)
        raise ScheduleError(
            f"microbatches={microbatches} must divide into rounds of one size, and on "
            f"ranks={ranks} there are max(1, microbatches // ranks) = {rounds} rounds: "
            f"take {microbatches - rest} or {above} microbatches"
        )
    return size
