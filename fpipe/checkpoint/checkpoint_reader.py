"""Which tensors of a checkpoint are which of a model, and reading those that are asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fpipe.checkpoint.safetensors_files import INDEX, SafetensorsFiles
from fpipe.checkpoint.source import HEAD, Source
from fpipe.errors import BatchError, few

log = logging.getLogger("fpipe")


class Naming(NamedTuple):
    """What a pipeline knows of the names in a checkpoint of its model.

    Attributes:
        aliases: further names of tensors that are tied, of which a checkpoint may have any.
        beside: what may be there and is not asked for.
        optional: what may be missing.
    """

    aliases: Mapping[str, Sequence[str]] = {}
    beside: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()


NO_NAMING = Naming()


def source_of(path: str | PathLike[str]) -> Source:
    """What there is at a path.

    Args:
        path: a file of safetensors; a directory with such files, with or without an index; or a
            directory of `torch.distributed.checkpoint`.

    Raises:
        BatchError: it is none of these.
    """
    place = Path(path)
    if place.is_file() and place.suffix == ".safetensors":
        return SafetensorsFiles.listed([place])
    if (place / HEAD).is_file():
        # It imports for a second, and few pipelines are loaded from such a directory.
        from fpipe.checkpoint.distributed import DistributedDirectory

        return DistributedDirectory(place)
    indices, files = sorted(place.glob(INDEX)), sorted(place.glob("*.safetensors"))
    if len(indices) == 1:
        return SafetensorsFiles.indexed(indices[0])
    if files and not indices:
        return SafetensorsFiles.listed(files)
    if indices:
        found = f"holds {len(indices)} indices"
    elif place.is_dir():
        found = "holds neither"
    else:
        found = "has another suffix than .safetensors" if place.exists() else "holds nothing"
    raise BatchError(
        f"{place} {found}: give a file of safetensors, a directory of such files with one "
        "index or none, or a directory of torch.distributed.checkpoint"
    )


def stored_names(
    source: Source,
    names: Sequence[str],
    naming: Naming,
    rename: Callable[[str], str] | None,
    strict: bool,
    *,
    whole: bool = True,
) -> dict[str, list[str]]:
    """The names in the checkpoint of each tensor, but for those that may be missing and are.

    Args:
        source: the checkpoint.
        names: of all tensors, whoever holds them.
        naming: what is known of them.
        rename: from the name of a tensor to that in the checkpoint; None for the same. It need not
            know aliases and what is beside: those that it raises for are not looked for.
        strict: refuse what is in the checkpoint and is none of them; name all that a tied one has,
            which must then be the same, and else the first.
        whole: refuse a checkpoint that lacks some of them; one that lacks all is refused anyway.

    Raises:
        BatchError: one is missing in the checkpoint, or has no counterpart.
    """
    renamed = rename or (lambda name: name)
    found: dict[str, list[str]] = {}
    known: set[str] = set()
    for name in names:
        stored = [renamed(name), *_those_renamed(naming.aliases.get(name, ()), renamed)]
        known.update(stored)
        there = [alias for alias in stored if alias in source.names]
        if there:
            found[name] = there if strict else there[:1]
    missing = [name for name in names if name not in found and name not in naming.optional]
    if strict or missing:
        known.update(_those_renamed(naming.beside, renamed))
    extra = sorted(source.names - known)
    if missing and (whole or not found):
        beside = f"; it has {few(extra)} beside what was looked for" if extra else ""
        raise BatchError(
            f"the checkpoint lacks {few(missing)}{beside}: where it has them by other names, pass "
            "rename=, a function from the name in the model to that in the checkpoint (of a "
            "Hugging Face model, save_pretrained(path, save_original_format=False) keeps its "
            "names); where it has none of them, such as adapters, init_fn=, which makes them"
        )
    if missing:
        log.info("the checkpoint lacks %s, which init_fn makes", few(missing))
    if extra and strict:
        raise BatchError(
            f"the checkpoint has {few(extra)}, which are no parameters: pass strict=False to pass "
            "over what is no parameter"
        )
    return found


def _those_renamed(names: Iterable[str], rename: Callable[[str], str]) -> Iterator[str]:
    """The names in the checkpoint of those that `rename` knows."""
    for name in names:
        # Its author was asked for the names of what is read, and may raise anything for others.
        with suppress(Exception):
            yield rename(name)


def reading(
    path: str | PathLike[str],
    names: Sequence[str],
    naming: Naming,
    rename: Callable[[str], str] | None,
    strict: bool,
    *,
    whole: bool = True,
) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """What reads tensors by name from a path; the names of all are checked at once.

    Raises:
        BatchError: as `source_of` and `stored_names` say.
    """
    source = source_of(path)
    stored = stored_names(source, names, naming, rename, strict, whole=whole)

    def read(wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        there = {name: like for name, like in wanted.items() if name in stored}
        asked = {alias: like for name, like in there.items() for alias in stored[name]}
        found = source.read(asked)
        for name in there:
            first, *others = stored[name]
            for other in others:
                if not _same(found[first], found[other]):
                    raise BatchError(
                        f"the checkpoint's {first!r} and {other!r} have other numbers, and in the "
                        "model they are one tied parameter: it is of a model in which they are "
                        f"not tied; pass strict=False to take {first!r}"
                    )
        return {name: found[stored[name][0]] for name in there}

    return read


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether the numbers are equal, those included that are none."""
    return one.shape == other.shape and bool(torch.isclose(one, other, 0, 0, equal_nan=True).all())
