"""The only module that knows how pytrees are flattened: optree, in one namespace.

torch's own `_pytree` keeps dict order and makes None a leaf, optree sorts keys and makes None a
node; a library that mixed the two would permute leaves silently. Custom nodes are registered with
optree, globally or in the namespace ``"fpipe"``.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Final

import optree
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import register_pytree_node

from fpipe import dtensors
from fpipe.errors import BatchError, a_type, shown
from fpipe.microbatches import Microbatches

NAMESPACE = "fpipe"

optree.register_pytree_node(
    Microbatches,
    lambda parts: (tuple(parts), None),
    lambda _, parts: Microbatches(parts),
    path_entry_type=optree.SequenceEntry,
    namespace=NAMESPACE,
)
# For functions of them that the transforms of torch.func take.
register_pytree_node(
    Microbatches,
    lambda parts: (list(parts), None),
    lambda parts, _: Microbatches(parts),
    serialized_type_name="fpipe.Microbatches",
)


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves of `tree` and its structure. None is a node without leaves."""
    if not dtensors.registered:
        dtensors.register()
    leaves, spec = optree.tree_flatten(tree, namespace=NAMESPACE)
    return leaves, spec


def entries(spec: optree.PyTreeSpec, tree: Any) -> list[Any]:
    """The entries of a tree in the places of the leaves of a structure: DTensors are whole.

    Raises:
        ValueError: it has another structure.
    """
    values: list[Any] = dtensors.structure_of_wholes(spec).flatten_up_to(tree)
    return values


def of_entries(spec: optree.PyTreeSpec, values: Sequence[Any]) -> Any:
    """The inverse of `entries`."""
    return optree.tree_unflatten(dtensors.structure_of_wholes(spec), values)


def key_paths(spec: optree.PyTreeSpec) -> list[tuple[Any, ...]]:
    """The keys and indices that lead to each leaf."""
    return [path[:-1] if path and path[-1] is dtensors.LOCAL else path for path in spec.paths()]


def tensors(name: str, tree: Any, hint: str) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """`flatten` for what a caller passed in: every leaf is a tensor that compiled code can read.

    Autograd history and pending conjugations and negations are left behind: compiled code reads
    memory, where a pending operation has not happened yet.

    Args:
        name: how the caller knows the tree, for messages.
        tree: pytree of dense tensors.
        hint: what to do about a leaf that is no tensor.

    Raises:
        BatchError: a leaf is no dense tensor; names it by its key path.
    """
    leaves, spec = flatten(tree)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, nn.Module):
            raise BatchError(
                f"{name}{paths(spec)[index]} is a module, {type(leaf).__name__}: pass its "
                "parameters, dict(module.named_parameters())"
            )
        if isinstance(leaf, Iterator):
            path = paths(spec)[index]
            instead = "" if name == "batch" and path else _ONCE.get(name, "")
            raise BatchError(
                f"{name}{path} is {a_type(leaf)}, which gives its values once: "
                f"{instead or 'pass list(...) of it'}"
            )
        if is_container(leaf):
            raise BatchError(
                f"{name}{paths(spec)[index]} is {a_type(leaf)}, into which pytrees do not "
                f"look: {_to_look_into(leaf)}"
            )
        if (
            not isinstance(leaf, Tensor)
            or leaf.layout is not torch.strided
            or leaf.is_nested
            or leaf.is_quantized
        ):
            raise BatchError(
                f"{name}{paths(spec)[index]}{_oddity(leaf)}: every leaf of {name} must be a dense "
                f"tensor ({hint})"
            )
        if type(leaf).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            leaf = leaves[index] = _plain(f"{name}{paths(spec)[index]}", leaf)
        if leaf.requires_grad:
            leaves[index] = leaf.detach()
        if leaf.is_conj() or leaf.is_neg():
            leaves[index] = leaves[index].resolve_conj().resolve_neg()
        if leaf._is_zerotensor():  # has no memory
            leaves[index] = torch.zeros_like(leaves[index])
    return leaves, spec


_ONCE: Final = {
    "batch": "a call takes one batch, next(...) of it, and one that is split already as "
    "fpipe.Microbatches(...) of it",
    "params": "pass list(...) of it, and of a module's parameters dict(module.named_parameters())",
}
"""Advice about an iterator, by the name of the argument."""


def is_container(leaf: Any) -> bool:
    """Whether a leaf holds others, which pytrees do not know of."""
    if isinstance(leaf, torch.Size):
        return False  # numbers, of which torch.as_tensor makes a tensor
    return isinstance(leaf, Mapping | list | tuple | set | frozenset) or is_dataclass(leaf)


def _to_look_into(container: Any) -> str:
    """Advice about a container that is no node."""
    if isinstance(container, Mapping):
        return 'use dict(…) of it, or register the class with optree, namespace="fpipe"'
    if isinstance(container, set | frozenset):
        return "use a list, in an order that is the same on all ranks"
    if isinstance(container, list | tuple):
        return 'use list(…) of it, or register the class with optree, namespace="fpipe"'
    return (
        'make the class with optree.dataclasses.dataclass(namespace="fpipe") in place of '
        "dataclasses.dataclass, or use a dict of its fields"
    )


def advice(leaf: Any) -> str:
    """Advice how to make a tensor, or a node, of a leaf that is neither."""
    if is_container(leaf):
        return _to_look_into(leaf)
    return (
        "torch.as_tensor makes one of a number; a container of your own is registered with "
        'optree, namespace="fpipe"'
    )


def _oddity(leaf: Any) -> str:
    """The reason why a leaf is no dense tensor, as the middle of a sentence."""
    if not isinstance(leaf, Tensor):
        return f"={shown(leaf)} is {a_type(leaf)}"
    if leaf.is_nested:
        return " is nested"
    if leaf.is_quantized:
        return " is quantized"
    return f" has layout {leaf.layout}"


def _plain(name: str, leaf: Tensor) -> Tensor:
    """The tensor within a leaf whose class computes in a way of its own.

    Raises:
        BatchError: it is none that compiled code, which reads memory, can do without.
    """
    if isinstance(leaf, FakeTensor):
        with unset_fake_temporarily():  # a shape, for whoever asks for no more
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    # Few have one, and it imports all of torch.distributed.
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(leaf, AsyncCollectiveTensor):
        return leaf.wait()
    kind = type(leaf).__name__
    instead = (
        "pass this process's part of it, .to_local(), and let the stages communicate, or all of "
        "it, .full_tensor()"
        if kind == "DTensor"
        else "pass the plain tensors that it is made of, and make it of them in the stage"
    )
    raise BatchError(f"{name} is a {kind}: stages compute with plain tensors ({instead})")


def unflatten(spec: optree.PyTreeSpec, leaves: Sequence[Any]) -> Any:
    """The inverse of `flatten`."""
    return optree.tree_unflatten(spec, leaves)


def structure(tree: Any) -> optree.PyTreeSpec:
    """The structure of `tree` without its leaves."""
    return flatten(tree)[1]


def orders(spec: optree.PyTreeSpec) -> tuple[Any, ...]:
    """The keys of every dict in a structure, as they were put in; equal structures may differ.

    Keys that are equal and of different types, such as 1 and True, come as different ones.

    Example:
        >>> one, other = structure({"a": 1, "b": 2}), structure({"b": 2, "a": 1})
        >>> one == other, orders(one), orders(other)
        (True, (('a', 'b'),), (('b', 'a'),))
        >>> one, other = structure({1: 1}), structure({True: 1})
        >>> one == other, orders(one) == orders(other)
        (True, False)
    """
    by_dict: list[Any] = []
    waiting = [spec]
    while waiting:
        node = waiting.pop()
        if node.num_nodes == node.num_leaves:
            continue  # a leaf
        if node.type in _DICTS:
            level = node.one_level()
            assert level is not None
            keys = tuple(level.unflatten(range(level.num_leaves)))
            # Nearly all are strings, and this is asked in each step.
            by_dict.append(
                keys if {*map(type, keys)} == _STRINGS else tuple(map(_told_apart, keys))
            )
        waiting += node.children()
    return tuple(by_dict)


_DICTS: Final = frozenset({dict, defaultdict, OrderedDict})
_STRINGS: Final = {str}


def _told_apart(key: Any) -> Any:
    """Equal for keys that are equal and of the same types."""
    if isinstance(key, tuple):
        return type(key), tuple(map(_told_apart, key))
    if isinstance(key, frozenset):
        return type(key), frozenset(map(_told_apart, key))
    return type(key), key


def tree_map(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply `function` to corresponding leaves of trees of one structure."""
    return optree.tree_map(function, tree, *rest, namespace=NAMESPACE)


def map_wholes(function: Callable[[Any, str], Any], tree: Any) -> Any:
    """Apply `function` to every leaf and its path, a DTensor being one leaf."""
    return optree.tree_map_with_accessor(
        lambda accessor, leaf: function(leaf, accessor.codify("")),
        tree,
        is_leaf=dtensors.is_dtensor,
        namespace=NAMESPACE,
    )


def map_nodes(function: Callable[[Any], Any], tree: Any, kind: type) -> Any:
    """Apply `function` to every node of a kind, with all that is beneath it."""
    return optree.tree_map(
        lambda node: function(node) if isinstance(node, kind) else node,
        tree,
        is_leaf=lambda node: isinstance(node, kind),
        namespace=NAMESPACE,
    )


def number_of_parts(tree: Any) -> int | None:
    """How many parts the `Microbatches` in a tree have; None where there are none.

    Raises:
        BatchError: they have different numbers.

    Example:
        >>> number_of_parts({"x": Microbatches([1, 2]), "y": 3}), number_of_parts({"y": 3})
        (2, None)
    """
    leaves: list[Any] = optree.tree_leaves(
        tree, is_leaf=lambda node: isinstance(node, Microbatches), namespace=NAMESPACE
    )
    counts = {len(leaf) for leaf in leaves if isinstance(leaf, Microbatches)}
    if len(counts) > 1:
        raise BatchError(
            f"Microbatches of {' and '.join(map(str, sorted(counts)))} parts stand in one batch: "
            "each must have one part for each microbatch of the schedule"
        )
    return next(iter(counts), None)


def part_of(tree: Any, microbatch: int) -> Any:
    """A tree with one of their parts in place of all `Microbatches`.

    Example:
        >>> part_of({"x": Microbatches([1, 2]), "y": 3}, 1)
        {'x': 2, 'y': 3}
    """
    return map_nodes(lambda parts: parts[microbatch], tree, Microbatches)


def places_of_parts(spec: optree.PyTreeSpec, parts: int) -> list[list[int]]:
    """For each part of a tree, as `part_of` returns it, where its leaves are in the whole one.

    Example:
        >>> places_of_parts(structure({"x": Microbatches([1, 2]), "y": 3}), 2)
        [[0, 2], [1, 2]]
    """
    places = unflatten(spec, range(spec.num_leaves))
    return [flatten(part_of(places, number))[0] for number in range(parts)]


def places_of_rest(spec: optree.PyTreeSpec) -> list[int]:
    """Where the leaves of a tree are that are in no `Microbatches`.

    Example:
        >>> places_of_rest(structure({"x": Microbatches([1, 2]), "y": 3}))
        [2]
    """
    places = unflatten(spec, range(spec.num_leaves))
    return flatten(map_nodes(lambda _: None, places, Microbatches))[0]


def flatten_prefix(prefix: Any) -> list[Any]:
    """The leaves of a prefix, None included."""
    leaves: list[Any] = optree.tree_leaves(prefix, none_is_leaf=True, namespace=NAMESPACE)
    return leaves


def hashable_prefix(prefix: Any) -> tuple[tuple[Any, ...], optree.PyTreeSpec]:
    """The leaves of a prefix and its structure, which are equal for prefixes that say the same."""
    spec = optree.tree_structure(prefix, none_is_leaf=True, namespace=NAMESPACE)
    return tuple(flatten_prefix(prefix)), spec


def prefix_map(rule: Callable[[Any], Any], prefix: Any) -> Any:
    """Apply `rule` to every leaf of a prefix, None included."""
    return optree.tree_map(rule, prefix, none_is_leaf=True, namespace=NAMESPACE)


def join_prefixes(
    first: Any, second: Any, rule: Callable[[Any, Any], Any], names: tuple[str, str]
) -> Any:
    """One prefix from two prefixes of the same pytree, leaf by leaf.

    Args:
        first: a pytree with None and other values as leaves.
        second: the same, deeper or shallower in any place.
        rule: from a leaf of each to that of the result.
        names: what the two are called, for messages.

    Raises:
        BatchError: no pytree has both as prefixes.

    Example:
        >>> join_prefixes({"x": 0, "y": None}, 1, lambda a, b: (a, b), ("a", "b"))
        {'x': (0, 1), 'y': (None, 1)}
    """
    if _is_leaf(first):
        return prefix_map(lambda b: rule(first, b), second)
    if _is_leaf(second):
        return prefix_map(lambda a: rule(a, second), first)
    (ours, metadata, entries, made_of), (theirs, _, other_entries, _) = (
        optree.tree_flatten_one_level(t, none_is_leaf=True, namespace=NAMESPACE)
        for t in (first, second)
    )
    if type(first) is not type(second) or entries != other_entries:
        raise BatchError(
            f"{names[0]}={first!r:.60} and {names[1]}={second!r:.60} are no prefixes of one "
            "pytree: both must have the structure of the batch, as deep as they go"
        )
    pairs = zip(ours, theirs, strict=True)
    return made_of(metadata, [join_prefixes(a, b, rule, names) for a, b in pairs])


def _is_leaf(value: Any) -> bool:
    return optree.tree_is_leaf(value, none_is_leaf=True, namespace=NAMESPACE)


def paths(spec: optree.PyTreeSpec) -> list[str]:
    """The key path of each leaf as it would be written in Python, such as ``"['a'][0]"``."""
    return [accessor.codify("") for accessor in spec.accessors()]


def is_dim(dim: Any, dims: int) -> bool:
    """Whether a tensor of so many dimensions has this one."""
    return type(dim) is int and -dims <= dim < dims


def broadcast_prefix(name: str, prefix: Any, tree: Any, tree_name: str) -> list[Any]:
    """One value of `prefix` for each leaf of `tree`, as `torch.func.vmap` reads ``in_dims``.

    None in `prefix` is a value ("not split") and not an empty node; None in `tree` has no leaf and
    takes none. Each part of `Microbatches` in `tree` has the prefix.

    Raises:
        BatchError: `prefix` is no prefix of `tree`; the message has the key path.

    Example:
        >>> broadcast_prefix("in_dims", {"x": 0, "mask": None}, {"x": [1, 2], "mask": 3}, "batch")
        [None, 0, 0]
        >>> parts = Microbatches([{"x": 1, "mask": 2}, {"x": 3, "mask": 4}])
        >>> broadcast_prefix("in_dims", {"x": 0, "mask": None}, parts, "batch")
        [None, 0, None, 0]
    """
    try:
        values = optree.broadcast_prefix(prefix, tree, none_is_leaf=True, namespace=NAMESPACE)
    except ValueError as error:
        if (parts := number_of_parts(tree)) is not None:
            return _broadcast_to_parts(name, prefix, tree, tree_name, parts)
        reasons = optree.prefix_errors(prefix, tree, none_is_leaf=True, namespace=NAMESPACE)
        detail = str(reasons[0](name)) if reasons else str(error)
        raise BatchError(
            f"{name} must be a pytree prefix of {tree_name}, as in torch.func.vmap: {detail}"
        ) from error
    leaves = optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)
    return [value for value, leaf in zip(values, leaves, strict=True) if leaf is not None]


def map_with_prefix(
    function: Callable[[Any, Any], Any], name: str, prefix: Any, tree: Any, tree_name: str
) -> Any:
    """Apply `function` to every leaf of `tree` and the value of `prefix` for it.

    Example:
        >>> map_with_prefix(max, "least", {"x": 2, "y": 0}, {"x": [1, 3], "y": 1}, "numbers")
        {'x': [2, 3], 'y': 1}
    """
    leaves, spec = flatten(tree)
    values = broadcast_prefix(name, prefix, tree, tree_name)
    return unflatten(spec, list(map(function, leaves, values)))


def _broadcast_to_parts(name: str, prefix: Any, tree: Any, tree_name: str, parts: int) -> list[Any]:
    """`broadcast_prefix` of a tree with `Microbatches` of so many parts, to each of them."""
    spec = structure(tree)
    by_place: dict[int, Any] = {}
    for number, places in enumerate(places_of_parts(spec, parts)):
        values = broadcast_prefix(name, prefix, part_of(tree, number), tree_name)
        by_place |= zip(places, values, strict=True)
    return [by_place[place] for place in range(spec.num_leaves)]
