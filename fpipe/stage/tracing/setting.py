"""What functions are traced in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from fpipe.stage.foreign.combined import with_contexts
from fpipe.stage.refusing.explain import unreported
from fpipe.stage.tracing.apart import apart
from fpipe.stage.tracing.peeking import without_peeking


@contextmanager
def tracing(mode: FakeTensorMode, gradients: AbstractContextManager[Any]) -> Iterator[None]:
    """Within it functions run on abstract tensors, and neither see nor change what is outside.

    Args:
        mode: of the abstract tensors.
        gradients: whether autograd records, such as `torch.no_grad()`.
    """
    with unreported(), apart(), mode, gradients, with_contexts(), without_peeking():
        yield
