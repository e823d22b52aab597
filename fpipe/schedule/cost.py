"""The cost of actions: times, latencies and activations, per stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Final

from fpipe.errors import ScheduleError, a_type
from fpipe.schedule.arguments import (
    Latency,
    PerStage,
    Shared,
    between_ranks,
    by_pair,
    check_kept,
    checked_flag,
    checked_pair,
    checked_shared,
    checked_sizes,
    checked_speed,
    has_any,
    per_stage,
    plain_counts,
    values_of_microbatches,
    values_of_stages,
)
from fpipe.schedule.exchange.files import PathLike, load, save
from fpipe.schedule.exchange.json_file import format_cost, parse_cost
from fpipe.schedule.placements import plain_placement
from fpipe.schedule.simulation.link_queues import links_on
from fpipe.schedule.stage_costs import (
    StageCosts,
    check_freed,
    choices_of,
    placed_values,
    recomputed,
)

PER_MICROBATCH: Final = ("f", "i", "w", "b", "activation", "freed_by_i")
_PLACED: Final = (*PER_MICROBATCH, "unshard", "reduce_grad", "update")
_PER_STAGE: Final = (*_PLACED, "recompute", "kept", "message")


@dataclass(frozen=True)
class Cost:
    """The cost of each action of a schedule. Times share one unit, activations another.

    A number is per rank and microbatch, that is for 1/p of the model: a stage takes 1/v of it (v
    stages per rank), so that schedules with different v compare fairly. A sequence has the value of
    each stage.

    Attributes:
        f: time of a forward.
        i: time of an input gradient.
        w: time of a weight gradient.
        comm: latency of a hop between two stages on different ranks; a number, or a square table
            with ``comm[a][b]`` the latency from rank a to rank b. Between stages of one rank it is
            0. A hop delays its reader and occupies no rank.
        transfer: how long the message of a microbatch occupies the link from one rank to another:
            its bytes over the bandwidth. 0 by default; a number, or a table as for `comm`. A link
            carries one message after the other, in the order in which they are made, those of the
            lower rank first where they are made at once; a message arrives `comm` after its
            transfer ends.
        b: time of a full backward; None means i + w.
        activation: what F keeps until B or W ends, in bytes or any unit.
        freed_by_i: the share of `activation` that I already frees, 0 by default. Negative where I
            hands more to W than it frees.
        sizes: of the microbatches, such as those of sequences of different lengths; None where all
            are equal. All other numbers are for a microbatch of size 1: times and activations of
            microbatch k are ``sizes[k]`` times as large, transfers too, and `comm` is not.
        memory_sizes: those of activations and transfers, where they are others than `sizes`: the
            time of attention grows with the square of a length, and its activations need not.
        unshard: time of the collective of an UNSHARD, 0 by default, whatever the microbatches are.
        reduce_grad: the same of a REDUCE_GRAD.
        collective_lane: those run beside the rank, one after the other: the rank goes on, and waits
            where it computes on the stage that an UNSHARD gathers, at the next REDUCE_GRAD of a
            stage, at its UPDATE, and at the end. False: the rank does nothing else meanwhile.
        update: time of the optimizer's step of a stage, an UPDATE, 0 by default; it occupies the
            rank.

        recompute: time by which a backward is longer where its stage computes values again; None
            means f. It counts in the cost that `with_remat` returns, as does `kept`.
        kept: what F keeps there, such as the input of the stage; None where that is unknown.

        pair: an F and a B that run together take this share of the sum of their times, such as 0.7,
            because each hides the messages inside the other; None where nothing runs together. An F
            and the B of another microbatch directly behind it in its row start together, once both
            have their inputs, and end together. Where that would make ranks wait in a circle, they
            run one after the other.

        message: what a stage hands to the next one, and gets back as a gradient, for all stages or
            each; 1 by default. A transfer takes `transfer` times as long: with messages in bytes,
            `transfer` is one over the bandwidth.
        shared: which hops share a link. False: each from one rank to another has its own (full
            duplex). True: both ways between two ranks are one (half duplex). A square table: where
            ``shared[a][b]`` is the same number, the hops are on one link, such as all those that
            leave a host.
        blocking: a send occupies its rank: that goes on once the transfer has ended, and computes
            nothing meanwhile, which counts as idle.

        speed: of each rank; None where all are alike. All times of actions on a rank, those of
            collectives apart, are divided by it: all other numbers are for a rank of speed 1.

    Numbers of any real type are taken, also those of numpy, and kept as Python's int or float.

    Raises:
        ScheduleError: a value is not finite, is negative (other than `freed_by_i`), or is further
            from 1 than a hundred powers of ten and not 0; values per stage have no order; `comm`
            is not square; a size is 0.

    Example:
        >>> cost = Cost(f=10, i=12, w=8, comm=1)
        >>> cost.on([0, 1, 1, 0]).f  # two stages per rank: half of it each
        (5.0, 5.0, 5.0, 5.0)
        >>> Cost(f=[1, 2, 1, 3], i=1, w=1).on([0, 1, 1, 0]).f
        (1, 2, 1, 3)
        >>> cost.hop(0, 1), cost.transfer_between(0, 1), cost.message_of(0), cost.way(0, 1)
        (1, 0, 1, (0, 1))
    """

    f: PerStage
    i: PerStage
    w: PerStage
    comm: Latency
    b: PerStage | None
    activation: PerStage
    freed_by_i: PerStage
    sizes: tuple[float, ...] | None
    unshard: PerStage
    reduce_grad: PerStage
    collective_lane: bool
    update: PerStage
    transfer: Latency
    recompute: PerStage | None
    kept: PerStage | None
    pair: float | None
    speed: tuple[float, ...] | None
    message: PerStage
    shared: Shared
    blocking: bool
    memory_sizes: tuple[float, ...] | None

    def __init__(
        self,
        f: float | Iterable[float],
        i: float | Iterable[float],
        w: float | Iterable[float],
        comm: float | Iterable[Iterable[float]] = 0,
        b: float | Iterable[float] | None = None,
        activation: float | Iterable[float] = 1,
        freed_by_i: float | Iterable[float] = 0,
        sizes: Iterable[float] | None = None,
        unshard: float | Iterable[float] = 0,
        reduce_grad: float | Iterable[float] = 0,
        collective_lane: bool = True,
        update: float | Iterable[float] = 0,
        transfer: float | Iterable[Iterable[float]] = 0,
        recompute: float | Iterable[float] | None = None,
        kept: float | Iterable[float] | None = None,
        pair: float | None = None,
        speed: Iterable[float] | None = None,
        message: float | Iterable[float] = 1,
        shared: bool | Iterable[Iterable[int]] = False,
        blocking: bool = False,
        memory_sizes: Iterable[float] | None = None,
    ) -> None:
        values: dict[str, object] = {
            "f": per_stage("f", f),
            "i": per_stage("i", i),
            "w": per_stage("w", w),
            "comm": by_pair("comm", comm, "latency"),
            "b": None if b is None else per_stage("b", b),
            "activation": per_stage("activation", activation),
            "freed_by_i": per_stage("freed_by_i", freed_by_i, signed=True),
            "sizes": checked_sizes("sizes", sizes),
            "unshard": per_stage("unshard", unshard),
            "reduce_grad": per_stage("reduce_grad", reduce_grad),
            "collective_lane": checked_flag("collective_lane", collective_lane),
            "update": per_stage("update", update),
            "transfer": by_pair("transfer", transfer, "time of a transfer"),
            "recompute": None if recompute is None else per_stage("recompute", recompute),
            "kept": None if kept is None else per_stage("kept", kept),
            "pair": checked_pair(pair),
            "speed": checked_speed(speed),
            "message": per_stage("message", message),
            "shared": checked_shared(shared),
            "blocking": checked_flag("blocking", blocking),
            "memory_sizes": checked_sizes("memory_sizes", memory_sizes),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def to_json(self, path: PathLike | None = None) -> str:
        """Write the cost as a JSON object, nothing lost; None for `path` writes no file.

        The command line takes it, as ``--cost cost.json``.

        Returns:
            Its text: the arguments of `Cost` that are not None.

        Example:
            >>> import tempfile, fpipe
            >>> with tempfile.NamedTemporaryFile() as file:
            ...     _ = fpipe.Cost(f=1, i=1, w=2).to_json(file.name)
            ...     fpipe.Cost.from_json(file.name).w
            2
        """
        return save(path, format_cost(vars(self)))

    @classmethod
    def from_json(cls, path: PathLike) -> Cost:
        """Read a file that `to_json` or a person wrote: f, i and w, and any of the others.

        Raises:
            ScheduleError: the file is not such an object, or a value is out of range.
            OSError: it cannot be opened.
        """
        return cls(**parse_cost(load(path), source=str(path)))

    def merged(self, stages: int) -> Cost:
        """The cost after every `stages` consecutive stages are merged into one.

        So costs measured on the stages of one schedule serve another with fewer stages. Times and
        activations of merged stages are summed, which for activations may be a little too much: a
        value between two of them may then be kept once. A number for all stages is for a share of
        the model, and stays. A `message` is that of the last stage.

        Args:
            stages: how many become one; a divisor of the number of stages.

        Raises:
            ScheduleError: `stages` is not such a divisor.

        Example:
            >>> from fpipe import Cost, schedules, simulate
            >>> four = Cost(f=[1, 2, 1, 3], i=1, w=1, activation=[4, 4, 4, 5])
            >>> four.merged(2).f, four.merged(2).activation
            ((3, 4), (8, 9))
            >>> simulate(schedules.zb_h1(ranks=2, microbatches=4), four.merged(2)).makespan
            27.0
        """
        (count,) = plain_counts(stages=stages)
        values = values_per_stage(self)
        for name, value in values.items():
            if len(value) % count:
                raise ScheduleError(
                    f"stages={count} do not divide the {len(value)} of cost.{name}: choose a "
                    "divisor"
                )
        return joined(self, [count] * (max(map(len, values.values()), default=0) // count))

    def with_remat(self, remat: str | Sequence[str], placement: Sequence[int]) -> Cost:
        """The cost where some stages keep only their inputs, and compute the rest again.

        A backward of such a stage takes `recompute` more, within its I or B, and F keeps `kept`. I
        hands on to W what it always does, ``activation - freed_by_i``. While it computes again,
        the stage holds all its activation: a peak counts that as little as other workspace.

        Args:
            remat: ``"full"`` or ``"none"``, of all stages or of each.
            placement: the rank of each stage.

        Returns:
            A cost with a value for each stage, without `recompute` and `kept`.

        Raises:
            ScheduleError: `remat` is none of these, or has not one for each stage; `kept` is None
                or more than `activation`, or the cost does not fit the placement.

        Example:
            >>> from fpipe import Cost
            >>> cost = Cost(f=1, i=1, w=1, kept=0.25).with_remat(["full", "none"], [0, 1])
            >>> cost.i, cost.activation, cost.freed_by_i
            ((2, 1), (0.25, 1), (-0.75, 0))
        """
        each = choices_of(remat, len(plain_placement(placement)))
        if "full" in each:
            check_kept(self.kept)
        costs, p = self.on(placement), max(placement) + 1
        more = costs.f
        if self.recompute is not None:
            again = {"recompute": self.recompute}
            more = placed_values(again, placement, p, self.speed)["recompute"]
        keeps = values_of_stages("kept", self.kept or 0, len(each), p)
        changed = recomputed(costs, each, more, keeps)
        if self.b is None:
            del changed["b"]
        return replace(self, **changed, recompute=None, kept=None, speed=None)

    def on(self, placement: Sequence[int], ranks: int | None = None) -> StageCosts:
        """The cost of each stage under a placement (stage → rank).

        Args:
            placement: the rank of each stage.
            ranks: number of ranks, if the last of them have no stage.

        Raises:
            ScheduleError: `placement` is invalid, `ranks` are too few for it, a sequence does not
                have one value per stage, `comm` lacks a row, or I would free more than F keeps.
        """
        placement = plain_placement(placement)
        stages, p = len(placement), max(placement) + 1
        if ranks is not None:
            (count,) = plain_counts(ranks=ranks)
            if count < p:
                raise ScheduleError(
                    f"ranks={count} are too few for a placement that uses rank {p - 1}: leave "
                    "ranks out, or give more"
                )
            p = count
        values = {name: getattr(self, name) for name in _PLACED}
        if self.b is None:
            del values["b"]
        each = placed_values(values, placement, p, self.speed)
        check_freed(each["activation"], each["freed_by_i"])
        if isinstance(self.message, tuple):
            values_of_stages("message", self.message, stages, p)  # refuses another number of them
        pairs = list(pairwise(placement))
        hops = [*pairs, *((b, a) for a, b in pairs)]
        messages = [self.message_of(stage) for stage in range(stages - 1)] * 2
        links, shared = links_on(
            [self.way(*hop) for hop in hops],
            [self.hop(*hop) for hop in hops],
            [self.transfer_between(*hop) * size for hop, size in zip(hops, messages, strict=True)],
            [source for source, _ in hops],
        )
        down, up = links[: stages - 1], links[stages - 1 :]
        amounts = self.sizes if self.memory_sizes is None else self.memory_sizes
        least = 1 if amounts is None else min(amounts)
        each.setdefault("b", tuple(map(sum, zip(each["i"], each["w"], strict=True))))
        each["freed_by_i"] = tuple(map(min, each["activation"], each["freed_by_i"]))
        return StageCosts(
            **each,
            down=tuple(link.latency + link.transfer * least for link in down),
            up=tuple(link.latency + link.transfer * least for link in up),
            memory_sizes=amounts,
            collective_lane=self.collective_lane,
            down_links=down if self.has_transfers else (),
            up_links=up if self.has_transfers else (),
            pair=self.pair,
            shared=shared,
            blocking=self.blocking and self.has_transfers,
        )

    def sizes_of(self, microbatches: int) -> tuple[float, ...]:
        """The size of each microbatch.

        Raises:
            ScheduleError: `sizes` has another number of values.

        Example:
            >>> from fpipe import Cost
            >>> Cost(f=1, i=1, w=1).sizes_of(3), Cost(f=1, i=1, w=1, sizes=[1, 0.5]).sizes_of(2)
            ((1, 1, 1), (1, 0.5))
            >>> Cost(f=1, i=1, w=1).memory_sizes_of(2)
            (1, 1)
        """
        return values_of_microbatches("sizes", self.sizes, microbatches)

    def memory_sizes_of(self, microbatches: int) -> tuple[float, ...]:
        """By how much activations and messages of each microbatch are multiplied.

        Raises:
            ScheduleError: `memory_sizes`, or `sizes` in its place, has another number of values.
        """
        if self.memory_sizes is None:
            return self.sizes_of(microbatches)
        return values_of_microbatches("memory_sizes", self.memory_sizes, microbatches)

    def _repr_html_(self) -> str:
        """The cost in a notebook: a table with a row for each stage, or one for each number."""
        from fpipe.schedule.picture.tables import cost_tables

        arguments = {field.name: getattr(self, field.name) for field in fields(self)}
        # The lane says nothing where there are no collectives.
        return cost_tables(arguments, {"message": 1, "collective_lane": not self.shards})

    @cached_property
    def shards(self) -> bool:
        """Whether gathers or reductions take any time."""
        return any(map(has_any, (self.unshard, self.reduce_grad)))

    @cached_property
    def updates(self) -> bool:
        """Whether the optimizer's step takes any time."""
        return has_any(self.update)

    @cached_property
    def has_transfers(self) -> bool:
        """Whether a message occupies a link for any time."""
        table = self.transfer if isinstance(self.transfer, tuple) else ((self.transfer,),)
        return any(map(any, table))

    @property
    def has_whole_stage(self) -> bool:
        """Whether any whole-stage action takes any time."""
        return self.shards or self.updates

    def hop(self, source: int, target: int) -> float:
        """Latency from one rank to another; 0 from a rank to itself.

        Raises:
            ScheduleError: one of them is not the number of a rank, or `comm` has no place for it.
        """
        return between_ranks("comm", self.comm, source, target)

    def transfer_between(self, source: int, target: int) -> float:
        """The transfer of a message of 1 from one rank to another, as `hop` the latency."""
        return between_ranks("transfer", self.transfer, source, target)

    def message_of(self, stage: int) -> float:
        """The message from a stage to the next, and of the gradient that comes back."""
        return self.message[stage] if isinstance(self.message, tuple) else self.message

    def way(self, source: int, target: int) -> tuple[int, ...]:
        """A name of the link from one rank to another, the same for hops that share it.

        Raises:
            ScheduleError: as for `hop`, where `shared` is a table.
        """
        if isinstance(self.shared, bool):
            return tuple(sorted((source, target))) if self.shared else (source, target)
        return (int(between_ranks("shared", self.shared, source, target)),)


def values_per_stage(cost: Cost) -> dict[str, tuple[float, ...]]:
    """The arguments of a cost that have a value for each stage, by name."""
    values = {name: getattr(cost, name) for name in _PER_STAGE}
    return {name: value for name, value in values.items() if isinstance(value, tuple)}


def joined(cost: Cost, counts: Iterable[int]) -> Cost:
    """The cost after so many consecutive stages, or layers, each become one; see `Cost.merged`."""
    spans = list(pairwise(accumulate(counts, initial=0)))
    changed: dict[str, Any] = {}
    for name, value in values_per_stage(cost).items():
        groups = (value[start:end] for start, end in spans if start < len(value))
        changed[name] = [group[-1] if name == "message" else sum(group) for group in groups]
    return replace(cost, **changed)


def check_cost(cost: object) -> None:
    """Raise a `ScheduleError` unless `cost` is a `Cost`."""
    if not isinstance(cost, Cost):
        raise ScheduleError(
            f"cost={cost!r:.60} is {a_type(cost)}: make one with fpipe.Cost(f=1, i=1, w=1)"
        )
