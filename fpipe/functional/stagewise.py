"""What every transform takes: something that was made from a definition."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from fpipe.definition import Definition
from fpipe.errors import StageError, a_type
from fpipe.spec.stage import Stage


class Transformed(Protocol):
    """A pipeline of any kind: it is made from its definition alone."""

    definition: Definition

    def __init__(self, definition: Definition) -> None: ...


P = TypeVar("P", bound=Transformed)

RANDOMNESS = ("error", "different", "same")


def refuse_choice(transform: str, definition: Definition, instead: str) -> None:
    """Refuse a pipeline whose gradients are taken by the batch; `instead` names the way round.

    Raises:
        StageError: names the transform.
    """
    if definition.argnums != "params":
        raise StageError(
            f"fpipe.{transform} of a pipeline whose argnums are {definition.argnums!r}: transform "
            f"one whose gradients are by the parameters; {instead}"
        )


def refuse_state(transform: str, definition: Definition, why: str) -> None:
    """Refuse a pipeline that threads a state; `why` says what the state would come to.

    Raises:
        StageError: names the transform.
    """
    if definition.has_state:
        raise StageError(
            f"fpipe.{transform} of a pipeline with has_state=True is not defined: {why}; pass the "
            "state with the parameters or the batch, and evaluate with it (training=False, "
            "module.eval())"
        )


def check_pipeline(transform: str, pipe: Any) -> None:
    """Refuse what is no pipeline.

    Raises:
        StageError: names the transform.
    """
    if not isinstance(getattr(pipe, "definition", None), Definition):
        raise StageError(
            f"pipe={pipe!r:.60} is {a_type(pipe)}: fpipe.{transform} takes a pipeline, "
            "which fpipe.pipeline(...) makes, and gives another"
        )


def each_stage(
    stages: Iterable[Stage], wrap: Callable[[Callable[..., Any], bool], Callable[..., Any]]
) -> tuple[Stage, ...]:
    """The stages with their functions wrapped; `wrap` is told whether it is the first stage.

    Stages of one function stay stages of one function, so that they are traced once.
    """
    made: dict[tuple[int, bool], Callable[..., Any]] = {}
    wrapped = []
    for index, stage in enumerate(stages):
        key = id(stage.fn), index == 0
        if key not in made:
            made[key] = wrap(stage.fn, index == 0)
        wrapped.append(replace(stage, fn=made[key]))
    return tuple(wrapped)
