"""What torch is told beside the arguments: autocast, dtypes, kernels, the current device."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import torch


class Ambient(NamedTuple):
    """What a trace depends on beside its arguments.

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
    """What a trace depends on now, where the definition has these modes."""
    casts = tuple((kind, torch.get_autocast_dtype(kind)) for kind in _casting())
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    # As torch.get_default_device does, which takes ten times as long to say it.
    device = torch.empty(0).device
    return Ambient(casts, dtype, kernels(), device, modes, threads)


_KINDS: Final = ("cpu", "cuda")
"""Of devices that have an autocast."""


def _casting() -> list[str]:
    """The kinds of device under autocast."""
    return [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]


def autocasts() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Autocast as it is now: of each kind of device whether it is on, and its dtype."""
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS
    )


@contextmanager
def cast_as(then: tuple[tuple[str, bool, torch.dtype], ...]) -> Iterator[None]:
    """Within it autocast is as it was when `autocasts` returned `then`."""
    with ExitStack() as stack:
        for own, (kind, enabled, dtype) in zip(autocasts(), then, strict=True):
            if own != (kind, enabled, dtype):
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """Within it nothing is cast that was not asked to be: of what has its casts already."""
    with ExitStack() as stack:
        for kind in _casting():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


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
