"""Arguments of an ensemble: stacked by the caller, and as its stages take them.

For the stages every mapped dimension is the first one. Beside its parameters every stage gets a
tensor without elements, whose first dimension is the number of members: so a stage without
parameters that reads a shared batch has something to be mapped over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fpipe import pytree
from fpipe.errors import BatchError
from fpipe.functional.batching import vmap_pytrees
from fpipe.functional.stagewise import Parts
from fpipe.inputs.split_batch import Beneath
from fpipe.spec.convention import PLAIN, STATE, Convention, Dual, spared

HINT = "torch.stack makes one of the members' values"


@dataclass(frozen=True)
class EnsembleArguments:
    """How the arguments of an ensemble are stacked.

    Attributes:
        in_dims: of params, state, batch and vectors, as the caller gave them.
        inner: convention of one member's pipeline.
        parts: of the pipeline's parameters.
        has_state: whether there is a state.
        size: the number of members; None where the arguments tell it.
    """

    in_dims: tuple[Any, ...]
    inner: Convention
    parts: Parts
    has_state: bool = False
    size: int | None = None

    @property
    def convention(self) -> Convention:
        """The convention of the ensemble's pipeline."""
        return Convention(
            enter=self.enter,
            loss=self.loss,
            grads=self.grads,
            out_dims=self.out_dims,
            aux_dims=self.aux_dims,
            batch=self.batch,
            vectors=self.inner.vectors,
            weigh=None if self.inner.weigh is None else self.weigh,
            state=self.state if self.has_state else self.inner.state,
        )

    # ── from the caller to the stages ───────────────────────────────────────────────────────────

    def enter(self, params: Any, *arguments: Any) -> tuple[Any, Any]:
        """Move the mapped dimensions to the front, and give every stage the number of members."""
        states, batch, vectors = self._after_params(arguments)
        state_dims, batch_dims, vector_dims = self._after_params(self.in_dims[1:])
        names = ("params", *(f"vectors[{number}]" for number in range(len(vectors))))
        kinds, trees = ("params", *self.inner.vectors), (params, *vectors)
        parts_of = list(map(self._read, names, kinds, trees, (self.in_dims[0], *vector_dims)))
        stacked_states = [_Stacked.read("state", *p) for p in zip(states, state_dims, strict=True)]
        stacked_batch = _Stacked.read("batch", batch, batch_dims)
        entries = [
            *(stacked for parts in parts_of for stacked in parts),
            *stacked_states,
            stacked_batch,
        ]
        size = _count(entries, self.size)
        packed, *directions = (
            self._joined(kind, [stacked.fronted(size) for stacked in parts], tree)
            for kind, parts, tree in zip(kinds, parts_of, trees, strict=True)
        )
        batch = stacked_batch.fronted(None)
        if self.inner is not PLAIN:
            before = [packed, *(state.fronted(size) for state in stacked_states)]
            packed, batch = self._enter_member(before, batch, directions, stacked_batch.dims)
        members = torch.empty(size, 0, dtype=torch.bool, device=_device(entries))
        if self.has_state:
            # The state stays beside the parameters, however many levels of members there are.
            return ((members, packed[0]), packed[1]), batch
        pairs = [(members, stacked) for stacked in self.parts.split(packed)]
        return self.parts.join(pairs, packed), batch

    def dims(self, arguments: Sequence[Any]) -> list[int | None]:
        """The mapped dimension of each flat leaf of parameters, batch and vectors."""
        kinds = ("params", "batch", *self.inner.vectors)
        parts_of = map(self._read, kinds, kinds, arguments, self.in_dims)
        return [dim for parts in parts_of for stacked in parts for dim in stacked.dims]

    def _after_params(self, values: Sequence[Any]) -> tuple[Sequence[Any], Any, Sequence[Any]]:
        """The state, if there is one; the batch; and the vectors."""
        return values[: self.has_state], values[self.has_state], values[self.has_state + 1 :]

    def _read(self, name: str, kind: str, value: Any, prefix: Any) -> list[_Stacked]:
        """The parts of an argument, which has the structure of the parameters or of the batch."""
        if value is None or kind == "batch":
            return [_Stacked.read(name, value, prefix)]
        named, prefixes = self.parts.named(name, value), self.parts.prefixes(prefix)
        return [
            _Stacked.read(part_name, tree, dims)
            for (part_name, tree), dims in zip(named, prefixes, strict=True)
        ]

    def _joined(self, kind: str, parts: Sequence[Any], like: Any) -> Any:
        """The inverse of `_read`."""
        return parts[0] if like is None or kind == "batch" else self.parts.join(parts, like)

    def _enter_member(
        self, before: Sequence[Any], batch: Any, vectors: Sequence[Any], dims: Sequence[int | None]
    ) -> tuple[Any, Any]:
        """Apply the convention of one member, for all members at once.

        The leaves of the batch are mapped where `dims` has a dimension; all other leaves are mapped
        along their first dimension, the direction of the batch included.

        Args:
            before: the arguments before the batch.
            batch: with the members in front.
            vectors: the arguments after the batch.
            dims: for each leaf of the batch, the caller's dimension of the members.
        """
        batch_has_direction = "batch" in self.inner.vectors and batch is not None
        leaves, spec = pytree.flatten((tuple(before), tuple(vectors), batch))
        batch_dims = tuple(None if dim is None else 0 for dim in dims)
        specs: list[optree.PyTreeSpec] = []

        def enter(*values: Tensor) -> tuple[tuple[Any, ...], ...]:
            member_before, member_vectors, member_batch = pytree.unflatten(spec, values)
            params, member_batch = self.inner.enter(*member_before, member_batch, *member_vectors)
            batches = member_batch if batch_has_direction else [member_batch]
            flat = [pytree.flatten(tree) for tree in (params, *batches)]
            specs[:] = [flat_spec for _, flat_spec in flat]
            return tuple(tuple(tree_leaves) for tree_leaves, _ in flat)

        in_dims = (*(0 for _ in leaves[: len(leaves) - len(batch_dims)]), *batch_dims)
        params_leaves, batch_leaves, *directions = torch.vmap(enter, in_dims=in_dims)(*leaves)
        # out_dims=None would say that a leaf is shared, but torch refuses it where a vmap around
        # this one has mapped the leaf.
        fronts = zip(batch_leaves, batch_dims, strict=True)
        shared_once = [leaf if dim == 0 else leaf[0] for leaf, dim in fronts]
        trees = zip(specs, (params_leaves, shared_once, *directions), strict=True)
        params, *batches = (pytree.unflatten(tree_spec, flat) for tree_spec, flat in trees)
        return params, tuple(batches) if batch_has_direction else batches[0]

    # ── from the stages to the caller ───────────────────────────────────────────────────────────

    def loss(self, loss: Tensor) -> Any:
        """Each member's loss as its own pipeline returns it, stacked."""
        return loss if self.inner is PLAIN else vmap_pytrees(self.inner.loss, [loss], [0])

    def grads(self, grads: Any) -> Any:
        """Drop the tensors that tell the number, and put the members where the caller has them."""
        packed: Any
        if self.has_state:
            (_, params_grads), state_grads = grads
            packed = params_grads, state_grads
        else:
            packed = self.parts.join(
                [None if pair is None else pair[1] for pair in self.parts.split(grads)], grads
            )
        if self.inner is not PLAIN:
            packed = vmap_pytrees(self.inner.grads, [packed], [0])
        return self._restored(packed)

    def _restored(self, grads: Any) -> Any:
        """The gradients, with the members along the caller's dimensions."""
        if isinstance(grads, Dual):
            return Dual(*map(self._restored, grads))
        return self._by_params(lambda leaf, dim: leaf.movedim(0, dim or 0), grads)

    def _by_params(self, function: Callable[[Tensor, int | None], Tensor], grads: Any) -> Any:
        """Apply `function` to each gradient by the parameters, and the dimension of its members."""
        pairs = zip(self.parts.split(grads), self.parts.prefixes(self.in_dims[0]), strict=True)
        parts = [
            None
            if tree is None
            else pytree.map_with_prefix(function, "in_dims[0]", prefix, tree, "params")
            for tree, prefix in pairs
        ]
        return self.parts.join(parts, grads)

    def weigh(self, grads: Any, cotangent: Tensor) -> Any:
        """The gradients of a sum of all members' losses, each with its weight."""
        assert self.inner.weigh is not None
        fronted = self._by_params(lambda leaf, dim: leaf.movedim(dim or 0, 0), grads)
        each = spared(fronted, cotangent)
        weighed = vmap_pytrees(self.inner.weigh, [each, cotangent], [0, 0])
        return self._by_params(
            lambda leaf, dim: leaf.sum(0) if dim is None else leaf.movedim(0, dim), weighed
        )

    def state(self, state: Any) -> Any:
        """The state of each member, with the members where the caller had them."""
        states = state if self.inner is STATE else vmap_pytrees(self.inner.state, [state], [0])
        return pytree.map_with_prefix(
            lambda leaf, dim: leaf.movedim(0, dim or 0),
            "in_dims[1]",
            self.in_dims[1],
            states,
            "state",
        )

    def batch(self, grads: Any) -> Any:
        """Put the members of the batch's gradients where the caller has them."""
        place = 1 + self.has_state
        prefix = self.in_dims[place]
        if "batch" in self.inner.vectors:
            prefix = prefix, 0
        dims = pytree.broadcast_prefix(f"in_dims[{place}]", prefix, grads, "batch")
        if all(dim is None for dim in dims):
            return self.inner.batch(grads)
        fronts = pytree.prefix_map(lambda dim: None if dim is None else 0, prefix)
        leaves, spec = pytree.flatten(vmap_pytrees(self.inner.batch, [grads], [fronts]))
        # A leaf that the members share has come out once for each of them.
        moved = [
            leaf[0] if dim is None else leaf.movedim(0, dim)
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
        return pytree.unflatten(spec, moved)

    def out_dims(self, out_dims: Any) -> Any:
        """The dimensions of outputs, beneath that of the members."""
        return pytree.prefix_map(_beneath, self.inner.out_dims(out_dims))

    def aux_dims(self, out_dims: Any) -> Any:
        """The dimensions of aux, beneath that of the members."""
        return pytree.prefix_map(_beneath, self.inner.aux_dims(out_dims))


def behind_members(dims: Any) -> Any:
    """Dimensions of one member's tensors, as dimensions of tensors with the members in front."""
    return pytree.prefix_map(lambda dim: dim + 1 if type(dim) is int and dim >= 0 else dim, dims)


def _beneath(dim: Any) -> Any:
    if isinstance(dim, Beneath):
        return Beneath(dim.levels + 1, dim.dim)
    return Beneath(1, dim) if type(dim) is int else dim


class _Stacked(NamedTuple):
    """One argument, flat, with the mapped dimension of each leaf."""

    name: str
    leaves: list[Tensor]
    spec: optree.PyTreeSpec
    dims: list[int | None]

    @classmethod
    def read(cls, name: str, value: Any, prefix: Any) -> _Stacked:
        """Flatten an argument and check its dimensions."""
        leaves, spec = pytree.tensors(name, value, HINT)
        # A part that belongs to another process is None, however deep the prefix goes.
        dims = [] if value is None else pytree.broadcast_prefix("in_dims", prefix, value, name)
        for path, leaf, dim in zip(pytree.paths(spec), leaves, dims, strict=True):
            if dim is not None and not pytree.is_dim(dim, leaf.dim()):
                raise BatchError(
                    f"in_dims is {dim!r} for {name}{path} of shape {tuple(leaf.shape)}: it must be "
                    "the dimension along which the members are stacked, or None for a leaf that "
                    "they share"
                )
        return cls(name, leaves, spec, dims)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """The name and the number of members of each mapped leaf."""
        for path, leaf, dim in zip(pytree.paths(self.spec), self.leaves, self.dims, strict=True):
            if dim is not None:
                yield f"{self.name}{path}", leaf.shape[dim]

    def fronted(self, size: int | None) -> Any:
        """The argument with its mapped dimensions in front.

        Args:
            size: the number of members, to which shared leaves are expanded; None keeps these.
        """
        leaves = []
        for leaf, dim in zip(self.leaves, self.dims, strict=True):
            if dim is not None:
                leaves.append(leaf.movedim(dim, 0))
            else:
                leaves.append(leaf if size is None else leaf.expand(size, *leaf.shape))
        return pytree.unflatten(self.spec, leaves)


def _count(entries: Sequence[_Stacked], size: int | None) -> int:
    """The number of members, which all mapped leaves must have, and the caller may have said.

    Raises:
        BatchError: no leaf is mapped, or two have other numbers, or there are no members.
    """
    sizes = [pair for entry in entries for pair in entry.sizes()]
    if size is not None:
        sizes.insert(0, ("axis_size", size))
    if not sizes:
        raise BatchError(
            "in_dims maps no leaf of the arguments, so the number of members is unknown: stack one "
            "at least, or pass fpipe.vmap its axis_size; so do all ranks of a group, if one of "
            "them has nothing that is stacked"
        )
    first, expected = sizes[0]
    for path, other in sizes:
        if other != expected:
            raise BatchError(
                f"{path} has {other} members along its mapped dimension, but {first} has "
                f"{expected}: all mapped leaves must have the same number of members; in_dims says "
                "which dimension it is (None: shared)"
            )
    if expected == 0:
        raise BatchError(f"{first} has 0 members along its mapped dimension: an ensemble has some")
    return expected


def _device(entries: Sequence[_Stacked]) -> torch.device:
    """The device of the first leaf that has data; leaves of other processes may have none."""
    devices = [leaf.device for entry in entries for leaf in entry.leaves]
    return next((d for d in devices if d.type != "meta"), (*devices, torch.empty(0).device)[0])
