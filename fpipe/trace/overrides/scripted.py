"""Functions that torch.jit has compiled, called as they were written while a function is recorded.

After some calls TorchScript runs an optimised graph with gradients disabled and a backward of its
own, of which a recorded graph knows nothing: the values would be seen to carry no gradient.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from fpipe.checks.explain import Untraceable
from fpipe.trace.overrides.standin import StandIn


def as_written() -> AbstractContextManager[None]:
    """Within it a compiled function is the Python function that it was made of.

    So it is to `torch.compile`. Of a compiled module there is none: its methods are refused. Calls
    in other threads are as before.
    """
    return _CALLS.active()


def _looking(kind: Any) -> Any:
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if not _CALLS.is_active:
            return _CALLS.own(kind)(self, *arguments, **options)
        # Set by torch.jit, for torch.compile.
        written = getattr(self, "_torchdynamo_inline", None)
        if written is None:
            raise Untraceable(
                f"calls {self.name!r}, which torch.jit has compiled",
                "its derivative is not recorded; use the function or module that torch.jit.trace "
                "or torch.jit.script was given, which fpipe compiles by itself (compile=)",
            )
        return written(*arguments, **options)

    return call


_CALLS = StandIn(
    "__call__",
    {kind: _looking(kind) for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod)},
)
