"""Modes of the caller's, which torch tells of each function or operation that is called.

A function mode changes what functions of Python do. A trace would keep that, and steps that come
later, which call none of them, would leave it out. A dispatch mode sees operations as they run: it
stays out of traces, and sees the steps of uncompiled stages.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe.errors import FpipeError, a_type
from fpipe.torch_internals import TorchFunctionMetadataMode


def refuse_modes(*, compiled: bool) -> None:
    """Refuse modes of the caller's that a pipeline cannot follow.

    Args:
        compiled: whether stages become kernels, which call no operation of torch.

    Raises:
        FpipeError: one is on; names its class.
    """
    if torch.jit.is_tracing():
        raise FpipeError(
            "a pipeline is called while torch.jit.trace records, which takes shapes for tensors: "
            "trace the functions that the pipeline was made of"
        )
    if _fake_mode() is not None:
        raise FpipeError(
            "a pipeline is called under a FakeTensorMode, where tensors have no data: "
            "pipe.programs takes shapes; call a step outside of it"
        )
    for index in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(index)
        # What torch.set_default_device and `with torch.device(...)` set, a plan depends on; and
        # what make_fx sets only takes notes.
        kinds = (DeviceContext, TorchFunctionMetadataMode)
        if not isinstance(mode, kinds) and not _is_of(mode, "fpipe."):
            raise FpipeError(
                f"a pipeline is called under {a_type(mode)}, a TorchFunctionMode, which changes "
                "what functions do: stages are traced once, and steps do not call them again. Call "
                "the pipeline outside of it, and enter it in the stages, which are traced with it"
            )
    for index in range(torch._C._len_torch_dispatch_stack() if compiled else 0):
        mode = torch._C._get_dispatch_stack_at(index)
        if not _is_of(mode, *_WATCHERS) and not _traces(mode):
            raise FpipeError(
                f"a pipeline that compiles its stages is called under {a_type(mode)}, a "
                "TorchDispatchMode, which sees no operation of theirs: call the pipeline outside "
                "of it, or make it with compile=False"
            )


_WATCHERS: Final = ("fpipe.", "torch.")
"""Whose dispatch modes change no number: counters, and `fpipe.nn.keyed`, which refuses draws."""


def _fake_mode() -> Any:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def _is_of(mode: Any, *packages: str) -> bool:
    return type(mode).__module__.startswith(packages)


def _traces(mode: Any) -> bool:
    """Whether a dispatch mode is a part of how torch itself traces."""
    return isinstance(mode, TorchDispatchMode) and bool(type(mode).is_infra_mode())
