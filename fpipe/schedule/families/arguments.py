"""The checks that every family makes of its arguments."""

from __future__ import annotations

from fpipe.errors import ScheduleError


def check_counts(**counts: int) -> None:
    """Refuse a count that is no integer or is less than 1; the keyword is the name to report.

    Raises:
        ScheduleError: naming the argument, its value and the rule.

    Example:
        >>> check_counts(ranks=4, microbatches=8)
    """
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ScheduleError(f"{name}={count!r} must be an integer, 1 or more")


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
