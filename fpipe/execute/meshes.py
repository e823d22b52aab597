"""Rows of a mesh that share DTensors: each runs a pipeline, and they must run the same one.

The stages of a row communicate with those of others at the same places in their programs. Where
rows ran different programs, they would wait for each other for ever.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from fpipe.dtensors import Placed, meshes_of, placements_of
from fpipe.errors import BatchError
from fpipe.execute.digests import digest
from fpipe.execute.refusal import odd_one_out, refusal
from fpipe.inputs.signature import Signature
from fpipe.schedule import Schedule


def places_in(signature: Signature) -> list[Placed]:
    """How the DTensors among the parameters lie."""
    places = (place for shape in signature.params for place in placements_of(shape.spec))
    return [place for place in places if place is not None]


def check_meshes(signature: Signature, pipeline: str) -> None:
    """Refuse DTensors over another mesh than the pipeline's.

    Args:
        signature: of a call.
        pipeline: the name of the process group of its ranks.

    Raises:
        BatchError: says which mesh, and what to do.
    """
    known = meshes_of(pipeline)
    for place in places_in(signature):
        # What lies over "pp" the planner refuses.
        if place.mesh not in known and "pp" not in (place.dims[0] or ()):
            raise BatchError(
                f"params has a DTensor over {place.mesh}, which is no part of the pipeline's mesh: "
                "make the pipeline with mesh= of all dimensions, and the DTensors over mesh['tp'] "
                "or another dimension of that"
            )


def compare_rows(signature: Signature, schedule: Schedule) -> None:
    """Refuse rows that run another step than this one; all processes of the mesh call this.

    Args:
        signature: of a call for which a plan was made.
        schedule: of the pipeline.

    Raises:
        PipelineError: on all of them.
    """
    places = places_in(signature)
    facts = {
        "another schedule": repr(schedule.actions),
        "a batch of another shape": repr((signature.goal, signature.rows, signature.batch)),
        "parameters that lie otherwise": repr(places),
    }
    own = {what: digest(text) for what, text in facts.items()}
    for mesh in dict.fromkeys(place.mesh for place in places):
        assert mesh is not None
        for dim, name in enumerate(mesh.mesh_dim_names or range(mesh.ndim)):
            everyone: list[Any] = [None] * mesh.shape[dim]
            dist.all_gather_object(everyone, own, group=mesh.get_group(dim))
            for what in facts:
                odd = odd_one_out([each[what] for each in everyone])
                if odd is not None:
                    raise refusal(
                        None,
                        f"process {odd} of the mesh dimension {name!r} has {what} than the others: "
                        "processes that share DTensors must run the same step",
                    )
