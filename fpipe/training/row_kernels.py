"""Elementwise graphs as kernels for rows of any number of elements.

graph over rows of eight ─┬─ Inductor: compiled for a symbolic size, called without dynamo
                          └─ another backend: torch.compile(dynamic=True)

An optimizer's step has a call for each parameter. Through dynamo, which looks at every argument,
one takes 200 microseconds and more; of Inductor's own callable it takes ten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fpipe.pieces.backends import patches_of, without_own
from fpipe.pieces.inductor import inner_artefacts
from fpipe.torch_internals import make_shape_env, row_of_any_size

RowKernel = Callable[[list[Tensor]], Sequence[Tensor]]
"""Takes rows, and tensors without dimensions after them; may empty the list."""


def row_kernel(
    graph: fx.GraphModule, rows: Sequence[Tensor], scalars: int, options: Mapping[str, Any]
) -> RowKernel:
    """A kernel of a graph that names no size.

    Args:
        graph: ``(*rows, *scalars) -> rows``, or writes into its rows.
        rows: one of each of its rows, with any number of elements.
        scalars: how many float64 without dimensions, on the CPU, follow.
        options: of `torch.compile`: ``backend``, ``mode``, ``options``.
    """
    if options.get("backend", "inductor") != "inductor":
        return _by_torch_compile(graph, options)
    return _by_inductor(graph, rows, scalars, options)


def _by_torch_compile(graph: fx.GraphModule, options: Mapping[str, Any]) -> RowKernel:
    compiled: Any = torch.compile(graph, dynamic=True, fullgraph=True, **options)

    def call(inputs: list[Tensor]) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = compiled(*map(_without_base, inputs))
        return outputs

    return call


def _without_base(value: Tensor) -> Tensor:
    """The same elements as no view: dynamo compiles anew for other bases."""
    bare = value.new_empty(0)
    return bare.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())


def _by_inductor(
    graph: fx.GraphModule, rows: Sequence[Tensor], scalars: int, options: Mapping[str, Any]
) -> RowKernel:
    from torch._inductor import config as inductor_config

    patches = patches_of(without_own(dict(options))[0])
    mode = FakeTensorMode(shape_env=make_shape_env())
    examples: list[Tensor] = [row_of_any_size(mode, row) for row in rows]
    with mode:
        examples += [torch.empty((), dtype=torch.float64) for _ in range(scalars)]
    with inductor_config.patch(patches):
        _, [artefact] = inner_artefacts(graph, examples)
    call: RowKernel = artefact.current_callable
    return call
