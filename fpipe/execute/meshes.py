"""Rows of a mesh that share DTensors, or hold replicas: they take a step together.

    mesh          tp 0        tp 1
    pp 0       process 0 ── process 1      peers: they share the parameters of stage 0
    pp 1       process 2 ── process 3
                row 0        row 1         a pipeline each

The stages of a row communicate with those of others at the same places in their programs. Where
rows ran different programs, or only some of them any, they would wait for each other for ever.
Rows that hold replicas (``data=``) have batches of their own, and so kernels of their own, but the
same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import product
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fpipe.dtensors import Placed, meshes_of, placements_of, whole_mesh
from fpipe.errors import BatchError, PipelineError, error_text
from fpipe.execute.fault import odd_one_out, refusal
from fpipe.execute.gathering import gather, gather_objects
from fpipe.execute.header import digest, identity
from fpipe.execute.sample import COPIED, Sample, unlike
from fpipe.inputs.signature import Signature
from fpipe.plan.plan import Plan
from fpipe.program.interpreter import Run
from fpipe.program.program import Program
from fpipe.program.replica_collectives import collectives_of
from fpipe.program.replica_layout import flattened, gathered, taken_apart
from fpipe.spec.data import Data
from fpipe.transport.connect import connect, wake

Alike = tuple[tuple[str, str], ...]
"""How something that differs is described, and a digest of it."""


class Facts(NamedTuple):
    """Facts about a row's next step, for the other rows.

    Attributes:
        everywhere: what all rows must have alike.
        within: what rows of one replica must have alike.
        rows: of the batch of its replica.
        copies: numbers of the parameters that replicas must have alike, by path; None where they
            were compared before.
    """

    everywhere: Alike
    within: Alike
    rows: int
    copies: Callable[[], Sample] | None


def places_in(signature: Signature) -> list[Placed]:
    """How the DTensors among the parameters lie."""
    places = (place for shape in signature.params for place in placements_of(shape.spec))
    return [place for place in places if place is not None]


def check_meshes(signature: Signature, pipeline: str) -> None:
    """Refuse DTensors over another mesh than that of the pipeline, named by its process group.

    Raises:
        BatchError: says which mesh, and what to do.
    """
    known = meshes_of(pipeline)
    for place in places_in(signature):
        # The planner refuses DTensors over "pp".
        if place.mesh not in known and "pp" not in (place.dims[0] or ()):
            raise BatchError(
                f"params has a DTensor over {place.mesh}, which is no part of the pipeline's mesh: "
                "make the pipeline with mesh= of all dimensions, and the DTensors over mesh['tp'] "
                "or another dimension of that"
            )


def facts_of(
    signature: Signature,
    plan: Plan,
    program: Program,
    setup: Mapping[str, str],
    copies: Callable[[], Sample],
) -> Facts:
    """Collect the facts about a step that a row has not taken before."""
    batch = {"a batch of another shape": repr((signature.rows, signature.batch))}
    texts = {
        "another call": signature.goal,
        "another schedule": repr(plan.schedule.actions),
        "parameters that lie otherwise": repr(places_in(signature)),
    }
    if plan.data is None:
        return Facts(_digests(texts), _digests(batch), sum(signature.rows), None)
    whole = gathered(signature, plan.data).params
    texts |= {f"another {name}": text for name, text in setup.items() if name != "schedule"}
    texts |= {
        "parameters of other shapes": repr(
            [[(leaf.shape, leaf.dtype) for leaf in tree.leaves] for tree in whole]
        ),
        "other gradients or parameters to add up or gather": repr(collectives_of(program)),
    }
    return Facts(_digests(texts), _digests(batch), sum(signature.rows), copies)


def _digests(texts: Mapping[str, str]) -> Alike:
    return tuple((what, digest(text)) for what, text in texts.items())


class Rows:
    """The processes that take a step with this one: those at its place in all rows of a mesh.

    Args:
        mesh: with the dimension ``"pp"`` and at least one more.
        store: which all processes ask.
        timeout: of the caller's process group, for which a process waits for its peers.
        data: the dimensions that hold replicas; none without replicas.

    Attributes:
        name: that of the peers alone, in the store.
        lost: under which peers tell each other why their connections broke.
        active: whether the rows take the step together that is under way.
    """

    def __init__(
        self, mesh: DeviceMesh, store: dist.Store, timeout: timedelta, data: Sequence[str] = ()
    ) -> None:
        names = mesh.mesh_dim_names
        assert names is not None
        others = [name for name in names if name != "pp"]
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
        self._dims = [mesh.get_group(name) for name in others]
        self.active = False
        places = list(product(*(range(mesh[name].size()) for name in others)))
        self._replicas = [tuple(place[others.index(name)] for name in data) for place in places]
        beside = [
            tuple(at for at, name in zip(place, others, strict=True) if name not in data)
            for place in places
        ]
        here = beside[self._place]
        self._one_of_each = [at for at, place in enumerate(beside) if place == here]
        self._deed = "holds a replica of" if data else "shares DTensors with"

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
    ) -> list[int]:
        """Wait for all rows to be about to take the same step; all processes of the mesh call this.

        Args:
            facts: of the step that this row is about to take, None if it takes none.
            problem: why not.
            given_up: whether to wait no longer for the peers, after so many seconds.

        Returns:
            How many rows of the batch each replica has.

        Raises:
            PipelineError: on all of them, where rows are about to take different steps, or none; or
                replicas have other parameters.
        """
        if self._peers is None:
            size, timeout = len(self._ranks), self._timeout
            self._peers = connect(
                "gloo", self._store, self._place, size, timeout, given_up=given_up
            )
        word = [0, 0, 0, 0]
        if facts is not None:
            is_new = int(facts.copies is not None)
            word = [identity(facts.everywhere), identity(facts.within), facts.rows, is_new]
        words = gather(torch.tensor(word, device="cpu"), self._peers).tolist()
        same = len({everywhere for everywhere, *_ in words}) == 1
        pairs = {(replica, row[1]) for replica, row in zip(self._replicas, words, strict=True)}
        if facts is None or not same or len(pairs) > len({*self._replicas}):
            text = None if problem is None else error_text(problem)
            everyone = gather_objects((facts and facts._replace(copies=None), text), self._peers)
            if problem is None:
                raise self._difference(everyone)
            return []
        if any(is_new for *_, is_new in words):
            samples: list[Sample] = gather_objects(
                {} if facts.copies is None else facts.copies(), self._peers
            )
            self._compare(samples)
        return [words[at][2] for at in self._one_of_each]

    def add_up(self, word: Tensor) -> Tensor:
        """The sum of a tensor over replicas, with the same bits on all of them."""
        assert self._peers is not None
        return gather(word, self._peers)[self._one_of_each].sum(0)

    def _compare(self, samples: Sequence[Sample]) -> None:
        """Refuse replicas that hold other numbers of a parameter which each has whole.

        Raises:
            PipelineError: on all of them.
        """
        difference = unlike([samples[at] for at in self._one_of_each], COPIED)
        if difference is not None:
            path, one, other = difference
            ranks = [self._ranks[at] for at in self._one_of_each]
            raise refusal(
                None,
                f"process {ranks[other]} has other numbers in params{path} than process "
                f"{ranks[one]}, which holds another replica: replicas begin alike, as "
                "pipe.replicate(params) and pipe.shard(params) make them",
            )

    def _difference(self, everyone: Sequence[tuple[Facts | None, str | None]]) -> PipelineError:
        known = [facts for facts, _ in everyone if facts is not None]
        if len(known) < len(everyone):
            rank, text = next(
                (rank, text)
                for rank, (facts, text) in zip(self._ranks, everyone, strict=True)
                if facts is None
            )
            return refusal(
                None, f"process {rank}, which {self._deed} this one, takes no step: {text}"
            )
        what, rank = self._odd_fact(known)
        return refusal(
            None,
            f"process {rank} has {what} than others of the processes {self._ranks}, each of which "
            f"{self._deed} the others: they must run the same step",
        )

    def _odd_fact(self, known: Sequence[Facts]) -> tuple[str, int]:
        """The fact that differs, and the process that has it."""
        groups = [(list(range(len(known))), [facts.everywhere for facts in known])]
        for replica in dict.fromkeys(self._replicas):
            members = [at for at, number in enumerate(self._replicas) if number == replica]
            groups.append((members, [known[at].within for at in members]))
        return next(
            (alike[0][0], self._ranks[members[place]])
            for members, facts in groups
            for alike in zip(*facts, strict=True)
            if (place := odd_one_out([value for _, value in alike])) is not None
        )


_ROWS: Final[WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, ...], Rows]]] = (
    WeakKeyDictionary()
)


def rows_of(
    group: dist.ProcessGroup,
    store: dist.Store,
    timeout: timedelta,
    data: tuple[str, ...] = (),
) -> Rows | None:
    """The rows of the mesh that the group of a pipeline's ranks was made with, if it has several.

    The other arguments are those of `Rows`.
    """
    mesh = whole_mesh(group.group_name)
    if mesh is None or mesh.size() == group.size():
        return None
    known = _ROWS.setdefault(group, {})
    if data not in known:
        known[data] = Rows(mesh, store, timeout, data)
    return known[data]


def agree_on_states(data: Data, run: Run) -> None:
    """Put the state of all replicas in place of that of this one.

    Leaves of floating-point numbers become the mean over replicas, or those of the first as `data`
    says; all others become those of the first. Every process of the mesh must call this.
    """
    slots = sorted({slot for _, slot in run.program.results.states})
    values = [run.slots[slot] for slot in slots]
    kinds = dict.fromkeys((value.dtype, value.device) for value in values)
    for dtype, device in kinds:
        alike = [
            at for at, value in enumerate(values) if (value.dtype, value.device) == (dtype, device)
        ]
        flat = _agreed(data, flattened([values[at] for at in alike]))
        pieces = taken_apart([values[at].shape for at in alike], flat)
        for at, piece in zip(alike, pieces, strict=True):
            run.slots[slots[at]] = piece


def _agreed(data: Data, flat: Tensor) -> Tensor:
    """The mean over replicas, or the numbers of the first of them."""
    groups = [data.mesh.get_group(dim) for dim in data.dims]
    if data.state == "mean" and flat.is_floating_point():
        for group in groups:
            dist.all_reduce(flat, group=group)
        return flat / data.replicas
    for group in reversed(groups):
        dist.broadcast(flat, group_src=0, group=group)
    return flat
