"""Tensors that a stage closes over: constants of its graph, each with a name if it can be seen."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.errors import StageError
from fpipe.stage.joint import Constant, Source

_DETACH = torch.ops.aten.detach.default


def lift_constants(
    name: str, module: fx.GraphModule, origin: Callable[..., Any]
) -> tuple[tuple[Tensor, ...], dict[str, Source]]:
    """Turn tensors that the function closes over into placeholders.

    The graph then depends on their shapes only, so stages that differ in them share an artefact.

    Args:
        name: the stage in messages.
        module: the traced stage; its graph is changed in place.
        origin: the user's own function.

    Raises:
        StageError: one of them is sparse, or requires grad and is not detached where it is used.
    """
    graph = module.graph
    found: dict[str, fx.Node] = {}
    constants: list[Tensor] = []
    sources: dict[str, Source] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(module, node.target)
        if not isinstance(value, Tensor):
            raise StageError(
                f"{name} closes over a {type(value).__name__} that the tracer keeps as an "
                "attribute: use plain tensor operations in a stage"
            )
        if value.layout is not torch.strided:
            raise StageError(
                f"{name} closes over a sparse tensor ({name_in_closure(value, origin)}, layout "
                f"{value.layout}), which cannot be traced: close over a dense one (.to_dense()), "
                "or over its indices and values, and use index_add or scatter_add"
            )
        if value.requires_grad and not all(user.target is _DETACH for user in node.users):
            raise StageError(
                f"{name} closes over a tensor that requires grad "
                f"({name_in_closure(value, origin)}, shape {tuple(value.shape)}): it would get no "
                "gradient; pass it as a parameter of the stage (torch.func.functional_call does so "
                "for a module), or detach it"
            )
        if node.target not in found:
            with graph.inserting_before(_first_computation(graph)):
                placeholder = graph.placeholder(f"constant_{len(constants)}")
            placeholder.meta["val"] = node.meta["val"]
            sources[placeholder.name] = Constant(len(constants))
            constants.append(value.detach())
            found[node.target] = placeholder
        node.replace_all_uses_with(found[node.target])
        graph.erase_node(node)
    return tuple(constants), sources


def name_in_closure(value: Tensor, origin: Callable[..., Any]) -> str:
    """What the user calls a tensor that a function closes over, as far as can be seen."""
    for scope in _scopes(origin):
        for key, candidate in scope.items():
            if candidate is value:
                return repr(key)
            if isinstance(candidate, torch.nn.Module):
                for path, tensor in _tensors(candidate):
                    if tensor is value:
                        return repr(f"{key}.{path}")
    return "an unnamed tensor"


def _scopes(function: Any) -> Iterator[Mapping[str, Any]]:
    """The names that a function sees, with its bound arguments."""
    if isinstance(function, partial):
        bound = inspect.signature(function.func).bind_partial(*function.args, **function.keywords)
        yield bound.arguments
        function = function.func
    function = inspect.unwrap(function)
    owner = getattr(function, "__self__", function)
    if isinstance(owner, torch.nn.Module):
        yield {type(owner).__name__: owner}
        function = owner.forward
    if inspect.isroutine(function):
        closure = inspect.getclosurevars(function)
        yield closure.nonlocals
        yield closure.globals
    elif not isinstance(owner, torch.nn.Module):
        yield getattr(owner, "__dict__", {})


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _first_computation(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op != "placeholder")
