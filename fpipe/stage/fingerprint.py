"""A key for what a graph computes, so that equal graphs are compiled once."""

from __future__ import annotations

import hashlib

from torch import fx

from fpipe.stage.joint import value_of


def fingerprint(graph: fx.Graph) -> str:
    """A key that two graphs share exactly when they compute the same on the same kind of inputs.

    Node names do not count; ops, their arguments and the placeholders' shapes, strides, dtypes and
    devices do.
    """
    number = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            v = value_of(node)
            lines.append(f"{v.dtype} {tuple(v.shape)} {v.stride()} {v.device}")
        else:
            arguments = fx.map_arg((node.args, node.kwargs), lambda n: _Numbered(number[n]))
            lines.append(f"{node.op} {node.target} {arguments!r}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Numbered(str):
    """A node in a fingerprint: unlike a string argument, it is printed bare."""

    def __repr__(self) -> str:
        return str(self)
