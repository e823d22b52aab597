"""A compiler that runs graphs as they are, and holds values to the strides they were traced with.

Inductor writes strides into its kernels and checks none of them, so a value that lies otherwise, or
that torch has yet to conjugate or negate, is read wrongly and in silence. Here it is an error,
without the seconds that Inductor takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx


def laid_out(
    module: fx.GraphModule, examples: Sequence[Tensor]
) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """For ``fpipe.pipeline(..., compile=laid_out)``."""
    returned: Any = module.graph.output_node().args[0]
    places = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    expected = [node.meta["val"] for node in returned]

    def call(inputs: list[Tensor]) -> Sequence[Tensor]:
        given = list(inputs)
        inputs.clear()
        for name, value, example in zip(places, given, examples, strict=True):
            found, wanted = look(value), look(example)
            assert found == wanted, f"{name} comes as {found} and was traced as {wanted}"
            assert not (value.is_conj() or value.is_neg()), f"{name} is no memory as it lies"
        # Kernels may lay out their results otherwise than the abstract ones; Inductor's do not.
        return [
            value
            if look(value) == look(like) or value.layout is not torch.strided
            else torch.empty_strided(like.shape, like.stride(), dtype=value.dtype).copy_(value)
            for value, like in zip(module(*given), expected, strict=True)
        ]

    return call


def look(value: Tensor) -> Any:
    """All of a value that a kernel is written for; how far apart single elements lie is not."""
    if value.layout is not torch.strided or value.numel() == 0:
        return tuple(value.shape), value.dtype
    strides = [n for n, size in zip(value.stride(), value.shape, strict=True) if size > 1]
    return tuple(value.shape), value.dtype, strides
