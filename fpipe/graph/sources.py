"""Sources: where the value of a stage's input comes from.

An input of a stage is a leaf of the caller's, what another stage returns, or what the runtime
makes. So a chain of stages is one case of a wider wiring.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Param:
    """Source: a leaf of the stage's own parameters."""

    leaf: int


@dataclass(frozen=True, slots=True)
class Upstream:
    """Source: an output leaf of another stage."""

    stage: int
    leaf: int


@dataclass(frozen=True, slots=True)
class BatchLeaf:
    """Source: a leaf of the microbatch."""

    leaf: int


@dataclass(frozen=True, slots=True)
class StateLeaf:
    """Source: a leaf of the state, as the microbatch before has left it.

    Attributes:
        leaf: its number among the leaves of parameters and state together.
    """

    leaf: int


@dataclass(frozen=True, slots=True)
class Constant:
    """Source: a tensor that the stage function closes over."""

    number: int


@dataclass(frozen=True, slots=True)
class Key:
    """Source: the key of the microbatch.

    Attributes:
        of_stage: with the number of the stage folded in.
        draw: with the number of an op that draws folded in, -1 for none.
    """

    of_stage: bool
    draw: int = -1


@dataclass(frozen=True, slots=True)
class Seed:
    """Source: the cotangent of the loss, the weight of the microbatch in the mean."""


@dataclass(frozen=True, slots=True)
class SumSoFar:
    """Source: the sum over earlier microbatches of the gradient of a parameter leaf."""

    leaf: int


Source = Param | Upstream | BatchLeaf | StateLeaf | Constant | Key | Seed | SumSoFar
