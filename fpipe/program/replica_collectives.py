"""Tasks that gather parameters from replicas, and add up gradients over them.

    UNSHARD      shards ─ pack ─► flat ══ all-gather ══► ……… first reader: unpack ─► whole leaves
    REDUCE_GRAD  sums   ─ pack ─► flat ══ reduce-scatter ══► ……… next one, or the end: unpack, add

A collective is begun by one task and waited for by another, where its result is needed, so that
kernels run meanwhile. RESHARD needs no task: what was gathered goes with its last reader, and what
comes after another UNSHARD is gathered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from fpipe.inputs.signature import Spec
from fpipe.program.async_collectives import (
    ReductionUnderWay,
    UnderWay,
    all_gather,
    all_reduce,
    reduce_by,
    reduce_scatter,
)
from fpipe.program.program import Compute, Program
from fpipe.program.replica_layout import Replicas, buckets, flattened, taken_apart
from fpipe.program.values import Computed, ParamValue, SumValue, Task, Value, kernel_task
from fpipe.schedule import Action, Op
from fpipe.spec.data import Group

Row = Sequence[Task | Action]
"""The tasks of a rank, and between them the UNSHARD and RESHARD of its schedule."""


@dataclass(frozen=True, eq=False)
class Begin:
    """A kernel that packs values and begins a collective; what it returns is there later.

    Attributes:
        pack: from the values to one flat tensor.
        launch: from that to the collective, which is under way.
        text: what moves, the same on all replicas.
    """

    pack: Callable[[list[Tensor]], Tensor]
    launch: Callable[[Tensor], UnderWay | ReductionUnderWay]
    text: str

    def __call__(self, values: list[Tensor]) -> list[Any]:
        flat = self.pack(values)
        values.clear()
        return [self.launch(flat)]


@dataclass(frozen=True, eq=False)
class Wait:
    """A kernel that waits for a collective and takes its result apart.

    Attributes:
        unpack: from the flat result to the leaves.
        over: add up the result over further groups.
    """

    unpack: Callable[[Tensor], list[Tensor]]
    over: tuple[Callable[[Tensor], UnderWay | ReductionUnderWay], ...] = ()

    def __call__(self, values: list[Any]) -> list[Tensor]:
        flat = values.pop(0).wait()
        before = values.copy()
        values.clear()
        for add_up in self.over:
            flat = add_up(flat).wait()
        leaves = self.unpack(flat)
        del flat
        return [old + new for old, new in zip(before, leaves, strict=True)] if before else leaves


def collectives_of(program: Program) -> list[str]:
    """The collectives of a rank's replicas, in order: the same on all of them."""
    kernels = (step.call for step in program.instructions if isinstance(step, Compute))
    return [kernel.text for kernel in kernels if isinstance(kernel, Begin)]


class _Gathers:
    """The gathers of one rank, in the order of its row."""

    def __init__(
        self,
        rank: int,
        placement: Sequence[int],
        replicas: Replicas,
        leaves: Mapping[int, list[int]],
    ) -> None:
        self._rank = rank
        self._placement = placement
        self._replicas = replicas
        self._leaves = leaves
        self._count: dict[int, int] = {}
        self._whole: dict[ParamValue, Computed] = {}
        self._arriving: dict[Computed, Task] = {}

    def reshard(self, stage: int) -> Iterator[Task]:
        """Let the leaves of a stage go: what reads them from here on gathers them again."""
        for value in [value for value in self._whole if value.stage == stage]:
            # A replica without rows reads nothing of what it has gathered with the others.
            yield from self._await(self._whole.pop(value))

    def finish(self) -> Iterator[Task]:
        """Let all go."""
        for stage in {value.stage: None for value in self._whole}:
            yield from self.reshard(stage)

    def _await(self, whole: Computed) -> Iterator[Task]:
        """The task that brings a leaf, unless it stands before."""
        arrive = self._arriving.get(whole)
        if arrive is not None:
            yield arrive
            for output in arrive.outputs:
                del self._arriving[output]

    def unshard(self, stage: int) -> Iterator[Task]:
        """Begin to gather the leaves of a stage that the rank reads."""
        number = self._count[stage] = self._count.get(stage, -1) + 1
        divided = self._replicas.divided
        leaves = self._leaves.get(stage, [])
        for dtype in dict.fromkeys(divided[stage, leaf].dtype for leaf in leaves):
            alike = [leaf for leaf in leaves if divided[stage, leaf].dtype == dtype]
            sizes = [Spec(divided[stage, leaf].whole, dtype).nbytes for leaf in alike]
            for bucket in buckets(sizes, self._replicas.bucket_bytes):
                yield self._begin(stage, number, [alike[at] for at in bucket], dtype)

    def _begin(self, stage: int, number: int, leaves: list[int], dtype: torch.dtype) -> Task:
        group = self._replicas.sharding
        packed = self._replicas.packed(stage, leaves, dtype)
        shard = Spec((sum(packed.sizes),), dtype)
        flat = Spec((shard.shape[0] * group.size,), dtype)
        action = Action(stage, Op.UNSHARD, None)
        # Until it has ended, a collective keeps what it was given. (gloo fills a further tensor,
        # which is not counted.)
        under_way = Spec((shard.shape[0] + flat.shape[0],), dtype)
        gathering = Computed(stage, 0, f"gathering {number} of leaves {leaves}")
        wholes = [Computed(stage, 0, f"gathered {number} of leaf {leaf}") for leaf in leaves]
        specs = tuple(Spec(division.whole, dtype) for division in packed.divisions)
        begin = Begin(packed.pack_parts, partial(all_gather, group), f"{action} {flat}")
        nbytes = max(0, sum(spec.nbytes for spec in specs) - shard.nbytes)
        wait = Wait(packed.unpack_wholes)
        arrive = kernel_task(wait, action, (gathering,), tuple(wholes), specs, nbytes)
        for leaf, whole in zip(leaves, wholes, strict=True):
            self._whole[ParamValue(stage, leaf)] = whole
            self._arriving[whole] = arrive
        shards = tuple(ParamValue(stage, leaf) for leaf in leaves)
        return kernel_task(begin, action, shards, (gathering,), (under_way,), under_way.nbytes)

    def read(self, task: Task) -> Iterator[Task]:
        """A task with whole leaves in place of parts, behind those that bring them."""
        divided = self._replicas.divided
        inputs: list[Value] = []
        for value in task.inputs:
            if not isinstance(value, ParamValue) or (value.stage, value.leaf) not in divided:
                inputs.append(value)
            elif self._placement[value.stage] != self._rank:
                inputs.append(Computed(value.stage, 0, f"gathered 0 of leaf {value.leaf}"))
            else:
                if value not in self._whole:
                    yield from self.unshard(value.stage)
                yield from self._await(self._whole[value])
                inputs.append(self._whole[value])
        yield task._replace(inputs=tuple(inputs))


def with_gathers(
    row: Row,
    rank: int,
    placement: Sequence[int],
    replicas: Replicas,
    leaves: Mapping[int, list[int]],
) -> list[Task]:
    """The tasks of a rank in which those that read divided leaves read them whole.

    The `leaves` of each stage are those that are divided and read by anyone.
    """
    gathers = _Gathers(rank, placement, replicas, leaves)
    tasks: list[Task] = []
    for task in row:
        if isinstance(task, Task):
            tasks += gathers.read(task)
        else:
            tasks += gathers.reshard(task.stage)
            if task.op == Op.UNSHARD:
                tasks += gathers.unshard(task.stage)
    return [*tasks, *gathers.finish()]


class Reductions:
    """Adds up the gradients of all replicas.

    Args:
        replicas: how leaves are divided.
        sums: the sums of this replica; those that are reduced are taken out, and in the end all
            are put back as what is left of them here.
        specs: of all sums by parameters, also of those to which this replica, having no rows, adds
            nothing.
    """

    def __init__(
        self, replicas: Replicas, sums: dict[SumValue, Value], specs: Mapping[SumValue, Spec]
    ) -> None:
        self._replicas = replicas
        self._sums = sums
        self._specs = specs
        self._reduced: dict[SumValue, Computed] = {}
        self._under_way: dict[int, list[Task]] = {}
        self._count: dict[int, int] = {}

    def launch(self, stage: int) -> Iterator[Task]:
        """Begin to reduce the sums of a stage, behind those of its last round.

        All other stages but the latest are waited for: until then each holds its whole sums.
        """
        yield from self.settle(stage)
        for earlier in list(self._under_way)[:-1]:
            yield from self.settle(earlier)
        number = self._count[stage] = self._count.get(stage, -1) + 1
        kinds: dict[tuple[torch.dtype, bool], list[SumValue]] = {}
        for total in sorted(total for total in self._specs if total.stage == stage):
            divided = (stage, total.leaf) in self._replicas.divided
            kinds.setdefault((self._specs[total].dtype, divided), []).append(total)
        for (dtype, divided), totals in kinds.items():
            sizes = [self._specs[total].nbytes for total in totals]
            for bucket in buckets(sizes, self._replicas.bucket_bytes):
                yield self._begin(stage, number, [totals[at] for at in bucket], dtype, divided)

    def finish(self, stages: Sequence[int]) -> Iterator[Task]:
        """Reduce the stages of a rank whose schedule does not say when, and wait for all."""
        for stage in stages:
            if stage not in self._count:
                yield from self.launch(stage)
        for stage in list(self._under_way):
            yield from self.settle(stage)
        self._sums.update(self._reduced)
        self._reduced.clear()

    def settle(self, stage: int) -> Iterator[Task]:
        """Wait for what is under way of a stage."""
        yield from self._under_way.pop(stage, ())

    def _begin(
        self,
        stage: int,
        number: int,
        totals: Sequence[SumValue],
        dtype: torch.dtype,
        divided: bool,
    ) -> Task:
        groups = self._replicas.groups
        action = Action(stage, Op.REDUCE_GRAD, None)
        leaves = [total.leaf for total in totals]
        specs = [self._specs[total] for total in totals]
        present = [total in self._sums for total in totals]
        inputs = tuple(self._sums.pop(total) for total in totals if total in self._sums)
        filled = partial(_with_zeros, specs, present, self._replicas.device)
        locals_ = tuple(
            self._replicas.local(stage, leaf, spec)
            for leaf, spec in zip(leaves, specs, strict=True)
        )
        if divided:
            group = self._replicas.sharding
            packed = self._replicas.packed(stage, leaves, dtype)
            result = Spec((sum(packed.sizes),), dtype)
            flat = Spec((result.shape[0] * group.size,), dtype)
            pack = packed.pack_wholes
            begin = Begin(
                lambda values: pack(filled(values)),
                self._over(group, result.shape[0], reduce_scatter),
                f"{action} {flat}",
            )
            over = groups[:-1]
            unpack: Callable[[Tensor], list[Tensor]] = packed.unpack_parts
            under_way = Spec((flat.shape[0] + result.shape[0],), dtype)
        else:
            group = groups[0]
            flat = result = Spec((sum(prod(spec.shape) for spec in specs),), dtype)
            begin = Begin(
                lambda values: flattened(filled(values)),
                self._over(group, result.shape[0], all_reduce),
                f"{action} whole {flat}",
            )
            over = groups[1:]
            unpack = partial(taken_apart, [spec.shape for spec in specs])
            under_way = result
        wait = Wait(unpack, tuple(self._over(other, result.shape[0], all_reduce) for other in over))
        reducing = Computed(stage, 0, f"reducing {number} of leaves {leaves}")
        before = tuple(self._reduced[total] for total in totals if total in self._reduced)
        after = [Computed(stage, 0, f"reduced {number} of leaf {leaf}") for leaf in leaves]
        self._reduced.update(zip(totals, after, strict=True))
        # The collective's input is freed when it has ended.
        nbytes = max(0, sum(s.nbytes for s in locals_) - under_way.nbytes + result.nbytes)
        arrive = kernel_task(wait, action, (reducing, *before), tuple(after), locals_, nbytes)
        self._under_way.setdefault(stage, []).append(arrive)
        # The sums go as they are packed, before there is a result.
        held = under_way.nbytes - (result.nbytes if divided else 0)
        return kernel_task(begin, action, inputs, (reducing,), (under_way,), held)

    def _over(
        self, group: Group, size: int, usual: Callable[[Group, Tensor], UnderWay]
    ) -> Callable[[Tensor], UnderWay | ReductionUnderWay]:
        """The function that reduces a flat tensor over a group, to a result of `size` elements."""
        reduce = self._replicas.reduce
        return partial(usual, group) if reduce is None else partial(reduce_by, reduce, size, group)


def _with_zeros(
    specs: Sequence[Spec], present: Sequence[bool], device: str, values: list[Tensor]
) -> list[Tensor]:
    """The values with zeros in place of those that are not there; takes them out of the list."""
    return [
        values.pop(0) if here else torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        for spec, here in zip(specs, present, strict=True)
    ]
