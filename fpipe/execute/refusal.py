"""The errors of steps that do not begin, and the rank that is to blame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from fpipe.errors import PipelineError


def odd_one_out(values: Sequence[Hashable]) -> int | None:
    """The first rank that differs from most others, None if all are equal."""
    common = Counter(values).most_common(1)[0][0]
    return next((rank for rank, value in enumerate(values) if value != common), None)


def refusal(rank: int | None, text: str) -> PipelineError:
    """The error of a step that did not begin."""
    return PipelineError(f"{text}. The pipeline can be used again", rank=rank)


def check_problems(
    deed: str, texts: Sequence[str | None], this_rank: int, problem: Exception | None
) -> None:
    """Refuse what a rank cannot do.

    Args:
        deed: what it cannot do.
        texts: of each rank what is wrong there, None if nothing is.
        this_rank: the number of this rank.
        problem: what is wrong on this rank, if anything is.

    Raises:
        PipelineError: about this rank if it has a problem, which is the cause, else about the first
            that has one; about none if all have the same.
    """
    failing = [rank for rank, text in enumerate(texts) if text is not None]
    if len(failing) > 1 and len({*texts}) == 1:
        raise refusal(None, f"no rank can {deed}: {texts[0]}") from problem
    if failing:
        rank = this_rank if this_rank in failing else failing[0]
        raise refusal(rank, f"rank {rank} cannot {deed}: {texts[rank]}") from problem
