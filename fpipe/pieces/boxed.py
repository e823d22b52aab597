"""Boxed callables: how pieces are called, and how their outputs lie.

A boxed callable takes its inputs in a list that it empties, so that an input can be freed before
the call ends; it returns a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fpipe.graph.layouts import Layout, unlike

Boxed = Callable[[list[Tensor]], Sequence[Tensor]]


def relaid(call: Boxed, layouts: Sequence[Layout | None]) -> Boxed:
    """The same with copies, which lie as they should, of outputs that do not."""

    def call_and_copy(inputs: list[Tensor]) -> Sequence[Tensor]:
        outputs = list(call(inputs))
        found = [
            None if layout is None else Layout(layout.shape, value.stride())
            for value, layout in zip(outputs, layouts, strict=True)
        ]
        for number in unlike(layouts, found):
            value, layout = outputs[number], layouts[number]
            assert layout is not None  # of what has none nothing is expected
            outputs[number] = value.new_empty_strided(*layout).copy_(value)
        return outputs

    return call_and_copy
