"""Boxed callables: how pieces are called, and what is made of several.

A boxed callable takes its inputs in a list that it empties, so that an input can be freed before
the call ends; it returns a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fpipe.graph.nodes import Layout, unlike

Boxed = Callable[[list[Tensor]], Sequence[Tensor]]


def relaid(call: Boxed, layouts: Sequence[Layout | None]) -> Boxed:
    """The same with copies, which lie as they should, of outputs that do not."""

    def call_and_copy(inputs: list[Tensor]) -> Sequence[Tensor]:
        outputs = list(call(inputs))
        laid = [
            None if layout is None else Layout(layout.shape, value.stride())
            for value, layout in zip(outputs, layouts, strict=True)
        ]
        for number in unlike(layouts, laid):
            value, layout = outputs[number], layouts[number]
            assert layout is not None  # of what has none nothing is expected
            outputs[number] = value.new_empty_strided(*layout).copy_(value)
        return outputs

    return call_and_copy


def in_sequence(
    calls: Sequence[tuple[Boxed, Sequence[str], Sequence[str]]],
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> Boxed:
    """One callable that calls several, and lets go of each value before its last reader runs.

    Args:
        calls: in their order, each with the names of what it reads and of what it returns.
        inputs: names of what the whole takes.
        outputs: names of what it returns.
    """
    names = [*inputs, *(name for _, _, returned in calls for name in returned)]
    slot = {name: number for number, name in enumerate(names)}
    last = {name: number for number, (_, read, _) in enumerate(calls) for name in read}
    steps = [
        (
            call,
            [slot[name] for name in read],
            [slot[name] for name in read if last[name] == number and name not in outputs],
        )
        for number, (call, read, _) in enumerate(calls)
    ]
    results = [slot[name] for name in outputs]

    def run(taken: list[Tensor]) -> Sequence[Tensor]:
        slots: list[Tensor | None] = list(taken)
        taken.clear()
        for call, read, dropped in steps:
            arguments: list[Any] = [slots[number] for number in read]
            for number in dropped:
                slots[number] = None
            slots += call(arguments)
        values: list[Any] = [slots[number] for number in results]
        return values

    return run
