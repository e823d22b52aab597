"""Checkpoints in files of safetensors: one, or several with an index, as Hugging Face has them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fpipe.checkpoint.source import check_dtype, check_shape
from fpipe.errors import BatchError, few

INDEX = "*.safetensors.index.json"


class SafetensorsFiles:
    """Tensors in files of safetensors.

    Args:
        files: the file of each tensor, by its name.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = dict(files)

    @classmethod
    def indexed(cls, index: Path) -> SafetensorsFiles:
        """What an index lists: the other files are not opened for it.

        Raises:
            BatchError: it cannot be read, or is no index.
        """
        try:
            found = json.loads(index.read_text("utf-8"))
        except OSError as error:
            raise BatchError(f"{index} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise BatchError(f"{index} is no JSON: {error}") from error
        files = found.get("weight_map") if isinstance(found, dict) else None
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise BatchError(
                f"{index} has no weight_map of names to files: an index of safetensors maps the "
                "name of each tensor to its file"
            )
        return cls({name: index.parent / file for name, file in files.items()})

    @classmethod
    def listed(cls, files: Sequence[Path]) -> SafetensorsFiles:
        """All tensors of some files, by the lists at their heads.

        Raises:
            BatchError: two files have tensors of one name.
        """
        found: dict[str, Path] = {}
        for file in files:
            for name in _names_in(file):
                if found.setdefault(name, file) != file:
                    raise BatchError(
                        f"{name!r} is in two files, {found[name]} and {file}, and no index says "
                        "which one counts: give the file, or a directory of those that belong "
                        "together"
                    )
        return cls(found)

    @property
    def names(self) -> frozenset[str]:
        """All that there is."""
        return frozenset(self._files)

    def read(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read some, file by file."""
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in wanted:
            by_file[self._files[name]].append(name)
        found = {}
        for file, names in by_file.items():
            opened = _opened(file)
            absent = set(names).difference(opened.keys())
            if absent:
                raise BatchError(f"{file} lacks {few(sorted(absent))}, which its index says it has")
            for name in names:
                like = wanted[name]
                check_shape(name, tuple(opened.get_slice(name).get_shape()), like)
                value = opened.get_tensor(name)
                check_dtype(name, value.dtype, like)
                found[name] = value.to(like.dtype)
        return found


def _names_in(file: Path) -> list[str]:
    names: list[str] = _opened(file).keys()  # it is no mapping
    return names


def _opened(file: Path) -> Any:
    """A file whose head has been read.

    Raises:
        BatchError: it cannot be.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise BatchError(
            f"reading {file} takes the package safetensors: pip install safetensors"
        ) from error
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BatchError(f"{file} cannot be read: {error}") from error
