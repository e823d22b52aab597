"""Tensors in files, by name: those of safetensors, and of torch.distributed.checkpoint."""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fpipe.errors import BatchError, error_text, few
from fpipe.live_line import advance

INDEX = "*.safetensors.index.json"
"""The name of an index of safetensors."""

HEAD = ".metadata"
"""The file by which a directory of `torch.distributed.checkpoint` is known."""

MARK = "fpipe.mark."
"""How the names of marks begin: each file that fpipe has written has one, of its number."""


class Source(Protocol):
    """Tensors in files, by name."""

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors in the files."""

    def read(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read some tensors, and nothing else.

        Args:
            wanted: for each name a meta tensor of the shape and dtype that it must come in.

        Returns:
            Tensors on the CPU, of those dtypes.

        Raises:
            BatchError: one has another shape, or its numbers do not fit.
        """


class SafetensorsFiles:
    """Tensors in files of safetensors.

    Args:
        files: the file of each tensor, by its name.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = dict(files)

    @classmethod
    def indexed(cls, index: Path) -> SafetensorsFiles:
        """Take the tensors that an index lists, without opening the other files.

        Raises:
            BatchError: it cannot be read, or is no index.
        """
        try:
            content = json.loads(index.read_text("utf-8"))
        except OSError as error:
            raise BatchError(f"{index} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise BatchError(f"{index} is no JSON: {error}") from error
        files = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise BatchError(
                f"{index} has no weight_map of names to files: an index of safetensors maps the "
                "name of each tensor to its file"
            )
        return cls({name: index.parent / file for name, file in files.items()})

    @classmethod
    def listed(cls, files: Sequence[Path]) -> SafetensorsFiles:
        """Take all tensors of some files, as listed at the heads of the files.

        Raises:
            BatchError: two files have tensors of one name.
        """
        file_of: dict[str, Path] = {}
        for file in files:
            names: list[str] = _opened(file).keys()  # it is no mapping
            for name in names:
                if file_of.setdefault(name, file) != file:
                    raise BatchError(
                        f"{name!r} is in two files, {file_of[name]} and {file}, and no index says "
                        "which one counts: give the file, or a directory of those that belong "
                        "together"
                    )
        return cls(file_of)

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors in the files."""
        return frozenset(self._files)

    def read(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read some tensors, file by file."""
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in wanted:
            by_file[self._files[name]].append(name)
        values = {}
        for file, names in by_file.items():
            advance(file.name)
            opened = _opened(file)
            absent = set(names).difference(opened.keys())
            if absent:
                raise BatchError(f"{file} lacks {few(sorted(absent))}, which its index says it has")
            for name in names:
                like = wanted[name]
                check_shape(name, tuple(opened.get_slice(name).get_shape()), like)
                value = opened.get_tensor(name)
                check_dtype(name, value.dtype, like)
                values[name] = value.to(like.dtype)
        return values


def _opened(file: Path) -> Any:
    """Open a file of safetensors, and read its head.

    Raises:
        BatchError: the file cannot be read, or the package is missing.
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


class DistributedDirectory:
    """Tensors in a directory that ``torch.distributed.checkpoint.save`` has written.

    Each process reads by itself, however many processes wrote the directory or read it. Entries
    that are no tensors are passed over. torch.distributed.checkpoint takes a second to import, so
    only the methods import it.

    Args:
        path: of the directory.

    Raises:
        BatchError: the list of its tensors cannot be read.
    """

    def __init__(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

        self._path = path
        try:
            metadata = dcp.FileSystemReader(path).read_metadata()
            entries = metadata.state_dict_metadata
            stored: Mapping[MetadataIndex, Any] = metadata.storage_data
        except Exception as error:  # it is a pickle, and reading one may raise anything
            raise BatchError(
                f"{path / HEAD} cannot be read ({error_text(error)}): it must be that "
                "of a whole checkpoint, as torch.distributed.checkpoint.save writes it at its end"
            ) from error
        self._kinds = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._files: dict[str, set[str]] = defaultdict(set)
        for index, place in stored.items():
            self._files[index.fqn].add(place.relative_path)

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors in the directory, but for marks."""
        return frozenset(name for name in self._kinds if not name.startswith(MARK))

    @property
    def marks(self) -> frozenset[int]:
        """The marks of all files that fpipe has written."""
        return frozenset(int(name[len(MARK) :]) for name in self._kinds if name.startswith(MARK))

    def read(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read some tensors.

        Raises:
            BatchError: a file is broken, or belongs to another checkpoint.
        """
        for name, like in wanted.items():
            shape, dtype = self._kinds[name]
            check_shape(name, shape, like)
            check_dtype(name, dtype, like)
        files = {file for name in wanted for file in self._files[name]}
        marks = [f"{MARK}{mark}" for mark in self.marks]
        number = torch.empty((), dtype=torch.int64, device="meta")
        read = self._values(
            {**wanted, **{name: number for name in marks if self._files[name] <= files}}
        )
        for name in marks:
            if name in read and int(read[name]) != int(name[len(MARK) :]):
                (file,) = self._files[name]
                raise BatchError(
                    f"{self._path / file} belongs to another checkpoint than {HEAD} beside it: "
                    "files of several were mixed, and their numbers do not belong together"
                )
        return {name: read[name] for name in wanted}

    def _values(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        values = {name: torch.empty_like(like, device="cpu") for name, like in wanted.items()}
        if values:
            with warnings.catch_warnings():
                # The warning says that this process reads without the others, as it should.
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                try:
                    dcp.load(values, storage_reader=dcp.FileSystemReader(self._path), no_dist=True)
                except CheckpointException as error:  # it is no Exception, which callers catch
                    (first, _), *_ = error.failures.values()
                    raise BatchError(
                        f"{self._path} cannot be read: {type(first).__name__}: {first}"
                    ) from error
        return values


def check_shape(name: str, shape: tuple[int, ...], like: Tensor) -> None:
    """Refuse a tensor of another shape."""
    if shape != tuple(like.shape):
        raise BatchError(
            f"the checkpoint's {name!r} has shape {shape}, but the model's has "
            f"{tuple(like.shape)}: it is of a model of another configuration"
        )


def check_dtype(name: str, dtype: torch.dtype, like: Tensor) -> None:
    """Refuse numbers that cannot become the model's: complex ones real, or large integers small."""
    if not torch.can_cast(dtype, like.dtype) or _wraps(dtype, like.dtype):
        raise BatchError(
            f"the checkpoint's {name!r} has dtype {dtype}, but the model's has {like.dtype}, in "
            "which a part of its numbers would be lost: convert the checkpoint"
        )


def _wraps(dtype: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether both are of integers, and some integers of `dtype` do not fit into `wanted`."""
    pair = (dtype, wanted)
    if torch.bool in pair or any(d.is_floating_point or d.is_complex for d in pair):
        return False
    stored, model = torch.iinfo(dtype), torch.iinfo(wanted)
    return stored.min < model.min or stored.max > model.max
