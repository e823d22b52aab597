"""Where the buffers of a module get their numbers: from the user, the module, or a checkpoint.

Parameters come with each call, but buffers are constants of the trace, which need their numbers;
those of a module that was built on the meta device have shapes alone. A buffer that ``state_dict``
leaves out depends on the configuration of the module alone: the method that modules have for this
purpose computes it anew. The others a checkpoint has, by their names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.random import fork_rng

from fpipe.checkpoint.checkpoint_reader import Naming, reading
from fpipe.errors import BatchError, StageError, a_type
from fpipe.nn import buffers_of
from fpipe.pipelines import Pipeline
from fpipe.random.torch_draws import generators


def real_buffers(
    module: nn.Module,
    buffers: Mapping[str, Tensor] | None,
    device: torch.device,
    *,
    stored: bool = False,
) -> dict[str, Tensor]:
    """The buffers in place of a module's own: those of the user, and those made anew.

    Args:
        module: it is not changed.
        buffers: of the user, by the names of ``module.named_buffers()``.
        device: of the buffers that are made anew.
        stored: also make the buffers anew that ``state_dict`` has, and so a checkpoint may have.

    Raises:
        StageError: the user names no buffer of the module, or gives one of another shape.
    """
    held = dict(module.named_buffers())
    if buffers is not None and not isinstance(buffers, Mapping):
        raise StageError(
            f"buffers={buffers!r:.60} is {a_type(buffers)}: it must be a dict of tensors by "
            "the names of module.named_buffers()"
        )
    numbers = dict(buffers or {})
    for name, value in numbers.items():
        if name not in held:
            raise StageError(
                f"buffers names {name!r}, which is no buffer of {type(module).__name__}; "
                "module.named_buffers() lists them"
            )
        if not isinstance(value, Tensor) or value.shape != held[name].shape or value.is_meta:
            raise StageError(
                f"buffers[{name!r}] must be a tensor of shape {tuple(held[name].shape)} with data, "
                f"not on the meta device: it is {_in_words(value)}"
            )
    for name, buffer in held.items():
        is_missing = buffer.is_meta and name not in numbers
        if is_missing and (stored or not _is_stored(module, name)):
            remade = _made_anew(module, name, device)
            if remade is not None:
                numbers[name] = remade
    return numbers


def _is_stored(module: nn.Module, name: str) -> bool:
    """Whether ``module.state_dict()`` has a buffer."""
    path, _, attribute = name.rpartition(".")
    return attribute not in module.get_submodule(path)._non_persistent_buffers_set


def refuse_missing(module: nn.Module, replaced: Container[str]) -> None:
    """Refuse a module with buffers that have no data, and that nothing replaces."""
    for name, buffer in module.named_buffers():
        if buffer.is_meta and name not in replaced:
            raise StageError(
                f"the buffer {name!r} of {type(module).__name__} lies on the meta device and has "
                "no data, and no _init_weights or reset_parameters of the module makes it anew: "
                f"pass its {tuple(buffer.shape)} numbers, from_module(..., "
                f"buffers={{{name!r}: tensor}}), or those of a checkpoint, "
                "buffers=fpipe.load_buffers(module, path); take it into the state of a step, "
                "has_state=True; or build that submodule outside torch.device('meta')"
            )


def refuse_elsewhere(
    module: nn.Module, replaced: Mapping[str, Tensor], device: torch.device
) -> None:
    """Refuse buffers that do not lie on the device on which a module is traced."""
    for name, held in module.named_buffers():
        buffer = replaced.get(name, held)
        if buffer.dim() and buffer.device not in (device, torch.device("meta")):
            raise StageError(
                f"the buffer {name!r} of {type(module).__name__} lies on {buffer.device}, but the "
                f"forward is traced on {device}, the device of the first stage: pass from_module("
                f'..., buffers={{name: buffer.to("{device}") for name, buffer in '
                "module.named_buffers()}), or move the module there"
            )


def shaped_buffers(module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Stand-ins for buffers on the meta device, where numbers do not count: one element each."""
    return {
        name: torch.zeros((), dtype=buffer.dtype, device=device).expand(buffer.shape)
        for name, buffer in module.named_buffers()
        if buffer.is_meta
    }


def _made_anew(module: nn.Module, name: str, device: torch.device) -> Tensor | None:
    """The buffer as the module itself initializes it; None if it does not."""
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    for initialize in _initializers(module, path):
        # The module has set the buffer if its numbers do not depend on those before.
        first, second = (
            _initialized(owner, attribute, fill, device, initialize) for fill in (0, 1)
        )
        if first is not None and second is not None and torch.equal(first, second):
            return first
    return None


def _initializers(module: nn.Module, path: str) -> Iterator[Callable[[Any], object]]:
    """Functions that initialize a submodule, the nearest first."""
    owner: Any = module.get_submodule(path)
    if hasattr(owner, "reset_parameters"):
        yield lambda copied: copied.reset_parameters()
    names: Sequence[str] = path.split(".") if path else []
    outer = [module, *map(module.get_submodule, accumulate(names, "{}.{}".format))]
    for candidate in reversed(outer):
        if callable(init := getattr(candidate, "_init_weights", None)):
            yield init


def _initialized(
    owner: nn.Module,
    name: str,
    fill: int,
    device: torch.device,
    initialize: Callable[[Any], object],
) -> Tensor | None:
    """The buffer of a copy of its submodule that was initialized, from buffers filled with `fill`.

    The copy has the shapes of parameters, and not their data.
    """
    memo: dict[int, object] = {}
    for tensor in (*owner.parameters(), *owner.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    for module in owner.modules():  # a copy of a pipeline would be a new one of the process group
        pipes = [value for value in vars(module).values() if isinstance(value, Pipeline)]
        memo |= {id(pipe): pipe for pipe in pipes}
    for buffer in owner._buffers.values():
        if buffer is not None:
            memo[id(buffer)] = torch.full_like(buffer, fill, device=device)
    try:
        # Random numbers depend on the seed, and so are not taken.
        with torch.no_grad(), fork_rng([device] if device.type == "cuda" else []):
            for generator in generators([device]):
                generator.manual_seed(fill)
            copied = copy.deepcopy(owner, memo)
            initialize(copied)
    except Exception:
        # The method has another purpose: the user is asked for the buffer by name.
        return None
    value = copied._buffers[name]
    return None if value is None or value.is_meta else value


def _in_words(value: object) -> str:
    if not isinstance(value, Tensor):
        return a_type(value)
    return f"{tuple(value.shape)} on {value.device}"


def check_state(module: nn.Module, state: Any) -> None:
    """Refuse a state that is not `fpipe.nn.state_of` of the module, or some entries of it.

    Raises:
        BatchError: it is no dict of buffers, or a name or a shape differs.
    """
    if not isinstance(state, Mapping):
        raise BatchError(
            f"state is {a_type(state)}: the state of a module is a dict of its buffers, "
            "fpipe.nn.state_of(module)"
        )
    held = dict(module.named_buffers())
    aliases = dict(module.named_buffers(remove_duplicate=False))
    for name, buffer in buffers_of(state).items():
        if name not in held and name in aliases:
            first = next(known for known, other in held.items() if other is aliases[name])
            raise BatchError(
                f"the buffers {first!r} and {name!r} of {type(module).__name__} are one tensor, "
                "but in a state each has numbers of its own: give one of them a tensor of its own "
                "(.clone()), or share the whole layer"
            )
        if name not in held or held[name].shape != buffer.shape:
            fact = f"has shape {tuple(held[name].shape)}" if name in held else "does not exist"
            raise BatchError(
                f"state has the buffer {name!r} of shape {tuple(buffer.shape)}, which in "
                f"{type(module).__name__} {fact}: pass fpipe.nn.state_of(module), or what a step "
                "of a pipeline of such a module has returned"
            )


def naming_of_parameters(module: nn.Module) -> Naming:
    """The names of parameters in a checkpoint, which may have buffers beside them."""
    beside = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return Naming(_aliases(module.named_parameters), beside=frozenset(beside))


def naming_of_buffers(module: nn.Module) -> Naming:
    """The names of buffers in a checkpoint, which may lack those that ``state_dict`` leaves out."""
    beside = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    unstored = {name for name, _ in module.named_buffers() if not _is_stored(module, name)}
    return Naming(_aliases(module.named_buffers), frozenset(beside), frozenset(unstored))


def load_buffers(
    module: nn.Module,
    path: str | PathLike[str],
    *,
    rename: Callable[[str], str] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Read the buffers of a module from files, for ``fpipe.from_module(..., buffers=...)``.

    Args:
        module: it is not changed, and may lie on the meta device; names, shapes and dtypes are
            those of its buffers.
        path: as for `Pipeline.load`. Tensors that are no buffers are passed over.
        rename: from the name of a buffer to that in the checkpoint.
        device: the device to bring them to, that of the parameters.

    Returns:
        The buffers, by the names of ``module.named_buffers()``. Those that ``module.state_dict()``
        leaves out are missing where the checkpoint lacks them.

    Raises:
        BatchError: one is missing or has another shape; says which.

    Example:
        >>> import os, tempfile, torch, fpipe
        >>> from safetensors.torch import save_file
        >>> module = torch.nn.BatchNorm1d(2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "model.safetensors")
        ...     save_file(module.state_dict(), path)
        ...     buffers = fpipe.load_buffers(module.to("meta"), path)
        >>> buffers["running_var"]
        tensor([1., 1.])
    """
    likes = {name: torch.empty_like(b, device="meta") for name, b in module.named_buffers()}
    read = reading(path, list(likes), naming_of_buffers(module), rename, strict=False)
    return {name: value.to(device) for name, value in read(likes).items()}


def _aliases(listed: Callable[..., Iterable[tuple[str, Tensor]]]) -> dict[str, list[str]]:
    """The further names of tensors that have several, by the first."""
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    pairs: Any = listed(remove_duplicate=False)
    for name, tensor in pairs:
        if first.setdefault(id(tensor), name) != name:
            aliases.setdefault(first[id(tensor)], []).append(name)
    return aliases
