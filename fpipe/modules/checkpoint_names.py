"""What a checkpoint calls the parameters and the buffers of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.checkpoint.checkpoint_reader import Naming, reading
from fpipe.modules.module_buffers import is_stored


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
