"""Checkpoints in files of safetensors: one, or several with an index, as Hugging Face has them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fpipe.checkpoint.source import check_shape
from fpipe.errors import BatchError

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
            BatchError: it is no index.
        """
        found = json.loads(index.read_text("utf-8"))
        files = found.get("weight_map") if isinstance(found, dict) else None
        if not isinstance(files, dict):
            raise BatchError(
                f"{index} has no weight_map: an index of safetensors maps the name of each tensor "
                "to its file"
            )
        return cls({name: index.parent / file for name, file in files.items()})

    @classmethod
    def listed(cls, files: Sequence[Path]) -> SafetensorsFiles:
        """All tensors of some files, by the lists at their heads."""
        return cls({name: file for file in files for name in _names_in(file)})

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
            for name in names:
                check_shape(name, tuple(opened.get_slice(name).get_shape()), wanted[name])
                found[name] = opened.get_tensor(name).to(wanted[name].dtype)
        return found


def _names_in(file: Path) -> list[str]:
    names: list[str] = _opened(file).keys()  # it is no mapping
    return names


def _opened(file: Path) -> Any:
    """A file whose head has been read."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise BatchError(
            f"reading {file} takes the package safetensors: pip install safetensors"
        ) from error
    return safe_open(file, framework="pt")
