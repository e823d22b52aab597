"""Rows of a mesh that share DTensors: each runs a pipeline, and they take a step together.

    mesh          tp 0        tp 1
    pp 0       process 0 ── process 1      peers: they share the parameters of stage 0
    pp 1       process 2 ── process 3
                row 0        row 1         a pipeline each

The stages of a row communicate with those of others at the same places in their programs. Where
rows ran different programs, or only some of them any, they would wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fpipe.dtensors import Placed, meshes_of, placements_of, whole_mesh
from fpipe.errors import BatchError, PipelineError, told
from fpipe.execute.digests import digest, identity
from fpipe.execute.gathering import gather, gather_objects
from fpipe.execute.refusal import odd_one_out, refusal
from fpipe.inputs.signature import Signature
from fpipe.schedule import Schedule
from fpipe.transport.connect import connect_peers, wake

Facts = tuple[tuple[str, str], ...]
"""What rows must have alike for a step: how one that differs is described, and a digest of it."""


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


def facts_of(signature: Signature, schedule: Schedule) -> Facts:
    """What rows that share DTensors must have alike for a step of this signature."""
    texts = {
        "another schedule": repr(schedule.actions),
        "another call": signature.goal,
        "a batch of another shape": repr((signature.rows, signature.batch)),
        "parameters that lie otherwise": repr(places_in(signature)),
    }
    return tuple((what, digest(text)) for what, text in texts.items())


class Rows:
    """The processes that share DTensors with this one: those at its place in all rows of a mesh.

    Args:
        mesh: with the dimension ``"pp"`` and at least one more.
        store: which all processes ask.
        timeout: of the caller's process group, for which a process waits for its peers.

    Attributes:
        name: that of the peers alone, in the store.
        lost: under which peers tell each other why their connections broke.
        active: whether the rows take the step together that is under way.
    """

    def __init__(self, mesh: DeviceMesh, store: dist.Store, timeout: timedelta) -> None:
        names = mesh.mesh_dim_names
        assert names is not None
        columns = mesh.mesh.movedim(names.index("pp"), 0)
        self._ranks: list[int] = columns[mesh.get_local_rank("pp")].flatten().tolist()
        self._place = self._ranks.index(dist.get_rank())
        members = "-".join(map(str, self._ranks))
        # Processes make their meshes and pipelines in the same order.
        number = store.add(f"rows/{members}/{self._place}", 1)
        self.name: Final = f"rows/{members}/{number}"
        self.lost: Final = f"{self.name}/lost"
        self._store = dist.PrefixStore(self.name, store)
        self._timeout = timeout
        self._peers: dist.ProcessGroup | None = None
        self._dims = [mesh.get_group(name) for name in names if name != "pp"]
        self.active = False

    def topic(self) -> str | None:
        """Where peers look for the fault of a step that rows take together."""
        return self.lost if self.active else None

    def ring(self) -> None:
        """Wake every collective with peers that waits, by breaking the groups, if rows use them."""
        if self.active:
            wake([*self._dims, *([] if self._peers is None else [self._peers])])

    def check(
        self,
        facts: Facts | None,
        problem: Exception | None,
        given_up: Callable[[float], bool],
    ) -> None:
        """Wait for all rows to be about to take the same step; all processes of the mesh call this.

        Args:
            facts: of the step that this row is about to take, None if it takes none.
            problem: why not.
            given_up: whether to wait no longer for the peers, after so many seconds.

        Raises:
            PipelineError: on all of them, where rows are about to take different steps, or none.
        """
        if self._peers is None:
            self._peers = connect_peers(
                self._store, self._place, len(self._ranks), self._timeout, given_up
            )
        own = 0 if facts is None else identity(facts)
        tokens = gather(torch.tensor([own], device="cpu"), self._peers).flatten().tolist()
        if own and len({*tokens}) == 1:
            return
        text = None if problem is None else told(problem)
        everyone: list[tuple[Facts | None, str | None]] = gather_objects((facts, text), self._peers)
        if problem is None:
            raise self._difference(everyone)

    def _difference(self, everyone: Sequence[tuple[Facts | None, str | None]]) -> PipelineError:
        known = [facts for facts, _ in everyone if facts is not None]
        if len(known) < len(everyone):
            rank, text = next(
                (rank, text)
                for rank, (facts, text) in zip(self._ranks, everyone, strict=True)
                if facts is None
            )
            what = f"process {rank}, which shares DTensors with this one, takes no step: {text}"
            return refusal(None, what)
        what, place = next(
            (alike[0][0], place)
            for alike in zip(*known, strict=True)
            if (place := odd_one_out([value for _, value in alike])) is not None
        )
        return refusal(
            None,
            f"process {self._ranks[place]} has {what} than others of the processes {self._ranks}, "
            "which share DTensors: they must run the same step",
        )


_ROWS: Final[WeakKeyDictionary[dist.ProcessGroup, Rows]] = WeakKeyDictionary()


def rows_of(group: dist.ProcessGroup, store: dist.Store, timeout: timedelta) -> Rows | None:
    """The rows of the mesh that the group of a pipeline's ranks was made with, if it has several.

    Args:
        group: of the ranks of this process's row.
        store: which all processes ask.
        timeout: as for `Rows`.
    """
    mesh = whole_mesh(group.group_name)
    if mesh is None or mesh.size() == group.size():
        return None
    if group not in _ROWS:
        _ROWS[group] = Rows(mesh, store, timeout)
    return _ROWS[group]
