"""A function that draws from Python's or numpy's generator: a trace would keep what it drew.

All microbatches of all steps would get the same numbers, and those that each rank traces others.
"""

from __future__ import annotations

import logging
import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from fpipe.checks.explain import Untraceable
from fpipe.checks.seeding import others

log = logging.getLogger("fpipe")

_INSTEAD: Final = (
    "what the trace draws would be drawn in every step, the same for all microbatches; draw with "
    "torch (from a key, with has_key=True), or draw before the step and pass it in the batch"
)


@contextmanager
def undrawn() -> Iterator[None]:
    """Refuse what leaves one of these generators in another state, which is put back.

    Other threads, which load data for one, may draw meanwhile: while there are such, nothing is
    refused or put back, and the log has a warning.

    Raises:
        Untraceable: it was drawn from, or seeded.
    """
    python, alone = random.getstate(), not others()
    numpy: Any = sys.modules.get("numpy")
    before = _state_of(numpy)
    drew: list[str] = []
    try:
        yield
    finally:
        alone = alone and not others()
        if random.getstate() != python:
            drew.append("Python's random")
            if alone:
                random.setstate(python)
        if _state_of(numpy) != before:
            drew.append("numpy.random")
            if alone:
                numpy.random.set_state(pickle.loads(before))
    if drew and alone:
        raise Untraceable(f"draws from {drew[0]}", _INSTEAD)
    if drew:
        log.warning(
            "%s was drawn from while a stage was traced, by the stage or by another thread; if by "
            "the stage: %s",
            drew[0],
            _INSTEAD,
        )


def _state_of(numpy: Any) -> bytes:
    return b"" if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))
