"""Batches are split into microbatches, and outputs merged again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fpipe import BatchError, pytree
from fpipe.inputs.split_batch import merge, split


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 2))
def test_merge_is_the_inverse_of_split(rows: int, microbatches: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = rows
    batch = {"a": torch.arange(torch.Size(shape).numel()).view(shape)}
    if rows < microbatches:
        with pytest.raises(BatchError, match="fewer than"):
            split(batch, dim, microbatches)
        return
    parts = split(batch, dim, microbatches)
    assert sum(parts.rows) == rows
    assert max(parts.rows) - min(parts.rows) <= 1
    assert list(parts.rows) == sorted(parts.rows, reverse=True)
    columns = list(zip(*parts.leaves, strict=True))
    shapes = [[part.shape for part in column] for column in columns]
    assert merge(columns, shapes, parts.spec, dim, "output")["a"].equal(batch["a"])


def test_leaf_that_is_not_split_is_the_same_in_all() -> None:
    mask = torch.ones(5)
    parts = split({"x": torch.zeros(4, 2), "mask": mask}, {"x": 0, "mask": None}, 2)
    assert [leaves[0] is mask for leaves in parts.leaves] == [True, True]


def test_rows_share_the_memory_of_the_batch() -> None:
    x = torch.zeros(4, 2)
    parts = split(x, 0, 2)
    storages = {leaf.untyped_storage().data_ptr() for (leaf,) in parts.leaves}
    assert storages == {x.untyped_storage().data_ptr()}


@pytest.mark.parametrize("x", [torch.zeros(6, 4).t(), torch.zeros(4, 12)[:, ::2]])
def test_microbatches_are_contiguous(x: torch.Tensor) -> None:
    assert all(leaf.is_contiguous() for (leaf,) in split(x, 0, 2).leaves)


def test_empty_batch_without_anything_to_split() -> None:
    assert split({}, 0, 1).leaves == ((),)
    with pytest.raises(BatchError, match=r"batch=\{\} has no tensor to split into the 2"):
        split({}, 0, 2)


def test_no_rows() -> None:
    with pytest.raises(BatchError, match="batch has 0 rows, of which each microbatch takes one"):
        split(torch.zeros(0, 3), 0, 1)


@pytest.mark.parametrize("dim", [2, -3, True, 0.0, "0"])
def test_dimension_that_a_leaf_lacks(dim: Any) -> None:
    with pytest.raises(BatchError, match=r"in_dims is .* for batch of shape \(4, 2\)"):
        split(torch.zeros(4, 2), dim, 2)


def test_leaves_merge_each_along_its_own_dimension() -> None:
    column_c = [torch.tensor(1), torch.tensor(2)]
    columns = [[torch.zeros(2, 3)] * 2, [torch.ones(3, 2)] * 2, column_c]
    spec = pytree.structure({"a": 0, "b": 0, "c": 0})
    shapes = [[part.shape for part in column] for column in columns]
    merged = merge(columns, shapes, spec, {"a": 0, "b": 1, "c": None}, "output")
    assert {name: tuple(leaf.shape) for name, leaf in merged.items()} == {
        "a": (4, 3),
        "b": (3, 4),
        "c": (),
    }
    assert merged["c"] == 2
    assert merged["c"] is not column_c[1]
