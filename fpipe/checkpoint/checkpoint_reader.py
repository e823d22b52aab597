"""Find the tensors of a model in a checkpoint by name, and read those that are wanted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fpipe.checkpoint.checkpoint_files import (
    HEAD,
    INDEX,
    DistributedDirectory,
    SafetensorsFiles,
    Source,
)
from fpipe.errors import BatchError, few

log = logging.getLogger("fpipe")


class Naming(NamedTuple):
    """The names that a checkpoint of a model may have.

    Attributes:
        aliases: further names of tied tensors; a checkpoint may have any of them.
        beside: names that the checkpoint may have and nobody reads.
        optional: names that the checkpoint may lack.
    """

    aliases: Mapping[str, Sequence[str]] = {}
    beside: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()


def source_of(path: str | PathLike[str]) -> Source:
    """Open the checkpoint at a path.

    Args:
        path: a file of safetensors; a directory with such files, with or without an index; or a
            directory of `torch.distributed.checkpoint`.

    Raises:
        BatchError: there is none of these at the path.
    """
    place = Path(path)
    if place.is_file() and place.suffix == ".safetensors":
        return SafetensorsFiles.listed([place])
    if (place / HEAD).is_file():
        return DistributedDirectory(place)
    indices, files = sorted(place.glob(INDEX)), sorted(place.glob("*.safetensors"))
    if len(indices) == 1:
        return SafetensorsFiles.indexed(indices[0])
    if files and not indices:
        return SafetensorsFiles.listed(files)
    if indices:
        problem = f"holds {len(indices)} indices"
    elif place.is_dir():
        problem = "holds neither"
    else:
        problem = "has another suffix than .safetensors" if place.exists() else "holds nothing"
    raise BatchError(
        f"{place} {problem}: give a file of safetensors, a directory of such files with one "
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
    """The names in the checkpoint of each tensor; an optional one that it lacks is left out.

    Args:
        source: the checkpoint.
        names: of all tensors of the model, whichever rank holds them.
        naming: further names that the checkpoint may have.
        rename: from the name of a tensor to that in the checkpoint; None for the same. It may raise
            for aliases and for names of no tensor of the model: those are not looked for.
        strict: refuse a checkpoint with tensors that the model has not; give all names of a tied
            tensor, whose numbers must then be equal, and otherwise the first.
        whole: refuse a checkpoint that lacks some tensors; one that lacks all is refused anyway.

    Raises:
        BatchError: the checkpoint lacks a tensor, or has one more than the model.
    """
    renamed = rename or (lambda name: name)
    stored_as: dict[str, list[str]] = {}
    known: set[str] = set()
    for name in names:
        aliases = [renamed(name), *_renamed(naming.aliases.get(name, ()), renamed)]
        known.update(aliases)
        present = [alias for alias in aliases if alias in source.names]
        if present:
            stored_as[name] = present if strict else present[:1]
    missing = [name for name in names if name not in stored_as and name not in naming.optional]
    if strict or missing:
        known.update(_renamed(naming.beside, renamed))
    extra = sorted(source.names - known)
    if missing and (whole or not stored_as):
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
    return stored_as


def _renamed(names: Iterable[str], rename: Callable[[str], str]) -> Iterator[str]:
    """The names in the checkpoint, of those names that `rename` knows."""
    for name in names:
        # `rename` is written for the tensors of the model, and may raise anything for other names.
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
    """A function that reads tensors by name from a path; the names of all are checked at once.

    Raises:
        BatchError: as in `source_of` and `stored_names`.
    """
    source = source_of(path)
    stored = stored_names(source, names, naming, rename, strict, whole=whole)

    def read(wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        present = {name: like for name, like in wanted.items() if name in stored}
        likes = {alias: like for name, like in present.items() for alias in stored[name]}
        values = source.read(likes)
        for name in present:
            first, *others = stored[name]
            for other in others:
                if not _same(values[first], values[other]):
                    raise BatchError(
                        f"the checkpoint's {first!r} and {other!r} have other numbers, and in the "
                        "model they are one tied parameter: it is of a model in which they are "
                        f"not tied; pass strict=False to take {first!r}"
                    )
        return {name: values[stored[name][0]] for name in present}

    return read


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether the numbers are equal; NaN equals NaN."""
    return one.shape == other.shape and bool(torch.isclose(one, other, 0, 0, equal_nan=True).all())
