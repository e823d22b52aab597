"""The schedule itself: an immutable value, one tuple of actions per rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from fpipe.errors import ScheduleError, a_type
from fpipe.schedule.action import (
    SHARDING_OPS,
    Action,
    Op,
    check_form,
    in_order,
    plain_or_same,
    plain_row,
)
from fpipe.schedule.cost import Cost
from fpipe.schedule.exchange.csv_file import format_csv, parse_csv
from fpipe.schedule.exchange.files import PathLike, load, save
from fpipe.schedule.exchange.json_file import format_json, parse_json
from fpipe.schedule.exchange.text_form import format_text, parse_text
from fpipe.schedule.grid import one_line, sizes, text_grid
from fpipe.schedule.placements import stages_on
from fpipe.schedule.whole_stage import STEP, gathered_at_once, sharded_rows, updated_rows

LARGEST_SHOWN: Final = 20_000  # actions in a notebook's picture: about two megabytes


@dataclass(frozen=True)
class Schedule:
    """Which rank runs which action, in which order.

    A schedule is pure data: it can be compared, hashed, printed, edited with
    `dataclasses.replace`, verified, simulated and run. Its constructor checks the form only;
    `fpipe.verify` proves that it can run.

    Attributes:
        placement: the rank of each stage, so ``len(placement)`` is the number of stages.
        actions: one tuple of `Action` per rank, in the order in which that rank runs them. Integers
            of any type, here and in `placement`, become Python's int.
        name: for people; equality and hash ignore it.

    Raises:
        ScheduleError: there is no rank or no stage, a placement names a rank that does not exist,
            an entry is not an `Action` of a number, an op and a number or None, `name` is not text,
            or an argument is not a sequence.

    Example:
        >>> from fpipe.schedule import Action, Schedule
        >>> parse = lambda text: [Action.parse(word) for word in text.split()]
        >>> schedule = Schedule(placement=[0, 1], actions=[parse("0F0 0B0"), parse("1F0 1B0")])
        >>> schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
        (2, 2, 1)
    """

    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    name: str = field(default="custom", compare=False)

    def __init__(
        self,
        placement: Iterable[int],
        actions: Iterable[Iterable[Action]],
        name: str = "custom",
    ) -> None:
        ranks = in_order("placement", placement, "the rank of each stage")
        rows = in_order("actions", actions, "the actions of each rank")
        rows = tuple(
            in_order(f"actions[{rank}]", row, "the actions of a rank")
            for rank, row in enumerate(rows)
        )
        if not isinstance(name, str):
            raise ScheduleError(f"name={name!r:.60} is {a_type(name)}: it must be text")
        ranks = tuple(map(plain_or_same, ranks))
        check_form(ranks, rows)
        rows = tuple(plain_row(rank, row) for rank, row in enumerate(rows))
        object.__setattr__(self, "placement", ranks)
        object.__setattr__(self, "actions", rows)
        object.__setattr__(self, "name", name)

    @property
    def num_ranks(self) -> int:
        """Number of ranks: the length of `actions`."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Number of stages: the length of `placement`."""
        return len(self.placement)

    @cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches: one more than the greatest that an action names, or 0."""
        every = (a.microbatch for row in self.actions for a in row)
        named = (number for number in every if number is not None)
        return max(named, default=-1) + 1

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W."""
        return any(a.op in (Op.I, Op.W) for row in self.actions for a in row)

    @cached_property
    def is_sharded(self) -> bool:
        """Whether it says when parameters are gathered and gradients reduced."""
        return any(a.op in SHARDING_OPS for row in self.actions for a in row)

    @cached_property
    def has_updates(self) -> bool:
        """Whether it says when the optimizer's step of each stage is made."""
        return any(a.op == Op.UPDATE for row in self.actions for a in row)

    @cached_property
    def required_ops(self) -> tuple[str, ...]:
        """The ops that each stage must run, by its actions, as `fpipe.verify` takes them.

        Example:
            >>> from fpipe import schedules
            >>> schedules.zb_h1(ranks=2, microbatches=2).required_ops
            ('FIW', 'FIW')
        """
        ops: defaultdict[tuple[int, int | None], set[str]] = defaultdict(set)
        for row in self.actions:
            for stage, op, microbatch in row:
                ops[stage, microbatch].add(op)
        forms: list[set[str]] = [set() for _ in self.placement]
        for (stage, _), has in ops.items():
            forms[stage].add("B" if Op.B in has else "".join(op for op in "IW" if op in has))
        owed = []
        passed = False  # whether the stage before owes a gradient, which this one then passes back
        for form in forms:
            # One microbatch with I alone shows that B elsewhere stands for I; the same holds for W.
            halves = form & {"I", "W"} or form & {"B", "IW"}
            i = passed or any(half != "W" for half in halves)
            w = any(half != "I" for half in halves)
            passed = i or w
            owed.append("F" + "I" * i + "W" * w)
        return tuple(owed)

    @property
    def gathered_at_once(self) -> int:
        """The most stages that any rank has gathered at one time; 0 where none is ever."""
        return max(map(gathered_at_once, self.actions))

    def sharded(self, gather: int | str = STEP, reduce: int | str = STEP) -> Schedule:
        """The schedule with the actions of sharded data parallelism put in.

        A pipeline that is made with ``data=`` runs them: `UNSHARD` gathers the parameters of a
        stage, `RESHARD` lets them go, `REDUCE_GRAD` adds its gradients up over replicas. Those that
        are in the schedule already are replaced, and so are its `UPDATE`, if it has any.

        Args:
            gather: ``"step"`` gathers each stage once a step, before all else. A number, 1 or more:
                at most so many stages of a rank are gathered at any time, the one that is being
                prefetched included; a stage may be gathered several times then.
            reduce: ``"step"`` reduces the gradients of a stage once, after its last W or B. A
                number, 1 or more: after every so many microbatches, so that a rank never holds
                whole sums of all of its stages for long.

        Returns:
            The schedule, with the policy in its name.

        Raises:
            ScheduleError: `gather` or `reduce` is something else.

        Example:
            >>> import fpipe
            >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
            >>> print(*schedule.sharded(reduce=1).actions[0])
            0UNSHARD 0F0 0F1 0B0 0REDUCE_GRAD 0B1 0RESHARD 0REDUCE_GRAD
        """
        rows = sharded_rows(self.actions, gather, reduce)
        policy = f"gather={gather}, reduce={reduce}"
        schedule = Schedule(self.placement, rows, name=f"{self.name} ({policy})")
        return schedule.updated() if self.has_updates else schedule

    def updated(self, cost: Cost | None = None) -> Schedule:
        """The schedule with the optimizer's step of each stage put in, as `UPDATE`.

        A step of `fpipe.train` runs them, and puts them into a schedule that has none. Each stands
        behind the last gradient of its stage, in the first idle time of its rank that is long
        enough; where there is none, at the end of the rank. Those that are in the schedule already
        are replaced. Every other step runs the schedule as if they were not there.

        Args:
            cost: with ``update``, the time of an UPDATE; None for one in which it takes as long as
                F of one microbatch.

        Returns:
            The schedule under the same name.

        Raises:
            ScheduleError: the schedule cannot run, or `cost` does not fit it.

        Example:
            >>> import fpipe
            >>> schedule = fpipe.schedules.interleaved_1f1b(ranks=2, microbatches=2)
            >>> print(*schedule.updated(fpipe.Cost(f=1, i=1, w=1, comm=1, update=1)).actions[0])
            0F0 0F1 2F0 2F1 2B0 2B1 2UPDATE 0B0 0B1 0UPDATE
        """
        rows = updated_rows(self.placement, self.actions, self.num_microbatches, cost)
        return Schedule(self.placement, rows, name=self.name)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that the placement puts on `rank`, in order.

        Args:
            rank: its number.

        Returns:
            Their numbers; () for a rank without any.

        Example:
            >>> from fpipe import schedules
            >>> schedules.zbv(ranks=2, microbatches=4).stages_of(0)
            (0, 3)
        """
        return stages_on(self.placement, rank)

    def to_csv(self, path: PathLike | None = None, *, overlap: bool = False) -> str:
        """Write the actions as torch.distributed.pipelining does, a row per rank.

        Args:
            path: the file to write; None to write none.
            overlap: write an F and the B of another stage that follows it directly as a pair that
                torch overlaps, ``(0F5;3B2)OVERLAP_F_B``, as DualPipeV needs it. Every such pair is
                written, because a schedule does not say what overlaps; reading splits it again.

        Returns:
            The text of the file; `fpipe.schedule.exchange.csv_file` describes the form.

        Raises:
            ScheduleError: the placement does not follow from the rows; CSV has no place for it.

        Example:
            >>> from fpipe import schedules
            >>> schedules.gpipe(ranks=2, microbatches=1).to_csv().split()
            ['0F0,0B0', '1F0,1B0']
        """
        return save(path, format_csv(self.placement, self.actions, overlap=overlap))

    @classmethod
    def from_csv(cls, path: PathLike, *, name: str | None = None) -> Schedule:
        """Read a file of `to_csv`, or of torch's ``_dump_csv`` in either of its two formats.

        Args:
            path: the file.
            name: of the schedule; None for the name of the file without its suffix.

        Raises:
            ScheduleError: the file is malformed; the text names row, column and reason.
            OSError: it cannot be opened.

        Example:
            >>> import tempfile, fpipe
            >>> zbv = fpipe.schedules.zbv(ranks=2, microbatches=4)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = zbv.to_csv(f"{folder}/zbv.csv")
            ...     fpipe.Schedule.from_csv(f"{folder}/zbv.csv") == zbv
            True
        """
        text = load(path)
        name = Path(path).stem if name is None else name
        return cls(*parse_csv(text, name=name, source=str(path)))

    def to_json(self, path: PathLike | None = None) -> str:
        """Write placement, actions and name as JSON; None for `path` writes no file.

        Returns:
            The text of the file; `fpipe.schedule.exchange.json_file` describes the form.

        Args:
            path: the file to write; None to write none.

        Example:
            >>> import json
            >>> from fpipe import schedules
            >>> json.loads(schedules.gpipe(ranks=2, microbatches=1).to_json())["placement"]
            [0, 1]
        """
        return save(path, format_json(self.placement, self.actions, self.name))

    @classmethod
    def from_json(cls, path: PathLike) -> Schedule:
        """Read a file of `to_json`.

        Raises:
            ScheduleError: the file is malformed; the text names the place and the reason.
            OSError: it cannot be opened.

        Args:
            path: the file.

        Example:
            >>> import tempfile, fpipe
            >>> zbv = fpipe.schedules.zbv(ranks=2, microbatches=4)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = zbv.to_json(f"{folder}/zbv.json")
            ...     fpipe.Schedule.from_json(f"{folder}/zbv.json") == zbv
            True
        """
        return cls(*parse_json(load(path), source=str(path)))

    def to_text(self, path: PathLike | None = None) -> str:
        """Write the schedule as text for people; None for `path` writes no file.

        Returns:
            The text of the file; `fpipe.schedule.exchange.text_form` describes the form.

        Args:
            path: the file to write; None to write none.

        Example:
            >>> from fpipe import Schedule, schedules
            >>> gpipe = schedules.gpipe(ranks=2, microbatches=2)
            >>> Schedule.from_text(gpipe.to_text()) == gpipe
            True
        """
        return save(path, format_text(self.placement, self.actions, self.name))

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        r"""Read lines that `to_text` or a person wrote: a line per rank.

        Raises:
            ScheduleError: the text is malformed; the error names line, column and reason.

        Example:
            >>> import fpipe
            >>> print(fpipe.Schedule.from_text("0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1"))
            custom: 2 ranks, 2 stages, 2 microbatches
            time    0              5
            rank 0  F0 F1    B0    B1
            rank 1     F0 B0 F1 B1
        """
        if not isinstance(text, str):
            raise ScheduleError(
                f"text={text!r:.60} is {a_type(text)}: give the lines themselves, such as "
                "pathlib.Path('schedule.txt').read_text()"
            )
        return cls(*parse_text(text))

    # Pictures are imported when one is drawn, so that `import fpipe` stays quick.

    def to_svg(self, path: PathLike | None = None, *, width: float | None = None) -> str:
        """Draw the schedule as SVG, with one unit of time for each of F, I and W, and two for B.

        For other costs draw the timeline of `fpipe.simulate`. A schedule that cannot run is drawn
        as its plain rows.

        Args:
            path: the file to write; None to write none.
            width: in pixels; None for a width in which microbatch numbers fit, within limits.

        Returns:
            The text of the file.

        Raises:
            ScheduleError: an action is of a stage that does not exist, or `width` is too small.

        Example:
            >>> import fpipe
            >>> fpipe.schedules.zbv(ranks=2, microbatches=4).to_svg().startswith("<svg")
            True
        """
        from fpipe.schedule.picture.chart_data import unit_chart
        from fpipe.schedule.picture.svg import svg

        return save(path, svg([unit_chart(self, self.name)], width=width))

    def to_html(self, path: PathLike | None = None) -> str:
        """Draw the schedule as one HTML file to look around in: hover, zoom, move.

        Times, arguments, result and errors are those of `to_svg`.

        Args:
            path: the file to write; None to write none.

        Example:
            >>> from fpipe import schedules
            >>> "</html>" in schedules.gpipe(ranks=2, microbatches=2).to_html()
            True
        """
        from fpipe.schedule.picture.chart_data import unit_chart
        from fpipe.schedule.picture.page import page

        return save(path, page([unit_chart(self, self.name)]))

    def to_trace(self, path: PathLike | None = None) -> str:
        """Write the schedule as a trace for https://ui.perfetto.dev, a unit of time as 1 ms.

        Times, arguments, result and errors are those of `to_svg`.

        Args:
            path: the file to write; None to write none.

        Example:
            >>> import json
            >>> from fpipe import schedules
            >>> trace = json.loads(schedules.gpipe(ranks=2, microbatches=2).to_trace())
            >>> "traceEvents" in trace
            True
        """
        from fpipe.schedule.picture.chart_data import unit_chart
        from fpipe.schedule.picture.trace import trace

        return save(path, trace(unit_chart(self, self.name)))

    def _repr_svg_(self) -> str | None:
        """The picture where a page takes no HTML; None if it would be too large."""
        return self.to_svg() if sum(map(len, self.actions)) <= LARGEST_SHOWN else None

    def _repr_html_(self) -> str:
        """The picture in a notebook, as wide as the page at most, however long the schedule."""
        from fpipe.schedule.picture.chart_data import unit_chart
        from fpipe.schedule.picture.page import figure

        return figure([unit_chart(self, self.name, waits=False)])

    @cached_property
    def _hash(self) -> int:
        return hash((self.placement, self.actions))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # The cached hash is left out: another process hashes text differently.
        return type(self), (self.placement, self.actions, self.name)

    def __repr__(self) -> str:
        return f"<Schedule {self.summary}>"

    def __str__(self) -> str:
        """The schedule as a text grid (`fpipe.schedule.grid.text_grid` has choices)."""
        return f"{self.summary}\n{text_grid(self)}"

    @property
    def summary(self) -> str:
        """Name and size in one line."""
        counts = sizes(self.num_ranks, self.num_stages, self.num_microbatches)
        return f"{one_line(self.name)}: {counts}"
