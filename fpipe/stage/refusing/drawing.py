"""A function that draws from Python's or numpy's generator: a trace would keep what it drew.

All microbatches of all steps would get the same numbers, and those that each rank traces others.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fpipe.stage.refusing.explain import Untraceable
from fpipe.stage.refusing.seeding import others


@contextmanager
def undrawn() -> Iterator[None]:
    """Refuse what leaves one of these generators in another state, which is put back.

    Other threads, which load data for one, may draw meanwhile: it is looked at while there are
    none.

    Raises:
        Untraceable: it was drawn from, or seeded.
    """
    python, alone = random.getstate(), not others()
    numpy: Any = sys.modules.get("numpy")
    before = _state_of(numpy)
    yield
    if not alone or others():
        return
    if random.getstate() != python:
        random.setstate(python)
        raise _refusal("Python's random")
    if _state_of(numpy) != before:
        numpy.random.set_state(pickle.loads(before))
        raise _refusal("numpy.random")


def _state_of(numpy: Any) -> bytes:
    return b"" if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))


def _refusal(generator: str) -> Untraceable:
    return Untraceable(
        f"draws from {generator}",
        "what the trace draws would be drawn in every step, the same for all microbatches; draw "
        "with torch (from a key, with has_key=True), or draw before the step and pass it in the "
        "batch",
    )
