"""Functions that torch.jit has compiled, called as they were written while a function is recorded.

After some calls TorchScript runs an optimised graph with gradients disabled and a backward of its
own, of which a recorded graph knows nothing: the values would be seen to carry no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any

import torch

from fpipe.stage.explain import Untraceable

_AS_WRITTEN: ContextVar[bool] = ContextVar("fpipe.scripted", default=False)
_lock = Lock()
_recording = 0


@contextmanager
def as_written() -> Iterator[None]:
    """Within it a compiled function is the Python function that it was made of.

    So it is to `torch.compile`. Of a compiled module there is none: its methods are refused. Calls
    in other threads are as before.
    """
    token = _AS_WRITTEN.set(True)
    _looked_at(1)
    try:
        yield
    finally:
        _looked_at(-1)
        _AS_WRITTEN.reset(token)


def _looked_at(more: int) -> None:
    """While anything is recorded, calls of compiled functions are looked at: no mode sees them."""
    global _recording
    with _lock:
        before, _recording = _recording, _recording + more
        if bool(before) != bool(_recording):
            for kind, call in _CALLS.items():
                kind.__call__ = _looking(call) if _recording else call


def _looking(compiled: Any) -> Any:
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if not _AS_WRITTEN.get():
            return compiled(self, *arguments, **options)
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


_CALLS: dict[Any, Any] = {
    kind: kind.__call__ for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod)
}
