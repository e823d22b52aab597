"""A function that seeds torch's generator: it would do so while it is traced, and not in a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fpipe.stage.explain import Untraceable


@contextmanager
def unseeded() -> Iterator[None]:
    """Refuse what leaves torch's generator in another state, and put that back.

    Abstract tensors draw nothing, and `torch.manual_seed` seeds the generators of all devices.

    Raises:
        Untraceable: it was left in another state.
    """
    before = torch.get_rng_state()
    yield
    if not torch.equal(torch.get_rng_state(), before):
        torch.set_rng_state(before)
        raise Untraceable(
            "seeds torch's generator",
            "a step draws what was traced from a stream of its own; draw from a key, with "
            "fpipe.random and has_key=True (fpipe.Stage(fn, reads_key=True) for a stage), or seed "
            "before the step",
        )
