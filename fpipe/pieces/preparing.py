"""What no microbatch goes into: computed once a step, before the first piece that reads it.

    params ──► cast, merged, normalised weights ──► every F, B, I and W of the stage

A stage that casts its weights (autocast does), adds an adapter to them or normalises them would
otherwise do so for each microbatch, and keep the result of each until its backward.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import NamedTuple

from torch import fx

from fpipe.graph.joint import Joint
from fpipe.graph.nodes import base_of, is_product, is_random
from fpipe.graph.sources import Constant, Param


class Unchanging(NamedTuple):
    """The values of a stage that no microbatch goes into.

    Attributes:
        prepared: depend on parameters and constants, and are read by what does not; none is an
            output or a gradient, since what leaves a stage leaves its F, B or W.
        cheap: are made of nothing, such as masks and positions, which cost less to make than to
            keep.
    """

    prepared: list[fx.Node]
    cheap: set[fx.Node]


def unchanging(joint: Joint, live: Collection[fx.Node]) -> Unchanging:
    """Find what no microbatch goes into.

    Args:
        joint: the traced stage.
        live: the nodes that its pieces may run.
    """
    leaving = {joint.nodes[name] for name in (*joint.outputs, *joint.gradients.values())}
    # What returns several, one of which leaves, is run where that leaves from.
    leaving |= {node.all_input_nodes[0] for node in leaving if node.target is operator.getitem}
    fixed: set[fx.Node] = set()
    cheap: set[fx.Node] = set()
    for node in joint.graph.nodes:
        inputs = node.all_input_nodes
        if isinstance(joint.sources.get(node.name), Param | Constant):
            fixed.add(node)
        elif node.op != "call_function" or node in leaving or is_random(node) or node.is_impure():
            continue
        elif cheap.issuperset(inputs) and not is_product(node):
            cheap.add(node)
        elif all(n in fixed or n in cheap for n in inputs):
            fixed.add(node)
    read = {
        base_of(value)
        for node in live
        if node not in fixed and node not in cheap
        for value in node.all_input_nodes
        if value in fixed
    }
    prepared = [n for n in joint.graph.nodes if n in read and n.op != "placeholder" and n in fixed]
    return Unchanging(prepared, cheap)
