"""`fpipe.pipeline`: what a user writes down, as a definition, which checks the arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fpipe.errors import StageError, a_type
from fpipe.pieces.backends import Compile
from fpipe.pieces.partition import Remat
from fpipe.pipelines import Pipeline
from fpipe.schedule import Schedule
from fpipe.spec.convention import called
from fpipe.spec.data import Reduce, read_data
from fpipe.spec.definition import Definition
from fpipe.spec.objective import Trainable
from fpipe.spec.placing import devices_of_ranks, group_of, placed
from fpipe.spec.policies import cast_function, cast_stages, read_offload, read_policy
from fpipe.spec.user_functions import Stage

if TYPE_CHECKING:  # to import it takes a tenth of a second
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy


def pipeline(
    stages: Sequence[Callable[..., Any] | Stage] | Callable[..., Any],
    loss: Callable[[Any, Any], Any] | None = None,
    schedule: Schedule | None = None,
    *,
    # The arguments and results of a step.
    in_dims: Any = 0,
    out_dims: Any = 0,
    has_aux: bool = False,
    has_key: bool = False,
    has_state: bool = False,
    batch_norm: str = "microbatch",
    trainable: Any = None,
    reduction: str = "mean",
    # How the stages are traced and compiled.
    remat: Remat = "none",
    compile: Compile = True,
    accum_dtype: torch.dtype | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    # Where the stages run.
    devices: Sequence[torch.device | str | int] | None = None,
    offload_policy: OffloadPolicy | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    data: str | Sequence[str] | None = None,
    replica_state: str = "mean",
    bucket_bytes: int | None = None,
    reduce: Reduce | None = None,
    timeout: float = 60.0,
) -> Pipeline:
    """Make a pipeline of stage functions, in this process or over a process group.

    Without `group` and `mesh` this process drives all ranks. With one of them every process of the
    group makes the same pipeline and drives its own rank: it passes the parameters of its own
    stages (`Pipeline.local` keeps those) and gets their gradients; the loss comes back everywhere.

    Args:
        stages: one function ``(params, x) -> y`` per stage of `schedule`, or `fpipe.Stage`. Pytrees
            of tensors in and out; stage 0 gets the microbatch as ``x``. Or one function
            ``loss_fn(params, batch) -> scalar`` of the whole model that executes `fpipe.cut`
            between stages; `params` is then one pytree of its own structure, whose leaves any
            stage may read, and there is no `loss`.
        loss: ``(y, microbatch) -> scalar``, of the last stage's output. With ``reduction="mean"``
            it must be the mean over the rows of the microbatch. It returns more where `has_aux` or
            `reduction` declare it.
        schedule: who does what in which order; its number of microbatches is how many parts each
            batch is split into.
        in_dims: pytree prefix of the batch: the dimension that is split, or None for a leaf that
            every microbatch gets whole, as in `torch.func.vmap`. Microbatches that the caller has
            split, `fpipe.Microbatches`, have their rows along that dimension.
        out_dims: pytree prefix of aux: the dimension along which the leaves of the microbatches are
            concatenated, None to keep the last microbatch's leaf, or `fpipe.Microbatches` to leave
            them apart. A leaf without dimensions has none to concatenate along: those of the
            microbatches are stacked, with one entry each. The same for the output of
            `Pipeline.forward`.
        has_aux: the loss function returns ``(loss, aux)``: aux is any pytree of tensors, made in
            any stage. It comes back beside loss and gradients, and no gradient flows from it.
        has_key: one function is ``loss_fn(params, batch, key)``, called with the keyword argument
            ``key``, which is ``fpipe.random.fold_in(key, m)`` for microbatch `m`. Each stage says
            for itself whether it reads a key: ``fpipe.Stage(fn, reads_key=True)``.
        has_state: the function is ``loss_fn(params, state, batch)`` and returns the new state after
            the loss, ``(loss, state)`` or ``(loss, state, aux)``; ``step``, ``value`` and
            ``forward`` take the state after the parameters. A state is any pytree of tensors, such
            as running statistics: each microbatch begins with what the one before has left, and no
            gradient flows through it. A leaf must be read and brought up to date in one stage, and
            a stage's forwards must run in the order of the microbatches, as they do in all families
            of `fpipe.schedules`: so the state is the same on every schedule, remat policy and
            transport.
        batch_norm: when the running statistics in a state, `fpipe.nn.BatchStats`, take in those of
            the data. ``"microbatch"``: at each microbatch, as layers do that know of no
            microbatches. ``"deferred"``: at the end of the step, those of the whole batch at once,
            so that they are what they would be without microbatches (torchgpipe,
            arXiv 2004.09910). In both each microbatch is normalised by its own.
        trainable: which parameters get a gradient; None for all. A pytree prefix of bools over the
            parameters, ``[False, {"w": False, "lora": True}]``, or a function of the path of a
            leaf, a tuple of keys and indices: ``lambda path: "lora" in path``. The gradients of the
            others are None, and nothing is computed, kept or sent for them: stages before the
            first that is trained run no backward, and `schedule` may leave theirs out.
        reduction: how the losses of microbatches make the batch's. ``"mean"`` weighs them by their
            rows; ``"sum"`` adds them. With ``"weighted"`` the loss function returns
            ``(sum, weight)`` in place of the loss, and the loss is the sum of all sums divided by
            the sum of all weights, exactly, however the weight (such as a number of tokens) is
            spread over the microbatches. A weight is one real number, and a constant to the
            derivative: it should not depend on the parameters.
        remat: ``"none"`` keeps what the backward reads; ``"full"`` keeps each stage's inputs and
            computes the rest again; ``"except_last"`` is full but for the last microbatch of each
            stage; a callable decides for each traced forward node whether its value may be kept;
            a list has one of these for each stage.
            The inside of a call of `torch.utils.checkpoint` is computed again in any case, call
            by call, and saved where selective checkpointing says so. A value that depends
            on parameters alone is computed once a step, and kept for it. The result never depends
            on any of it.
        compile: True for Inductor; False to run the traced graphs uncompiled; a mapping with
            ``backend``, ``mode`` and ``options`` as for `torch.compile`, or a backend's name.
            Layers that are alike within a stage are compiled once, unless the mapping has
            ``"regions": False``, by which each piece of a stage is compiled whole. Or a
            callable from a graph module and example inputs to a boxed callable, which takes its
            inputs in a list and may empty it; its outputs must have the strides that the graph's
            have.
        accum_dtype: dtype in which gradients are summed over microbatches, None for that of each
            parameter, but for float8, in which torch sums nothing; it is no narrower than that.
            Gradients are returned in the parameters' dtypes.
        mp_policy: in which dtypes to compute, as a ``torch.distributed.fsdp.MixedPrecisionPolicy``
            says: the way to compute in bfloat16 with float32 parameters. They are cast to
            ``param_dtype`` once a step (with `data`, before they are gathered), and so are
            floating-point values that stages get and pass on, unless ``cast_forward_inputs`` is
            False; what the last stage returns is cast to ``output_dtype`` before the loss.
            Gradients are added up in ``reduce_dtype``, over microbatches and replicas, and come
            back in the parameters' dtypes. For one function all of the batch is cast, and there is
            no ``output_dtype``. Not beside `accum_dtype`.
        devices: the device of each rank, on which the parameters of its stages must lie;
            `Pipeline.place` puts them there. One function is recorded on the device of its first
            stage, where what it closes over must lie, and computes on all of them, which are of
            one type; its parameters may lie anywhere, and are copied in every step where they are
            read on another device. A gradient lies where its parameter does. None leaves everything
            on the device that it is on. Not with `group` or `mesh`.
        offload_policy: a ``torch.distributed.fsdp.CPUOffloadPolicy`` keeps parameters and gradients
            on the CPU, page-locked unless it says otherwise: `Pipeline.place`, `init`, `load` and
            `shard` put them there. A step copies parameters to the device that reads them, those
            that replicas hold parts of for each gather anew, and gradients back when they are
            whole, on a stream of their own; an optimizer's step of them is made on the CPU. Where
            ranks compute on the CPU it changes nothing. In one process it takes `devices`. The
            state and the batch stay where they are.
        group: a process group with one process per rank of the schedule (gloo or NCCL), such as
            ``torch.distributed.group.WORLD``.
        mesh: instead of `group`, a `DeviceMesh` whose dimension ``"pp"`` is the pipeline.
        data: the dimension of `mesh` over which the rows of a batch are divided: each index of it
            is a replica, which passes its own rows. Loss and gradients are those of all rows of all
            replicas. Parameters are plain tensors, alike on all replicas (`Pipeline.replicate`), or
            divided over them (`Pipeline.shard`); gradients are placed as they are. Two dimensions,
            ``("replicate", "shard")``, for hybrid sharding. When parameters are gathered and
            gradients reduced, the schedule says (`Schedule.sharded`).
        replica_state: with `data` and `has_state`: every replica gets the ``"mean"`` of the states
            of all, or that of the ``"first"``. Leaves of integers are the first's in both.
        bucket_bytes: with `data`, the most bytes that one collective moves, unless one leaf has
            more; None for one per stage and dtype.
        reduce: with `data`, what adds up gradients over replicas in place of torch, as a
            communication hook of DDP does: ``(bucket, group) -> bucket``, pure. A bucket is one
            flat tensor of sums, and what is returned their sum over the process group, in its shape
            and dtype. For divided parameters a bucket has a row for each replica, and the row of
            this one is returned. In place of the sum it may return something whose ``wait()``
            returns it, such as a ``torch.futures.Future``: the rank goes on until it needs the sum.
            `fpipe.reductions` has one.
        timeout: with a group, seconds after which a rank that does not respond is given up. A rank
            that computes or compiles responds.

    Returns:
        A `Pipeline`, with ``step``, ``value`` and ``forward``.

    Raises:
        ScheduleError: the schedule cannot run.
        StageError: an argument is wrong, or there is not one stage for each of the schedule's.

    Example:
        >>> import torch, fpipe
        >>> stage = lambda w, x: torch.tanh(x["x"] @ w) if isinstance(x, dict) else x @ w
        >>> loss = lambda y, microbatch: (y - microbatch["y"]).square().mean()
        >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=4)
        >>> pipe = fpipe.pipeline([stage, stage], loss, schedule, compile=False)
        >>> params = [torch.eye(3), torch.ones(3, 1)]
        >>> value, grads = pipe.step(params, {"x": torch.zeros(8, 3), "y": torch.ones(8, 1)})
        >>> value.item(), [tuple(g.shape) for g in grads]
        (1.0, [(3, 3), (3, 1)])
    """
    whole = callable(stages) and not isinstance(stages, Stage)
    chosen_loss: Any = _whole_loss(stages, loss) if whole else _stage_loss(stages, loss)
    chosen_schedule: Any = schedule
    precision = read_policy(mp_policy, accum_dtype)
    if whole:
        chosen_loss = cast_function(chosen_loss, precision)
    group, places = group_of(group, mesh, schedule), placed(devices)
    definition = Definition(
        stages=() if whole else cast_stages(_stages_of(stages), precision),
        loss=chosen_loss,
        function=whole,
        schedule=chosen_schedule,
        in_dims=in_dims,
        out_dims=out_dims,
        has_aux=has_aux,
        has_key=has_key,
        has_state=has_state,
        convention=called(has_state is True, batch_norm),
        trainable=Trainable(trainable),
        reduction=reduction,
        remat=remat,
        compile=compile,
        accum_dtype=accum_dtype,
        precision=precision,
        devices=places,
        offload=read_offload(offload_policy, devices_of_ranks(places, group)),
        group=group,
        data=read_data(
            data,
            mesh,
            state=replica_state,
            bucket_bytes=bucket_bytes,
            precision=precision,
            reduce=reduce,
        ),
        timeout=timeout,
    )
    if definition.reduction == "weighted":
        definition = replace(definition, loss=definition.returns.wrap(definition.loss))
    return Pipeline(definition)


def _stages_of(stages: Any) -> tuple[Stage, ...]:
    """Functions as stages."""
    if not isinstance(stages, Sequence):
        raise StageError(
            f"stages={stages!r:.60} is {a_type(stages)}: it must be a list or tuple with "
            "one function per stage of the schedule"
        )
    for index, stage in enumerate(stages):
        if stage is None:
            raise StageError(
                f"stages[{index}] is None: every rank passes the functions of all stages, and "
                "leaves out no more than the parameters of those that it does not run (pipe.local)"
            )
    return tuple(stage if isinstance(stage, Stage) else Stage(stage) for stage in stages)


def _stage_loss(stages: Any, loss: Any) -> Any:
    """The loss of a pipeline that is made of stage functions."""
    if isinstance(loss, Schedule):
        raise StageError(
            f"loss={loss!r:.60} is a Schedule: after the stages comes the loss, a function "
            "(y, microbatch) -> scalar, and then the schedule"
        )
    if loss is None and isinstance(stages, Sequence) and len(stages) == 1:
        raise StageError(
            "loss=None beside one stage: give a function (y, microbatch) -> scalar; one function "
            "of the whole model, which returns the loss itself, is passed without a list"
        )
    return loss


def _whole_loss(function: Any, loss: Any) -> Any:
    """The loss of a pipeline that is made of one function."""
    if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
        raise StageError(
            f"stages is {a_type(function)}, a module with parameters: fpipe.from_module("
            "module, schedule=…, cuts=[…], loss=…) makes a pipeline of it; fpipe.pipeline takes "
            "functions of parameters"
        )
    if isinstance(loss, Schedule):
        raise StageError(
            f"loss={loss!r:.60}, the second argument, is the schedule: of one function, which "
            "returns the loss itself, pass it by name, schedule=…"
        )
    if loss is not None:
        raise StageError(
            f"loss={loss!r:.60} is given beside one function of the whole model, which returns the "
            "loss itself: leave loss out, or pass a list of stages"
        )
    return function
