"""`torch.func.vmap` over pytrees of ours: only flat leaves enter torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from fpipe import pytree


def over(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    in_dims: Sequence[Any],
    randomness: str = "error",
) -> Any:
    """The outputs of `function` for all members at once, stacked along dimension 0.

    Args:
        function: of pytrees of tensors, to one.
        arguments: its arguments, stacked; at least one leaf must be, if there are any.
        in_dims: for each argument a pytree prefix of dimensions, None for leaves that are shared.
        randomness: as in `torch.func.vmap`.
    """
    leaves, spec = pytree.flatten(tuple(arguments))
    if not leaves:
        return function(*arguments)  # torch's vmap refuses to call it
    dims = [
        dim
        for number, (prefix, argument) in enumerate(zip(in_dims, arguments, strict=True))
        for dim in pytree.broadcast_prefix(f"in_dims[{number}]", prefix, argument, "the argument")
    ]
    made: list[optree.PyTreeSpec] = []

    def flat(*values: Any) -> tuple[Any, ...]:
        outputs, structure = pytree.flatten(function(*pytree.unflatten(spec, values)))
        made.append(structure)
        return tuple(outputs)

    outputs = torch.vmap(flat, in_dims=tuple(dims), randomness=randomness)(*leaves)
    return pytree.unflatten(made[-1], outputs)
