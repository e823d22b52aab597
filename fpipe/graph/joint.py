"""The joint graph: one stage's forward and backward in one fx graph, with every value named.

    parameters ─┐                ┌─ outputs
    inputs      ├─►  one graph ──┤
    constants   │                ├─ gradient of each input
    cotangents ─┘                └─ gradient of each parameter

A value is named by its node. An input names its source, so that a chain of stages is one case of a
wider wiring: a value that passes through a stage unchanged keeps the name of the placeholder that
it came in by, and the runtime follows it to where it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor, fx

from fpipe.graph.sources import Source


class Cotangent(NamedTuple):
    """A placeholder for what one reader of an output hands back.

    Attributes:
        reader: the stage that reads the output.
        name: of the placeholder.
    """

    reader: int
    name: str


class Sum(NamedTuple):
    """How the gradient of a leaf of the caller's is collected, by names of values.

    Attributes:
        start: the gradient of the first microbatch, in the dtype of the sum.
        so_far: placeholder for the sum of earlier microbatches; None where each microbatch's
            gradient is kept by itself.
        total: `so_far` plus the gradient of this one.
        folded: whether it is what the sink keeps; if not, it is a part of a gradient of which other
            stages have the rest, and folded when they have been added up.
    """

    start: str
    so_far: str | None
    total: str
    folded: bool = True


@dataclass(frozen=True, eq=False)
class Joint:
    """A traced stage.

    Attributes:
        graph: placeholders first; every node has its fake value in ``meta["val"]``.
        sources: where the value of each placeholder that is not a cotangent comes from.
        constants: the tensors that `Constant` sources number.
        outputs: node name of each output leaf. On the last stage of a training step these are
            the loss, with its weight if it has one, the state that the stage leaves, and aux.
        cotangents: what each output gets back, one for each stage that reads it, added up inside;
            none where the output carries no gradient.
        gradients: node name of the gradient of each differentiable source.
        sums: how the gradient of each leaf of the caller's that has one is collected.
    """

    graph: fx.Graph
    sources: dict[str, Source]
    constants: tuple[Tensor, ...]
    outputs: tuple[str, ...]
    cotangents: tuple[tuple[Cotangent, ...], ...]
    gradients: dict[Source, str]
    sums: dict[Source, Sum]

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        """Nodes by name."""
        return {node.name: node for node in self.graph.nodes}

    def renamed(
        self, rename: Callable[[Source], Source], readers: Sequence[Sequence[int]]
    ) -> Joint:
        """The same graph as that of another stage.

        Args:
            rename: from each source to what takes its place.
            readers: for each output, the stages that read it there.
        """
        return replace(
            self,
            sources={name: rename(source) for name, source in self.sources.items()},
            gradients={rename(source): name for source, name in self.gradients.items()},
            sums={rename(source): entry for source, entry in self.sums.items()},
            cotangents=tuple(
                tuple(c._replace(reader=reader) for c, reader in zip(group, stages, strict=False))
                for group, stages in zip(self.cotangents, readers, strict=True)
            ),
        )
