"""Make pieces callable: each distinct graph once, shared between stages that have the same."""

from __future__ import annotations

import logging
import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, lru_cache
from itertools import chain
from types import CodeType
from typing import Any, Final

import torch
from torch import fx

from fpipe.errors import StageError, error_text, label_of
from fpipe.graph.nodes import value_of
from fpipe.graph.rewrites import free_views_of_layout
from fpipe.inputs.ambient import kernels, without_autocast
from fpipe.live_line import advance
from fpipe.pieces.backends import Compile, maker_of, without_regions
from fpipe.pieces.boxed import Boxed, in_sequence
from fpipe.pieces.inductor import module_of
from fpipe.pieces.piece import Piece
from fpipe.pieces.regions import divide, names_of
from fpipe.pieces.side_by_side import Waits, collected

log = logging.getLogger("fpipe")

_CUT_SHORT: Final = ("file too short", "invalid ELF header")
"""The loader's messages for a library that was not written to its end."""


class Compiler:
    """Compiles graphs by one set of options, each distinct graph once.

    Layers that are alike within a piece are distinct graphs once (`regions`), but for a callable of
    the user's own, which gets pieces whole.

    Args:
        compile: True for Inductor; False to run the graphs uncompiled; a mapping with what
            `torch.compile` accepts (``backend``, ``mode``, ``options``, among which
            ``fpipe.wgrad_kernel`` may be False; see `wgrad_sums`) and ``regions``, which may be
            False to compile each piece whole; the name of a backend; or a callable from a
            `GraphModule` and its example inputs (fake tensors) to a boxed callable: one that takes
            a list, which it may empty, and returns a sequence.

    Attributes:
        fuses: elementwise operations are taken to run where their results are read.

    Raises:
        StageError: `compile` is none of these.
    """

    def __init__(self, compile: Compile) -> None:
        self._name = label_of(compile) if callable(compile) else repr(compile)
        self._of_modules = None
        self.fuses = compile is not False
        divides = False
        if compile is not False:
            compile, divides = without_regions(compile)
            self._of_modules = maker_of(compile)
        self._divide = cache(divide) if divides else None
        self._artefacts: dict[Hashable, Boxed] = {}
        self._together: list[tuple[str, Waits]] | None = None

    def crossing(self, piece: Piece) -> frozenset[str]:
        """The values of a piece that one of its regions writes for another to read."""
        regions = () if self._divide is None else self._divide(piece)[:-1]
        return frozenset(name for region in regions for name in region.outputs)

    def key(self, region: Piece) -> Hashable:
        """The same for those that share a callable."""
        # Inductor writes the number of threads into its loops, and takes the kernels it is told to.
        return region.fingerprint, region.places, torch.get_num_threads(), kernels()

    def missing(self, pieces: Iterable[Piece]) -> int:
        """How many distinct graphs of pieces have no callable yet."""
        regions = pieces if self._divide is None else chain.from_iterable(map(self._divide, pieces))
        keys = set(map(self.key, regions))
        return len(keys - self._artefacts.keys())

    def __call__(self, piece: Piece, label: str, *, whole: bool = False) -> Boxed:
        """The boxed callable of `piece`.

        Args:
            piece: what it computes.
            label: names it in the log and in errors.
            whole: it is not divided.

        Raises:
            StageError: it cannot be compiled; the cause is what the compiler raised.
        """
        if self._divide is not None and not whole:
            return self._in_regions(piece, self._divide(piece), label)
        key = self.key(piece)
        if key not in self._artefacts:
            advance(label)
            examples = list(map(value_of, piece.graph.find_nodes(op="placeholder")))
            log.info("%s %s", "compiling" if self.fuses else "making", label)
            waits: Waits = []
            together = self.fuses and self._together is not None
            with _told(label), collected(waits) if together else nullcontext():
                # Some kernels lay their result out otherwise than the abstract ones with which the
                # graph was traced, and so do some operations as a compiler writes them by means of
                # others: a view of it would fail where a reshape copies.
                free_views_of_layout(piece.graph)
                with without_autocast():  # the casts are in the graph
                    call: Boxed = (
                        _uncompiled(piece.graph)
                        if self._of_modules is None
                        else self._of_modules(module_of(piece.graph), examples)
                    )
            if waits and self._together is not None:
                self._together.append((label, waits))
            if not callable(call):
                raise StageError(
                    f"compile={self._name} made {call!r:.60} of {label}: it must return a boxed "
                    "callable, which takes a list of inputs and returns a sequence of outputs"
                )
            self._artefacts[key] = call
        return self._artefacts[key]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within it graphs are compiled side by side; what is made can be called afterwards.

        Raises:
            StageError: one cannot be compiled. Nothing is kept that was made within.
        """
        before = set(self._artefacts)
        waiting = self._together = []
        try:
            yield
            self._together = None
            while waiting:
                label, waits = waiting.pop(0)
                advance(label, parts=0)
                with _told(label):
                    for wait in waits:
                        wait()
        except BaseException as error:
            self._together = None
            for key in self._artefacts.keys() - before:
                del self._artefacts[key]
            for _, waits in waiting if isinstance(error, Exception) else ():
                for wait in waits:
                    with suppress(Exception):
                        wait()
            raise

    def _in_regions(self, piece: Piece, regions: Sequence[Piece], label: str) -> Boxed:
        if len(regions) == 1:
            return self(piece, label, whole=True)
        key = piece, self.key(regions[0])
        if key not in self._artefacts:
            calls = [
                (
                    self(region, f"{label}, region {number} of {len(regions)}", whole=True),
                    region.inputs,
                    region.outputs,
                )
                for number, region in enumerate(regions, 1)
            ]
            self._artefacts[key] = in_sequence(calls, *names_of(piece))
        return self._artefacts[key]


@contextmanager
def _told(label: str) -> Iterator[None]:
    """Says of what a compiler raises which piece cannot be compiled."""
    try:
        yield
    except Exception as error:
        says = error_text(error)
        way = "compile=False runs it uncompiled"
        if any(words in says for words in _CUT_SHORT):
            way = "a compilation that was interrupted has left that file: delete it"
        raise StageError(f"{label} cannot be compiled: {says} ({way})") from error


def _uncompiled(graph: fx.Graph) -> Boxed:
    """The graph as Python, taking its inputs from a list and dropping each after its last use.

    It is no `GraphModule`: each of those is a class, which slows every later trace of torch's, and
    has a text that takes long to write and that torch never frees.
    """
    nodes = list(graph.nodes)
    names = {node: f"v{number}" for number, node in enumerate(nodes)}
    last = {read: node for node in nodes for read in node.all_input_nodes}
    functions: dict[Any, str] = {}
    objects: dict[str, Any] = {}  # what the code calls and reads

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, list):
            return f"[{', '.join(map(text, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(text(item) + ', ' for item in value)})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {text(item)}' for key, item in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({text(value.start)}, {text(value.stop)}, {text(value.step)})"
        if type(value) in _AS_WRITTEN:
            return repr(value)
        name = f"c{len(objects)}"
        objects[name] = value
        return name

    inputs = [names[node] for node in nodes if node.op == "placeholder"]
    lines = ["def forward(inputs):", f"{', '.join(inputs)}, = inputs" if inputs else "pass"]
    lines.append("inputs.clear()")
    for node in nodes:
        if node.op == "output":
            lines.append(f"return {text(node.args[0])}")
            break
        if node.target is operator.getitem:
            lines.append(f"{names[node]} = {text(node.args[0])}[{text(node.args[1])}]")
        elif node.op == "call_function":
            called = functions.setdefault(node.target, f"f{len(functions)}")
            arguments = [text(value) for value in node.args]
            arguments += [f"{name}={text(value)}" for name, value in node.kwargs.items()]
            lines.append(f"{names[node]} = {called}({', '.join(arguments)})")
        gone = [names[read] for read in node.all_input_nodes if last[read] is node]
        if node not in last:
            gone.append(names[node])
        if gone:
            lines.append(f"del {', '.join(gone)}")
    objects |= {name: function for function, name in functions.items()}
    exec(_code("\n    ".join(lines)), objects)
    call: Boxed = objects["forward"]
    return call


@lru_cache(1024)
def _code(source: str) -> CodeType:
    """The code of a text: graphs that differ in their objects alone have the same."""
    return compile(source, "<fpipe, uncompiled>", "exec")


_AS_WRITTEN: Final = (bool, int, str, type(None))
"""Types of arguments that stand in the code; of others it has the objects."""
