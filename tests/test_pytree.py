"""The one module that flattens pytrees."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from fpipe import BatchError, pytree


class Point(NamedTuple):
    x: Any
    y: Any


TREES = [
    {"b": 1, "a": [2, (3,)]},
    Point(1, {"k": None}),
    [None, (), {}, [None]],
    OrderedDict(z=1, a=2),
    5,
    None,
]


@pytest.mark.parametrize("value", TREES)
def test_unflatten_is_the_inverse(value: Any) -> None:
    leaves, spec = pytree.flatten(value)
    assert pytree.unflatten(spec, leaves) == value
    assert pytree.structure(value) == spec


def test_dicts_are_read_by_sorted_key() -> None:
    assert pytree.flatten({"b": 1, "a": 2})[0] == [2, 1]
    assert pytree.structure({"b": 1, "a": 2}) == pytree.structure({"a": 1, "b": 2})


def test_none_is_a_node_without_leaves() -> None:
    assert pytree.flatten({"a": None, "b": 1})[0] == [1]
    assert pytree.tree_map(lambda leaf: leaf + 1, [None, 1]) == [None, 2]


def test_paths_are_written_as_in_python() -> None:
    spec = pytree.structure({"a": [1, Point(2, 3)], "b": 4})
    assert pytree.paths(spec) == ["['a'][0]", "['a'][1].x", "['a'][1].y", "['b']"]


@pytest.mark.parametrize(
    ("prefix", "value", "expected"),
    [
        (0, {"x": [1, 2], "m": 3}, [0, 0, 0]),
        ({"x": 1, "m": None}, {"x": [1, 2], "m": 3}, [None, 1, 1]),
        ({"x": [0, 1], "m": 2}, {"x": [1, 2], "m": 3}, [2, 0, 1]),
        (None, [1, 2], [None, None]),
        ([0, None], [None, {"k": 1, "n": None}], [None]),
        (0, None, []),
    ],
)
def test_prefixes_are_broadcast(prefix: Any, value: Any, expected: list[Any]) -> None:
    assert pytree.broadcast_prefix("in_dims", prefix, value, "batch") == expected


@pytest.mark.parametrize(
    ("prefix", "where"),
    [
        ({"x": [0], "m": 0}, r"in_dims\['x'\]"),
        ({"x": (0, 0), "m": 0}, r"in_dims\['x'\]"),
        ({"x": 0}, r"(?s)extra key.*\['m'\]"),
        ({"x": 0, "m": 0, "k": 0}, r"(?s)missing key.*\['k'\]"),
    ],
)
def test_what_is_no_prefix_is_refused_by_key_path(prefix: Any, where: str) -> None:
    with pytest.raises(BatchError, match=where):
        pytree.broadcast_prefix("in_dims", prefix, {"x": [1, 2], "m": 3}, "batch")


def test_tensors_are_free_of_history_and_pending_operations() -> None:
    value = torch.complex(torch.ones(2), torch.ones(2))
    given = {"grad": torch.ones(2, requires_grad=True), "conj": value.conj(), "plain": value}
    given["neg"] = value.conj().imag
    leaves, spec = pytree.tensors("batch", given, "")
    found = pytree.unflatten(spec, leaves)
    assert not any(v.requires_grad or v.is_conj() or v.is_neg() for v in found.values())
    assert all(found[name].equal(given[name]) for name in given)
    assert found["plain"] is value


@pytest.mark.parametrize(
    ("leaf", "found"),
    [
        (3.0, r"batch\['k'\]\[1\]=3.0 is a float"),
        ("text", r"batch\['k'\]\[1\]='text' is a str"),
        (torch.ones(2).to_sparse(), r"batch\['k'\]\[1\] has layout torch.sparse_coo"),
    ],
)
def test_leaves_that_are_no_dense_tensors(leaf: Any, found: str) -> None:
    rule = found + r": every leaf of batch must be a dense tensor \(a hint\)"
    with pytest.raises(BatchError, match=rule):
        pytree.tensors("batch", {"k": [torch.ones(1), leaf]}, "a hint")


def test_module_in_place_of_its_parameters() -> None:
    rule = r"params\[0\] is a module, Linear: pass its parameters, dict\(module.named_parameters"
    with pytest.raises(BatchError, match=rule):
        pytree.tensors("params", [torch.nn.Linear(1, 1)], "a hint")


@dataclass
class Pair:
    x: torch.Tensor


@pytest.mark.parametrize(
    ("container", "instead"),
    [
        (UserDict(x=torch.ones(1)), r"use dict\(…\) of it"),
        (Pair(torch.ones(1)), "make .* optree.dataclasses.* or use a dict of its fields"),
    ],
)
def test_containers_that_are_no_nodes(container: Any, instead: str) -> None:
    # As tokenizers of Hugging Face return them. The hint was to make a tensor of them.
    kind = type(container).__name__
    with pytest.raises(BatchError, match=rf"batch\['k'\] is a {kind}, into which .*: {instead}"):
        pytree.tensors("batch", {"k": container}, "a hint")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors() -> None:
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.raises(BatchError, match=r"batch\['k'\] is nested: every leaf"):
        pytree.tensors("batch", {"k": nested}, "a hint")
