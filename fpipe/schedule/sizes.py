"""The size of a schedule in words, and its name in a line."""

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


def one_line(name: str) -> str:
    """A name as it stands within a line; in quotes, with escapes, where it would not stay in it.

    Example:
        >>> one_line("zb_h1"), one_line("two\\nlines")
        ('zb_h1', "'two\\\\nlines'")
    """
    return name if name.isprintable() else repr(name)
