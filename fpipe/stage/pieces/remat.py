"""Remat policies: which forward values the backward may read, and which it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import fx

from fpipe.errors import check_choice

Policy = Callable[[fx.Node], bool]
"""Whether the backward may read the value of a forward node, or computes it again."""

Remat = str | Callable[[fx.Node], bool]


def save_all(node: fx.Node) -> bool:
    """Keep every forward value that the backward reads."""
    return True


def save_nothing(node: fx.Node) -> bool:
    """Keep the stage's inputs (and random values) only; compute the rest again."""
    return False


NAMES: Final = ("none", "full", "except_last")


def policies(remat: Remat) -> tuple[Policy, Policy]:
    """The policy of every microbatch, and that of a stage's last.

    Args:
        remat: ``"none"`` keeps all residuals; ``"full"`` keeps none and runs the forward again in
            the backward; ``"except_last"`` is full but for the last microbatch that a stage runs
            forward, whose backward comes first or soon (torchgpipe, arXiv 2004.09910);
            a callable gets an `fx.Node` of the traced forward (aten ops; ``node.meta["val"]`` has
            shape and dtype) and returns whether its value may be kept.

    Raises:
        StageError: `remat` is none of these.
    """
    if callable(remat):
        return remat, remat
    other = ", or a callable that takes a traced node and returns whether to save its value"
    check_choice("remat", remat, NAMES, other)
    usual = save_all if remat == "none" else save_nothing
    return usual, save_nothing if remat == "full" else save_all
