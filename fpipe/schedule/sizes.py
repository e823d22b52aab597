"""The size of a schedule in words."""

from __future__ import annotations


def sizes(ranks: int, stages: int, microbatches: int) -> str:
    """How many ranks, stages and microbatches there are.

    Example:
        >>> sizes(1, 2, 8)
        '1 rank, 2 stages, 8 microbatches'
    """
    return ", ".join(
        f"{number} {noun if number == 1 else plural}"
        for number, noun, plural in (
            (ranks, "rank", "ranks"),
            (stages, "stage", "stages"),
            (microbatches, "microbatch", "microbatches"),
        )
    )
