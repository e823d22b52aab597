"""Make pieces callable: each distinct graph once, shared between stages that have the same."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from functools import partial
from typing import Final

import torch
from torch import Tensor, fx
from torch.fx.graph import _BoxedCodeGen

from fpipe.errors import StageError, error_text, label_of
from fpipe.graph.nodes import value_of
from fpipe.graph.rewrites import free_views_of_layout
from fpipe.inputs.ambient import kernels, without_autocast
from fpipe.live_line import advance
from fpipe.pieces.backends import Compile, maker_of
from fpipe.pieces.boxed import Boxed
from fpipe.pieces.inductor import module_of
from fpipe.pieces.piece import Piece

log = logging.getLogger("fpipe")

_CUT_SHORT: Final = ("file too short", "invalid ELF header")
"""The loader's messages for a library that was not written to its end."""


class Compiler:
    """Compiles graphs by one set of options, each distinct graph once.

    Args:
        compile: True for Inductor; False to run the graphs uncompiled; a mapping with what
            `torch.compile` accepts (``backend``, ``mode``, ``options``, among which
            ``fpipe.wgrad_kernel`` may be False; see `wgrad_sums`); the name of a backend;
            or a callable from a `GraphModule` and its example inputs (fake tensors) to a boxed
            callable: one that takes a list, which it may empty, and returns a sequence.

    Attributes:
        fuses: elementwise operations are taken to run where their results are read.

    Raises:
        StageError: `compile` is none of these.
    """

    def __init__(self, compile: Compile) -> None:
        self._of_modules = None if compile is False else maker_of(compile)
        self._name = label_of(compile) if callable(compile) else repr(compile)
        self.fuses = compile is not False
        self._artefacts: dict[Hashable, Boxed] = {}

    def key(self, piece: Piece) -> Hashable:
        """The same for pieces that share a callable."""
        # Inductor writes the number of threads into its loops, and takes the kernels it is error_text to.
        return piece.fingerprint, piece.places, torch.get_num_threads(), kernels()

    def __contains__(self, key: Hashable) -> bool:
        """Whether a callable was made by this key."""
        return key in self._artefacts

    def __call__(self, piece: Piece, label: str) -> Boxed:
        """The boxed callable of `piece`; `label` names it in the log and in errors.

        Raises:
            StageError: it cannot be compiled; the cause is what the compiler raised.
        """
        key = self.key(piece)
        if key not in self._artefacts:
            advance(label)
            examples = [value_of(n) for n in piece.graph.nodes if n.op == "placeholder"]
            log.info("%s %s", "compiling" if self.fuses else "making", label)
            try:
                with without_autocast():  # the casts are in the graph
                    made = self._make(piece.graph, examples)
            except Exception as error:
                says = error_text(error)
                way = "compile=False runs it uncompiled"
                if any(words in says for words in _CUT_SHORT):
                    way = "a compilation that was interrupted has left that file: delete it"
                raise StageError(f"{label} cannot be compiled: {says} ({way})") from error
            if not callable(made):
                raise StageError(
                    f"compile={self._name} made {made!r:.60} of {label}: it must return a boxed "
                    "callable, which takes a list of inputs and returns a sequence of outputs"
                )
            self._artefacts[key] = made
        return self._artefacts[key]

    def _make(self, graph: fx.Graph, examples: list[Tensor]) -> Boxed:
        """The callable of a graph.

        Some kernels lay their result out otherwise than the abstract ones with which the graph was
        traced, and so do some operations as a compiler writes them by means of others: a view of it
        would fail where a reshape copies.
        """
        free_views_of_layout(graph)
        if self._of_modules is None:
            return _uncompiled(graph)
        return self._of_modules(module_of(graph), examples)


def _uncompiled(graph: fx.Graph) -> Boxed:
    """The graph as Python, taking its inputs from a list and dropping each after its last use.

    Not as a `GraphModule`: each is a class of its own, which all modules of the process pay for
    whenever torch traces, and its text is kept by torch for good.
    """
    graph.set_codegen(_BoxedCodeGen())
    written = graph.python_code("self")
    names = dict(written.globals)
    exec(compile(written.src, "<fpipe, uncompiled>", "exec"), names)
    call: Boxed = partial(names["forward"], None)  # a graph of stages has no attributes
    return call
