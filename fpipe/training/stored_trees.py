"""Trees of tensors as plain values that a file holds, and trees of meta tensors again of these.

Dicts, lists, tuples and `fpipe.nn.BatchStats` are known; a file knows no others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from fpipe.nn import BatchStats

NODES: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "list": list,
    "tuple": tuple,
    "BatchStats": lambda parts: BatchStats(*parts),
}


def described(tree: Any) -> Any:
    """A tree with the shape and the dtype of each leaf.

    Other nodes are None, and so are those of other processes.

    Example:
        >>> described([{"w": torch.ones(2)}, None])
        ('list', [('dict', [('w', ('leaf', (2,), torch.float32))]), None])
    """
    if isinstance(tree, Tensor):
        return "leaf", tuple(tree.shape), tree.dtype
    if type(tree) is dict:
        return "dict", [(key, described(value)) for key, value in tree.items()]
    if type(tree) in (list, tuple, BatchStats):
        return type(tree).__name__, [described(value) for value in tree]
    return None


def joined(trees: list[Any]) -> Any:
    """One description of those of all processes, of which each has some parts."""
    known = [tree for tree in trees if tree is not None]
    if not known or known[0][0] not in ("list", "tuple"):
        return known[0] if known else None
    kind, first = known[0][:2]
    return kind, [joined([tree[1][i] for tree in known]) for i in range(len(first))]


def tree_of(description: Any) -> Any:
    """Meta tensors in the structure that was described.

    Example:
        >>> tree_of(described((torch.ones(2),)))[0].shape
        torch.Size([2])
    """
    if description is None:
        return None
    kind, *content = description
    if kind == "leaf":
        return torch.empty(content[0], dtype=content[1], device="meta")
    if kind == "dict":
        return {key: tree_of(value) for key, value in content[0]}
    return NODES[kind]([tree_of(value) for value in content[0]])
