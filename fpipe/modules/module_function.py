"""The forward of a module while it is traced, and the module left as it was afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

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
