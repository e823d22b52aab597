"""The surroundings of a call: transforms and modes of torch, autocast, dtypes, kernels, devices.

A function mode changes what functions of Python do. A trace would keep that, and steps that come
later, which call none of them, would leave it out. A dispatch mode sees operations as they run: it
stays out of traces, and sees the steps of uncompiled stages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe.errors import FpipeError, a_type
from fpipe.torch_internals import TorchFunctionMetadataMode, functorch


class Ambient(NamedTuple):
    """The settings that a trace depends on beside its arguments.

    Attributes:
        casts: kinds of device under autocast, with the dtype.
        dtype: the default one.
        kernels: which ones torch was told to take.
        device: the default one.
        modes: of the definition.
        threads: their number, which every process may choose for itself.
    """

    casts: tuple[tuple[str, torch.dtype], ...]
    dtype: torch.dtype
    kernels: Hashable
    device: torch.device
    modes: Hashable
    threads: int


def ambient(modes: Hashable = None) -> Ambient:
    """The settings as they are now, where the definition has these modes."""
    casts = tuple([(kind, dtype) for kind, enabled, dtype in autocasts() if enabled])
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    # As torch.get_default_device does, which takes ten times as long to say it.
    device = torch.empty(0).device
    return Ambient(casts, dtype, kernels(), device, modes, threads)


_KINDS: Final = ("cpu", "cuda")
"""The kinds of devices that have an autocast."""


def autocasts() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Autocast as it is now: of each kind of device whether it is on, and its dtype."""
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS
    )


@contextmanager
def cast_as(then: tuple[tuple[str, bool, torch.dtype], ...]) -> Iterator[None]:
    """Within it autocast is as it was when `autocasts` returned `then`."""
    with ExitStack() as stack:
        for now, (kind, enabled, dtype) in zip(autocasts(), then, strict=True):
            if now != (kind, enabled, dtype):
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
        yield


def without_autocast() -> AbstractContextManager[Any]:
    """Disable autocast: the traced graph already contains its casts."""
    now = autocasts()
    on = [kind for kind, enabled, _ in now if enabled]
    if not on:
        return nullcontext()
    return cast_as(tuple((kind, False, dtype) for kind, _, dtype in now))


def current(device: torch.device | None) -> AbstractContextManager[Any]:
    """Within it a device of CUDA is the current one; of another, or None, nothing changes."""
    if device is None or device.type != "cuda":
        return nullcontext()
    return torch.cuda.device(device)


def kernels() -> Hashable:
    """Which kernels torch was told to take: in what it traces, and in what Inductor makes of it."""
    attention = torch.backends.cuda  # of every kind of device
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        attention.flash_sdp_enabled(),
        attention.mem_efficient_sdp_enabled(),
        attention.math_sdp_enabled(),
        attention.cudnn_sdp_enabled(),
    )


# ── transforms and modes of the caller's ────────────────────────────────────────────────────────


def is_within() -> bool:
    """Whether `torch.func`, forward-mode autograd or `torch.compile` surrounds this call."""
    return (
        torch.compiler.is_dynamo_compiling()
        or functorch.peek_interpreter_stack() is not None
        or (forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled())
    )


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
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        raise FpipeError(
            "a pipeline is called under a FakeTensorMode, where tensors have no data: "
            "pipe.programs takes shapes; call a step outside of it"
        )
    for index in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(index)
        # A plan depends on the mode of torch.set_default_device and `with torch.device(...)`;
        # the mode of make_fx only takes notes.
        kinds = (DeviceContext, TorchFunctionMetadataMode)
        if not isinstance(mode, kinds) and not _is_of(mode, "fpipe."):
            raise FpipeError(
                f"a pipeline is called under {a_type(mode)}, a TorchFunctionMode, which changes "
                "what functions do: stages are traced once, and steps do not call them again. Call "
                "the pipeline outside of it, and enter it in the stages, which are traced with it"
            )
    for index in range(torch._C._len_torch_dispatch_stack() if compiled else 0):
        mode = torch._C._get_dispatch_stack_at(index)
        # Those of infrastructure are how torch itself traces.
        traces = isinstance(mode, TorchDispatchMode) and mode.is_infra_mode()
        if not _is_of(mode, *_WATCHERS) and not traces:
            raise FpipeError(
                f"a pipeline that compiles its stages is called under {a_type(mode)}, a "
                "TorchDispatchMode, which sees no operation of theirs: call the pipeline outside "
                "of it, or make it with compile=False"
            )


_WATCHERS: Final = ("fpipe.", "torch.")
"""Whose dispatch modes change no number: counters, and `fpipe.nn.keyed`, which refuses draws."""


def _is_of(mode: Any, *packages: str) -> bool:
    return type(mode).__module__.startswith(packages)
