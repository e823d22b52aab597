"""Parts of parameters: one for each stage; of one function there is one part, which is the whole.

Transforms take parameters, vectors and gradients apart in this way, and put them together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fpipe.definition import Definition
from fpipe.errors import BatchError
from fpipe.inputs.params import check_parts, contained


@dataclass(frozen=True)
class Parts:
    """How the parameters of a pipeline are divided.

    Attributes:
        stages: how many stages have a part of their own; None for one function.
    """

    stages: int | None

    @classmethod
    def of(cls, definition: Definition) -> Parts:
        """Those of the pipeline with this definition."""
        return cls(None if definition.function else len(definition.stages))

    def split(self, value: Any) -> Sequence[Any]:
        """The parts of parameters, or of what has their structure."""
        return [value] if self.stages is None else value

    def join(self, parts: Sequence[Any], like: Any) -> Any:
        """The inverse of `split`; `like` is the container that the parts come in."""
        return parts[0] if self.stages is None else contained(parts, like)

    def read(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """The parts of an argument of the caller's, each with its name.

        Raises:
            BatchError: there is not one for each stage.
        """
        if self.stages is None:
            return [(name, value)]
        check_parts(name, value, self.stages)
        return [(f"{name}[{stage}]", part) for stage, part in enumerate(value)]

    def prefixes(self, prefix: Any) -> Sequence[Any]:
        """A pytree prefix of each part; parts that are None may have a deep one.

        Args:
            prefix: of them all, as the caller gave it.

        Raises:
            BatchError: it cannot be taken apart.
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
