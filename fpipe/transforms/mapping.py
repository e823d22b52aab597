"""`torch.func.vmap` over pytrees of ours: only flat leaves enter torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from fpipe import tree
from fpipe.errors import BatchError


def over(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    in_dims: Sequence[Any],
    randomness: str = "error",
) -> Any:
    """The outputs of `function` for all members at once, stacked along dimension 0.

    Args:
        function: of pytrees of tensors, to one.
        arguments: its arguments, stacked; at least one leaf must be, if there are any.
        in_dims: for each argument a pytree prefix of dimensions, None for leaves that are shared.
        randomness: as in `torch.func.vmap`.
    """
    leaves, spec = tree.flatten(tuple(arguments))
    if not leaves:
        return function(*arguments)  # torch's vmap refuses to call it
    dims = [
        dim
        for number, (prefix, argument) in enumerate(zip(in_dims, arguments, strict=True))
        for dim in tree.broadcast_prefix(f"in_dims[{number}]", prefix, argument, "the argument")
    ]
    made: list[optree.PyTreeSpec] = []

    def flat(*values: Any) -> tuple[Any, ...]:
        outputs, structure = tree.flatten(function(*tree.unflatten(spec, values)))
        made.append(structure)
        return tuple(outputs)

    outputs = torch.vmap(flat, in_dims=tuple(dims), randomness=randomness)(*leaves)
    return tree.unflatten(made[-1], outputs)


def join(first: Any, second: Any, rule: Callable[[Any, Any], Any], names: tuple[str, str]) -> Any:
    """One prefix from two prefixes of the same pytree, leaf by leaf.

    Args:
        first: a pytree with None and other values as leaves.
        second: the same, deeper or shallower in any place.
        rule: from a leaf of each to that of the result.
        names: what the two are called, for messages.

    Raises:
        BatchError: no pytree has both as prefixes.

    Example:
        >>> join({"x": 0, "y": None}, 1, lambda a, b: (a, b), ("a", "b"))
        {'x': (0, 1), 'y': (None, 1)}
    """
    if _is_leaf(first):
        return prefix_map(lambda b: rule(first, b), second)
    if _is_leaf(second):
        return prefix_map(lambda a: rule(a, second), first)
    (ours, metadata, entries, unflatten), (theirs, _, other_entries, _) = (
        optree.tree_flatten_one_level(t, none_is_leaf=True, namespace=tree.NAMESPACE)
        for t in (first, second)
    )
    if type(first) is not type(second) or entries != other_entries:
        raise BatchError(
            f"{names[0]}={first!r:.60} and {names[1]}={second!r:.60} are no prefixes of one "
            "pytree: both must have the structure of the batch, as deep as they go"
        )
    pairs = zip(ours, theirs, strict=True)
    return unflatten(metadata, [join(a, b, rule, names) for a, b in pairs])


def _is_leaf(value: Any) -> bool:
    return optree.tree_is_leaf(value, none_is_leaf=True, namespace=tree.NAMESPACE)


def prefix_map(rule: Callable[[Any], Any], prefix: Any) -> Any:
    """Apply `rule` to every leaf of a prefix, None included."""
    return optree.tree_map(rule, prefix, none_is_leaf=True, namespace=tree.NAMESPACE)
