"""Apply a transform stage by stage, and divide arguments by stage.

A transform replaces the function of every stage, and changes the arguments of every stage. A
pipeline of one function has no stages before it is traced: there the function, and the arguments as
a whole, take the place of the only stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fpipe.errors import BatchError, StageError
from fpipe.inputs.params import check_parts, contained
from fpipe.spec.definition import Definition
from fpipe.spec.user_functions import Stage

RANDOMNESS = ("error", "different", "same")
"""The choices of ``randomness``, as `torch.func.vmap` has them."""


def each_stage(
    stages: Iterable[Stage], wrap: Callable[[Callable[..., Any], bool], Callable[..., Any]]
) -> tuple[Stage, ...]:
    """The stages with their functions wrapped; `wrap` is told whether one is the first stage's.

    Stages that share a function still share one afterwards, so it is traced once.
    """
    wrapped: dict[tuple[int, bool], Callable[..., Any]] = {}
    results = []
    for index, stage in enumerate(stages):
        key = id(stage.fn), index == 0
        if key not in wrapped:
            wrapped[key] = wrap(stage.fn, index == 0)
        results.append(replace(stage, fn=wrapped[key]))
    return tuple(results)


@dataclass(frozen=True)
class Parts:
    """How parameters, vectors and gradients are divided by stage.

    Attributes:
        stages: the number of stages, each with one part; None for one function, whose only part is
            the whole.
    """

    stages: int | None

    @classmethod
    def of(cls, definition: Definition) -> Parts:
        """The parts of the parameters of a pipeline with this definition."""
        return cls(None if definition.function else len(definition.stages))

    def split(self, value: Any) -> Sequence[Any]:
        """The parts of a value with the structure of the parameters."""
        return [value] if self.stages is None else value

    def join(self, parts: Sequence[Any], like: Any) -> Any:
        """The inverse of `split`; the result is a list or a tuple, as `like` is."""
        return parts[0] if self.stages is None else contained(parts, like)

    def named(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """The parts of an argument of the caller's, each with its name.

        Raises:
            BatchError: there is not one for each stage.
        """
        if self.stages is None:
            return [(name, value)]
        check_parts(name, value, self.stages)
        return [(f"{name}[{stage}]", tree) for stage, tree in enumerate(value)]

    def prefixes(self, prefix: Any) -> Sequence[Any]:
        """The prefix of each part, of a prefix for the whole that the caller gave.

        Raises:
            BatchError: it cannot be divided.
        """
        if self.stages is None:
            return [prefix]
        if isinstance(prefix, list | tuple) and len(prefix) == self.stages:
            return prefix
        if isinstance(prefix, int) or prefix is None:
            return [prefix] * self.stages
        raise BatchError(
            f"in_dims[0]={prefix!r:.60} must be an int, None, or a list with one pytree prefix for "
            f"each of the {self.stages} stages"
        )


def refuse_argnums(transform: str, definition: Definition, instead: str) -> None:
    """Refuse a pipeline whose gradients are not by the parameters alone, and say what to call."""
    if definition.argnums != "params":
        raise StageError(
            f"fpipe.{transform} of a pipeline whose argnums are {definition.argnums!r}: transform "
            f"one whose gradients are by the parameters; {instead}"
        )


def refuse_state(transform: str, definition: Definition, why: str) -> None:
    """Refuse a pipeline with ``has_state``; says why a transformed state has no meaning."""
    if definition.has_state:
        raise StageError(
            f"fpipe.{transform} of a pipeline with has_state=True is not defined: {why}; pass the "
            "state with the parameters or the batch, and evaluate with it (training=False, "
            "module.eval())"
        )
