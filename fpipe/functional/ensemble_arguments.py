"""Members of an ensemble: from the caller's stacked arguments to those of the stages, and back.

Inside, every mapped dimension is the first one. Every stage (or the one function) gets, beside its
parameters, a tensor without elements whose first dimension is the number of members, so that a
stage without parameters that reads a shared batch still knows how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fpipe import pytree
from fpipe.convention import PLAIN, STATE, Convention, Dual, spared
from fpipe.errors import BatchError
from fpipe.functional.batching import over
from fpipe.functional.parts import Parts
from fpipe.inputs.batch import Beneath
from fpipe.inputs.presplit import is_dim

HINT = "torch.stack makes one of the members' values"


@dataclass(frozen=True)
class Members:
    """How the arguments of an ensemble are stacked.

    Attributes:
        in_dims: of params, state, batch and vectors, as the caller gave them.
        inner: convention of one member's pipeline.
        parts: of the pipeline's parameters.
        has_state: whether there is a state.
        size: how many there are, None where the arguments tell.
    """

    in_dims: tuple[Any, ...]
    inner: Convention
    parts: Parts
    has_state: bool = False
    size: int | None = None

    @property
    def convention(self) -> Convention:
        """These members as a convention."""
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

    def enter(self, params: Any, *arguments: Any) -> tuple[Any, Any]:
        """Move the mapped dimensions to the front, and give every stage the number of members."""
        (state, batch, vectors), (state_dims, batch_dims, vector_dims) = map(
            self._apart, (arguments, self.in_dims[1:])
        )
        names = ("params", *(f"vectors[{number}]" for number in range(len(vectors))))
        kinds, given = ("params", *self.inner.vectors), (params, *vectors)
        stacked = list(map(self._read, names, kinds, given, (self.in_dims[0], *vector_dims)))
        states = [_Stacked.read("state", *pair) for pair in zip(state, state_dims, strict=True)]
        shared = _Stacked.read("batch", batch, batch_dims)
        entries = [*(entry for parts in stacked for entry in parts), *states, shared]
        size = _count(entries, self.size)
        packed, *directions = (
            self._joined(kind, [entry.moved(size) for entry in parts], own)
            for kind, parts, own in zip(kinds, stacked, given, strict=True)
        )
        batch = shared.moved(None)
        if self.inner is not PLAIN:
            more = [state.moved(size) for state in states]
            packed, batch = self._enter_one([packed, *more], batch, directions, shared.dims)
        members = torch.empty(size, 0, dtype=torch.bool, device=_device(entries))
        if self.has_state:
            # The state stays beside the parameters, however many levels of members there are.
            return ((members, packed[0]), packed[1]), batch
        pairs = [(members, part) for part in self.parts.split(packed)]
        return self.parts.join(pairs, packed), batch

    def dims(self, arguments: Sequence[Any]) -> list[int | None]:
        """The mapped dimension of each flat leaf of parameters, batch and vectors."""
        kinds = ("params", "batch", *self.inner.vectors)
        read = map(self._read, kinds, kinds, arguments, self.in_dims)
        return [dim for parts in read for entry in parts for dim in entry.dims]

    def _apart(self, values: Sequence[Any]) -> tuple[Sequence[Any], Any, Sequence[Any]]:
        """What comes after the parameters: the state, if there is one, the batch, the vectors."""
        return values[: self.has_state], values[self.has_state], values[self.has_state + 1 :]

    def _read(self, name: str, kind: str, value: Any, prefix: Any) -> list[_Stacked]:
        """The parts of an argument that has the structure of the one that `kind` names."""
        if value is None or kind == "batch":
            return [_Stacked.read(name, value, prefix)]
        named, prefixes = self.parts.read(name, value), self.parts.prefixes(prefix)
        return [
            _Stacked.read(own, part, dims)
            for (own, part), dims in zip(named, prefixes, strict=True)
        ]

    def _joined(self, kind: str, parts: Sequence[Any], like: Any) -> Any:
        """The inverse of `_read`."""
        return parts[0] if like is None or kind == "batch" else self.parts.join(parts, like)

    def _enter_one(
        self, before: Sequence[Any], batch: Any, vectors: Sequence[Any], dims: Sequence[int | None]
    ) -> tuple[Any, Any]:
        """The convention of one member, for all members at once; `before` comes before the batch.

        The leaves of the batch are mapped along `dims`, all others along their first dimension:
        so is the direction of the batch, if it comes with one.
        """
        moves = "batch" in self.inner.vectors and batch is not None
        leaves, spec = pytree.flatten((tuple(before), tuple(vectors), batch))
        mapped = tuple(None if dim is None else 0 for dim in dims)
        specs: list[optree.PyTreeSpec] = []

        def one(*values: Tensor) -> tuple[tuple[Any, ...], ...]:
            own, own_vectors, own_batch = pytree.unflatten(spec, values)
            entered, own_batch = self.inner.enter(*own, own_batch, *own_vectors)
            packed = [pytree.flatten(e) for e in (entered, *(own_batch if moves else [own_batch]))]
            specs[:] = [made for _, made in packed]
            return tuple(tuple(found) for found, _ in packed)

        in_dims = (*(0 for _ in leaves[: len(leaves) - len(mapped)]), *mapped)
        own, shown, *moving = torch.vmap(one, in_dims=in_dims)(*leaves)
        # Not by out_dims=None, which torch refuses of what a vmap around this one has mapped.
        fronts = zip(shown, mapped, strict=True)
        packed = own, [leaf if dim == 0 else leaf[0] for leaf, dim in fronts], *moving
        params, *batches = (pytree.unflatten(s, own) for s, own in zip(specs, packed, strict=True))
        return params, tuple(batches) if moves else batches[0]

    def loss(self, loss: Tensor) -> Any:
        """One member's view of the loss, stacked."""
        return loss if self.inner is PLAIN else over(self.inner.loss, [loss], [0])

    def grads(self, grads: Any) -> Any:
        """Drop the tensors that told the number, and put the members where the caller has them."""
        packed: Any
        if self.has_state:
            (_, own), state = grads
            packed = own, state
        else:
            packed = self.parts.join(
                [None if part is None else part[1] for part in self.parts.split(grads)], grads
            )
        if self.inner is not PLAIN:
            packed = over(self.inner.grads, [packed], [0])
        return self._restore(packed)

    def _restore(self, grads: Any) -> Any:
        if isinstance(grads, Dual):
            return Dual(*map(self._restore, grads))
        pairs = zip(self.parts.split(grads), self.parts.prefixes(self.in_dims[0]), strict=True)
        return self.parts.join([_restored(part, prefix) for part, prefix in pairs], grads)

    def weigh(self, grads: Any, cotangent: Tensor) -> Any:
        """The gradients of a sum of all members' losses, each with its weight."""
        assert self.inner.weigh is not None
        leaves, spec = pytree.flatten(grads)
        dims = [
            dim
            for part, prefix in zip(
                self.parts.split(grads), self.parts.prefixes(self.in_dims[0]), strict=True
            )
            for dim in _dims_of(part, prefix)
        ]
        fronted = [leaf.movedim(dim or 0, 0) for leaf, dim in zip(leaves, dims, strict=True)]
        each = spared(pytree.unflatten(spec, fronted), cotangent)
        own = over(self.inner.weigh, [each, cotangent], [0, 0])
        summed = [
            leaf.sum(0) if dim is None else leaf.movedim(0, dim)
            for leaf, dim in zip(pytree.flatten(own)[0], dims, strict=True)
        ]
        return pytree.unflatten(spec, summed)

    def state(self, state: Any) -> Any:
        """The state of each member, with the members where the caller had them."""
        own = state if self.inner is STATE else over(self.inner.state, [state], [0])
        leaves, spec = pytree.flatten(own)
        dims = pytree.broadcast_prefix("in_dims[1]", self.in_dims[1], own, "state")
        moved = [leaf.movedim(0, dim or 0) for leaf, dim in zip(leaves, dims, strict=True)]
        return pytree.unflatten(spec, moved)

    def batch(self, grads: Any) -> Any:
        """Put the members of the batch's gradients where the caller has them."""
        place = 1 + self.has_state
        prefix = self.in_dims[place]
        if "batch" in self.inner.vectors:
            prefix = prefix, 0
        dims = pytree.broadcast_prefix(f"in_dims[{place}]", prefix, grads, "batch")
        if all(dim is None for dim in dims):
            return self.inner.batch(grads)
        mapped = pytree.prefix_map(lambda dim: None if dim is None else 0, prefix)
        leaves, spec = pytree.flatten(over(self.inner.batch, [grads], [mapped]))
        # What members share has come out once for each of them.
        moved = [
            leaf[0] if dim is None else leaf.movedim(0, dim)
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
        return pytree.unflatten(spec, moved)

    def out_dims(self, out_dims: Any) -> Any:
        """Beneath the dimension of the members."""
        return pytree.prefix_map(_beneath, self.inner.out_dims(out_dims))

    def aux_dims(self, out_dims: Any) -> Any:
        """Beneath the dimension of the members."""
        return pytree.prefix_map(_beneath, self.inner.aux_dims(out_dims))


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
            if dim is not None and not is_dim(dim, leaf.dim()):
                raise BatchError(
                    f"in_dims is {dim!r} for {name}{path} of shape {tuple(leaf.shape)}: it must be "
                    "the dimension along which the members are stacked, or None for a leaf that "
                    "they share"
                )
        return cls(name, leaves, spec, dims)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """The members of each mapped leaf."""
        for path, leaf, dim in zip(pytree.paths(self.spec), self.leaves, self.dims, strict=True):
            if dim is not None:
                yield f"{self.name}{path}", leaf.shape[dim]

    def moved(self, size: int | None) -> Any:
        """The argument with its mapped dimensions in front; `size` gives shared leaves one too."""
        return pytree.unflatten(
            self.spec,
            [
                leaf.movedim(dim, 0)
                if dim is not None
                else leaf
                if size is None
                else leaf.expand(size, *leaf.shape)
                for leaf, dim in zip(self.leaves, self.dims, strict=True)
            ],
        )


def _count(entries: Sequence[_Stacked], size: int | None) -> int:
    """The number of members, which all mapped leaves must have: `size`, if it is known."""
    found = [pair for entry in entries for pair in entry.sizes()]
    if size is not None:
        found.insert(0, ("axis_size", size))
    if not found:
        raise BatchError(
            "in_dims maps no leaf of the arguments, so the number of members is unknown: stack one "
            "at least, or pass fpipe.vmap its axis_size; so do all ranks of a group, if one of "
            "them has nothing that is stacked"
        )
    first, expected = found[0]
    for path, other in found:
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
    """Where the first leaf lies that has data: those that another process reads may have none."""
    found = [leaf.device for entry in entries for leaf in entry.leaves]
    return next((d for d in found if d.type != "meta"), (*found, torch.empty(0).device)[0])


def _restored(part: Any, prefix: Any) -> Any:
    if part is None:
        return None
    leaves, spec = pytree.flatten(part)
    dims = _dims_of(part, prefix)
    return pytree.unflatten(
        spec, [leaf.movedim(0, dim or 0) for leaf, dim in zip(leaves, dims, strict=True)]
    )


def _dims_of(part: Any, prefix: Any) -> list[int | None]:
    """The mapped dimension of every leaf of a stage's gradients."""
    return [] if part is None else pytree.broadcast_prefix("in_dims[0]", prefix, part, "params")


def _beneath(dim: Any) -> Any:
    if isinstance(dim, Beneath):
        return Beneath(dim.levels + 1, dim.dim)
    return Beneath(1, dim) if type(dim) is int else dim


def behind(dims: Any) -> Any:
    """Dimensions of one member's tensors as dimensions of the stacked ones, members first."""
    return pytree.prefix_map(lambda dim: dim + 1 if type(dim) is int and dim >= 0 else dim, dims)
