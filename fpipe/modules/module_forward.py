"""Trace the forward of a module: explain errors, restore the module, and refuse what would be lost.

Hooks of all modules would stay in the trace. A state is threaded as a value, so a write to a buffer
is not seen through another tensor in the same memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.modules import module as modules

from fpipe.checks.explain import Untraceable, place, told_apart
from fpipe.errors import StageError, a_type, told
from fpipe.locks import Turns

log = logging.getLogger("fpipe")


@contextmanager
def explaining(name: str, *, is_compiling: bool) -> Iterator[None]:
    """Run a forward within it, while it is traced.

    Args:
        name: of the module's class.
        is_compiling: what `torch.compiler.is_compiling` says meanwhile, as where `torch.export`
            traces.

    Raises:
        StageError: the forward cannot be traced, for a reason with a known way round.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = is_compiling or before
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        at = place(error)
        if "transformers/utils/import_utils.py:" in at:
            raise StageError(
                f"{name} checks its data{at}, which a pipeline that is traced once cannot: set the "
                "environment variable TRANSFORMERS_DISABLE_TORCH_CHECK=1, with which Hugging Face "
                "models do not"
            ) from error
        of_hugging_face = "transformers/" in at
        known = told_apart(error)
        # There it is a mixture of experts that looks which tokens each of them gets.
        if known is not None and not (of_hugging_face and "aten.nonzero" in known):
            raise StageError(f"{name} {known}") from error
        advice = (
            "" if is_compiling else ", or trace it with is_compiling=True, so that it does not look"
        )
        if of_hugging_face:
            advice = (
                "; in a Hugging Face model this is most often the padding mask: pass the mask with "
                "four dimensions, bool[batch, 1, query, key], load a decoder with "
                'attn_implementation="eager" (experts: experts_implementation="batched_mm"), '
                "drop no layers (config.layerdrop = 0)" + advice
            )
        raise StageError(
            f"{name} branches on data ({error}){at}, which a pipeline that is traced "
            f"once cannot: use torch.where or a mask{advice}"
        ) from error
    except Exception as error:
        if "transformers/integrations/moe.py:" not in place(error):
            raise
        raise StageError(
            f"{name} chose an implementation of its experts that cannot be traced{place(error)} "
            f"({told(error)}): load the model with "
            'experts_implementation="batched_mm", or call '
            'module.set_experts_implementation("batched_mm")'
        ) from error
    finally:
        torch.compiler._is_compiling_flag = before


as_left = Turns()
"""Within it no other thread is `unchanged`: modules are as their user has left them."""


@contextmanager
def unchanged(*modules: nn.Module) -> Iterator[None]:
    """What modules set on themselves within it is gone at its end.

    What they cache is abstract while they are traced: the next trace, or the module's own forward,
    would take it for numbers. A conversion to what a part is, ``self.router.to(self.dtype)``, does
    nothing.

    Raises:
        Untraceable: a module is converted to what it is not.
    """
    with as_left():
        parts = [part for module in modules for part in module.modules()]
        restore = [put for part in parts for put in _as_held(part)]
        try:
            for part in parts:
                vars(part)["_apply"] = partial(_converted, part)
                # Of Module.compile; stages are compiled whole.
                vars(part)["_compiled_call_impl"] = None
            before = [(part, dict(vars(part))) for part in parts]
            yield
            for part, held in before:
                _tell_of_changes(part, held)
        finally:
            for put in restore:
                put()


_TOLD: Final[WeakKeyDictionary[nn.Module, set[str]]] = WeakKeyDictionary()
"""Of which of a module's attributes a warning was given."""


def _tell_of_changes(part: nn.Module, before: Mapping[str, Any]) -> None:
    """Warn of what was a number and is another, such as a count: no later step will change it."""
    now, told_before = vars(part), _TOLD.setdefault(part, set())
    for name, old in before.items():
        new = now.get(name, old)
        if name not in told_before and _is_number(old) and _is_number(new) and new != old:
            told_before.add(name)
            log.warning(
                "the forward changes the attribute %s of %s, which stays what it was: a trace is "
                "made once, and steps do not run the forward again; keep what changes in a buffer, "
                "with has_state=True, or give it with the batch",
                name,
                a_type(part),
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _converted(
    part: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """What `nn.Module._apply` returns where it has nothing to do; it would write to parameters."""
    for value in (*part.parameters(recurse), *part.buffers(recurse)):
        wanted = convert(value)
        if (wanted.dtype, wanted.device) != (value.dtype, value.device):
            raise Untraceable(
                f"converts {a_type(part)} of {value.dtype} on {value.device} to "
                f"{wanted.dtype} on {wanted.device} in its forward",
                "convert the module before the pipeline is made",
            )
    return part


def _as_held(part: nn.Module) -> Iterator[Callable[[], None]]:
    """What puts back the attributes of a module, and what the containers among them contain."""
    waiting: list[Any] = [vars(part)]
    seen: set[int] = set()
    while waiting:
        held = waiting.pop()
        if id(held) not in seen:
            seen.add(id(held))
            yield partial(_put_back, held, _content(held))
            values = held.values() if isinstance(held, dict) else held
            waiting += [value for value in values if isinstance(value, dict | set | list)]


def _content(held: Any) -> tuple[Any, ...]:
    return tuple(held.items() if isinstance(held, dict) else held)


def _put_back(held: Any, content: tuple[Any, ...]) -> None:
    now = _content(held)
    if len(now) != len(content) or any(map(_differ, now, content)):
        held.clear()
        (held.extend if isinstance(held, list) else held.update)(content)


def _differ(one: Any, other: Any) -> bool:
    """Whether two items are not the same objects; those of a dict are pairs made anew."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return any(a is not b for a, b in zip(one, other, strict=True))
    return one is not other


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
