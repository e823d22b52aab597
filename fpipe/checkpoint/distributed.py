"""Checkpoints in directories of `torch.distributed.checkpoint`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fpipe.checkpoint.source import HEAD, check_dtype, check_shape
from fpipe.errors import BatchError, told


class DistributedDirectory:
    """Tensors in a directory that ``torch.distributed.checkpoint.save`` has written.

    Each process reads by itself: how many wrote it, or read it, does not matter. Entries that are
    no tensors are passed over.

    Args:
        path: of the directory.

    Raises:
        BatchError: what says which tensors it has cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        except Exception as error:  # it is a pickle, and reading one may raise anything
            raise BatchError(
                f"{path / HEAD} cannot be read ({told(error)}): it must be that "
                "of a whole checkpoint, as torch.distributed.checkpoint.save writes it at its end"
            ) from error
        self._kinds = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    @property
    def names(self) -> frozenset[str]:
        """All that there is."""
        return frozenset(self._kinds)

    def read(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read some."""
        for name, like in wanted.items():
            shape, dtype = self._kinds[name]
            check_shape(name, shape, like)
            check_dtype(name, dtype, like)
        found = {name: torch.empty_like(like, device="cpu") for name, like in wanted.items()}
        if found:
            with warnings.catch_warnings():
                # That it reads without the other processes is just what is meant.
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                try:
                    dcp.load(found, storage_reader=dcp.FileSystemReader(self._path), no_dist=True)
                except CheckpointException as error:  # it is no Exception, which callers catch
                    (first, _), *_ = error.failures.values()
                    raise BatchError(
                        f"{self._path} cannot be read: {type(first).__name__}: {first}"
                    ) from error
        return found
