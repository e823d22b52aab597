"""The joint graph: one stage's forward and backward in one fx graph, with every value named.

    parameters ─┐                ┌─ outputs
    inputs      ├─►  one graph ──┤
    constants   │                ├─ gradient of each input
    cotangents ─┘                └─ gradient of each parameter

A value is named by its node, an input by its source: a leaf of the caller's, an output of another
stage, or a value that the runtime makes. So a chain of stages is one case of a wider wiring. A
value that passes through a stage unchanged keeps the name of the placeholder that it came in by,
and the runtime follows it to where it was computed.

Each parameter gradient may get two more nodes: itself in the dtype of the sum, which starts the sum
without a zero-fill, and the sum so far plus itself, which continues it without a separate pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fpipe.graph.nodes import value_of


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


aten = torch.ops.aten


def add_sums(
    graph: fx.Graph,
    gradients: Mapping[Param, fx.Node],
    dtype: torch.dtype | None,
) -> dict[Source, Sum]:
    """Add the nodes of a `Sum` to `graph` for each parameter leaf in `gradients`.

    Args:
        graph: placeholders first; extended in place, and the new nodes have fake values.
        gradients: the gradient of each parameter leaf that has one.
        dtype: the dtype to sum in, or None for the gradient's own; a complex gradient is summed in
            a complex dtype only, and a real one in a real.
    """
    first = next(node for node in graph.nodes if node.op != "placeholder")
    types: dict[Param, torch.dtype] = {}
    so_far: dict[Param, fx.Node] = {}
    for source, gradient in gradients.items():
        kept = value_of(gradient).dtype
        types[source] = kept if dtype is None or dtype.is_complex != kept.is_complex else dtype
        with graph.inserting_before(first):
            so_far[source] = graph.placeholder(f"sum_so_far_{source.leaf}")
        so_far[source].meta["val"] = value_of(gradient).to(types[source])

    def append(after: fx.Node, target: OpOverload, *arguments: Any, **options: Any) -> fx.Node:
        # Right where the gradient is made: what waits for its sum takes memory. A gradient is never
        # a placeholder; one that would be is copied, to be the caller's own.
        assert after.op == "call_function", after
        with graph.inserting_after(after):
            return graph.call_function(target, arguments, options)

    sums: dict[Source, Sum] = {}
    for source, gradient in gradients.items():
        start, sum_type = gradient, types[source]
        if sum_type != value_of(gradient).dtype:
            start = append(gradient, aten._to_copy.default, gradient, dtype=sum_type)
        total = append(start, aten.add.Tensor, so_far[source], start)
        start.meta["val"] = total.meta["val"] = so_far[source].meta["val"]
        sums[source] = Sum(start.name, so_far[source].name, total.name)
    return sums
