"""Remat policies: which forward values the backward may read, and which it computes again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from torch import fx

from fpipe.errors import StageError, check_choice, label_of

Policy = Callable[[fx.Node], bool]
"""Whether the backward may read the value of a forward node, or computes it again."""

Policies: TypeAlias = tuple[Policy, ...]
"""One for each stage."""

Remat: TypeAlias = str | Policy | Sequence[str | Policy]
"""A policy by its name or as a function, of all stages or of each."""


def save_all(node: fx.Node) -> bool:
    """Keep every forward value that the backward reads."""
    return True


def save_nothing(node: fx.Node) -> bool:
    """Keep the stage's inputs (and random values) only; compute the rest again."""
    return False


NAMES: Final = ("none", "full", "except_last")


def policies(remat: Remat, stages: int) -> tuple[Policies, Policies]:
    """For each stage the policy of every microbatch, and that of its last.

    Args:
        remat: ``"none"`` keeps all residuals; ``"full"`` keeps none and runs the forward again in
            the backward; ``"except_last"`` is full but for the last microbatch that a stage runs
            forward, whose backward comes first or soon (torchgpipe, arXiv 2004.09910);
            a callable gets an `fx.Node` of the traced forward (aten ops; ``node.meta["val"]`` has
            shape and dtype) and returns whether its value may be kept. Or a list of these, one for
            each stage.
        stages: how many there are.

    Raises:
        StageError: `remat` is none of these, or has not one for each stage.
    """
    if isinstance(remat, list | tuple):
        if len(remat) != stages:
            raise StageError(
                f"remat has {len(remat)} entries, but the schedule has {stages} stages: give one "
                "for each stage, or one alone for all"
            )
        pairs = [_pair(f"remat[{stage}]", own) for stage, own in enumerate(remat)]
    else:
        pairs = [_pair("remat", remat)] * stages
    return tuple(usual for usual, _ in pairs), tuple(last for _, last in pairs)


def named(remat: Remat) -> str:
    """A text that is the same in every process."""
    if isinstance(remat, list | tuple):
        return ", ".join(map(named, remat))
    return remat if isinstance(remat, str) else label_of(remat)


def _pair(name: str, remat: object) -> tuple[Policy, Policy]:
    if callable(remat):
        return remat, remat
    other = ", or a callable that takes a traced node and returns whether to save its value"
    check_choice(name, remat, NAMES, other)
    usual = save_all if remat == "none" else save_nothing
    return usual, save_nothing if remat == "full" else save_all
