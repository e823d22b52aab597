"""A stage and its backward, as one function of flat tensors.

arguments ──► stage ──► outputs
                │
cotangents ──► vjp ──► gradients of what is asked for
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.func import vjp
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fpipe import tree
from fpipe.arguments.ambient import without_autocast
from fpipe.arguments.shapes import is_differentiable
from fpipe.stage.graphs.sources import Source
from fpipe.stage.refusing.explain import SPARSE, Untraceable
from fpipe.stage.tracing.abstract import Leaves
from fpipe.stage.tracing.nograd import undifferentiated


@dataclass(frozen=True)
class Demand:
    """Which gradients a stage owes, and what it is given for them.

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
            leaves: the stage's abstract arguments.
            outputs: its abstract output leaves.
            readers: the stages that read an output leaf, each of which hands a cotangent back.
        """
        places: dict[Source, list[int]] = {}
        for index, source in enumerate(leaves.sources):
            if leaves.differentiable[index]:
                places.setdefault(source, []).append(index)
        carries = tuple(
            bool(places) and is_differentiable(value) and bool(readers(leaf))
            for leaf, value in enumerate(outputs)
        )
        cotangents = tuple(
            (leaf, reader) for leaf, flag in enumerate(carries) if flag for reader in readers(leaf)
        )
        return cls(places, carries, cotangents)

    @classmethod
    def none(cls, outputs: Sequence[Tensor]) -> Demand:
        """No gradients."""
        return cls({}, (False,) * len(outputs), ())


class WithBackward:
    """A stage on flat leaves, called with cotangents too; returns outputs and gradients.

    Args:
        function: the stage.
        leaves: its abstract arguments.
        demand: the gradients that are owed, and the cotangents that come in.
        lift: from the arguments to what the function takes, by which gradients are taken.
        fold: from the number of an argument and its gradient to what is kept of that.
    """

    def __init__(
        self,
        function: Callable[[Sequence[Any]], Any],
        leaves: Leaves,
        demand: Demand,
        lift: Callable[[Sequence[Tensor]], list[Tensor]],
        fold: Callable[[int, Tensor], Tensor],
    ) -> None:
        self._function = function
        self._leaves = leaves
        self._demand = demand
        self._lift = lift
        self._fold = fold

    def __call__(
        self, arguments: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs, contiguous, and the gradients that are owed, in the order of the demand."""
        lifted = self._lift(arguments)
        owed = [indices[0] for indices in self._demand.places.values()]
        if not cotangents:
            # Earlier stages wait for what is owed all the same, as where an output is constant.
            zeros = [torch.zeros_like(lifted[index]) for index in owed]
            outputs = undifferentiated(lambda: self._forward(lifted))
            return outputs, list(map(self._fold, owed, zeros))

        def split(*chosen: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            outputs = self._forward(self._filled(lifted, chosen))
            return self._only(True, outputs), self._only(False, outputs)

        result: Any = vjp(split, *(lifted[index] for index in owed), has_aux=True)
        carried, pullback, plain = result
        sides = {True: iter(carried), False: iter(plain)}
        outputs = [next(sides[flag]) for flag in self._demand.carries]
        with _as_of_torch():
            gradients = pullback(self._totals(cotangents))
        # A backward of a user's own may return what its forward saved, of a level that is over.
        gradients = tuple(map(torch._C._functorch.unwrap_if_dead, gradients))
        for index, gradient in zip(owed, gradients, strict=True):
            self._check(index, gradient)
        return outputs, list(map(self._fold, owed, gradients))

    def _forward(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        outputs, _ = tree.flatten(self._function(arguments))
        # One layout at every stage boundary, decided here, lets the compiled graphs assume it.
        return [_settled(o).resolve_conj().resolve_neg().contiguous() for o in outputs]

    def _filled(self, arguments: Sequence[Tensor], chosen: Sequence[Tensor]) -> list[Tensor]:
        """The arguments with one value wherever a source that is owed a gradient comes in."""
        full = list(arguments)
        for indices, value in zip(self._demand.places.values(), chosen, strict=True):
            for index in indices:
                full[index] = value
        return full

    def _only(self, carrying: bool, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs that carry a gradient, or those that do not."""
        pairs = zip(outputs, self._demand.carries, strict=True)
        return [output for output, flag in pairs if flag == carrying]

    def _totals(self, cotangents: Sequence[Tensor]) -> list[Tensor]:
        """The cotangent of each output that carries a gradient: the sum over its readers."""
        totals: dict[int, Tensor] = {}
        for (leaf, _), cotangent in zip(self._demand.cotangents, cotangents, strict=True):
            totals[leaf] = totals[leaf] + cotangent if leaf in totals else cotangent
        return list(totals.values())

    def _check(self, index: int, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            deed, instead = SPARSE
            raise Untraceable(f"{deed} by {self._leaves.paths[index]}", instead)


@contextmanager
def _as_of_torch() -> Iterator[None]:
    """Within it is a backward as that of a loop in torch, ``loss.backward()``, is.

    It is outside of autocast, so that what it computes has the dtypes of the forward. And nothing
    differentiates it again, for which torch takes other formulas, which are longer and round more.
    They alone do without what oneDNN's LSTM keeps, which is nothing where no gradient is asked for,
    as when a pipeline runs it.
    """
    recording = get_proxy_mode()
    graph = None if recording is None else recording.tracer.graph
    again = graph is not None and bool(graph.find_nodes(op="call_function", target=_LSTM))
    with without_autocast(), torch.set_grad_enabled(again):
        yield


_LSTM: Final = torch.ops.aten.mkldnn_rnn_layer.default


def _settled(output: Tensor) -> Tensor:
    """An output, detached if it says that it requires a gradient and none comes back through it.

    Views that are made within ``torch.no_grad()`` say so.
    """
    lost = output._is_view() and output.requires_grad and output.grad_fn is None
    return output.detach() if lost else output
