"""Graphs without writes: functions recorded with their in-place updates turned into pure ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from fpipe.stage.foreign.checkpointed import Marks, Replay
from fpipe.stage.refusing.purity import writes
from fpipe.stage.tracing.known import Known
from fpipe.stage.tracing.nograd import with_gradients
from fpipe.stage.tracing.setting import tracing


def record(
    function: Callable[..., Any], arguments: Sequence[Tensor], mode: FakeTensorMode
) -> fx.GraphModule:
    """The graph of `function` on flat abstract arguments; what it still writes to is not its own.

    Args:
        function: of as many tensors as there are arguments.
        arguments: fake tensors.
        mode: that they live in.
    """

    def known(*values: Tensor) -> Any:
        with Known():
            return function(*values)

    with tracing(mode, with_gradients()):
        graph = _made_functional(known, arguments) or marked(known, arguments)
        # Those have not been made functional. And where nothing is differentiated, composite
        # ops are taken apart after they have been, and may write to what they have made. Nor
        # has what is made of tensors alone that the function closes over.
        if any(writes(graph.graph)):
            graph = _functional(graph, arguments)
        return graph


def marked(function: Callable[..., Any], arguments: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of a function, in which the calls of checkpoint are marked."""
    marks = Marks()
    with marks.active():
        # With a table, though it is empty, what is detached stays so, in torch 2.14 too.
        trace = make_fx(function, decomposition_table={}, _disable_torch_fn_metadata_mode=True)
        made = trace(*arguments)
    marks.mark(made.graph)
    return made


def _made_functional(
    function: Callable[..., Any], arguments: Sequence[Tensor]
) -> fx.GraphModule | None:
    """The graph made functional, if it can be."""
    try:
        return marked(functionalize(function), arguments)
    except Exception as error:
        # functionalize does not know a custom autograd.Function; plain vjp does.
        if "Functionalize rule" not in str(error):
            raise
    # Not while the error is known, whose frames are in the midst of calls of checkpoint.
    return None


def _functional(module: fx.GraphModule, arguments: Sequence[Tensor]) -> fx.GraphModule:
    """The same without writes, made functional with what it closes over among its arguments."""
    found = {
        node.target: getattr(module, node.target)
        for node in module.graph.nodes
        if node.op == "get_attr"
    }
    held = {target: value for target, value in found.items() if type(value) in _DENSE}

    def run(*values: Tensor) -> Any:
        own = dict(zip(held, values[len(arguments) :], strict=True))
        return _Given(module.graph, own).run(*values[: len(arguments)])

    made = marked(functionalize(run), (*arguments, *held.values()))
    placeholders = [node for node in made.graph.nodes if node.op == "placeholder"]
    for node, (target, value) in zip(placeholders[len(arguments) :], held.items(), strict=True):
        made.register_buffer(f"held{target}", value)
        with made.graph.inserting_after(placeholders[-1]):
            constant = made.graph.get_attr(f"held{target}")
        constant.meta |= node.meta
        node.replace_all_uses_with(constant)
        made.graph.erase_node(node)
    return made


_DENSE = (Tensor, torch.nn.Parameter)
"""Not abstract; others are refused by name later."""


class _Given(Replay):
    """Runs a graph with other tensors in place of those that it closes over."""

    def __init__(self, graph: fx.Graph, given: Mapping[str, Tensor]) -> None:
        super().__init__(graph)
        self._given = given

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The tensor of this name."""
        if target in self._given:
            return self._given[target]
        return super().get_attr(target, args, kwargs)
