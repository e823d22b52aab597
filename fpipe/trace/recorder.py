"""Record a function and its backward as one graph, the way autograd runs it.

    arguments ──► function ──► outputs        plain autograd, on functional tensors
                     │
    cotangents ──► torch.autograd.grad ──► gradients, in the same trace

It is what AOTAutograd does. So whatever works under autograd is recorded as it works there:
Functions with a backward of their own, hooks, writes within ``torch.no_grad()`` or by way of
``x.data``, derivatives that the function takes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any, Final

import torch
from torch import Tensor, fx

from fpipe.checks.explain import SPARSE, Untraceable, explain
from fpipe.checks.purity import WriteGuard, name_in_closure, refuse_mapped, undrawn, unseeded
from fpipe.errors import FpipeError, StageError
from fpipe.graph.joint import Source
from fpipe.graph.node_writer import NodeWriter, write_graph
from fpipe.inputs.ambient import without_autocast
from fpipe.torch_internals import (
    FakeTensorMode,
    FunctionalTensor,
    disable_proxy_modes_tracing,
    from_fun,
    get_proxy_mode,
    to_fun,
)
from fpipe.trace.abstract import Leaves
from fpipe.trace.data_dependence import Known, without_data_checks
from fpipe.trace.functional import Checked, Functional
from fpipe.trace.isolation import is_compiling, tracing
from fpipe.trace.labels import Labels
from fpipe.trace.overrides.checkpointed import Marks


@dataclass(frozen=True)
class Demand:
    """Which gradients a function owes, and what it is given for them.

    Attributes:
        places: for each source that a gradient is owed by, the arguments that it comes in as. A
            leaf of the batch may be two, the first stage's input and itself.
        carries: whether each output leaf carries a gradient.
        cotangents: the output leaf and the reader that each cotangent belongs to.
    """

    places: dict[Source, list[int]]
    carries: tuple[bool, ...]
    cotangents: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, leaves: Leaves, outputs: Sequence[Tensor], readers: Callable[[int], Sequence[int]]
    ) -> Demand:
        """The demand for the gradients of all differentiable leaves.

        Args:
            leaves: the abstract arguments.
            outputs: the abstract output leaves.
            readers: the stages that read an output leaf, each of which hands a cotangent back.
        """
        places = leaves.places
        carries = tuple(
            bool(places) and _depends(value) and bool(readers(leaf))
            for leaf, value in enumerate(outputs)
        )
        cotangents = tuple(
            (leaf, reader) for leaf, flag in enumerate(carries) if flag for reader in readers(leaf)
        )
        return cls(places, carries, cotangents)


@dataclass(frozen=True)
class Way:
    """How the arguments of a trace become those of the function, and gradients go back.

    Attributes:
        lift: from the number of an argument and the argument to what gradients are taken by.
        fold: from the number of an argument and its gradient to what is kept of that.
    """

    lift: Callable[[int, Tensor], Tensor] = lambda _, value: value
    fold: Callable[[int, Tensor], Tensor] = lambda _, gradient: gradient


@dataclass(frozen=True, eq=False)
class Recording:
    """A function with its backward, as one graph.

    Attributes:
        module: returns two lists, outputs and gradients; what the function closes over are its
            attributes.
        arguments: the placeholder of each argument.
        demand: the gradients that are owed, in order, and the cotangents that come in.
        cotangents: the placeholder of each.
        original: of an attribute of the module the tensor that the function closes over.
        depends: whether each output depends on something that gradients are taken by.
        lost: why an output cannot be differentiated, by its number.
    """

    module: fx.GraphModule
    arguments: list[fx.Node]
    demand: Demand
    cotangents: list[fx.Node]
    original: Callable[[Tensor], Tensor]
    depends: tuple[bool, ...]
    lost: dict[int, StageError] = field(default_factory=dict)


def record(
    name: str,
    function: Callable[[list[Any]], list[Tensor]],
    leaves: Leaves,
    mode: FakeTensorMode,
    readers: Callable[[int], Sequence[int]],
    *,
    differentiate: bool,
    origin: Any,
    way: Way | None = None,
    labels: Labels | None = None,
) -> Recording:
    """Record a function of flat tensors with its backward.

    Args:
        name: the function in messages.
        function: from the flat arguments to flat outputs.
        leaves: its abstract arguments.
        mode: the fake-tensor mode that they live in.
        readers: the stages that read an output leaf, by its index; each hands a cotangent back.
        differentiate: record the backward too.
        origin: the user's own function, or several in a tuple, searched for the name of a tensor.
        way: from the arguments to those of the function; None where they are the same.
        labels: notes where each node belongs.

    Raises:
        StageError: the function cannot be traced or is not pure; says which op or leaf.
    """
    functional = Functional(lambda value: name_in_closure(value, origin))
    nothing = Demand(leaves.places, (), ())
    trace = _Trace(
        function, leaves, mode, readers, differentiate, origin, way or Way(), labels, functional,
        nothing,
    )  # fmt: skip
    marks = Marks()
    try:
        refuse_mapped(origin)
        with (
            unseeded(),
            undrawn(),
            tracing(mode),
            without_data_checks(),
            marks.active(),
        ):
            module = write_graph(trace, leaves.values)
        for node in module.graph.nodes:
            if any(map(iskeyword, str(node.target).split("."))):
                raise SyntaxError(f"{node.target} is no name in Python")
    except FpipeError:
        raise
    except Exception as error:
        raise explain(name, error, leaves.arguments, leaves.called) from error
    marks.mark(module.graph)
    lost = {leaf: explain(name, why, leaves.arguments) for leaf, why in trace.lost.items()}
    return trace.recording(module, lost)


@dataclass(eq=False)
class _Trace:
    """The function that is traced: calls a user's, then autograd."""

    _function: Callable[[list[Any]], list[Tensor]]
    _leaves: Leaves
    _mode: FakeTensorMode
    _readers: Callable[[int], Sequence[int]]
    _differentiate: bool
    _origin: Any
    _way: Way
    _labels: Labels | None
    _functional: Functional
    _demand: Demand
    _known: Known = field(default_factory=Known)
    _cotangents: list[fx.Node] = field(default_factory=list)
    _depends: tuple[bool, ...] = ()
    lost: dict[int, Exception] = field(default_factory=dict)

    def __call__(self, *values: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and gradients, recorded."""
        functional = self._functional
        with functional:
            with torch._C.DisableTorchFunction():  # nothing of the user's yet, to stand in for
                arguments = [self._way.lift(n, to_fun(value)) for n, value in enumerate(values)]
                chosen = self._choose(arguments)
            paths = dict(zip(self._leaves.paths, arguments, strict=True))
            with ExitStack() as stack:
                if self._labels is not None:
                    stack.enter_context(self._labels)
                stack.enter_context(Checked(self._known, WriteGuard(paths, self._origin)))
                stack.enter_context(is_compiling())
                outputs = list(map(self._settled, self._function(list(arguments))))
        self._depends = tuple(map(_depends, outputs))
        demand = self._demand = Demand.of(self._leaves, outputs, self._readers)
        if not self._differentiate:
            self._demand = Demand({}, demand.carries, ())
            return list(map(from_fun, outputs)), []
        totals = self._totals(outputs)
        with functional, ExitStack() as stack:
            if self._labels is not None:
                stack.enter_context(self._labels)
            stack.enter_context(Checked(self._known))
            gradients = self._differentiated(outputs, chosen, totals)
            firsts = [places[0] for places in self._demand.places.values()]
            gradients = list(map(self._way.fold, firsts, gradients))
            return list(map(from_fun, outputs)), list(map(from_fun, gradients))

    def recording(self, module: fx.GraphModule, lost: dict[int, StageError]) -> Recording:
        """The finished recording; the cotangents follow the arguments."""
        nodes = iter(list(module.graph.nodes))
        arguments = [next(nodes) for _ in self._leaves.values]
        last = arguments[-1] if arguments else None
        for node in self._cotangents:
            if last is not None:
                last.append(node)
            last = node
        return Recording(
            module,
            arguments,
            self._demand,
            self._cotangents,
            self._functional.original,
            self._depends,
            lost,
        )

    def _choose(self, arguments: list[Tensor]) -> list[Tensor]:
        """Let gradients be taken by what is owed one; returns what they are taken by.

        A source that comes in as several arguments is one value.
        """
        chosen = []
        for places in self._leaves.places.values():
            leaf = arguments[places[0]]
            leaf = _Argument.apply(leaf.detach().requires_grad_(), self._functional)
            for place in places:
                arguments[place] = leaf
            chosen.append(leaf)
        return chosen

    def _settled(self, output: Any) -> Tensor:
        """An output, contiguous: one layout at every boundary lets compiled graphs assume it."""
        if not isinstance(output, FunctionalTensor):
            output = self._functional.made_functional(output)
        settled: Tensor = output.resolve_conj().resolve_neg().contiguous()
        return settled

    def _totals(self, outputs: Sequence[Tensor]) -> dict[int, Tensor]:
        """The cotangent of each output that carries a gradient: the sum over its readers."""
        totals: dict[int, Tensor] = {}
        for number, (leaf, _) in enumerate(self._demand.cotangents):
            like = outputs[leaf]
            with disable_proxy_modes_tracing() as writer, self._mode:
                value: Any = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            assert isinstance(writer, NodeWriter)
            self._cotangents.append(writer.placeholder(f"cotangent_{number}", value))
            totals[leaf] = totals[leaf] + value if leaf in totals else value
        with self._functional:
            return {leaf: to_fun(total) for leaf, total in totals.items()}

    def _differentiated(
        self, outputs: Sequence[Tensor], chosen: Sequence[Tensor], totals: dict[int, Tensor]
    ) -> list[Tensor]:
        """The gradients by what is chosen, zeros where nothing depends on it."""
        computed: Sequence[Tensor | None] = [None] * len(chosen)
        if totals and chosen:
            try:
                computed = self._grad(outputs, chosen, totals)
            except RuntimeError:
                # A function with cuts has its loss alone, and what it is made of is not recorded.
                if self._labels is not None or sum(self._demand.carries) == 1:
                    raise
                kept = self._without_lost(outputs, chosen, totals)
                computed = self._grad(outputs, chosen, kept) if kept else computed
        gradients = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(chosen, computed, strict=True)
        ]
        for places, gradient in zip(self._demand.places.values(), gradients, strict=True):
            if gradient.layout is not torch.strided:
                raise Untraceable(f"{SPARSE[0]} by {self._leaves.paths[places[0]]}", SPARSE[1])
        return gradients

    def _grad(
        self, outputs: Sequence[Tensor], chosen: Sequence[Tensor], owed: dict[int, Tensor]
    ) -> Sequence[Tensor | None]:
        """The gradients as those of a loop in torch: outside of autocast, not differentiable."""
        mode = get_proxy_mode()
        assert mode is not None
        # oneDNN's LSTM keeps nothing for a backward where no gradient is asked for, as when a
        # pipeline runs it. The formulas that can be differentiated again do without.
        again = bool(mode.tracer.graph.find_nodes(op="call_function", target=_LSTM))
        roots = [outputs[leaf] for leaf in owed]
        if self._labels is not None:
            self._labels.begin_backward(roots, chosen)
        with without_autocast(), torch.autograd.set_multithreading_enabled(False):
            return torch.autograd.grad(
                roots,
                chosen,
                list(owed.values()),
                create_graph=again,
                retain_graph=True,
                allow_unused=True,
            )

    def _without_lost(
        self, outputs: Sequence[Tensor], chosen: Sequence[Tensor], owed: dict[int, Tensor]
    ) -> dict[int, Tensor]:
        """Those that can be differentiated; the others only matter if a reader differentiates."""
        kept = {}
        for leaf, total in owed.items():
            try:
                self._grad(outputs, chosen, {leaf: total})
                kept[leaf] = total
            except RuntimeError as error:
                self.lost[leaf] = error
        return kept


def _depends(output: Tensor) -> bool:
    """Whether an output has a history; a view that was made within no_grad only says so."""
    return output.requires_grad and output.grad_fn is not None


_LSTM: Final = torch.ops.aten.mkldnn_rnn_layer.default


class _Argument(torch.autograd.Function):
    """An argument that gradients are taken by, and which is no leaf of autograd's.

    To write to a leaf is autograd's error, which does not say which argument it was. No operation
    is recorded.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, functional: Functional) -> Tensor:
        return functional.made_functional(from_fun(leaf))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None
