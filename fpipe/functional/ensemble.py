"""The definition of an ensemble: every stage becomes `torch.func.vmap` of itself over the members.

    (params, x) -> y    becomes    (members, stacked params), stacked x -> stacked y

`fpipe.functional.ensemble_arguments` stacks the arguments, and hands gradients back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.errors import BatchError, StageError
from fpipe.functional.batching import batching_rules, vmap_pytrees
from fpipe.functional.ensemble_arguments import EnsembleArguments, behind_members
from fpipe.functional.stagewise import Parts, each_stage
from fpipe.microbatches import Microbatches
from fpipe.spec.convention import COTANGENT
from fpipe.spec.definition import Alone, Definition
from fpipe.spec.objective import Sink


def ensemble(member: Alone) -> Definition:
    """The definition of the pipeline of all members.

    Args:
        member: the definition of one member, and how the members are stacked.

    Raises:
        StageError: the definition has no ensemble; says why.
        BatchError: the dimensions of the batch do not fit those along which one member splits it.
    """
    definition, in_dims, randomness, size = member
    if COTANGENT in definition.convention.vectors:
        raise StageError(
            "fpipe.vmap of fpipe.vjp(pipe) is not defined: differentiate each member's outputs by "
            "itself"
        )
    # A stage sees one microbatch of `fpipe.Microbatches`, so all of them are stacked alike.
    in_dims = pytree.map_nodes(_same_in_all, in_dims, Microbatches)
    place = definition.takes.index("batch")
    members_in_batch = in_dims[place]
    if "batch" in definition.convention.vectors:
        members_in_batch = members_in_batch, 0  # it comes with its direction, which is stacked
    batch_dims = pytree.prefix_map(lambda dim: None if dim is None else 0, members_in_batch)

    def mapped(function: Callable[..., Any], first: bool) -> Callable[..., Any]:
        return _mapped_stage(function, batch_dims if first else 0, batch_dims, randomness)

    if definition.function:
        # It takes the batch, as a first stage does, unless a state comes before the batch.
        loss = mapped(definition.loss, not definition.has_state)
    else:
        loss = _mapped_loss(definition.loss, batch_dims, randomness)
    return replace(
        definition,
        stages=each_stage(definition.stages, mapped),
        loss=loss,
        in_dims=pytree.join_prefixes(
            members_in_batch,
            definition.in_dims,
            lambda member_dim, row_dim: row_dim if member_dim is None else behind_members(row_dim),
            (f"in_dims[{place}]", "the pipeline's in_dims"),
        ),
        loss_shape=(None, *definition.loss_shape),
        convention=EnsembleArguments(
            in_dims, definition.convention, Parts.of(definition), definition.has_state, size
        ).convention,
        sink=_mapped_sink(definition.sink),
        # The number of members comes before a stage's parameters.
        trainable=replace(definition.trainable, within=(1, *definition.trainable.within)),
        alone=member._replace(in_dims=in_dims),
    )


def stacked_along(definition: Definition, arguments: Sequence[Any]) -> list[int | None]:
    """The dimension of the members in each flat leaf of parameters, batch and vectors.

    It is None for a leaf that the members share.
    """
    assert definition.alone is not None
    member, in_dims, *_ = definition.alone
    return EnsembleArguments(in_dims, member.convention, Parts.of(member)).dims(arguments)


def _same_in_all(microbatches: Microbatches[Any]) -> Any:
    """The prefix that all microbatches of the caller have."""
    if len({pytree.hashable_prefix(prefix) for prefix in microbatches}) != 1:
        raise BatchError(
            f"in_dims={microbatches!r:.60} must be the same for all microbatches: members are "
            "stacked along the same dimensions in all parts of Microbatches"
        )
    return microbatches[0]


def _mapped_stage(
    function: Callable[..., Any], x_dims: Any, batch_dims: Any, randomness: str
) -> Callable[..., Any]:
    """A stage function over all members, which share the key.

    Args:
        function: of one member: ``(params, x)``, and the microbatch if the stage reads it.
        x_dims: the dimensions of the members in x.
        batch_dims: the same in the microbatch.
        randomness: as in `torch.func.vmap`.
    """

    @wraps(function)
    def stage(packed: Any, *values: Any, **key: Tensor) -> Any:
        members, params = packed
        devices = {leaf.device.type for leaf in pytree.flatten(values)[0]}
        with batching_rules(devices):
            return vmap_pytrees(
                lambda _, *arguments: function(*arguments, **key),
                [members, params, *values],
                [0, 0, x_dims, batch_dims][: 2 + len(values)],
                randomness,
            )

    return stage


def _mapped_loss(
    function: Callable[..., Any], batch_dims: Any, randomness: str
) -> Callable[..., Any]:
    """The losses of all members."""

    @wraps(function)
    def loss(y: Any, microbatch: Any) -> Any:
        return vmap_pytrees(function, [y, microbatch], [0, batch_dims], randomness)

    return loss


def _mapped_sink(sink: Sink) -> Sink:
    """The sink of gradients that have the members in front."""
    if sink.everywhere:
        raise StageError(
            "fpipe.vmap of a pipeline that returns norms: stack first, and take the norms "
            "afterwards, as in fpipe.per_example_norms(fpipe.vmap(pipe))"
        )
    lift, join = sink.lift, sink.join
    if lift is None or join is None:
        return sink

    def mapped_lift(leaf: Tensor, rows: int) -> Tensor:
        lifted: Tensor = torch.vmap(lambda member: lift(member, rows))(leaf)
        return lifted

    return replace(sink, lift=mapped_lift, join=join + 1)
