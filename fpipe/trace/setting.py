"""What functions are traced in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fpipe.checks.explain import unreported
from fpipe.torch_internals import FakeTensorMode
from fpipe.trace.apart import apart
from fpipe.trace.overrides.functions import with_contexts
from fpipe.trace.overrides.scripted import as_written
from fpipe.trace.peeking import without_peeking


@contextmanager
def tracing(mode: FakeTensorMode) -> Iterator[None]:
    """Within it functions run on abstract tensors, and neither see nor change what is outside.

    Args:
        mode: of the abstract tensors.
    """
    with (
        unreported(),
        apart(),
        mode,
        _differentiable(),
        with_contexts(),
        as_written(),
        without_peeking(),
    ):
        yield


@contextmanager
def _differentiable() -> Iterator[None]:
    """Within it autograd records, whatever the caller has disabled."""
    # To torch 2.11 inference mode means no derivatives even where gradients are enabled again.
    with torch.inference_mode(False), torch.enable_grad():
        yield
