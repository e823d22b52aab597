"""What a forward depends on beside its arguments, as it is at a call: it is traced once for each.

A trace has the submodules, the buffers and the hooks that the module had. Numbers written to
buffers count, but not what is put in their place. So each time that some are others than before,
the mode is another one.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from fpipe.modules.lost import refuse_gradient_hooks
from fpipe.modules.tracing import as_left

log = logging.getLogger("fpipe")

MANY: Final = 8
"""As often as submodules, buffers or hooks may be replaced without a word."""


class Mode:
    """Which of the modules that are traced train, what they drop, their parts, buffers and hooks.

    Equal on all ranks whose modules are treated alike: parts, buffers and hooks are told by when
    they were first seen, not by where they lie.

    Args:
        modules: which are traced.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._modules: Final = modules
        self._parts: Final = _Seen()
        self._buffers: Final = _Seen()
        self._hooks: Final = _Seen()
        self._warned: set[str] = set()

    def __call__(self) -> Hashable:
        """The mode at this moment; waits while another thread traces a forward.

        Raises:
            StageError: meanwhile there are hooks on gradients.
        """
        with as_left():
            return self._read()

    def _read(self) -> Hashable:
        named = [pair for one in self._modules for pair in one.named_modules()]
        refuse_gradient_hooks(named)
        parts = [part for _, part in named]
        seen = self._parts(*_composition(parts))
        buffers = self._buffers(buffer for part in parts for buffer in part._buffers.values())
        hooks = self._hooks(hook for part in parts for hook in _hooks(part))
        self._warn(seen, "submodules", "make a pipeline of each module that there is to be")
        self._warn(buffers, "buffers", "write to them in place (buffer.copy_(...)), which counts "
                   "too, or let the step thread them (has_state=True)")  # fmt: skip
        self._warn(hooks, "forward hooks", "register a hook once, and the same one again")
        drops = tuple(part.p for part in parts if isinstance(part, _DropoutNd))
        return tuple(part.training for part in parts), drops, seen, buffers, hooks

    def _warn(self, times: int, what: str, instead: str) -> None:
        """Say once that something was replaced many times."""
        if times >= MANY and what not in self._warned:
            self._warned.add(what)
            log.warning(
                "the %s of %s have been replaced %d times, and each time it was traced again, "
                "which is kept with the %s: %s",
                what,
                type(self._modules[0]).__name__,
                times,
                what,
                instead,
            )


class _Seen:
    """Numbers collections of objects: one that was seen before keeps its number."""

    def __init__(self) -> None:
        # With the objects: the address of one that is gone would be given to another.
        self._numbers: dict[Hashable, tuple[int, list[Any]]] = {}

    def __call__(self, objects: Iterable[Any], words: Iterable[Hashable] = ()) -> int:
        kept = list(objects)
        key = tuple(map(id, kept)), tuple(words)
        number, _ = self._numbers.setdefault(key, (len(self._numbers), kept))
        return number


def _composition(parts: Sequence[nn.Module]) -> tuple[list[Any], list[Hashable]]:
    """What a module is made of, as objects and words that are the same where it computes the same.

    A forward may make parts anew, as one of another process may not have done yet.
    """
    places = {id(part): place for place, part in enumerate(parts)}
    objects: list[Any] = []
    words: list[Hashable] = []
    for part in parts:
        described = _described(part)
        objects += (part if described is None else type(part), vars(part).get("forward"))
        words.append(described)
        words.extend((name, places.get(id(child))) for name, child in part._modules.items())
    return objects, words


def _described(part: nn.Module) -> str | None:
    """What a part is beside its class, parameters, buffers and parts, if that can be told."""
    own = type(part)
    if vars(part).keys() <= _BARE:
        return ""
    if own.__module__.startswith("torch.nn.") and own.extra_repr is not nn.Module.extra_repr:
        return part.extra_repr()
    return None


_BARE: Final = vars(nn.Module()).keys()
"""The attributes of a module that sets none of its own."""


def _hooks(part: nn.Module) -> Iterable[Any]:
    """The hooks around the forward of a module, with None where one kind of them ends."""
    yield from part._forward_pre_hooks.values()
    yield None
    yield from part._forward_hooks.values()
    yield None
