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

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import flop_registry

from fpipe.draws import draws

aten = torch.ops.aten

STAGE = "fpipe.stage"
"""Where the ``meta`` of a node in a recorded function says in which stage that was."""

CHECKPOINT = "fpipe.checkpoint"
"""Where the ``meta`` of a forward node says in which `Checkpointed` call it was recorded."""

_COPIES = frozenset({aten.clone.default, aten._to_copy.default})
_ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})
_FILLED = frozenset({aten.full.default, aten.full_like.default, aten.new_full.default})


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


class Checkpointed(NamedTuple):
    """A call of `torch.utils.checkpoint`, as a node within it sees it.

    Attributes:
        number: of the call.
        saved: it saves what this node computes.
    """

    number: int
    saved: bool = False


class Cotangent(NamedTuple):
    """A placeholder for what one reader of an output hands back.

    Attributes:
        reader: the stage that reads the output.
        name: of the placeholder.
    """

    reader: int
    name: str


Source = Param | Upstream | BatchLeaf | StateLeaf | Constant | Key | Seed | SumSoFar


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
            the loss alone.
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


def value_of(node: fx.Node) -> Tensor:
    """The fake tensor that stands for what `node` computes."""
    value = node.meta["val"]
    assert isinstance(value, Tensor), f"{node.name} is no tensor"
    return value


def is_differentiable(value: Tensor) -> bool:
    """Whether a value of this dtype can have a gradient."""
    return value.dtype.is_floating_point or value.dtype.is_complex


def is_random(node: fx.Node) -> bool:
    """Whether running `node` twice would draw two different values."""
    own = _producer(node)
    return draws(own.target, own.args, own.kwargs)


def may_draw(node: fx.Node) -> bool:
    """Whether running `node` may draw from torch's generator: who knows what others' ops do."""
    target = node.target
    foreign = isinstance(target, torch._ops.OpOverload) and target.namespace not in _KNOWN
    return foreign or is_random(node)


_KNOWN = frozenset({"aten", "prims", "fpipe"})


def is_view(node: fx.Node) -> bool:
    """Whether `node` only looks at the storage of its first argument."""
    target = _producer(node).target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target is torch.ops.aten._unsafe_view.default:
        return True  # a view in fact; its schema keeps silent about it
    first = target._schema.arguments[0].alias_info if target._schema.arguments else None
    return first is not None and not first.is_write


def base_of(node: fx.Node) -> fx.Node:
    """The value whose memory `node` looks at."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_zero(node: fx.Node) -> bool:
    """Whether `node` is made as zeros, such as the gradient of what nothing depends on."""
    while is_view(node) or node.target in _COPIES:
        node = node.all_input_nodes[0]
    if node.target in _FILLED:
        return bool(node.args[-1] == 0)
    return node.target in _ZEROS


def ancestors(roots: Iterable[fx.Node], until: Collection[fx.Node] = ()) -> set[fx.Node]:
    """`roots` and all that they depend on, but for `until` and what those alone depend on."""
    found: set[fx.Node] = set(until)
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found.difference(until)


def is_product(node: fx.Node) -> bool:
    """Whether a library computes `node`: a matrix product, a convolution, attention."""
    return getattr(node.target, "overloadpacket", None) in flop_registry


def values_of(node: fx.Node) -> list[Tensor]:
    """The fake tensors that stand for what `node` computes: several, if it returns several."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return [v for v in values if isinstance(v, Tensor)]


def inserted(before: fx.Node, target: Any, *arguments: Any, **options: Any) -> fx.Node:
    """A node that calls `target`, with its value, in front of another and in the same stage."""
    like = values_of(before)[0]
    values = fx.map_arg(arguments, value_of)
    with like.fake_mode if isinstance(like, FakeTensor) else nullcontext(), torch.no_grad():
        value = target(*values, **options)
    with before.graph.inserting_before(before):
        made = before.graph.call_function(target, arguments, options)
    made.meta |= {"val": value} | marks_of(before)
    return made


def marks_of(node: fx.Node) -> dict[str, Any]:
    """Where a node was recorded, as the ``meta`` of one that takes its place says it."""
    return {key: node.meta[key] for key in (STAGE, CHECKPOINT) if key in node.meta}


def nbytes_of(node: fx.Node) -> int:
    """Bytes of what `node` computes; how many elements a sparse tensor has is data."""
    return sum(v.nbytes for v in values_of(node) if v.layout is torch.strided)


def _producer(node: fx.Node) -> fx.Node:
    """The op itself, for one element of an op that returns several."""
    if node.op == "call_function" and node.target is operator.getitem:
        assert isinstance(node.args[0], fx.Node)
        return node.args[0]
    return node
