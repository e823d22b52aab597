"""Guards around the forward of a module while it is traced.

explaining           turns errors of the trace into advice
unchanged            restores the attributes of the module
refuse_global_hooks  hooks of all modules would stay in the trace
refuse_aliases       a write to a buffer that is a state would not show in another tensor
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
from fpipe.errors import StageError, a_type, error_text
from fpipe.inputs.signature import extent_of
from fpipe.trace.isolation import is_compiling as traced_as_compiled
from fpipe.trace.overrides.standin import Turns

log = logging.getLogger("fpipe")


@contextmanager
def explaining(name: str, *, is_compiling: bool | None) -> Iterator[None]:
    """Explain errors of a forward that is traced within the context.

    Args:
        name: of the module's class.
        is_compiling: the value of `torch.compiler.is_compiling` meanwhile, as in `torch.export`;
            None where a trace that looks at data is made once more with True.

    Raises:
        StageError: the forward cannot be traced; says what to do about it.
    """
    try:
        with traced_as_compiled(is_compiling):
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
        # In these models it is a mixture of experts that looks up the tokens of each expert.
        if known is not None and not (of_hugging_face and "aten.nonzero" in known):
            raise StageError(f"{name} {known}") from error
        advice = (
            ", or trace it with is_compiling=True, so that it does not look"
            if is_compiling is False
            else " (it looks with is_compiling=True as well)"
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
            f"({error_text(error)}): load the model with "
            'experts_implementation="batched_mm", or call '
            'module.set_experts_implementation("batched_mm")'
        ) from error


as_left = Turns()
"""Within it no other thread traces a module: modules are as their user has left them."""


@contextmanager
def unchanged(*modules: nn.Module) -> Iterator[None]:
    """Restore the attributes of modules at the end of the context.

    A module that is traced caches abstract tensors: the next trace, or the module's own forward,
    would take them for numbers. A conversion to the dtype and device that a submodule already has,
    ``self.router.to(self.dtype)``, does nothing.

    Raises:
        Untraceable: a submodule is converted to another dtype or device.
    """
    with as_left():
        submodules = [submodule for module in modules for submodule in module.modules()]
        restore = [put_back for submodule in submodules for put_back in _restorers(submodule)]
        try:
            for submodule in submodules:
                vars(submodule)["_apply"] = partial(_converted, submodule)
                # Module.compile sets it; fpipe compiles whole stages.
                vars(submodule)["_compiled_call_impl"] = None
            before = [(submodule, dict(vars(submodule))) for submodule in submodules]
            yield
            for submodule, attributes in before:
                _warn_of_changes(submodule, attributes)
        finally:
            for put_back in restore:
                put_back()


_WARNED: Final[WeakKeyDictionary[nn.Module, set[str]]] = WeakKeyDictionary()
"""The attributes of each module that a warning has named."""


def _warn_of_changes(submodule: nn.Module, before: Mapping[str, Any]) -> None:
    """Warn of numbers that a forward has changed, such as counts: steps do not change them."""
    now, warned = vars(submodule), _WARNED.setdefault(submodule, set())
    for name, old in before.items():
        new = now.get(name, old)
        if name not in warned and _is_number(old) and _is_number(new) and new != old:
            warned.add(name)
            log.warning(
                "the forward changes the attribute %s of %s, which stays what it was: a trace is "
                "made once, and steps do not run the forward again; keep what changes in a buffer, "
                "with has_state=True, or give it with the batch",
                name,
                a_type(submodule),
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _converted(
    submodule: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Check, in place of `nn.Module._apply`, which writes to parameters, that nothing changes."""
    for value in (*submodule.parameters(recurse), *submodule.buffers(recurse)):
        wanted = convert(value)
        if (wanted.dtype, wanted.device) != (value.dtype, value.device):
            raise Untraceable(
                f"converts {a_type(submodule)} of {value.dtype} on {value.device} to "
                f"{wanted.dtype} on {wanted.device} in its forward",
                "convert the module before the pipeline is made",
            )
    return submodule


def _restorers(submodule: nn.Module) -> Iterator[Callable[[], None]]:
    """Functions that restore the attributes of a module, and the containers among them."""
    waiting: list[Any] = [vars(submodule)]
    seen: set[int] = set()
    while waiting:
        container = waiting.pop()
        if id(container) not in seen:
            seen.add(id(container))
            yield partial(_restore, container, _items(container))
            values = container.values() if isinstance(container, dict) else container
            waiting += [value for value in values if isinstance(value, dict | set | list)]


def _items(container: Any) -> tuple[Any, ...]:
    return tuple(container.items() if isinstance(container, dict) else container)


def _restore(container: Any, items: tuple[Any, ...]) -> None:
    now = _items(container)
    if len(now) != len(items) or any(map(_differ, now, items)):
        container.clear()
        (container.extend if isinstance(container, list) else container.update)(items)


def _differ(one: Any, other: Any) -> bool:
    """Whether two items are different objects; the items of a dict are new pairs each time."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return any(a is not b for a, b in zip(one, other, strict=True))
    return one is not other


def refuse_global_hooks(name: str) -> None:
    """Refuse hooks of all modules while one of this class is traced, in which they would stay."""
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
    """Refuse a module that has another tensor in the memory of a buffer that its forward writes to.

    A state is threaded as a value, so the other tensor would not change. One tensor that is
    registered as several buffers is one buffer. The module holds its own buffers, not the state.
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
    """All buffers and plain attributes, with their names, and those in lists, tuples and dicts."""
    for prefix, submodule in module.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                yield start + name, buffer, True
        for name, value in vars(submodule).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                for place, tensor in _tensors_in(value):
                    yield start + name + place, tensor, False


def _tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
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
    """Whether the ranges of memory between the ends of two tensors have bytes in common."""
    if not (_has_memory(one) and _has_memory(other)):
        return False
    (start, end), (other_start, other_end) = extent_of(one), extent_of(other)
    return start < other_end and other_start < end


def _has_memory(value: Tensor) -> bool:
    plain = type(value) in (Tensor, nn.Parameter, nn.Buffer) and value.layout == torch.strided
    return plain and not value.is_meta and value.numel() > 0
