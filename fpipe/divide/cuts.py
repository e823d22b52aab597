"""The mark of a stage boundary in a function: the identity, of which a tracer takes note."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch

T = TypeVar("T")

_NOTE: ContextVar[Callable[[], None] | None] = ContextVar("fpipe.cut", default=None)


def cut(x: T) -> T:
    """End a stage here: the n-th cut that is executed ends stage n, counted from 0.

    The identity, anywhere: eager, compiled, under grad, vmap or jvp. Only a pipeline of the
    function that executes it takes notice.

    Args:
        x: anything; usually what goes on to the next stage. Values that it does not name may be
            used after it all the same.

    Returns:
        `x`.

    Example:
        >>> import torch, fpipe
        >>> def loss_fn(params, batch):
        ...     hidden = fpipe.cut(torch.tanh(batch @ params["encode"]))
        ...     return (hidden @ params["decode"]).square().mean()
        >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
        >>> pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
        >>> params = {"encode": torch.eye(3), "decode": torch.eye(3)}
        >>> loss, grads = pipe.step(params, torch.ones(4, 3))
        >>> torch.equal(loss, loss_fn(params, torch.ones(4, 3))), sorted(grads)
        (True, ['decode', 'encode'])
    """
    # Code of torch.compile has no stages, and cannot read a context variable.
    note = None if torch.compiler.is_dynamo_compiling() else _NOTE.get()
    if note is not None:
        note()
    return x


@contextmanager
def noting(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` at each cut that is executed within."""
    token = _NOTE.set(note)
    try:
        yield
    finally:
        _NOTE.reset(token)
