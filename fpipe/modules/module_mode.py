"""The mode of a module: the state, beside its arguments, that the trace of a forward depends on.

A trace is made with the submodules, attributes of layers, buffers and hooks that the module had
then. A later call sees numbers written to these buffers, but no other objects in their places. So
when one of these objects is replaced, the mode changes, and the forward is traced again. Reading
the mode runs no code of the module.

Wrappers and hooks on parameters, which act outside the forward, are refused.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from fpipe.errors import StageError, a_type
from fpipe.modules.module_forward import as_left

log = logging.getLogger("fpipe")

MANY: Final = 8
"""How often submodules, attributes, buffers or hooks may be replaced before a warning."""


class Mode:
    """Reads the mode of the modules that are traced.

    Modes are equal on all ranks whose modules are treated alike: objects have numbers in the order
    in which they were first seen, whatever their addresses.

    Args:
        modules: the module, and the loss if that is one.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._modules: Final = modules
        # It keeps the objects: another object might get the address of one that is gone.
        self._seen: Final = defaultdict[str, dict[Hashable, tuple[int, list[Any]]]](dict)
        self._warned: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Mode:
        return Mode(*copy.deepcopy(self._modules, memo))

    def __call__(self) -> Hashable:
        """The mode at this moment; waits while another thread traces a forward.

        Raises:
            StageError: hooks on parameters have been registered.
        """
        with as_left():
            return self._read()

    def _read(self) -> Hashable:
        submodules = _submodules(self._modules)
        if any(map(_has_gradient_hooks, submodules)):
            refuse_gradient_hooks(pair for one in self._modules for pair in one.named_modules())
        buffers = (buffer for module in submodules for buffer in module._buffers.values())
        hooks = (hook for module in submodules for hook in _hooks(module))
        return (
            tuple(vars(submodule).get("training") for submodule in submodules),
            self._number("submodules", *_composition(submodules)),
            self._number("attributes of layers", *_attributes(submodules)),
            self._number("buffers", buffers),
            self._number("hooks", hooks),
        )

    def _number(self, what: str, objects: Iterable[Any], words: Iterable[Hashable] = ()) -> int:
        """The number of a collection of objects of a kind, which it keeps when it comes again.

        It warns once where such objects were replaced many times.
        """
        kept, seen = list(objects), self._seen[what]
        key = tuple(map(id, kept)), tuple(words)
        times, _ = seen.setdefault(key, (len(seen), kept))
        if times >= MANY and what not in self._warned:
            self._warned.add(what)
            log.warning(
                "the %s of %s have been replaced %d times, and each time it was traced again, "
                "which is kept with the %s: %s",
                what,
                type(self._modules[0]).__name__,
                times,
                what,
                _INSTEAD[what],
            )
        return times


_INSTEAD: Final = {
    "submodules": "make a pipeline of each module that there is to be",
    "attributes of layers": "give what changes often with the batch",
    "buffers": "write to them in place (buffer.copy_(...)), which counts too, or let the step "
    "thread them (has_state=True)",
    "hooks": "register a hook once, and the same one again",
}


def _submodules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules and their submodules; a submodule that several of `modules` hold comes again.

    It is faster than `nn.Module.modules`, and no module can override it.
    """
    submodules: list[nn.Module] = []
    for module in modules:
        seen = {id(module)}
        waiting = [module]
        while waiting:
            submodule = waiting.pop()
            submodules.append(submodule)
            for child in submodule._modules.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    waiting.append(child)
    return submodules


def _composition(submodules: Sequence[nn.Module]) -> tuple[list[Any], list[Hashable]]:
    """The tree of submodules, as objects and words that are equal if the forward computes the same.

    A forward may replace submodules by new ones of the same type; a module of torch, or one without
    attributes, counts by its type.
    """
    places = {id(submodule): place for place, submodule in enumerate(submodules)}
    objects: list[Any] = []
    words: list[Hashable] = []
    for submodule in submodules:
        kind: type = type(submodule)
        is_known = _is_of_torch(kind) or vars(submodule).keys() <= _BARE
        objects += (kind if is_known else submodule, vars(submodule).get("forward"))
        words.append(is_known)
        words.extend((name, places.get(id(child))) for name, child in submodule._modules.items())
    return objects, words


def _attributes(submodules: Sequence[nn.Module]) -> tuple[list[Any], list[Any]]:
    """The attributes of torch's own layers and of layers derived from them, as objects and words.

    They are more than a layer prints: the dropout of attention, an activation, label smoothing.
    """
    objects: list[Any] = []
    words: list[Any] = []
    for submodule in submodules:
        kind: type = type(submodule)
        if _derives_from_torch(kind):
            for name, value in vars(submodule).items():
                # Torch computes attributes with an underscore from the others, or caches them.
                if name[:1] != "_" and name != "training":
                    words.append(name)
                    _describe(value, objects, words)
            words.append(None)
    return objects, words


def _describe(value: Any, objects: list[Any], words: list[Any]) -> None:
    """Describe plain values by what they are, and others by which object they are.

    A tensor is only known to be a tensor: hooks, such as those of `torch.nn.utils.weight_norm`,
    compute such attributes from parameters at each forward.
    """
    kind = type(value)
    if kind in _PLAIN:
        words.extend((kind, value))
    elif kind is tuple or kind is list:
        words.extend((kind, len(value)))
        for item in value:
            _describe(item, objects, words)
    elif isinstance(value, Tensor):
        words.append(Tensor)
    else:
        words.append(object)
        objects.append(value)


_PLAIN: Final = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
)
"""Types whose equal values compute the same; `1` and `True` need not."""


@lru_cache(maxsize=1024)
def _is_of_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.")


@lru_cache(maxsize=1024)
def _derives_from_torch(kind: type) -> bool:
    """Whether a class of modules is a layer of torch, or derives from one."""
    return any(base is not nn.Module and _is_of_torch(base) for base in kind.__mro__)


_BARE: Final = vars(nn.Module()).keys()
"""The attributes that every module has."""


def _hooks(submodule: nn.Module) -> Iterator[Any]:
    """The hooks of a module, with None after each kind."""
    for hooks in (
        submodule._forward_pre_hooks,
        submodule._forward_hooks,
        submodule._backward_pre_hooks,
        submodule._backward_hooks,
    ):
        yield from hooks.values()
        yield None


# ── what acts outside the forward ───────────────────────────────────────────────────────────────

# By name: some of their modules take a second to import.
_WRAPPERS = {
    "OptimizedModule": ("_orig_mod", "fpipe compiles the stages itself (compile=)"),
    "DataParallel": ("module", "a pipeline of a module has a process for each device"),
    "DistributedDataParallel": (
        "module",
        "a step adds up gradients over replicas itself, data= (docs/data-parallel.md)",
    ),
}

# Functions of this package register hooks around the forward of a module.
_COMPOSED = "torch.distributed._composable"

_SHARDED = frozenset({"FSDPModule", "FullyShardedDataParallel"})
_WHOLE = (
    "pass the module as it is before it is sharded: data= and pipe.shard(params) divide parameters "
    "over replicas (docs/data-parallel.md), and parallelize_module may divide layers"
)


def refuse_lost(module: nn.Module) -> None:
    """Refuse wrappers around a module, sharded parameters, and hooks on parameters."""
    for path, submodule in module.named_modules():
        kind = type(submodule).__name__
        where = f"module.get_submodule({path!r})" if path else "module"
        sharded = {base.__name__ for base in type(submodule).__mro__}.intersection(_SHARDED)
        if sharded:
            as_what = "" if kind in sharded else f", a {sharded.pop()}"
            raise StageError(f"{where} is a {kind}{as_what}: {_WHOLE}")
        inner, why = _WRAPPERS.get(kind, ("", ""))
        if inner in submodule._modules and type(submodule).__module__.startswith("torch."):
            wrapped = a_type(submodule._modules[inner])
            raise StageError(
                f"{where} is {a_type(submodule)} around {wrapped}: take what is within, .{inner}; "
                f"{why}"
            )
        for hook in (*submodule._forward_pre_hooks.values(), *submodule._forward_hooks.values()):
            if (maker := str(getattr(hook, "__module__", ""))).startswith(_COMPOSED):
                raise StageError(
                    f"{where} has a hook of {maker}: pass the module as it is before that: data= "
                    "averages gradients over replicas (docs/data-parallel.md), and remat= or "
                    "torch.utils.checkpoint computes forwards again"
                )
    refuse_gradient_hooks(module.named_modules())


def refuse_gradient_hooks(named: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse hooks on the parameters of modules: a step takes other tensors in their place."""
    for path, submodule in named:
        for name, parameter in submodule._parameters.items():
            if _has_hooks(parameter):
                where = f"module.get_parameter({'.'.join(filter(None, (path, name)))!r})"
                raise StageError(
                    f"{where} has hooks on its gradient, which a step does not run, for it returns "
                    "gradients: remove the hooks, and change what step returns; those of modules "
                    "(register_full_backward_hook) run"
                )


def _has_gradient_hooks(submodule: nn.Module) -> bool:
    """Whether a submodule itself has a parameter with a hook on its gradient."""
    return any(map(_has_hooks, submodule._parameters.values()))


def _has_hooks(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and bool(
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )
