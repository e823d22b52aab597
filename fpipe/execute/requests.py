"""Requests: the arguments of a call of a pipeline, and the controller that runs it.

arguments ── in order ──► params, batch, key ── as the stages take them ──► Request ──► Controller
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from fpipe.dtensors import refuse_transformed
from fpipe.errors import BatchError
from fpipe.execute.header import Addend, Marked
from fpipe.execute.run_result import RunResult
from fpipe.inputs.ambient import refuse_modes
from fpipe.inputs.keys import Words, read_key
from fpipe.inputs.params import Parameters, Updating, keep
from fpipe.inputs.signature import Goal
from fpipe.inputs.split_batch import SplitBatch, split
from fpipe.plan.planner import Planner
from fpipe.program.program import Program
from fpipe.random.key_tensors import check_key, is_key
from fpipe.spec.convention import DEFERRED, PLAIN, STATE
from fpipe.spec.definition import ONE_BATCH, Definition


class Request(NamedTuple):
    """The arguments of a call, or why they cannot be used.

    Attributes:
        params: as the stages take them.
        batch: as the stages take it.
        key: None where nothing reads one.
        problem: why the arguments are wrong; None where they are not.
        scale: what the loss is multiplied with in the backward.
    """

    params: Any = None
    batch: Any = None
    key: Words | None = None
    problem: Exception | None = None
    scale: float = 1.0


class Reader:
    """Reads the arguments of calls, and refuses wrong ones."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._takes, self._reads_key = definition.takes, definition.reads_key
        schedule, group, data = definition.schedule, definition.group, definition.data
        self._num_stages, self._num_microbatches = schedule.num_stages, schedule.num_microbatches
        self._own_stages = None if group is None else schedule.stages_of(group.rank())
        self._replica = None if data is None else data.replica
        # Here the gradients by the batch come together.
        self._needs_batch = (
            group is not None
            and group.rank() == schedule.placement[0]
            and "batch" in definition.wanted
            and not definition.sink.everywhere
        )

    def in_order(
        self, arguments: tuple[Any, ...], key: Tensor | None, named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Tensor | None]:
        """The arguments after params in order, and the key, of a call that may name some.

        Raises:
            BatchError: the names are not those of the arguments that have no position.
        """
        if not named:
            if key is None and len(arguments) == len(self._takes):
                last = arguments[-1]
                # Something else is one argument too many, where nothing reads a key.
                if self._reads_key or last is None or is_key(last):
                    return arguments[:-1], last
            return arguments, key
        rest = self._takes[1 + len(arguments) :]
        if sorted(named) != sorted(rest):
            takes = ", ".join(self._takes)
            unknown = [name for name in named if name not in self._takes]
            if unknown:
                raise BatchError(
                    f"the pipeline got by name {', '.join(unknown)}: it takes {takes}, and key=; "
                    f"{ONE_BATCH}"
                )
            raise BatchError(
                f"the pipeline got {1 + len(arguments)} arguments by position, and by name "
                f"{', '.join(named)}: it takes {takes}, each of them once; with any of them by "
                "name, a key is key="
            )
        return (*arguments, *(named[name] for name in rest)), key

    def request(self, arguments: Sequence[Any], key: Tensor | None) -> Request:
        """The request of a call with these arguments, in order.

        Raises:
            BatchError: there are too few or too many, the batch is missing where its gradients are
                wanted, or a key is missing, or nobody reads it.
            FpipeError: it is made under a mode that a pipeline cannot follow, or in a transform.
        """
        params, batch = self.trees(arguments)
        words = None
        if self._reads_key or key is not None:
            words = read_key(key, wanted=self._reads_key, replica=self._replica)
        return Request(params, batch, words)

    def request_of_shapes(
        self, params: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Request:
        """The request for programs, which depend on shapes alone: the key may be left out."""
        ordered, last = self.in_order(arguments, None, named)
        if last is not None and not self._reads_key:
            raise self._miscounted((params, *arguments))
        if last is not None:
            check_key(last)
        return Request(*self.trees((params, *ordered)))

    def trees(self, arguments: Sequence[Any]) -> tuple[Any, Any]:
        """Parameters and batch as the stages take them; errors are those of `request`."""
        definition = self._definition
        refuse_modes(compiled=definition.compile is not False)
        if len(arguments) != len(self._takes):
            raise self._miscounted(arguments)
        if self._needs_batch and arguments[self._takes.index("batch")] is None:
            raise BatchError(
                "batch=None on the rank of the first stage, which gets the gradients by the batch: "
                "pass it there, of which leaves that others read may lie on the meta device"
            )
        convention = definition.convention
        if convention is PLAIN:
            params, batch = arguments
            return params, batch
        if convention not in (STATE, DEFERRED):
            refuse_transformed(arguments, "a transform of fpipe, such as fpipe.vmap and fpipe.hvp")
        return convention.enter(*arguments)

    def params(self, params: Any) -> Parameters:
        """The flat parameters of a request; those of other processes' stages may be missing.

        Raises:
            BatchError: they have not one part per stage, or a leaf is no dense tensor.
        """
        if isinstance(params, Updating):
            return replace(self.params(params.params), updating=params)
        if self._definition.has_state:
            return Parameters.with_state(params, self._num_stages)
        if self._definition.function:
            return Parameters.whole(params, self._num_stages)
        if self._own_stages is not None:
            # Parts of other ranks' stages are neither looked at nor kept.
            params = keep(params, self._own_stages)
        return Parameters.read(params, self._num_stages)

    def batch(self, batch: Any) -> SplitBatch:
        """The microbatches of a request; errors are those of `split`."""
        definition = self._definition
        return split(
            batch,
            definition.in_dims,
            self._num_microbatches,
            may_lack_rows=definition.data is not None,
        )

    def common(self, batch: Any) -> Any:
        """The part of a batch that is the same in every process; its leaves come first."""
        return self._definition.convention.common(batch)

    def _miscounted(self, arguments: Sequence[Any]) -> BatchError:
        more = f"; {ONE_BATCH}" if len(arguments) > len(self._takes) else ""
        return BatchError(
            f"the pipeline got {len(arguments)} arguments, but takes {len(self._takes)}: "
            f"{', '.join(self._takes)}{more}"
        )


T = TypeVar("T")

Gather = Callable[[Any], list[Any]]
"""From a picklable value of this process to those of all of them, by rank."""


class Controller(Protocol):
    """Drives the ranks that belong to this process.

    Attributes:
        planner: made the plans that it runs by.
    """

    planner: Planner

    def run(self, request: Request, goal: Goal, name: str | None = None) -> RunResult:
        """Plan, if the shapes are new, and run all programs to their end."""

    def telling(self, goal: Goal) -> AbstractContextManager[None]:
        """Within it a call is made, which may be refused before other processes know of it."""

    def programs(self, request: Request, goal: Goal) -> tuple[Program, ...]:
        """The programs of a training step on arguments of these shapes."""

    def add_up(self, call: str, deed: str, make: Callable[[], Addend]) -> Marked:
        """The sum of what `make` returns over all processes; where it raises, one cannot `deed`.

        `call` is one of `CALLS`, which all of them are in; numbers bring the same key.
        """

    def together(self, call: str, work: Callable[[Gather], T]) -> T:
        """Do what all processes do at once, under the watch; `call` says what it is."""
