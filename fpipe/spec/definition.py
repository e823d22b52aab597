"""The definition of a pipeline: everything that a user chose, checked, as one value.

A pipeline is made from its definition alone, so another one like it is made by replacing a field.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fpipe import pytree
from fpipe.errors import (
    ScheduleError,
    StageError,
    a_type,
    check_choice,
    check_flags,
    label_of,
)
from fpipe.pieces.backends import Compile
from fpipe.pieces.partition import Remat, named
from fpipe.schedule import Action, Op, Schedule
from fpipe.schedule.arguments import plain_number
from fpipe.schedule.verifier import verify
from fpipe.spec.convention import DEFERRED, PLAIN, Convention
from fpipe.spec.data import Data
from fpipe.spec.objective import ALL, SUM, Objective, Sink, Trainable
from fpipe.spec.placing import device_of
from fpipe.spec.policies import Offload, Precision
from fpipe.spec.user_functions import Returns, Stage

REDUCTIONS = ("mean", "sum", "weighted")

SHORTEST = 1.0
"""The shortest `timeout`, in seconds: a rank that is well is heard of twice in that time."""

ARGUMENTS = ("params", "batch")
"""The arguments by which a pipeline can be differentiated."""
ONE_BATCH = "the data of a step is one pytree, such as {'x': x, 'y': y}"
"""The rule in errors about too many arguments."""


class Alone(NamedTuple):
    """The pipeline and the arguments of an ensemble; as for `fpipe.vmap`.

    Attributes:
        definition: of one member.
        in_dims: of each argument.
        randomness: whether members draw different numbers.
        axis_size: the number of members, None where it is read from the arguments.
    """

    definition: Definition
    in_dims: tuple[Any, ...]
    randomness: str
    axis_size: int | None


@dataclass(frozen=True)
class Definition:
    """The arguments of `fpipe.pipeline`.

    Attributes:
        stages: one per stage of the schedule; none with `function`.
        loss: ``(y, microbatch) -> loss``; the whole ``(params, batch) -> loss`` with `function`.
        schedule: who does what in which order.
        in_dims: how the batch is split.
        out_dims: how what comes back for each microbatch is merged.
        has_aux: the loss comes with aux.
        has_key: one function is called with a key.
        keyed: what one function draws, it draws from the key of the step.
        has_state: one function takes a state after the parameters, and returns it after the loss.
        trainable: which parameters get a gradient.
        reduction: how the losses of microbatches make the batch's.
        remat: which values the backward may read.
        compile: how graphs are made callable.
        accum_dtype: dtype of the sums of gradients.
        precision: the dtypes of stages, to which they and the loss are cast.
        devices: the device of each rank, in one process.
        group: the ranks' processes, None for one process.
        timeout: seconds of silence after which a rank is given up.
        function: `loss` is one function of all parameters, cut into stages when it is traced.
        loss_shape: shape of what `loss` returns, with None for a size that the arguments tell. It
            is more than one number when a transform carries several losses at once.
        loss_cotangent: what of the losses is differentiated: the weights in their sum, flat, over
            the last dimensions of `loss_shape`, those with a size; None weighs each loss with 1.
        convention: how it is called, and what is returned.
        sink: how gradients and losses are collected over microbatches.
        argnums: what gradients are taken by: ``"params"``, ``"batch"``, or a tuple of both.
        modes: of one function, what else its trace depends on, as it is now: which of a module's
            submodules are in training mode.
        alone: of an ensemble what it was made of.
        data: which dimensions of the mesh hold replicas.
        offload: where parameters and gradients live, if not where stages compute.

    Raises:
        ScheduleError: the schedule cannot run.
        StageError: a field is wrong, or does not fit the schedule.
    """

    stages: tuple[Stage, ...]
    loss: Callable[[Any, Any], Any]
    schedule: Schedule
    in_dims: Any = 0
    out_dims: Any = 0
    has_aux: bool = False
    has_key: bool = False
    keyed: bool = False
    has_state: bool = False
    trainable: Trainable = ALL
    reduction: str = "mean"
    remat: Remat = "none"
    compile: Compile = True
    accum_dtype: torch.dtype | None = None
    precision: Precision | None = None
    devices: tuple[torch.device, ...] | None = None
    group: dist.ProcessGroup | None = None
    timeout: float = 60.0
    function: bool = False
    loss_shape: tuple[int | None, ...] = ()
    loss_cotangent: tuple[float, ...] | None = None
    convention: Convention = PLAIN
    sink: Sink = SUM
    argnums: str | tuple[str, ...] = "params"
    modes: Callable[[], Hashable] = tuple
    alone: Alone | None = None
    data: Data | None = None
    offload: Offload | None = None

    def __post_init__(self) -> None:
        check_flags(has_aux=self.has_aux, has_key=self.has_key, has_state=self.has_state)
        self._check_timeout()
        _check_schedule(self.schedule, self.trainable, function=self.function)
        if not callable(self.loss):
            raise StageError(
                f"loss={self.loss!r:.60} is not callable: it is a function (y, microbatch) -> "
                "scalar"
            )
        if not self.function:
            _check_stages(self.schedule, self.stages)
        if self.has_key and not self.function:
            raise StageError(
                "has_key=True is for one function of the whole model: of stages each says for "
                "itself whether it reads a key, fpipe.Stage(fn, reads_key=True)"
            )
        if self.has_state:
            self._check_state()
        check_choice("reduction", self.reduction, REDUCTIONS)
        if self.accum_dtype is not None and not (
            isinstance(self.accum_dtype, torch.dtype)
            and (self.accum_dtype.is_floating_point or self.accum_dtype.is_complex)
        ):
            raise StageError(
                f"accum_dtype={self.accum_dtype!r} must be a floating-point dtype such as "
                "torch.float32, or None"
            )
        ranks = self.schedule.num_ranks
        if self.devices is not None and len(self.devices) != ranks:
            raise StageError(
                f"devices has {len(self.devices)} entries, but the schedule has {ranks} ranks: "
                "give one device per rank, or None"
            )
        kinds = sorted({device.type for device in self.devices or ()})
        if self.function and len(kinds) > 1:
            raise StageError(
                f"devices has those of {' and '.join(kinds)}, but one function is recorded once, "
                "in operations of one kind of device: give devices of one kind, or pass stages, "
                "each of which is traced on its own"
            )
        if self.group is not None:
            self._check_group(self.group)
        if self.data is not None and (self.sink is not SUM or self.convention.vectors):
            raise StageError(
                f"data={self.data.dims} is not for transforms, whose gradients are no sums over "
                "replicas: transform a pipeline without data=, and add up what it returns"
            )

        if self.offload is not None and (self.sink is not SUM or self.convention.vectors):
            raise StageError(
                "offload_policy is not for transforms: transform a pipeline without it, and move "
                "what it returns to the CPU"
            )

    def _check_timeout(self) -> None:
        timeout = self.timeout
        seconds = None if isinstance(timeout, bool) else plain_number(timeout)
        if seconds is None or not seconds > 0:
            raise StageError(f"timeout={timeout!r:.60} must be a positive number of seconds")
        if timeout < SHORTEST and self.group is not None:
            raise StageError(
                f"timeout={timeout!r} is shorter than {SHORTEST:g} s: a rank that is well is heard "
                "of twice a second"
            )

    def _check_state(self) -> None:
        if not self.function:
            raise StageError(
                "has_state=True is for one function of the whole model, loss_fn(params, state, "
                "batch), cut into stages by fpipe.cut"
            )
        # The state goes through the microbatches in the order of each stage's forwards.
        latest: dict[int, Action] = {}
        for action in (a for row in self.schedule.actions for a in row if a.op == Op.F):
            before = latest.setdefault(action.stage, action)
            if action < before:
                raise StageError(
                    f"schedule {self.schedule.name} runs {action} after {before}: with "
                    "has_state=True every stage must run its forwards in the order of the "
                    "microbatches, in which the state goes through them"
                )
            latest[action.stage] = action

    def _check_group(self, group: dist.ProcessGroup) -> None:
        if self.devices is not None:
            raise StageError(
                "devices is for a pipeline in one process; with group or mesh each process "
                "computes on its own device (torch.cuda.set_device chooses it)"
            )
        if group.size() != self.schedule.num_ranks:
            raise StageError(
                f"the process group has {group.size()} processes, but the schedule "
                f"{self.schedule.name} has {self.schedule.num_ranks} ranks: start one process per "
                "rank, or make the schedule for this number of ranks"
            )
        try:
            dist.get_process_group_ranks(group)
        except KeyError:
            raise StageError(
                "the process group has been destroyed, by dist.destroy_process_group: pass one of "
                "those that there are now"
            ) from None

    @property
    def returns(self) -> Returns:
        """The declared results of the loss function."""
        return Returns(
            weighted=self.reduction == "weighted", state=self.has_state, aux=self.has_aux
        )

    @property
    def reads_key(self) -> bool:
        """Whether anything reads the key of a step."""
        return self.has_key or self.keyed or any(stage.reads_key for stage in self.stages)

    @property
    def takes(self) -> tuple[str, ...]:
        """The names of what a step takes, without a key."""
        vectors = ("vector" if v in ARGUMENTS else v for v in self.convention.vectors)
        return ("params", *("state",) * self.has_state, "batch", *vectors)

    @property
    def along(self) -> tuple[str, ...]:
        """For each argument but a state, which of `ARGUMENTS` it is or points along."""
        return (*ARGUMENTS, *self.convention.vectors)

    @property
    def stage_devices(self) -> tuple[torch.device, ...] | None:
        """The device of each stage, None to leave values where they lie."""
        if self.devices is None:
            return None
        return tuple(self.devices[rank] for rank in self.schedule.placement)

    @property
    def home(self) -> torch.device | None:
        """The device on which one function is recorded, that of its first stage.

        None where it is recorded on that of its arguments.
        """
        devices = self.stage_devices
        return devices[0] if self.function and devices is not None else None

    @property
    def device(self) -> torch.device:
        """Where this process makes what belongs to no stage alone, as a state."""
        return self.home or device_of(self.group)

    @property
    def copies_params(self) -> bool:
        """Whether parameters live on the CPU, and are copied to where stages compute."""
        return self.offload is not None and self.offload.copies

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names in `argnums`."""
        return (self.argnums,) if isinstance(self.argnums, str) else self.argnums

    def unwrap(self, values: tuple[Any, ...]) -> Any:
        """Unwrap the values for `wanted` to a single one if `argnums` is a string."""
        return values[0] if isinstance(self.argnums, str) else values

    def wrap(self, values: Any) -> Any:
        """A tuple with a value for each of `wanted`: the inverse of `unwrap`."""
        return (values,) if isinstance(self.argnums, str) else values

    @property
    def objective(self) -> Objective:
        """The objective for which the stages are differentiated."""
        return Objective(
            returns=self.returns,
            loss_shape=self.loss_shape,
            argnums=self.wanted,
            trainable=self.trainable,
            accum_dtype=self.accum_dtype,
            precision=self.precision,
            sink=self.sink,
        )

    @property
    def setup(self) -> dict[str, str]:
        """The settings on which all processes of a group must agree, as texts by name."""
        return {
            "schedule": repr((self.schedule.placement, self.schedule.actions)),
            "loss reduction": self.reduction,
            "has_aux": str(self.has_aux),
            "trainable": _named(self.trainable.choice),
            "readers of the key": repr(
                (self.has_key, self.keyed, [s.reads_key for s in self.stages])
            ),
            "has_state": str((self.has_state, self.convention is DEFERRED)),
            "remat policy": named(self.remat),
            "accum_dtype": str(self.accum_dtype),
            "mp_policy": str(self.precision),
            "offload_policy": str(self.offload is not None and self.offload.pins),
            "data": str(self.data),
            "reduce": "" if self.data is None else label_of(self.data.reduce),
            "in_dims": str(pytree.flatten(self.in_dims)),
            "transform": repr((self.loss_shape, self.loss_cotangent, self.sink.join, self.argnums)),
        }


def _named(choice: Any) -> str:
    """A choice of parameters, the same text in every process."""
    return label_of(choice) if callable(choice) else repr(choice)


def _check_schedule(schedule: Schedule, trainable: Trainable, *, function: bool) -> None:
    if not isinstance(schedule, Schedule):
        raise StageError(
            f"schedule={schedule!r:.60} is {a_type(schedule)}: make one with "
            "fpipe.schedules, such as fpipe.schedules.one_f_one_b(ranks=2, microbatches=4)"
        )
    try:
        verify(schedule)
    except ScheduleError as error:
        # It may leave out what nothing that is trained needs.
        requires = _requires(schedule, trainable, function=function)
        if requires is None:
            raise
        try:
            verify(schedule, requires)
        except ScheduleError as other:
            # Where everything is trained, the rule is that a whole one is wanted.
            usual = trainable.choice is None and requires != "F"
            raise (error if usual else other) from None


def _requires(
    schedule: Schedule, trainable: Trainable, *, function: bool
) -> str | Sequence[str] | None:
    """The least that an incomplete schedule owes, as `verify` takes it; None for everything.

    For one function the trace tells what it owes, and so where a function chooses the parameters: a
    plan of a step looks at that.
    """
    if all(action.op == Op.F for row in schedule.actions for action in row):
        return "F"  # `value` and `forward` can be run by it
    if callable(trainable.choice) or (function and trainable.choice is not None):
        return schedule.required_ops
    return None if function else trainable.requires(schedule.num_stages)


def _check_stages(schedule: Schedule, stages: Sequence[Stage]) -> None:
    if len(stages) != schedule.num_stages:
        raise StageError(
            f"stages has {len(stages)} functions, but the schedule {schedule.name} has "
            f"{schedule.num_stages} stages on {schedule.num_ranks} ranks: pass one function per "
            "stage, of all ranks in every process, or make the schedule for this number of stages"
        )
