"""Small rewrites of a freshly traced joint graph.

Five aims: no op that computes nothing (uncompiled runs pay for each); none that reads a value for
its shape alone, which would be kept for it; none that computes input and weight gradient at once,
because it could not be split between I and W; no value without memory; and results that are fit to
leave: a parameter's gradient shares memory with nothing, because it becomes the caller's, and lies
as the parameter does, because microbatches of other numbers of rows go on with its sum; an input's
is contiguous, as every value at a stage boundary is, and none of them keeps more alive than itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from fpipe.graph.layouts import copied, memory_order
from fpipe.graph.nodes import ancestors, base_of, inserted, replace, value_of
from fpipe.graph.rewrites import OVERWRITES

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
        elif node.target is aten.t.default and _is_transpose(node.args[0]):
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
        fit = value_of(node).permute(order).is_contiguous()
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
    return order if owner.permute(order).is_contiguous() else usual


def _is_transpose(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is aten.t.default


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
