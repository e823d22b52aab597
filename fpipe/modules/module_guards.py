"""Refuse modules that a pipeline of their forward would not follow.

Wrappers and hooks on parameters act outside the forward. A state is threaded as a value, so a write
to a buffer is not seen through another tensor in the same memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from fpipe.checks.explain import Untraceable
from fpipe.errors import StageError, a_type

# By name: some of their modules take a second to import.
_WRAPPERS = {
    "OptimizedModule": ("_orig_mod", "fpipe compiles the stages itself (compile=)"),
    "DataParallel": ("module", "a pipeline of a module has a process for each device"),
    "DistributedDataParallel": (
        "module",
        "it cannot average the gradients of a step: do so yourself (docs/distributed.md)",
    ),
}

# What modules are given by torch.distributed._composable: hooks around their forward.
_COMPOSED = "torch.distributed._composable"

_SHARDED = frozenset({"FSDPModule", "FullyShardedDataParallel"})
_WHOLE = (
    "pass the module as it is before it is sharded: a pipeline divides it by layers, and "
    "parallelize_module may divide the layers (docs/distributed.md)"
)


def refuse_lost(module: nn.Module) -> None:
    """Refuse wrappers around a module, sharded parameters, and hooks on parameters.

    Raises:
        StageError: it has some; names it.
    """
    for path, part in module.named_modules():
        kind = type(part).__name__
        where = f"module.get_submodule({path!r})" if path else "module"
        sharded = {base.__name__ for base in type(part).__mro__}.intersection(_SHARDED)
        if sharded:
            as_what = "" if kind in sharded else f", a {sharded.pop()}"
            raise StageError(f"{where} is a {kind}{as_what}: {_WHOLE}")
        inner, why = _WRAPPERS.get(kind, ("", ""))
        if inner in part._modules and type(part).__module__.startswith("torch."):
            raise StageError(
                f"{where} is {a_type(part)} around {a_type(part._modules[inner])}: take what is "
                f"within, .{inner}; {why}"
            )
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            if (maker := str(getattr(hook, "__module__", ""))).startswith(_COMPOSED):
                raise StageError(
                    f"{where} has a hook of {maker}: pass the module as it is before that: a step "
                    "averages no gradients (do so yourself: docs/distributed.md), and computes "
                    "forwards again by remat= or torch.utils.checkpoint"
                )
    refuse_gradient_hooks(module.named_modules())


def refuse_global_hooks(name: str) -> None:
    """Refuse hooks of all modules while one is traced, in which they would stay.

    Args:
        name: of the module's class.

    Raises:
        StageError: there are some.
    """
    for kind, hooks in (
        ("forward pre-hook", modules._global_forward_pre_hooks),
        ("forward hook", modules._global_forward_hooks),
        ("backward pre-hook", modules._global_backward_pre_hooks),
        ("backward hook", modules._global_backward_hooks),
    ):
        if hooks:
            raise StageError(
                f"{name} is traced while a {kind} of all modules is registered ("
                f"{next(iter(hooks.values()))!r:.100}), as torch's counter of FLOPs has one: make "
                "the first call without it; later ones, for which nothing is traced, do not call it"
            )


def refuse_gradient_hooks(parts: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse hooks on the parameters of a module: a step takes other tensors in their place.

    Args:
        parts: as ``module.named_modules()`` gives them.

    Raises:
        StageError: there is one; names where.
    """
    for path, part in parts:
        for name, own in part._parameters.items():
            if _has_hooks(own):
                where = f"module.get_parameter({'.'.join(filter(None, (path, name)))!r})"
                raise StageError(
                    f"{where} has hooks on its gradient, which a step does not run, for it returns "
                    "gradients: remove the hooks, and change what step returns; those of modules "
                    "(register_full_backward_hook) run"
                )


def has_gradient_hooks(part: nn.Module) -> bool:
    """Whether a submodule has a parameter of its own with a hook on its gradient."""
    return any(map(_has_hooks, part._parameters.values()))


def _has_hooks(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and bool(
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


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
