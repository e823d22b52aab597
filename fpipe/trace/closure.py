"""Tensors that a stage closes over: constants of its graph, each with a name if it can be seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, fx

from fpipe.checks.closure_names import name_in_closure
from fpipe.errors import StageError, a_type
from fpipe.graph.joint import Constant, Source
from fpipe.torch_internals import FakeTensor, from_fun, functorch


def lift_constants(
    name: str, module: fx.GraphModule, origin: Any, original: Callable[[Tensor], Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Source]]:
    """Turn tensors that the function closes over into placeholders.

    The graph then depends on their shapes only, so stages that differ in them share an artefact.

    Args:
        name: the stage in messages.
        module: the traced stage; its graph is changed in place.
        origin: the user's own function, or several.
        original: of a tensor that the graph names, the one that it stands for, perhaps on another
            device.

    Raises:
        StageError: one of them is sparse, or abstract.
    """
    graph = module.graph
    lifted: dict[str, fx.Node] = {}
    constants: list[Tensor] = []
    sources: dict[str, Source] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(module, node.target)
        if not isinstance(value, Tensor):
            raise StageError(
                f"{name} closes over {a_type(value)} that the tracer keeps as an "
                "attribute: use plain tensor operations in a stage"
            )
        value = original(value)
        if isinstance(value, FakeTensor) or _is_traced(value):
            raise StageError(
                f"{name} closes over an abstract tensor ({name_in_closure(value, origin)}, shape "
                f"{tuple(value.shape)}), which a cache outside of it, such as functools.cache, has "
                "kept while it was traced: clear that cache, and call the function once on real "
                "data before it is traced, or do not cache what torch computes"
            )
        if value.layout is not torch.strided:
            raise StageError(
                f"{name} closes over a sparse tensor ({name_in_closure(value, origin)}, layout "
                f"{value.layout}), which cannot be traced: close over a dense one (.to_dense()), "
                "or over its indices and values, and use index_add or scatter_add"
            )
        if node.target not in lifted:
            with graph.inserting_before(_first_computation(graph)):
                placeholder = graph.placeholder(f"constant_{len(constants)}")
                placeholder.meta["val"] = from_fun(node.meta["val"])
                sources[placeholder.name] = Constant(len(constants))
                memory, lifted[node.target] = _as_it_lies(value.detach(), placeholder)
            constants.append(memory)
        node.replace_all_uses_with(lifted[node.target])
        graph.erase_node(node)
    return tuple(constants), sources


def _as_it_lies(value: Tensor, placeholder: fx.Node) -> tuple[Tensor, fx.Node]:
    """A view of the memory of a constant, and the node that makes the constant of it.

    They differ where torch has put off a negation or a conjugation, of which kernels know nothing.
    The view is for what is written to the constant later.
    """
    node = placeholder
    for is_put_off, undo, do in _PUT_OFF:
        if is_put_off(value):
            value, fake = undo(value), placeholder.meta["val"]
            placeholder.meta["val"] = undo(fake) if is_put_off(fake) else fake
            node = placeholder.graph.call_function(do, (node,))
            node.meta["val"] = fake
    return value, node


_PUT_OFF: Final = (
    (Tensor.is_neg, torch._neg_view, torch.ops.aten._neg_view.default),
    (Tensor.is_conj, torch._conj, torch.ops.aten._conj.default),
)


def _is_traced(value: Tensor) -> bool:
    """Whether `value` belongs to a transform of `torch.func`, or to a trace."""
    return functorch.is_functorch_wrapped_tensor(value) or torch._is_functional_tensor(value)


def _first_computation(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op != "placeholder")
