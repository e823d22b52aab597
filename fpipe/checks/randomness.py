"""Refuse functions that seed torch's generator, or draw from that of Python or numpy.

A seed would be set while the function is traced, and not in a step. A number that it draws would
be kept in the trace: all microbatches of all steps would get the same, and each rank another.
"""

from __future__ import annotations

import logging
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch

from fpipe.checks.explain import Untraceable
from fpipe.trace.overrides.standin import StandIn

_JUPYTER: Final = ("IOPub", "Heartbeat", "Control", "IPythonHistorySavingThread")

QUIET: Final = ("fpipe ", "tqdm_monitor", *_JUPYTER)
"""How the names of threads start that draw nothing: fpipe's own, tqdm's and those of notebooks."""


@contextmanager
def unseeded() -> Iterator[None]:
    """Refuse what seeds torch's generator, or leaves it in another state, which is put back.

    A call of `torch.manual_seed` is refused where it stands, before any device is seeded. Other
    ways to seed show in the state of the CPU's generator alone, for abstract tensors draw nothing;
    but other threads, which load data or train, may have drawn or seeded meanwhile, so that is
    looked at while there are none.

    Raises:
        Untraceable: it was seeded, or left in another state.
    """
    before, alone = torch.get_rng_state(), not others()
    calls: list[int] = []
    token = _CALLS.set(calls)
    changed = False
    try:
        with _SEEDS.active():
            yield
    finally:
        _CALLS.reset(token)
        if alone and not others() and not torch.equal(torch.get_rng_state(), before):
            torch.set_rng_state(before)
            changed = True
    if calls or changed:  # where it was called, the function has caught the refusal
        raise _refusal()


def others() -> list[threading.Thread]:
    """The other threads that run and may draw.

    Those do not that watch other ranks for fpipe, in which Inductor compiles, that look after the
    bars of tqdm, and that carry messages of a notebook.
    """
    compile = sys.modules.get("torch._inductor.async_compile")
    pool = None if compile is None else compile.AsyncCompile.pool
    quiet = {threading.current_thread()}
    if pool is not None and pool.cache_info().currsize:
        quiet |= pool()._threads
    return [t for t in threading.enumerate() if t not in quiet and not t.name.startswith(QUIET)]


def _refusing(module: Any) -> Callable[[int], Any]:
    def manual_seed(seed: int) -> Any:
        calls = _CALLS.get()
        if calls is None:
            return _SEEDS.original(module)(seed)
        calls.append(seed)
        raise _refusal()

    return manual_seed


def _refusal() -> Untraceable:
    return Untraceable(
        "seeds torch's generator",
        "a step draws what was traced from a stream of its own; draw from a key, with fpipe.random "
        "and has_key=True (fpipe.Stage(fn, reads_key=True) for a stage), or seed before the step",
    )


_CALLS: ContextVar[list[int] | None] = ContextVar("fpipe.seeds", default=None)
_SEEDS = StandIn("manual_seed", {module: _refusing(module) for module in (torch, torch.random)})


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
