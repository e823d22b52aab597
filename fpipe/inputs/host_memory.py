"""Tensors in the CPU's memory, where devices copy from it, and in files that are mapped into it.

tensor ── page_locked ──► memory that a device reads by itself, beside what is computed
       ── MappedFolder ─► a file: the system reads and writes it, and needs no memory for it
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from fpipe.errors import FpipeError

CPU: Final = torch.device("cpu")

Keep = Callable[[Tensor], Tensor] | None
"""Puts a tensor where it is to live; None leaves it where it is."""


def empty_on_the_cpu(like: Tensor, *, pin: bool) -> Tensor:
    """Memory of the CPU for a tensor of this shape and these strides, page-locked or not."""
    shape, stride = like.shape, like.stride()
    return torch.empty_strided(shape, stride, dtype=like.dtype, device=CPU, pin_memory=pin)


def on_the_cpu(value: Tensor, *, pin: bool) -> Tensor:
    """A tensor on the CPU: itself where it lies so, and else a copy, which requires a gradient too.

    Args:
        value: on any device.
        pin: page-locked, which takes an accelerator.
    """
    if value.device == CPU and (not pin or value.is_pinned()):
        return value
    with torch.no_grad():
        dense = torch.empty_like(value, device="meta")
        held = empty_on_the_cpu(dense, pin=pin)
        held.copy_(value)
    return held.requires_grad_(value.requires_grad)


class MappedFolder:
    """Keeps tensors in memory-mapped files, each of which has gone when its tensor has.

    A file loses its name as soon as it is mapped: nothing is left of a process that is killed, and
    no other process takes a part of it for the whole.

    Args:
        path: of the directory, made if it is missing; on a disk, not in memory.

    Raises:
        FpipeError: there is no such directory, or it cannot be written to.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(os.path.abspath(path))
        self._since = 0
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FpipeError(
                f"{self._path} cannot be a directory of tensors: {error.strerror}"
            ) from error

    def hold(self, value: Tensor) -> Tensor:
        """A copy of a tensor in a file: of its dtype and shape, and dense strides.

        Raises:
            FpipeError: the file cannot be made, as where the disk is full.
        """
        dense = torch.empty_like(value, device="meta")
        if not value.numel():
            return torch.empty_like(value, device=CPU)
        memory = self._map(value.numel(), value.dtype)
        with torch.no_grad():
            held = memory.new_empty(0).set_(
                memory.untyped_storage(), 0, dense.shape, dense.stride()
            )
            held.copy_(value)
        self._since += value.nbytes
        if self._since > 1 << 26:
            self._since = 0
            _give_back()
        return held.requires_grad_(value.requires_grad)

    def _map(self, count: int, dtype: torch.dtype) -> Tensor:
        """So many elements in a file without a name."""
        try:
            handle, name = tempfile.mkstemp(prefix="fpipe-", suffix=".tensor", dir=self._path)
            try:
                # Else a full disk is found out when memory is written, which ends the process.
                _reserve(handle, count * dtype.itemsize)
                return torch.from_file(name, shared=True, size=count, dtype=dtype, device=CPU)
            finally:
                os.close(handle)
                os.unlink(name)
        except OSError as error:
            raise FpipeError(
                f"{self._path} cannot hold a tensor of {count * dtype.itemsize:,} bytes: "
                f"{error.strerror}"
            ) from error


def _reserve(handle: int, size: int) -> None:
    """Give a file its size; where the system can say so, with room on the disk."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        os.truncate(handle, size)


def _give_back() -> None:
    """Return to the system what tensors have left of the process's memory.

    The allocator of glibc keeps it, in pieces that tensors of that size do not fit in any more.
    """
    with suppress(AttributeError, OSError):  # another allocator
        ctypes.CDLL(None).malloc_trim(0)
