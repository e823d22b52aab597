"""What a step may write into: parameters and a state that the caller has given up.

Two leaves in the same memory would be updated twice, so they are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from torch import Tensor

from fpipe import pytree
from fpipe.dtensors import local
from fpipe.errors import FpipeError
from fpipe.holding import names_of
from fpipe.inputs.ambient import is_within
from fpipe.torch_internals import is_transformed
from fpipe.training.train_step import TrainState


def check_donated(params: Any, hyper: Iterable[Any]) -> None:
    """Refuse to write where a write would be wrong.

    Args:
        params: as a trainer's step takes them.
        hyper: values of hyperparameters.

    Raises:
        FpipeError: the step is within a transform, or leaves of the parameters share memory.
    """
    leaves, spec = pytree.flatten(params)
    watched = [value for value in (*leaves, *hyper) if isinstance(value, Tensor)]
    if is_within() or any(map(is_transformed, watched)):
        raise FpipeError(
            "donate=True within a transform of torch.func: it would write into what the transform "
            "reads; make the trainer without donate"
        )
    ends: list[tuple[int, int, int]] = []
    for place, leaf in enumerate(leaves):
        tensor = local(leaf)
        if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.numel():
            start, end = _extent(tensor)
            ends.append((start, end, place))
    ends.sort()
    for (_, end, first), (start, _, second) in pairwise(ends):
        if start < end:
            names = names_of(spec)
            raise FpipeError(
                f"donate=True: parameters {names[first]!r} and {names[second]!r} lie in the same "
                "memory, which the step would update twice: clone one of them, or let one stage or "
                "function read it twice"
            )


def clones(params: Any, state: TrainState) -> tuple[Any, TrainState]:
    """Parameters and state in memory of their own, which no later step writes into."""
    copied: tuple[Any, TrainState] = pytree.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, (params, state)
    )
    return copied


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and behind its last."""
    start = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return start, start + (last + 1) * tensor.element_size()
