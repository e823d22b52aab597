"""Tensors of a module that share memory with a buffer that its forward writes to.

A state is threaded as a value: what the forward writes to a buffer is seen by who reads the buffer,
and by nobody who reads the same memory by another name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.checks.explain import Untraceable


def refuse_aliases(module: nn.Module, written: Collection[str]) -> None:
    """Refuse a module that has another tensor in the memory of a buffer that changes.

    One tensor that is registered as several buffers is one buffer.

    Args:
        module: holds its own buffers.
        written: the names of buffers to which its forward writes.

    Raises:
        Untraceable: names both.
    """
    for name in written:
        buffer = module.get_buffer(name)
        for other, value, is_buffer in _tensors(module):
            if not (is_buffer and value is buffer) and _overlap(buffer, value):
                raise Untraceable(
                    f"writes to its buffer {name!r}, and has {other!r} in the same memory",
                    "with has_state=True a buffer is a value, and what is written to it is seen "
                    "nowhere else: make the other of the buffer in the forward, or give it memory "
                    "of its own, .clone()",
                )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Every buffer and plain attribute, and what lists, tuples and dicts among those hold."""
    for prefix, part in module.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield start + name, buffer, True
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                for place, found in _held(value):
                    yield start + name + place, found, False


def _held(value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            if isinstance(entry, Tensor):
                yield f"[{index}]", entry
    elif isinstance(value, dict):
        for key, entry in value.items():
            if isinstance(entry, Tensor):
                yield f"[{key!r}]", entry


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether both reach into the same stretch of one memory."""
    first, second = _reach(one), _reach(other)
    if first is None or second is None or first[0] != second[0]:
        return False
    return first[1] < second[2] and second[1] < first[2]


def _reach(value: Tensor) -> tuple[int, int, int] | None:
    """The address of its memory, and of its first byte and of the one after its last."""
    plain = type(value) in (Tensor, nn.Parameter, nn.Buffer)
    if not plain or value.is_meta or value.layout != torch.strided or not value.numel():
        return None
    last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    begin = value.data_ptr()
    return value.untyped_storage().data_ptr(), begin, begin + (last + 1) * value.itemsize
