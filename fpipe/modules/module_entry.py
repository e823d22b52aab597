"""`from_module`: make a pipeline of a module without editing it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from fpipe.divide.cuts import cut
from fpipe.errors import StageError, a_type, check_flags
from fpipe.live_line import working
from fpipe.modules.balancing import choose_cuts
from fpipe.modules.module_buffers import real_buffers, refuse_elsewhere, refuse_missing
from fpipe.modules.module_loss import Loss, definition_of, with_buffers, with_cuts
from fpipe.modules.module_pipeline import ModulePipeline
from fpipe.modules.stage_shares import Balance
from fpipe.pieces.backends import Compile
from fpipe.pieces.partition import Remat
from fpipe.schedule import Schedule
from fpipe.schedule.arguments import plain_integer
from fpipe.spec.data import Reduce, read_data
from fpipe.spec.definition import Definition
from fpipe.spec.placing import devices_of_ranks, group_of, placed
from fpipe.spec.policies import read_offload, read_policy

if TYPE_CHECKING:  # to import it takes a tenth of a second
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

log = logging.getLogger("fpipe")


@_disable_dynamo  # torch.compile would go into it, and fail there
def from_module(
    module: nn.Module,
    *,
    schedule: Schedule,
    # How the module is split into stages.
    cuts: Sequence[str] | Balance | Callable[[Any], Any] | None = None,
    stages: int | None = None,
    example: Any = None,
    memory: float = inf,
    measure: bool = False,
    # The arguments and results of a step.
    loss: Loss | None = None,
    reduction: str = "mean",
    in_dims: Any = 0,
    out_dims: Any = 0,
    has_aux: bool = False,
    has_key: bool = False,
    has_state: bool = False,
    batch_norm: str = "microbatch",
    buffers: Mapping[str, Tensor] | None = None,
    # How the stages are traced and compiled.
    is_compiling: bool | None = None,
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
) -> ModulePipeline:
    """Make a pipeline of a module as it is: any whose forward can be traced.

    ``step(params, batch)`` takes two dicts of tensors: the parameters, by the names of
    ``module.named_parameters()``, in which tied parameters come once, and the keyword arguments of
    the forward. It returns the loss and the gradients, by the same names. It computes with `params`
    and leaves the module as it was.

    A trace reads the module, with abstract parameters in place of its own, once for each set of
    shapes; meanwhile no other thread may use the module, as with `torch.func.functional_call`. A
    step follows these changes of the module, by a new trace where it takes one: its mode and the
    modes of its submodules (``module.train()``, ``module.eval()``), its submodules, hooks and
    buffers, and the attributes of torch's own layers and of layers derived from them, tensors
    excepted. All else is as it was at the trace: attributes of the user's own modules, what the
    loss closes over. Pass what is to change in the batch.

    Parameters that require no gradient when this function is called are frozen, as with
    ``trainable`` of `fpipe.pipeline`. Buffers are constants, and a forward that writes to them
    (batch norm in training mode) is refused, unless ``has_state=True``.

    Args:
        module: its buffers must lie on the device of the parameters, or on the meta device, where
            the whole module lies if it was built under ``torch.device("meta")``: its parameters
            are never read then, and take no memory.
        schedule: the actions of each rank in their order; its number of microbatches is how many
            parts a batch is split into. The arguments that follow say how the module is split into
            stages (`cuts` or `stages`, `example`, `memory`, `measure`), what a step takes and
            returns (`loss` to `buffers`), how stages are traced and compiled (`is_compiling` to
            `mp_policy`), and where they run (`devices`, or `group`, or `mesh`).
        cuts: names of submodules, as ``module.named_modules()`` gives them: a stage ends after
            each, so there is one name fewer than the schedule has stages. Values that later stages
            read (the encoder's output, masks, positions) go straight to them. Or a `Balance`, which
            `fpipe.balance` makes, with more options than there are here. Or `fpipe.cut` itself, for
            a module whose forward, or hooks of it, call that.
        stages: instead of `cuts`: choose the cuts, for this number of stages, which must be the
            schedule's, with costs as even as possible. None for the schedule's number.
            `fpipe.balance` says how cuts are chosen; they are logged to ``fpipe`` at level INFO,
            and kept as `ModulePipeline.balance`.
        example: a batch to choose cuts for, of any dtypes that the forward takes; only its shapes
            count, and it may lie on the meta device, unless times are measured.
        memory: bytes that a rank may hold, as for `fpipe.balance`.
        measure: balance measured times instead of counted costs. Over a process group the first
            rank measures, and the others take its cuts. Not with a mesh of several pipelines.
        loss: ``(output, microbatch) -> scalar``, a floating-point tensor of no dimensions; `output`
            is what the forward returns. Entries of the batch that the forward does not take are for
            `loss` alone. None takes ``output.loss`` or ``output["loss"]``, as Hugging Face models
            return it for ``labels``: a mean over labels, of which those of -100 do not count, is
            that of the whole batch, however they are spread over its rows.
        reduction: with ``"mean"``, the loss must be the mean over the rows of the microbatch, and
            the batch's loss is the mean over all its rows; otherwise as for `fpipe.pipeline`, as
            are the following arguments where nothing else is said.
        in_dims: the dimension along which each entry of the batch is split, or None for an entry
            that every microbatch gets whole: one for all, or a dict.
        out_dims: the dimension along which the aux of the microbatches is concatenated.
        has_aux: `loss` returns ``(loss, aux)``, with logits or whatever else is to come back.
        has_key: ``step(params, batch, key)`` takes a key, from which all that the forward draws is
            drawn: dropout in ``module.train()``, and `torch.rand` and the like. The n-th op that
            draws gets ``fold_in(fold_in(key, m), n)`` for microbatch `m`, so the numbers depend
            neither on the schedule nor on the cuts; `fpipe.nn.keyed` draws them without a
            pipeline. Without a key they come from torch's generator, and are never drawn twice.
        has_state: ``step(params, state, batch)`` takes buffers and returns them as the forward
            has left them: ``fpipe.nn.state_of(module)``, or some of its entries; the other buffers
            are constants. Buffers that do not change may be read in any stage.
        batch_norm: ``"deferred"`` for running statistics of the whole batch.
        buffers: tensors of the buffers' shapes, by the names of ``module.named_buffers()``, in
            place of the module's own. Buffers on the meta device that are not given are made anew,
            as the module's ``_init_weights`` (of Hugging Face models) or ``reset_parameters`` makes
            them. `fpipe.load_buffers` reads those that a checkpoint has.
        is_compiling: the value of ``torch.compiler.is_compiling()`` while the forward is traced.
            With True, Hugging Face models do not look at data, such as whether a padding mask masks
            anything, which cannot be traced. None for True where a trace without it looks at data.
        remat: which values the backward may read, in all stages or in each: ``"none"`` keeps all,
            ``"full"`` computes them again.
        compile: how graphs are made callable: True for Inductor, False for eager.
        accum_dtype: dtype of the sums of gradients over microbatches, None for each parameter's.
        mp_policy: in which dtypes to compute, as for `fpipe.pipeline`: the forward gets parameters
            and floating-point arguments in ``param_dtype``, and `loss` what the forward returns
            in ``output_dtype``. Buffers stay as they are.
        devices: the device of each rank, in this process. Buffers must lie on the device of the
            first stage, on which the forward is traced; parameters may lie anywhere, and
            `Pipeline.place` puts them where they are read.
        offload_policy: a ``CPUOffloadPolicy`` keeps parameters and gradients on the CPU.
        group: a process group with one process per rank of the schedule.
        mesh: instead of `group`, a mesh with a dimension ``"pp"``.
        data: the dimension of `mesh` that holds replicas, or two for hybrid sharding.
        replica_state: how replicas agree on a state, ``"mean"`` or ``"first"``.
        bucket_bytes: the most bytes that one collective of `data` moves.
        reduce: what adds up gradients over replicas, ``(bucket, group) -> bucket``.
        timeout: seconds of silence after which a rank is given up.

    Returns:
        A `ModulePipeline`: a `Pipeline` with ``load_into(module, params)``, ``init_state`` and
        ``load_state``.

    Raises:
        ScheduleError: the schedule cannot run.
        StageError: an argument is wrong, the number of cuts is not one less than that of stages, no
            cuts can be chosen, or a buffer has no data and cannot be made.
        PipelineError: over a process group, the first rank cannot measure, or another cannot make
            its pipeline meanwhile.

    Example:
        >>> import torch, fpipe
        >>> module = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
        >>> pipe = fpipe.from_module(
        ...     module,
        ...     schedule=fpipe.schedules.zbv(ranks=2, microbatches=4),
        ...     cuts=["0", "1", "2"],
        ...     loss=lambda output, batch: output.square().mean(),
        ...     compile=False,
        ... )
        >>> params = {name: p.detach() for name, p in module.named_parameters()}
        >>> loss, grads = pipe.step(params, {"input": torch.ones(8, 3)})
        >>> torch.allclose(loss, module(torch.ones(8, 3)).square().mean()), len(grads)
        (True, 8)
        >>> pipe.load_into(module, {name: params[name] - 0.1 * grads[name] for name in params})

        Without `cuts` they are chosen, for batches like an example:

        >>> fpipe.from_module(
        ...     module,
        ...     schedule=fpipe.schedules.zb_h1(ranks=2, microbatches=4),
        ...     stages=2,
        ...     example={"input": torch.ones(8, 3)},
        ...     loss=lambda output, batch: output.square().mean(),
        ... ).cuts
        ('1',)
    """
    group = group_of(group, mesh, schedule)
    check_flags(measure=measure, has_key=has_key)
    if measure and mesh is not None and group is not None and mesh.size() > group.size():
        raise StageError(
            f"measure=True with a mesh of {mesh.size()} processes, in which a pipeline has "
            f"{group.size()}: each pipeline would choose cuts by times of its own, and then their "
            "gradients lie on other ranks; let one process choose, fpipe.balance(..., "
            "measure=True), broadcast its cuts, and pass those"
        )
    precision, places = read_policy(mp_policy, accum_dtype), placed(devices)
    uncut = definition_of(
        module,
        loss,
        schedule,
        in_dims=in_dims,
        out_dims=out_dims,
        has_aux=has_aux,
        keyed=has_key,
        has_state=has_state,
        batch_norm=batch_norm,
        is_compiling=is_compiling,
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

    @cache
    def with_real_buffers() -> Definition:
        # This may fail on one rank alone: where times are measured, the others hear of it.
        numbers = real_buffers(module, buffers, uncut.device)
        if not has_state:  # a state says which buffers it has when there is one
            refuse_missing(module, numbers)
            if uncut.home is not None:
                refuse_elsewhere(module, numbers, uncut.home)
        if cuts is None:
            _check_stages(stages, example, schedule)
        return with_buffers(uncut, numbers)

    balance = cuts if isinstance(cuts, Balance) else None
    if cuts is None:
        with working("choosing cuts"):
            balance = choose_cuts(
                uncut, example, memory=memory, measure=measure, complete=with_real_buffers
            )
        log.info("chose the cuts of %s:\n%s", type(module).__name__, balance)
    elif stages is not None or example is not None or memory != inf or measure:
        raise StageError(
            f"cuts={cuts!r:.60} is given beside stages, example, memory or measure, by which cuts "
            "are chosen: give the cuts, or let them be chosen"
        )
    calls_cut = cuts is cut  # the forward itself calls fpipe.cut
    names: Any = None if calls_cut else cuts if balance is None else balance.cuts
    return ModulePipeline(with_cuts(with_real_buffers(), names), balance)


def _check_stages(stages: int | None, example: Any, schedule: Schedule) -> None:
    """Refuse to choose cuts without an example, or for another number of stages."""
    if stages is not None and (plain_integer(stages) is None or isinstance(stages, bool)):
        raise StageError(
            f"stages={stages!r:.60} is {a_type(stages)}: it must be an integer, "
            f"{schedule.num_stages} for the schedule {schedule.name}; or leave it out"
        )
    if stages is not None and stages != schedule.num_stages:
        raise StageError(
            f"stages={stages!r:.60}, but the schedule {schedule.name} has {schedule.num_stages} on "
            f"{schedule.num_ranks} ranks: leave stages out, or make the schedule for this number"
        )
    if example is None:
        raise StageError(
            "cuts and example are both missing: name the submodules after which a stage ends, "
            'cuts=["model.layers.4"], give a batch, example=batch, for which cuts are chosen, or '
            "pass cuts=fpipe.cut where the forward calls that"
        )
