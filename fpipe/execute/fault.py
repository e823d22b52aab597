"""Faults of a step: the error that names the rank to blame, and the message for other ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass

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
    """Refuse what a rank cannot do, a `deed` such as "run this step".

    The texts say why, of each rank that cannot; `problem` is what is wrong on this one.

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


class Torn(Exception):
    """A step was left half-way: what comes next could not be told from what came before.

    Attributes:
        failure: what an action raised, if one did; its cause is this error's cause too.
    """

    def __init__(self, failure: Exception) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass(frozen=True)
class Fault:
    """Why a step failed.

    Attributes:
        rank: the rank at fault, None if it cannot be said.
        text: what happened, with the original error's text.
        breaks: whether the connections of the group are lost with it.
        stage: the stage of the action that failed, if an action did.
        microbatch: its microbatch.
        action: the action as text.
    """

    rank: int | None
    text: str
    breaks: bool
    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None

    @classmethod
    def of(cls, error: PipelineError) -> Fault:
        """The fault of an action that raised."""
        return cls(error.rank, str(error), False, error.stage, error.microbatch, error.action)

    def dump(self) -> str:
        """As text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str | bytes) -> Fault:
        """The inverse of `dump`."""
        return cls(**json.loads(text))

    def error(self) -> PipelineError:
        """The error that every rank raises."""
        after = (
            "The connections of the group are lost: make a new process group and a new pipeline"
            if self.breaks
            else "The pipeline can be used again"
        )
        return PipelineError(
            f"{self.text}. {after}",
            rank=self.rank,
            stage=self.stage,
            microbatch=self.microbatch,
            action=self.action,
        )


def is_connection_error(error: BaseException | None) -> bool:
    """Whether an operation raised because a process at the other end is gone, or has given up."""
    text = str(error).lower()
    broken = ("gloo", "nccl", "connection", "aborted")
    return isinstance(error, RuntimeError) and any(word in text for word in broken)
