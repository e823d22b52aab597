"""Nodes of a stage's graphs: what they compute, where they were recorded, how they lie in memory.

Every node has its fake value, a tensor or a tuple of them, in ``meta["val"]``. Graphs that compute
the same have equal fingerprints, so that they are compiled once.

A graph is traced once, and cut into pieces that are compiled apart: one must leave a value as the
others, in whose kernels its strides are written, expect it. So outputs have layouts, and copies
restore them.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate
from torch.utils.flop_counter import flop_registry

from fpipe.errors import StageError
from fpipe.inputs.ambient import without_autocast
from fpipe.random.torch_draws import draws

aten = torch.ops.aten

_DRAWS: Final = torch.Tag.nondeterministic_seeded

STAGE = "fpipe.stage"
"""Where the ``meta`` of a node in a recorded function says in which stage that was."""

TURN = "fpipe.turn"
"""Where the ``meta`` of a node of the backward says which node of autograd's it belongs to."""

COUNT = "fpipe.count"
"""Where the ``meta`` of a node of the forward has autograd's counter of that moment."""


CHECKPOINT = "fpipe.checkpoint"
"""Where the ``meta`` of a forward node says in which `Checkpointed` call it was recorded."""

COPIES = frozenset({aten.clone.default, aten._to_copy.default})
_ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})
_FILLED = frozenset({aten.full.default, aten.full_like.default, aten.new_full.default})

UNLISTED_PRODUCTS = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        aten._grouped_mm,
        aten._scaled_grouped_mm,
        aten._int_mm,
        aten.mkldnn_rnn_layer,
        aten.mkldnn_rnn_layer_backward,
    }
)
"""Further ops that libraries compute, which torch's table of FLOPs lacks."""

# By operation. Not functools.cache, of which Dynamo warns where a caller is compiled.
_VIEWS: Final[dict[Any, bool]] = {}
_NAMES: Final[dict[Any, tuple[str, ...]]] = {}

# Namespaces of operations of which it is known whether they draw.
_KNOWN = frozenset({"aten", "prims", "fpipe"})


class Checkpointed(NamedTuple):
    """A call of `torch.utils.checkpoint`, as a node within it sees it.

    Attributes:
        number: of the call.
        saved: it saves what this node computes.
    """

    number: int
    saved: bool = False


def value_of(node: fx.Node) -> Tensor:
    """The fake tensor that stands for what `node` computes."""
    value = node.meta["val"]
    assert isinstance(value, Tensor), f"{node.name} is no tensor"
    return value


def is_random(node: fx.Node) -> bool:
    """Whether running `node` twice would draw two different values."""
    producer = _producer(node)
    op = producer.target
    if not isinstance(op, torch._ops.OpOverload) or _DRAWS not in op.tags:
        return False  # as of nearly all nodes
    return draws(op, producer.args, producer.kwargs)


def may_draw(node: fx.Node) -> bool:
    """Whether running `node` may draw from torch's generator: who knows what others' ops do."""
    target = node.target
    foreign = isinstance(target, torch._ops.OpOverload) and target.namespace not in _KNOWN
    return foreign or is_random(node)


def is_view(node: fx.Node) -> bool:
    """Whether `node` only looks at the storage of its first argument."""
    target = _producer(node).target
    known = _VIEWS.get(target)
    if known is None:
        arguments = target._schema.arguments if isinstance(target, OpOverload) else ()
        first = arguments[0].alias_info if arguments else None
        # The schema of _unsafe_view keeps silent about the view that it is in fact.
        known = target is aten._unsafe_view.default or (first is not None and not first.is_write)
        _VIEWS[target] = known
    return known


def base_of(node: fx.Node) -> fx.Node:
    """The value whose memory `node` looks at."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_zero(node: fx.Node) -> bool:
    """Whether `node` is made as zeros, such as the gradient of what nothing depends on."""
    while is_view(node) or node.target in COPIES:
        node = node.all_input_nodes[0]
    if node.target in _FILLED:
        return bool(node.args[-1] == 0)
    return node.target in _ZEROS


def ancestors(roots: Iterable[fx.Node], until: Collection[fx.Node] = ()) -> set[fx.Node]:
    """`roots` and all that they depend on, but for `until` and what those alone depend on."""
    reached: set[fx.Node] = set(until)
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack.extend(node.all_input_nodes)
    return reached.difference(until)


def is_product(node: fx.Node) -> bool:
    """Whether a library computes `node`: a matrix product, a convolution, attention."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet in flop_registry or packet in UNLISTED_PRODUCTS


def values_of(node: fx.Node) -> list[Tensor]:
    """The fake tensors that stand for what `node` computes: several, if it returns several."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return [v for v in values if isinstance(v, Tensor)]


def add(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    name: str | None = None,
) -> fx.Node:
    """A node that calls `target`, where the graph inserts nodes.

    It is what `fx.Graph.create_node` adds, which looks for raw symbolic sizes in all arguments.
    """
    node = graph.create_node("call_function", target, name=name)
    node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node


def copy_into(graph: fx.Graph, node: fx.Node, copy_of: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """A copy of a node that calls a function, with its value, in another graph.

    Args:
        graph: the other graph.
        node: what is copied.
        copy_of: the node of that graph which stands for one that `node` reads.
    """
    args: Any = fx.map_arg(node.args, copy_of)
    kwargs: Any = fx.map_arg(node.kwargs, copy_of)
    copy = add(graph, node.target, args, kwargs, node.name)
    copy.meta["val"] = node.meta.get("val")
    return copy


def inserted(before: fx.Node, target: Any, *arguments: Any, **options: Any) -> fx.Node:
    """A node that calls `target`, with its value, in front of another and in the same stage."""
    like = values_of(before)[0]
    values = fx.map_arg(arguments, value_of)
    mode = like.fake_mode if isinstance(like, FakeTensor) else nullcontext()
    with mode, torch.no_grad(), without_autocast():
        value = target(*values, **options)
    with before.graph.inserting_before(before):
        new = before.graph.call_function(target, arguments, options)
    new.meta |= {"val": value} | marks_of(before)
    return new


def replace(node: fx.Node, by: fx.Node) -> None:
    """Let `by` take the place of a node, which leaves its graph."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def marks_of(node: fx.Node) -> dict[str, Any]:
    """Where a node was recorded, as the ``meta`` of one that takes its place says it."""
    return {key: node.meta[key] for key in (STAGE, COUNT, TURN, CHECKPOINT) if key in node.meta}


def nbytes_of(node: fx.Node) -> int:
    """Bytes of what `node` computes; how many elements a sparse tensor has is data."""
    return sum(v.nbytes for v in values_of(node) if v.layout is torch.strided)


def _producer(node: fx.Node) -> fx.Node:
    """The op itself, for one element of an op that returns several."""
    if node.op == "call_function" and node.target is operator.getitem:
        assert isinstance(node.args[0], fx.Node)
        return node.args[0]
    return node


def fingerprint(graph: fx.Graph) -> str:
    """A key that two graphs share only if they compute the same on the same kind of inputs.

    Node names do not count; ops, their arguments and the placeholders' shapes, strides and dtypes
    do. Devices and process groups count by which are the same, and not by their numbers: ranks
    that have a device each, and each a group for its own part of a layer, compute the same.
    """
    number = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    places: dict[torch.device | _Group, str] = {}

    def bare(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return _Bare(number[value])
        if isinstance(value, torch.device):
            return _Bare(places.setdefault(value, f"{value.type}#{len(places)}"))
        if isinstance(value, _Group):
            return _Bare(places.setdefault(value, f"group#{len(places)}"))
        return value

    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            v = value_of(node)
            lines.append(f"{v.dtype} {tuple(v.shape)} {v.stride()} {bare(v.device)}")
        else:
            arguments = map_aggregate(_arguments(node), bare)
            lines.append(f"{node.op} {node.target} {arguments!r}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def places_of(graph: fx.Graph) -> tuple[torch.device | str, ...]:
    """The devices, and the names of process groups, in the order in which a graph has them."""
    places: dict[torch.device | str, None] = {}

    def look(value: Any) -> Any:
        if isinstance(value, torch.device | _Group):
            places[value] = None
        return value

    for node in graph.nodes:
        if node.op == "placeholder":
            look(value_of(node).device)
        else:
            map_aggregate(_arguments(node), look)
    return tuple(places)


def is_on_cpu(graph: fx.Graph) -> bool:
    """Whether a graph computes on the CPU alone, without collectives."""
    return all(place == torch.device("cpu") for place in places_of(graph))


class _Bare(str):
    """A node, device or group in a fingerprint: unlike a string argument, it is printed bare."""

    def __repr__(self) -> str:
        return str(self)


class _Group(str):
    """The name of a process group, which each process may count in its own way."""


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a node, those that name a process group marked."""
    names = _NAMES.get(node.target)
    if names is None:
        schema = getattr(node.target, "_schema", None)
        names = () if schema is None else tuple(argument.name for argument in schema.arguments)
        _NAMES[node.target] = names
    if "group_name" not in names:
        return node.args, node.kwargs
    args = (_marked(name, value) for name, value in zip(names, node.args, strict=False))
    return tuple(args), {name: _marked(name, value) for name, value in node.kwargs.items()}


def _marked(name: str, value: Any) -> Any:
    return _Group(value) if name == "group_name" and isinstance(value, str) else value


class Layout(NamedTuple):
    """Shape and strides of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides that tell: one along which there is a single element does not."""
        pairs = zip(self.shape, self.stride, strict=True)
        return () if 0 in self.shape else tuple(step for size, step in pairs if size > 1)


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dimensions of a tensor as its memory has them, the slowest first.

    Example:
        >>> memory_order((4, 2, 3), (1, 12, 4))
        [1, 2, 0]
    """
    return [dim for *_, dim in sorted((-stride[n], -shape[n], n) for n in range(len(shape)))]


def lies_in_order(value: Tensor, order: Sequence[int]) -> bool:
    """Whether memory has a tensor without gaps, its dimensions in an order, the slowest first."""
    shape, stride, step = value.shape, value.stride(), 1
    if value.numel() == 0:
        return True
    for dim in reversed(order):
        if shape[dim] != 1:
            if stride[dim] != step:
                return False
            step *= shape[dim]
    return True


def layouts_of(graph: fx.Graph) -> list[Layout | None]:
    """The layout of each output of a graph; None of what is no dense tensor."""
    returned: Any = graph.output_node().args[0]
    values = [node.meta["val"] if isinstance(node, fx.Node) else node for node in returned]
    return [
        Layout(tuple(value.shape), value.stride())
        if isinstance(value, Tensor) and value.layout == torch.strided
        else None
        for value in values
    ]


def unlike(expected: Sequence[Layout | None], actual: Sequence[Layout | None]) -> list[int]:
    """The numbers of the outputs that do not lie as expected."""
    return [
        number
        for number, (wanted, layout) in enumerate(zip(expected, actual, strict=True))
        if wanted is not None and layout is not None and wanted.steps != layout.steps
    ]


def lay_out(graph: fx.Graph, layouts: Mapping[int, Layout]) -> None:
    """Let a graph return copies of outputs that lie as they should.

    Args:
        graph: changed in place.
        layouts: by number of the output.

    Raises:
        StageError: a layout has gaps, or elements in the same place.
    """
    end = graph.output_node()
    returned: Any = end.args[0]
    outputs = list(returned)
    for number, layout in layouts.items():
        order = memory_order(layout.shape, layout.stride)
        places = [order.index(dim) for dim in range(len(order))]
        dense = torch.empty([layout.shape[dim] for dim in order], device="meta").permute(places)
        if Layout(layout.shape, dense.stride()).steps != layout.steps:
            raise StageError(
                f"{outputs[number]} has shape {layout.shape} and strides {layout.stride}, which "
                "the compiler does not keep: take x.contiguous() of it where it is made"
            )
        outputs[number] = copied(end, outputs[number], order)
    end.args = (type(returned)(outputs),)


def copied(before: fx.Node, node: fx.Node, order: list[int]) -> fx.Node:
    """A copy of a value in front of another node, with its dimensions lying in this order."""

    def call(target: OpOverload, argument: fx.Node, *arguments: Any, **options: Any) -> fx.Node:
        with before.graph.inserting_before(before):
            new = before.graph.call_function(target, (argument, *arguments), options)
        return new

    value, usual = value_of(node), sorted(order)
    turned = order != usual
    if turned:
        node = call(aten.permute.default, node, order)
        node.meta["val"] = value.permute(order)
    copy = call(aten.clone.default, node, memory_format=torch.contiguous_format)
    copy.meta["val"] = value.new_empty([value.shape[d] for d in order])
    if turned:
        back = sorted(usual, key=order.__getitem__)
        view = call(aten.permute.default, copy, back)
        view.meta["val"] = value_of(copy).permute(back)
        return view
    return copy
