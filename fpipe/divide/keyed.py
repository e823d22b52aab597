"""Let a recorded forward graph draw from keys what it would draw from torch's generator.

Each drawing op becomes the plain tensor operations of `fpipe.random`, on a key that comes in as an
argument of its own. So layers of one kind stay alike, and what they draw is computed where it is
read, again or not, as the remat policy likes.
"""

from __future__ import annotations

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fpipe.errors import StageError
from fpipe.graph.inlining import Inliner
from fpipe.graph.nodes import marks_of
from fpipe.random.torch_draws import KEYED, draws, refusal


def draw_from_keys(name: str, graph: fx.Graph, key: Tensor, mode: FakeTensorMode) -> list[fx.Node]:
    """Replace the ops that draw.

    Args:
        name: the function in messages.
        graph: changed in place.
        key: a fake one.
        mode: the fake-tensor mode of the graph's values.

    Returns:
        The placeholder of the key of each op that drew, in their order; they follow the others.

    Raises:
        StageError: an op draws that has no function of a key.
    """
    drawing = [node for node in graph.nodes if draws(node.target, node.args, node.kwargs)]
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    inline = Inliner(mode)
    keys: list[fx.Node] = []
    for node in drawing:
        if node.target not in KEYED:
            raise StageError(f"{name} {refusal(node.target)}")
        with graph.inserting_after(keys[-1] if keys else last):
            keys.append(graph.placeholder(f"key_{len(keys)}"))
        keys[-1].meta |= {"val": key} | marks_of(node)
        inline(node, KEYED[node.target], keys[-1])
    return keys
