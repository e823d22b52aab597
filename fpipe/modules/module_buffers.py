"""Buffers of a module that was built on the meta device, where they have shapes and no numbers.

Parameters are the caller's, but buffers are constants of the trace, so they need their numbers. A
buffer that ``state_dict`` leaves out is computed from the module's configuration alone; the method
that modules have for it, for just this case, is asked to do so again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.checkpoint.checkpoint_reader import Naming, reading
from fpipe.engine import Pipeline
from fpipe.errors import BatchError, StageError, a_type
from fpipe.nn import buffers_of
from fpipe.random.torch_draws import generators


def real_buffers(
    module: nn.Module,
    given: Mapping[str, Tensor] | None,
    device: torch.device,
    *,
    stored: bool = False,
) -> dict[str, Tensor]:
    """What takes the place of a module's own buffers: those given, and those that it makes anew.

    Args:
        module: it is not changed.
        given: by the names of ``module.named_buffers()``.
        device: where those are made that are not given.
        stored: make those anew too that ``state_dict`` has, for which a checkpoint may have others.

    Raises:
        StageError: one that is given is no buffer or has another shape.
    """
    own = dict(module.named_buffers())
    if given is not None and not isinstance(given, Mapping):
        raise StageError(
            f"buffers={given!r:.60} is {a_type(given)}: it must be a dict of tensors by "
            "the names of module.named_buffers()"
        )
    found = dict(given or {})
    for name, value in found.items():
        if name not in own:
            raise StageError(
                f"buffers names {name!r}, which is no buffer of {type(module).__name__}; "
                "module.named_buffers() lists them"
            )
        if not isinstance(value, Tensor) or value.shape != own[name].shape or value.is_meta:
            raise StageError(
                f"buffers[{name!r}] must be a tensor of shape {tuple(own[name].shape)} with data, "
                f"not on the meta device: it is {_in_words(value)}"
            )
    for name, buffer in own.items():
        wanted = buffer.is_meta and name not in found
        if wanted and (stored or not is_stored(module, name)):
            made = _made(module, name, device)
            if made is not None:
                found[name] = made
    return found


def is_stored(module: nn.Module, name: str) -> bool:
    """Whether ``module.state_dict()`` has a buffer."""
    path, _, own = name.rpartition(".")
    return own not in module.get_submodule(path)._non_persistent_buffers_set


def refuse_missing(module: nn.Module, given: Container[str]) -> None:
    """Refuse a module with buffers that have no data, and for which nothing is given.

    Raises:
        StageError: names the first.
    """
    for name, buffer in module.named_buffers():
        if buffer.is_meta and name not in given:
            raise StageError(
                f"the buffer {name!r} of {type(module).__name__} lies on the meta device and has "
                "no data, and no _init_weights or reset_parameters of the module makes it anew: "
                f"pass its {tuple(buffer.shape)} numbers, from_module(..., "
                f"buffers={{{name!r}: tensor}}), or those of a checkpoint, "
                "buffers=fpipe.load_buffers(module, path); take it into the state of a step, "
                "has_state=True; or build that submodule outside torch.device('meta')"
            )


def refuse_elsewhere(module: nn.Module, given: Mapping[str, Tensor], device: torch.device) -> None:
    """Refuse buffers that do not lie on the device on which a module is traced.

    Raises:
        StageError: names the first.
    """
    for name, own in module.named_buffers():
        buffer = given.get(name, own)
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


def _made(module: nn.Module, name: str, device: torch.device) -> Tensor | None:
    """The buffer as the module itself makes it; None if it does not."""
    path, _, own = name.rpartition(".")
    owner = module.get_submodule(path)
    for make in _makers(module, path):
        # Whatever was there before, a buffer that has been made is the same.
        first, second = (_once(owner, own, fill, device, make) for fill in (0, 1))
        if first is not None and second is not None and torch.equal(first, second):
            return first
    return None


def _makers(module: nn.Module, path: str) -> Iterator[Callable[[Any], object]]:
    """What fills a submodule with its first numbers, the nearest first."""
    owner: Any = module.get_submodule(path)
    if hasattr(owner, "reset_parameters"):
        yield lambda copied: copied.reset_parameters()
    names: Sequence[str] = path.split(".") if path else []
    outer = [module, *map(module.get_submodule, accumulate(names, "{}.{}".format))]
    for candidate in reversed(outer):
        if callable(init := getattr(candidate, "_init_weights", None)):
            yield init


def _once(
    owner: nn.Module,
    name: str,
    fill: int,
    device: torch.device,
    make: Callable[[Any], object],
) -> Tensor | None:
    """The buffer as it is made in a copy of its submodule, without the data of other tensors."""
    memo: dict[int, object] = {}
    for tensor in (*owner.parameters(), *owner.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    for part in owner.modules():  # a copy of its pipeline would be another of the process group
        memo |= {id(own): own for own in vars(part).values() if isinstance(own, Pipeline)}
    for buffer in owner._buffers.values():
        if buffer is not None:
            memo[id(buffer)] = torch.full_like(buffer, fill, device=device)
    try:
        # Numbers that are drawn differ by the seed, and so are not taken.
        with torch.no_grad(), _seeded(device, fill):
            other = copy.deepcopy(owner, memo)
            make(other)
    except Exception:
        # It was written for something else: the buffer is then asked for by name.
        return None
    value = other._buffers[name]
    return None if value is None or value.is_meta else value


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Within it what draws on a device draws by a seed; no generator is left in another state."""
    own = generators([device])
    states = [generator.get_state() for generator in own]
    try:
        for generator in own:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)


def _in_words(value: object) -> str:
    if not isinstance(value, Tensor):
        return a_type(value)
    return f"{tuple(value.shape)} on {value.device}"


def check_state(module: nn.Module, state: Any) -> None:
    """Refuse a state that `fpipe.nn.state_of` could not have made of the module, or a part of it.

    Raises:
        BatchError: it is no dict of buffers, or a name or a shape differs.
    """
    if not isinstance(state, Mapping):
        raise BatchError(
            f"state is {a_type(state)}: the state of a module is a dict of its buffers, "
            "fpipe.nn.state_of(module)"
        )
    own = dict(module.named_buffers())
    every = dict(module.named_buffers(remove_duplicate=False))
    for name, buffer in buffers_of(state).items():
        if name not in own and name in every:
            first = next(known for known, other in own.items() if other is every[name])
            raise BatchError(
                f"the buffers {first!r} and {name!r} of {type(module).__name__} are one tensor, "
                "but in a state each has numbers of its own: give one of them a tensor of its own "
                "(.clone()), or share the whole layer"
            )
        if name not in own or own[name].shape != buffer.shape:
            found = f"has shape {tuple(own[name].shape)}" if name in own else "does not exist"
            raise BatchError(
                f"state has the buffer {name!r} of shape {tuple(buffer.shape)}, which in "
                f"{type(module).__name__} {found}: pass fpipe.nn.state_of(module), or what a step "
                "of a pipeline of such a module has returned"
            )


def naming_of_parameters(module: nn.Module) -> Naming:
    """How parameters are found in a checkpoint, which may have the buffers beside them."""
    beside = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return Naming(_aliases(module.named_parameters), beside=frozenset(beside))


def naming_of_buffers(module: nn.Module) -> Naming:
    """How buffers are found in a checkpoint, which need not have those that are not stored."""
    beside = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    unstored = {name for name, _ in module.named_buffers() if not is_stored(module, name)}
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
        module: it is not changed, and may lie on the meta device; its buffers tell names, shapes
            and dtypes.
        path: as for `Pipeline.load`. What is no buffer is passed over.
        rename: from the name of a buffer to that in the checkpoint.
        device: where they shall lie: that of the parameters.

    Returns:
        All that ``module.state_dict()`` has, by the names of ``module.named_buffers()``, and of the
        others those that the checkpoint has.

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
