"""Rewrites of recorded graphs; a new node takes the marks of the node that it replaces.

`simplify` has five aims for a joint graph: no op that computes nothing (uncompiled runs pay for
each); none that reads a value for its shape alone, which would be kept for it; none that computes
input and weight gradient at once, because it could not be split between I and W; no value without
memory; and results that are fit to leave: a parameter's gradient shares memory with nothing,
because it becomes the caller's, and lies as the parameter does, because microbatches of other
numbers of rows go on with its sum; an input's is contiguous, as every value at a stage boundary is,
and none of them keeps more alive than itself.

Others replace ops that write to their arguments and do not say so, that rely on the layout which
their argument had while recorded, or that draw.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from fpipe.errors import StageError
from fpipe.graph.nodes import (
    ancestors,
    base_of,
    copied,
    inserted,
    is_view,
    lies_in_order,
    marks_of,
    memory_order,
    replace,
    value_of,
)
from fpipe.inputs.ambient import without_autocast
from fpipe.torch_internals import FakeTensorMode

aten = torch.ops.aten

# Identity ops that tracing leaves behind: the value is the argument.
_IDENTITIES = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default})

# Views that look at their argument as it is, where they have its shape and strides.
_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.expand.default})

# The fill values of ops that read only the shape of their argument.
_FILLS: Final[dict[Any, Callable[[fx.Node], Any]]] = {
    aten.zeros_like.default: lambda node: 0,
    aten.new_zeros.default: lambda node: 0,
    aten.ones_like.default: lambda node: 1,
    aten.new_ones.default: lambda node: 1,
    aten.full_like.default: lambda node: node.args[1],
    aten.new_full.default: lambda node: node.args[2],
}


def simplify(
    graph: fx.Graph, owners: Sequence[Tensor | None], private: Collection[fx.Node] = ()
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Rewrite `graph` in place; returns its output nodes and its gradient nodes.

    Args:
        graph: returns ``(outputs, gradients)``, two lists of nodes.
        owners: for each gradient, the fake leaf of the caller's that it belongs to, and with it
            becomes the caller's; None for that of an input.
        private: placeholders that other stages cannot read: the parameters, and what the stage
            closes over. Returned as an output, one of them is copied.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        _give_memory(node)
        if node.target in _FILLS:
            _look_at_nothing(node)
        elif node.target in _IDENTITIES or _is_overwritten(node) or _is_same_view(node):
            replace(node, node.args[0])
        elif node.target is aten._conj.default and not isinstance(node.args[0], fx.Node):
            _conjugate_number(node)
        elif node.target is aten.t.default and node.args[0].target is aten.t.default:
            replace(node, node.args[0].args[0])
        elif node.target is aten.convolution_backward.default:
            _split_convolution_backward(graph, node)
        elif node.target is aten.nll_loss2d_backward.default:
            _give_in_order(node)
    graph.eliminate_dead_code()
    for node, owner in dict(zip(_results(graph)[1], owners, strict=True)).items():
        _turn_product(node, owner)
    _settle_gradients(graph, owners)
    _settle_outputs(graph, private)
    return _results(graph)


def _is_same_view(node: fx.Node) -> bool:
    """Whether `node` looks at its argument as the argument looks at itself."""
    if node.target not in _RESHAPES:
        return False
    value, other = value_of(node), value_of(node.all_input_nodes[0])
    return value.shape == other.shape and value.stride() == other.stride()


def _is_overwritten(node: fx.Node) -> bool:
    """Whether memory only says to a draw how many numbers there are, as its argument would too."""
    if node.target is not aten.empty_like.default:
        return False
    same = value_of(node).dtype == value_of(node.all_input_nodes[0]).dtype
    return same and bool(node.users) and all(user.target in OVERWRITES for user in node.users)


def _give_in_order(node: fx.Node) -> None:
    """Copy what the kernel takes in one order of its elements alone, where it has another.

    It comes so from what is differentiated twice: a derivative lies as its formula made it.
    """
    operand = node.args[1]
    if isinstance(operand, fx.Node) and not value_of(operand).is_contiguous():
        order = torch.contiguous_format
        node.update_arg(1, inserted(node, aten.clone.default, operand, memory_format=order))


def _results(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes that the graph returns: outputs, gradients."""
    returned: Any = graph.output_node().args[0]
    outputs, gradients = returned
    return list(outputs), list(gradients)


def _turn_product(node: fx.Node, owner: Tensor | None) -> None:
    """Let a product of batches come out as its parameter lies, where it is transposed at the end.

    So `torch.func.vmap` maps the gradient of a linear layer. The product of both sides, transposed
    and exchanged, is the same, and needs no copy; torch itself does so for a single product.
    """
    if node.target is not aten.transpose.int or owner is None:
        return
    product, dims = node.args[0], {int(dim) % 3 for dim in node.args[1:]}  # type: ignore[arg-type]
    if not isinstance(product, fx.Node) or product.target is not aten.bmm.default:
        return
    usual = _order_of(value_of(node), owner) == [0, 1, 2]
    if usual and dims == {1, 2} and len(product.users) == 1:
        left, right = (inserted(product, aten.transpose.int, side, 1, 2) for side in product.args)
        replace(node, inserted(product, aten.bmm.default, right, left))
        node.graph.erase_node(product)


def _settle_gradients(graph: fx.Graph, owners: Sequence[Tensor | None]) -> None:
    """Copy the gradients that may not leave as they are.

    None may be a value of the forward, which a backward of a user's own can return. A parameter's
    may be no placeholder and no second look at another gradient.
    """
    end = graph.output_node()
    outputs, gradients = _results(graph)
    forward = ancestors(outputs)
    claimed: set[fx.Node] = set()
    for index, node in enumerate(gradients):
        base, owner = base_of(node), owners[index]
        order = _order_of(value_of(node), owner)
        fit = lies_in_order(value_of(node), order)
        if owner is not None:
            fit &= base.op != "placeholder" and base not in claimed
        fit &= base.op == "placeholder" or base not in forward
        if not fit or _is_part(node):
            # Right where it is made, but for what the forward makes, and what comes in.
            inner = node.op == "call_function" and base not in forward
            gradients[index] = copied(node.next if inner else end, node, order)
        claimed.add(base)
    end.args = ((outputs, gradients),)


def _settle_outputs(graph: fx.Graph, private: Collection[fx.Node]) -> None:
    """Copy the outputs that other stages cannot read where they are, or that hold more alive."""
    outputs, gradients = _results(graph)
    copies = {
        n: copied(graph.output_node(), n, _order_of(value_of(n), None))
        for n in dict.fromkeys(outputs)
        if n in private or _is_part(n)
    }
    graph.output_node().args = (([copies.get(n, n) for n in outputs], gradients),)


def _is_part(node: fx.Node) -> bool:
    """Whether `node` looks at a part of a value, and would keep the whole of it alive."""
    return value_of(base_of(node)).numel() > value_of(node).numel()


def _order_of(value: Tensor, owner: Tensor | None) -> list[int]:
    """The dimensions of a gradient, from the outermost in memory: as those of its owner lie.

    Not as they happen to come, which may depend on the number of rows of the microbatch.
    """
    usual = list(range(value.dim()))
    if owner is None or owner.shape != value.shape:
        return usual
    order = memory_order(owner.shape, owner.stride())
    return order if lies_in_order(owner, order) else usual


def _give_memory(node: fx.Node) -> None:
    """Let zeros have memory: forward mode makes some without, and products with them have none.

    Inductor takes them for buffers, which it writes to; a caller could not update them.
    """
    if node.target is aten._efficientzerotensor.default:
        node.target = aten.zeros.default
    value: Any = node.meta.get("val")
    if isinstance(value, Tensor) and value._is_zerotensor():
        with value.fake_mode:  # type: ignore[attr-defined]
            node.meta["val"] = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )


def _look_at_nothing(node: fx.Node) -> None:
    """Fill memory without an argument that only lends its shape, and would be kept for it."""
    value = value_of(node)
    if value.is_contiguous() and value.layout == torch.strided:
        node.args = (list(value.shape), _FILLS[node.target](node))
        node.kwargs = {"dtype": value.dtype, "device": value.device}
        node.target = aten.full.default


def _conjugate_number(node: fx.Node) -> None:
    """Make the conjugate of a number, which the derivative of ``1j * x`` has, without a view of it.

    The view would look at the memory of no value of the graph.
    """
    value, number = value_of(node), node.args[0]
    assert isinstance(number, complex)
    node.args = (number.conjugate(),)
    node.kwargs = {"dtype": value.dtype, "device": value.device}
    node.target = aten.scalar_tensor.default


def _split_convolution_backward(graph: fx.Graph, node: fx.Node) -> None:
    """One op for the input gradient and one for weight and bias gradients."""
    arguments: tuple[Any, ...] = node.args
    mask = list(arguments[-1])
    if not (mask[0] and any(mask[1:])):
        return
    values = node.meta["val"]
    halves = {}
    with graph.inserting_after(node):
        for half_mask in ([False, *mask[1:]], [True, False, False]):
            half = graph.call_function(
                aten.convolution_backward.default, (*arguments[:-1], half_mask)
            )
            half.meta["val"] = tuple(
                v if keep else None for v, keep in zip(values, half_mask, strict=True)
            )
            halves[half_mask[0]] = half
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_input_with(node, halves[user.args[1] == 0])
    graph.erase_node(node)


# Their schemas keep silent about the running statistics, which they write to.
_BATCH_NORMS = frozenset({aten.native_batch_norm.default, aten.cudnn_batch_norm.default})

_BACKWARDS = frozenset(
    {aten.native_batch_norm_backward.default, aten.cudnn_batch_norm_backward.default}
)

# With a probability given beside the tensor whose shape they take.
_BERNOULLIS = frozenset({aten.bernoulli.p, aten.bernoulli.Tensor})

# Operations that overwrite a value with what is drawn, as functionalisation writes it, or draws as
# many as there are of it: not differentiable.
OVERWRITES = frozenset(
    {
        *(getattr(aten.randint_like, name) for name in aten.randint_like.overloads()),
        aten.normal_functional.default,
        *(op.default for op in (aten.uniform, aten.exponential, aten.geometric)),
        *(op.default for op in (aten.log_normal, aten.cauchy)),
        *_BERNOULLIS,
    }
)


def free_views_of_layout(graph: fx.Graph) -> None:
    """Replace ``view`` by ``reshape``, which copies where a layout is not that of the trace.

    A value that crosses a boundary becomes contiguous: a value that was transposed before a
    boundary and is transposed back behind it, as a recurrent layer does with batches, can be viewed
    no more.
    """
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default


def with_uniform_draws(graph: fx.Graph) -> fx.Graph:
    """The graph with dropout drawn from uniform numbers, which Inductor draws itself.

    On the CPU it leaves ``bernoulli`` to a kernel that draws from the generator which seeds its own
    draws, too, and in an order that depends on what else a graph returns: with another remat policy
    it would draw other numbers. Without a dtype it draws in float32, whatever the default was in
    the trace.
    """
    copied = copy_of(graph)
    for node in list(copied.nodes):
        if node.target in (aten.rand.default, aten.randn.default):
            node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}
        if node.target not in _BERNOULLIS or node.kwargs.get("generator") is not None:
            continue
        like = node.meta["val"]
        with copied.inserting_before(node):
            place = {"dtype": torch.float32, "device": like.device}
            uniform = copied.call_function(aten.rand.default, (list(like.shape),), place)
            compare = aten.lt.Tensor if isinstance(node.args[1], fx.Node) else aten.lt.Scalar
            drawn = copied.call_function(compare, (uniform, node.args[1]))
            cast = copied.call_function(aten._to_copy.default, (drawn,), {"dtype": like.dtype})
        node.replace_all_uses_with(cast)
        copied.erase_node(node)
    return copied


def copy_of(graph: fx.Graph) -> fx.Graph:
    """The same graph, to be rewritten in place."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def return_statistics(name: str, graph: fx.Graph) -> None:
    """Let batch normalisations return their running statistics instead of writing to them.

    Args:
        name: the function in messages.
        graph: changed in place; a backward, if it has one, does not need them.

    Raises:
        StageError: the statistics are a part of another tensor, which would change with them.
    """
    for node in list(graph.nodes):
        if node.target not in _BATCH_NORMS or not node.args[5]:
            continue
        running = [arg for arg in node.args[3:5] if isinstance(arg, fx.Node)]
        if not running:
            continue
        if any(is_view(arg) for arg in running):
            raise StageError(
                f"{name} lets a batch normalisation update running statistics that are a view of "
                "another tensor: clone() each of them before, or call fpipe.nn.batch_norm"
            )
        with graph.inserting_after(node):
            whole = graph.call_function(aten._native_batch_norm_legit_functional.default, node.args)
        outputs: tuple[Any, ...] = node.meta["val"]
        values = (*outputs[:3], *(arg.meta["val"] for arg in running))
        whole.meta |= {"val": values} | marks_of(node)
        later = set(_after(whole))
        for user in list(node.users):
            user.replace_input_with(node, whole)
        for index, arg in enumerate(running, 3):
            with graph.inserting_after(whole):
                new = graph.call_function(operator.getitem, (whole, index))
            new.meta |= {"val": arg.meta["val"]} | marks_of(node)
            readers = [user for user in arg.users if user in later]
            for user in (user for user in readers if user.target not in _BACKWARDS):
                user.replace_input_with(arg, new)
        graph.erase_node(node)


def _after(node: fx.Node) -> list[fx.Node]:
    """The nodes that come later."""
    later = []
    while node.next.op != "root":
        node = node.next
        later.append(node)
    return later


def propagate(
    graph: fx.Graph, mode: FakeTensorMode, place: Callable[[Any], Any] = lambda value: value
) -> None:
    """Run a graph of pure operations on the fake values of its placeholders and attributes.

    A view that the new strides do not allow becomes a view of a copy.

    Args:
        graph: changed in place.
        mode: the fake-tensor mode of its values.
        place: what takes the place of an argument of an operation, such as a device.
    """
    with mode, torch.no_grad(), without_autocast():
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), place)
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
            try:
                node.meta["val"] = node.target(*args, **kwargs)
            except RuntimeError:
                if node.target is not aten.view.default:
                    raise
                _view_of_copy(graph, node, args)


def _view_of_copy(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...]) -> None:
    value: Tensor = args[0].contiguous()
    with graph.inserting_before(node):
        options: dict[str, Any] = {"memory_format": torch.contiguous_format}
        copy = graph.call_function(aten.clone.default, (node.args[0],), options)
    copy.meta |= {"val": value} | marks_of(node)
    node.update_arg(0, copy)
    node.meta["val"] = aten.view.default(value, *args[1:])
