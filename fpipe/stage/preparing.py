"""What no microbatch goes into: computed once a step, before the first piece that reads it.

    params ──► cast, merged, normalised weights ──► every F, B, I and W of the stage

A stage that casts its weights (autocast does), adds an adapter to them or normalises them would
otherwise do so for each microbatch, and keep the result of each until its backward.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from fpipe.stage.joint import Constant, Joint, Param, base_of, is_random


def prepared_values(joint: Joint, live: Collection[fx.Node]) -> list[fx.Node]:
    """The values that depend on parameters and constants alone, and are read by what does not.

    Outputs are none of them, since what leaves a stage leaves its F; nor is what is made of
    nothing, such as zeros and positions, which costs less to make than to keep.

    Args:
        joint: the traced stage.
        live: the nodes that its pieces may run.
    """
    outputs = {joint.nodes[name] for name in joint.outputs}
    fixed: set[fx.Node] = set()
    made_of_nothing: set[fx.Node] = set()
    for node in joint.graph.nodes:
        inputs = node.all_input_nodes
        if isinstance(joint.sources.get(node.name), Param | Constant):
            fixed.add(node)
        elif node.op != "call_function" or node in outputs or is_random(node) or node.is_impure():
            continue
        elif made_of_nothing.issuperset(inputs):
            made_of_nothing.add(node)
        elif all(n in fixed or n in made_of_nothing for n in inputs):
            fixed.add(node)
    read = {
        base_of(value)
        for node in live
        if node not in fixed and node not in made_of_nothing
        for value in node.all_input_nodes
        if value in fixed
    }
    return [n for n in joint.graph.nodes if n in read and n.op != "placeholder" and n in fixed]
