"""A function that seeds torch's generator: it would do so while it is traced, and not in a step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fpipe.stage.refusing.explain import Untraceable


@contextmanager
def unseeded() -> Iterator[None]:
    """Refuse what leaves torch's generator in another state, and put that back.

    Abstract tensors draw nothing, and `torch.manual_seed` seeds the generators of all devices. But
    other threads, which load data, may have drawn meanwhile: while there are any, only a state that
    none but a seed leaves is refused.

    Raises:
        Untraceable: it was left in another state.
    """
    before, seed = torch.get_rng_state(), torch.initial_seed()
    yield
    after = torch.get_rng_state()
    if not torch.equal(after, before) and (threading.active_count() == 1 or _seeded(after, seed)):
        torch.set_rng_state(before)
        raise Untraceable(
            "seeds torch's generator",
            "a step draws what was traced from a stream of its own; draw from a key, with "
            "fpipe.random and has_key=True (fpipe.Stage(fn, reads_key=True) for a stage), or seed "
            "before the step",
        )


def _seeded(state: Tensor, before: int) -> bool:
    """Whether this is a state right after a seed; `before` is the one that held before."""
    seed = torch.initial_seed()
    return seed != before or torch.equal(state, torch.Generator().manual_seed(seed).get_state())
