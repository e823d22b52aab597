"""Functions that `torch.compile` has compiled, called as they were written in a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within it what the caller has compiled is called as it was written, in other threads too.

    torch refuses to trace it otherwise, and what is traced is compiled with its stage.
    """
    frames: Any = torch._dynamo.eval_frame
    own = frames.DynamoStance("force_eager")
    # The caller may be compiled itself, and what runs in it may not set a stance.
    caller = torch._C._dynamo.eval_frame.set_eval_frame(None)
    before = frames._set_stance(own)
    try:
        with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
            yield
    finally:
        if frames._stance is own:
            frames._set_stance(before)
        # Another thread that has set its own meanwhile comes back to this one.
        for name, value in vars(before).items():
            object.__setattr__(own, name, value)
        torch._C._dynamo.eval_frame.set_eval_frame(caller)
