"""DTensors as nodes of pytrees: a local tensor, and how it lies in the whole.

    DTensor ── flatten ──► local tensor      the structure of the tree holds mesh and placements
       ▲                       │
       └────── unflatten ──────┘

So parameters, gradients and what goes between stages may be DTensors, while all that fpipe does is
about plain tensors. Within a trace both ways are autograd's own (`to_local` and `from_local`), so
the communication that a placement asks for is recorded with the stage.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any, Final

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.errors import BatchError
from fpipe.torch_internals import dtensor_on_the_cpu

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_MODULE: Final = "torch.distributed.tensor"
Dims = tuple[tuple[str, ...] | None, tuple[int, ...]]

_MESHES: dict[Dims, DeviceMesh] = {}
_PIPELINES: dict[str, dict[Dims, DeviceMesh]] = {}
_WHOLE: dict[str, DeviceMesh] = {}
_kinds: list[Any] = []
registered = False

_PROBE: Final = object()
"""Stands for a local tensor where the question is how it lies."""


class _Step(Enum):
    """Not a string, which could be a key of the caller's."""

    LOCAL = "local"


LOCAL: Final = _Step.LOCAL
"""The entry of a path that leads from a DTensor to its local tensor; names leave it out."""


@dataclass(frozen=True)
class Placed:
    """Where the elements of a DTensor lie.

    Ranks tell each other theirs: each puts its own mesh, whose dimensions have equal names, in the
    place of the sender's.

    Attributes:
        dims: the names of the mesh's dimensions, and their sizes.
        placements: one for each of them.
        shape: of the whole tensor.
        stride: of the whole tensor.
        mesh: that of this process; None where it has none of these dimensions.
    """

    dims: Dims
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    mesh: DeviceMesh | None = field(repr=False)

    @classmethod
    def of(cls, tensor: DTensor) -> Placed:
        """How a DTensor lies."""
        mesh = tensor.device_mesh
        return cls(
            _dims_of(mesh), tuple(tensor.placements), tuple(tensor.shape), tensor.stride(), mesh
        )

    def made_of(self, local: Tensor) -> Any:
        """The DTensor with this local tensor."""
        if self.mesh is None:
            raise BatchError(
                f"a DTensor lies over the mesh dimensions {self.dims}, which this process does not "
                "know: pass the mesh that has them to the pipeline, mesh="
            )
        return assembled(local, self.mesh, self.placements, self.shape, self.stride)

    def without(self, names: Collection[str]) -> Placed | None:
        """The same without some dimensions of the mesh; None where no other is left."""
        known, sizes = self.dims
        kept = [at for at, name in enumerate(known or ()) if name not in names]
        if not kept or known is None:
            return None
        dims = tuple(known[at] for at in kept), tuple(sizes[at] for at in kept)
        placements = tuple(self.placements[at] for at in kept)
        mesh = None if self.mesh is None else _MESHES.get(dims)
        return Placed(dims, placements, self.shape, self.stride, mesh)

    def over(self, name: str) -> Placement | None:
        """The placement over a dimension of the mesh, None where it does not lie over that."""
        names = self.dims[0] or ()
        return self.placements[names.index(name)] if name in names else None

    def part_of(self, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor, which every process has; a part stays as it is."""
        from torch.distributed.tensor import distribute_tensor

        if tuple(whole.shape) != self.shape:
            return whole
        assert self.mesh is not None
        return local(distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None))

    def __reduce__(self) -> Any:
        """A mesh is the sender's own; the receiver has another with these dimensions."""
        return _received, (self.dims, self.placements, self.shape, self.stride)


def _received(
    dims: Dims,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> Placed:
    return Placed(dims, placements, shape, stride, _MESHES.get(dims))


def assembled(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: tuple[int, ...],
) -> Any:
    """The DTensor with this local tensor, which stays where it lies."""
    from torch.distributed.tensor import DTensor

    if local.device.type == "cpu" != mesh.device_type:
        return dtensor_on_the_cpu(local, mesh, placements, _size(shape), stride)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=_size(shape), stride=stride
    )


def _size(shape: Sequence[int]) -> Any:
    return torch.Size(shape)


def _dims_of(mesh: DeviceMesh) -> Dims:
    return mesh.mesh_dim_names, tuple(mesh.shape)


def learn(mesh: DeviceMesh, pipeline: str) -> None:
    """Let a process know the mesh of a pipeline, over whose dimensions stages of others may lie.

    Args:
        mesh: of all its dimensions.
        pipeline: the name of the process group of its ranks.
    """
    importlib.import_module(_MODULE)
    register()
    _WHOLE[pipeline] = mesh
    names = [name for name in mesh.mesh_dim_names or () if name != "pp"]
    chosen = chain.from_iterable(combinations(names, n) for n in range(1, len(names) + 1))
    _PIPELINES[pipeline] = {_dims_of(submesh): submesh for submesh in map(mesh.__getitem__, chosen)}


def meshes_of(pipeline: str) -> list[DeviceMesh]:
    """The meshes over which DTensors of a pipeline may lie; none if it was made without `mesh`."""
    return list(_PIPELINES.get(pipeline, {}).values())


def whole_mesh(pipeline: str) -> DeviceMesh | None:
    """The mesh, with all its dimensions, that a pipeline was given; None without `mesh`."""
    return _WHOLE.get(pipeline)


def recall(pipeline: str) -> None:
    """Values that come from other ranks of this pipeline lie over its mesh."""
    _MESHES.update(_PIPELINES.get(pipeline, {}))


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor."""
    return bool(_kinds) and isinstance(value, _kinds[0])


def place_of(value: Any) -> Placed | None:
    """How a DTensor lies, None for any other value."""
    return Placed.of(value) if is_dtensor(value) else None


def local(value: Any) -> Any:
    """The local tensor of a DTensor; any other value itself."""
    return value.to_local() if is_dtensor(value) else value


def structure_of_wholes(spec: optree.PyTreeSpec) -> optree.PyTreeSpec:
    """A structure in which DTensors are leaves, as a user sees it."""
    if not registered:
        return spec
    tree = optree.tree_unflatten(spec, [_PROBE] * spec.num_leaves)
    return optree.tree_structure(tree, namespace="fpipe")


def placements_of(spec: optree.PyTreeSpec) -> list[Placed | None]:
    """For each leaf of a tree how the DTensor lies whose local tensor it is, None for a tensor."""
    if not registered:
        return [None] * spec.num_leaves
    probes = optree.tree_unflatten(spec, [_PROBE] * spec.num_leaves)
    leaves = optree.tree_leaves(probes, namespace="fpipe")
    return [leaf if isinstance(leaf, Placed) else None for leaf in leaves]


def without_dims(
    spec: optree.PyTreeSpec, leaves: Sequence[Sequence[int]], names: Collection[str]
) -> optree.PyTreeSpec:
    """The structure of a tree whose DTensors do not lie over some dimensions any more.

    Then `leaves` are the shapes of its leaves.
    """
    places = placements_of(spec)
    if not any(place is not None and set(names) & set(place.dims[0] or ()) for place in places):
        return spec
    values: list[Any] = []
    for place, shape in zip(places, leaves, strict=True):
        rest = None if place is None else place.without(names)
        values.append(0 if rest is None else rest.made_of(torch.empty(shape, device="meta")))
    tree = optree.tree_unflatten(structure_of_wholes(spec), values)
    return optree.tree_structure(tree, namespace="fpipe")


def add_over_meshes(numbers: Tensor, places: Sequence[Placed | None]) -> Tensor:
    """Sums over all parts of DTensors, of a number for each local tensor; each element counts once.

    Every process of a mesh must call this, with the same DTensors.

    Args:
        numbers: one for each leaf of a tree, such as the sum of its squares.
        places: how each leaf lies.
    """
    meshes = dict.fromkeys(place.mesh for place in places if place is not None)
    if not meshes:
        return numbers
    numbers = numbers.clone()
    for mesh in meshes:
        assert mesh is not None
        held = [index for index, at in enumerate(places) if at is not None and at.mesh == mesh]
        sums = numbers[held]
        for at, index in enumerate(held):
            place = places[index]
            assert place is not None
            for placement, size in zip(place.placements, mesh.shape, strict=True):
                if placement.is_replicate():
                    sums[at] /= size
        for dim in range(len(mesh.shape)):
            dist.all_reduce(sums, group=mesh.get_group(dim))
        numbers[held] = sums
    return numbers


def as_parameters(spec: optree.PyTreeSpec, leaves: Sequence[Any]) -> Any:
    """The tree of parameters that a stage takes, whose gradients need not be sums over a mesh yet.

    Where a parameter is `Replicate`, the gradient of its local tensor is this process's part of a
    sum, so that microbatches add up without communication; `add_up_replicated` takes the sum.
    """
    if not registered:
        return optree.tree_unflatten(spec, leaves)
    values = [
        leaf if place is None or not isinstance(leaf, Tensor) else _AsParameter.apply(leaf, place)
        for place, leaf in zip(placements_of(spec), leaves, strict=True)
    ]
    return optree.tree_unflatten(structure_of_wholes(spec), values)


def add_up_replicated(
    grads: Sequence[Tensor | None],
    places: Sequence[Placed | None],
    but: Collection[str] = (),
) -> None:
    """Take the sums that `as_parameters` has put off, in place: one collective a dimension.

    Every process of a mesh must call this, with gradients of the same parameters.

    Args:
        grads: gradients of local tensors, whose memory is nobody else's.
        places: how the DTensors lie whose local tensors they are by.
        but: dimensions over which there is no sum to take.
    """
    for mesh in dict.fromkeys(place.mesh for place in places if place is not None):
        assert mesh is not None
        for dim, name in enumerate(mesh.mesh_dim_names or ("",) * mesh.ndim):
            if name in but:
                continue
            held = [
                grad
                for grad, place in zip(grads, places, strict=True)
                if grad is not None
                and place is not None
                and place.mesh == mesh
                and place.placements[dim].is_replicate()
            ]
            for dtype in dict.fromkeys(grad.dtype for grad in held):
                alike = [grad for grad in held if grad.dtype == dtype]
                flat = torch.cat([grad.reshape(-1) for grad in alike])
                dist.all_reduce(flat, group=mesh.get_group(dim))
                for grad, piece in zip(alike, flat.split([g.numel() for g in alike]), strict=True):
                    grad.copy_(piece.view(grad.shape))


class _AsParameter(torch.autograd.Function):
    """A DTensor of a local tensor, whose gradient is a part of a sum where it is `Replicate`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, place: Placed) -> Any:
        ctx.place = place
        return place.made_of(local)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
        from torch.distributed.tensor import Replicate

        place = ctx.place
        wanted = [
            target if not target.is_replicate() else (lies if lies.is_partial() else Replicate())
            for target, lies in zip(place.placements, grad.placements, strict=True)
        ]
        local = grad.redistribute(place.mesh, wanted).to_local(grad_placements=wanted)
        for target, lies, size in zip(place.placements, wanted, place.mesh.shape, strict=True):
            if target.is_replicate() and lies.is_replicate():
                local = local / size  # the same on all of them, which are to be added
        return local, None


def whole(value: Any) -> Any:
    """All of a DTensor, on every rank of its mesh; any other value itself."""
    return value.full_tensor() if is_dtensor(value) else value


def register() -> None:
    """Let DTensors be nodes, once anyone has imported them."""
    global registered
    module = sys.modules.get(_MODULE)
    kind = getattr(module, "DTensor", None)
    if _kinds or kind is None:
        return
    _kinds.append(kind)
    registered = True
    optree.register_pytree_node(
        kind,
        _taken_apart,
        _made,
        path_entry_type=_LocalEntry,
        namespace="fpipe",
    )


def _taken_apart(tensor: Any) -> Any:
    return (tensor.to_local(),), Placed.of(tensor), (LOCAL,)


def _made(placed: Any, children: Any) -> Any:
    """A DTensor; what stands for one in a tree of other things stays as it is."""
    [local] = children
    if local is _PROBE:
        return placed
    return placed.made_of(local) if isinstance(local, Tensor) else local


class _LocalEntry(optree.PyTreeEntry):
    """The step to a local tensor, of which a path says nothing."""

    def codify(self, /, node: str = "") -> str:
        """The expression of the DTensor itself."""
        return node


def refuse_transformed(tree: Any, transform: str) -> None:
    """Refuse DTensors where a transform would take their local tensors for all of them."""
    # They are not taken apart: torch refuses that within its transforms.
    if registered and any(
        map(is_dtensor, optree.tree_leaves(tree, is_leaf=is_dtensor, namespace="fpipe"))
    ):
        raise BatchError(
            f"DTensors among the arguments of {transform}, which does not know how they lie: pass "
            "plain tensors, .full_tensor(), or call the pipeline that is not transformed"
        )


def refuse_placements(
    params: Sequence[optree.PyTreeSpec], batch: Sequence[optree.PyTreeSpec]
) -> None:
    """Refuse DTensors in parameters, by stage, and in microbatches that a pipeline cannot take."""
    for stage, spec in enumerate(params):
        for index, placed in enumerate(placements_of(spec)):
            if placed is None:
                continue
            where = f"params{spec.accessors()[index].codify('')} of stage {stage}"
            if "pp" in (placed.dims[0] or ()):
                raise BatchError(
                    f"{where} is a DTensor over {placed.dims[0]}: the dimension 'pp' divides "
                    "stages and no tensors; place it over the others, mesh['tp']"
                )
            if any(placement.is_partial() for placement in placed.placements):
                raise BatchError(
                    f"{where} is a DTensor placed {placed.placements}, a sum that is not yet "
                    "taken: redistribute it to Replicate() or Shard(dim)"
                )
    for spec in batch:
        for index, placed in enumerate(placements_of(spec)):
            if placed is not None:
                path = spec.accessors()[index].codify("")
                raise BatchError(
                    f"batch{path} is a DTensor: rows are split into microbatches, so "
                    "pass plain tensors, .to_local() or .full_tensor(); a stage may distribute "
                    "them"
                )
