"""`from_module`: a pipeline of a module that nobody had to edit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from fpipe.definition import Definition
from fpipe.divide.cuts import cut
from fpipe.errors import StageError, a_type, check_flags
from fpipe.modules.balancing import chosen
from fpipe.modules.module_buffers import real_buffers, refuse_elsewhere, refuse_missing
from fpipe.modules.module_loss import Loss, declared, with_buffers, with_cuts
from fpipe.modules.module_pipeline import ModulePipeline
from fpipe.modules.stage_shares import Balance
from fpipe.pieces.compiler import Compile
from fpipe.pieces.remat import Remat
from fpipe.placing import group_of, placed
from fpipe.schedule import Schedule
from fpipe.schedule.arguments import plain_integer

log = logging.getLogger("fpipe")


@_disable_dynamo  # torch.compile would go into it, and fail there
def from_module(
    module: nn.Module,
    *,
    schedule: Schedule,
    cuts: Sequence[str] | Balance | Callable[[Any], Any] | None = None,
    stages: int | None = None,
    example: Any = None,
    memory: float = inf,
    measure: bool = False,
    loss: Loss | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    is_compiling: bool = False,
    in_dims: Any = 0,
    out_dims: Any = 0,
    has_aux: bool = False,
    has_key: bool = False,
    has_state: bool = False,
    batch_norm: str = "microbatch",
    reduction: str = "mean",
    remat: Remat = "none",
    compile: Compile = True,
    accum_dtype: torch.dtype | None = None,
    devices: Sequence[torch.device | str | int] | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    timeout: float = 60.0,
) -> ModulePipeline:
    """Make a pipeline of a module as it is: any whose forward can be traced.

    ``step(params, batch)`` takes the dict of ``module.named_parameters()``, in which tied
    parameters come once, and as the batch the dict of the forward's keyword arguments. What the
    module itself holds is not changed; but while a new set of shapes is traced, which reads the
    module with abstract parameters in place of its own, no other thread may use it, as with
    `torch.func.functional_call`. Parameters that require no gradient at this call are frozen,
    as with ``trainable`` of `fpipe.pipeline`. Buffers are constants; a forward that changes them
    (batch norm in training mode) is refused, unless they are a state. The mode of the module, by
    ``module.train()`` and ``module.eval()``, its parts, the attributes of torch's own layers and of
    layers derived from them (but for tensors), and its buffers are those of the call; each
    combination is traced once. Other Python values that the forward or the loss reads, attributes
    of the user's own modules and what they close over, are those of the trace: pass what is to
    change in the batch.

    Args:
        module: its forward is traced on abstract tensors at the first step, once for each set of
            shapes. Its buffers must lie on the device of the parameters, or on the meta device, as
            all of it does when it was built under ``torch.device("meta")``: what it holds is not
            read then, and takes no memory.
        schedule: who does what in which order.
        cuts: names of submodules, as ``module.named_modules()`` gives them: a stage ends after
            each. One fewer than the schedule has stages. Values that other stages read later (the
            encoder's output, masks, positions) go straight to them. Or a `Balance`, which
            `fpipe.balance` chooses with more options than there are here; or `fpipe.cut` itself,
            of a module whose forward, or hooks of it, call that.
        stages: instead of `cuts`: so many stages, as many as the schedule has, of costs as even as
            can be. None for the schedule's number. `fpipe.balance` says how they are found; they
            are logged to ``fpipe`` at level INFO, and kept as `ModulePipeline.balance`.
        example: a batch, to choose cuts for; only its shapes count, unless times are measured.
        memory: bytes that a rank may hold, as for `fpipe.balance`.
        measure: balance measured times instead of counted costs. Over a process group the first
            rank measures, and the others take its cuts. Not with a mesh of several pipelines.
        loss: ``(output, batch) -> scalar``, of what the forward returns and the microbatch; None
            takes the output's own ``loss``, as Hugging Face models give it for ``labels``. Entries
            of the batch that the forward does not take are for `loss` alone.
        buffers: by the names of ``module.named_buffers()``, in place of the module's own. Those
            that lie on the meta device and are not given are made anew, as the module's
            ``_init_weights`` (of Hugging Face models) or ``reset_parameters`` makes them.
            `fpipe.load_buffers` reads those that a checkpoint has.
        is_compiling: what ``torch.compiler.is_compiling()`` says while the forward is traced. True
            makes Hugging Face models do without looks at data, such as whether a padding mask
            masks anything, that cannot be traced.
        in_dims: as for `fpipe.pipeline`, as are all arguments from here on.
        out_dims: how aux is merged.
        has_aux: `loss` returns ``(loss, aux)``, with logits or whatever else is to come back.
        has_key: ``step(params, batch, key)`` takes a key, from which all that the forward draws is
            drawn: dropout in ``module.train()``, and `torch.rand` and the like. The n-th op that
            draws gets ``fold_in(fold_in(key, m), n)`` for microbatch `m`, so the numbers depend
            neither on the schedule nor on the cuts; `fpipe.nn.keyed` draws them without a
            pipeline. Without it they come from torch's generator, and are never drawn twice.
        has_state: ``step(params, state, batch)`` takes buffers and returns them as the forward
            has left them: ``fpipe.nn.state_of(module)``, or a part of it; the other buffers are
            constants. Those that do not change may be read in any stage.
        batch_norm: ``"deferred"`` for running statistics of the whole batch.
        reduction: with ``"mean"`` the loss must be the mean over the rows of the microbatch.
        remat: which values the backward may read, of all stages or of each.
        compile: how graphs are made callable.
        accum_dtype: dtype of the sums of gradients.
        devices: the device of each rank, in this process. Buffers must lie on that of the first
            stage, on which the forward is traced; parameters may lie anywhere, and `Pipeline.place`
            puts them where they are read.
        group: a process group with one process per rank.
        mesh: instead of `group`, a mesh with a dimension ``"pp"``.
        timeout: seconds of silence after which a rank is given up.

    Returns:
        A `ModulePipeline`: a `Pipeline` with ``load_into(module, params)``.

    Raises:
        ScheduleError: the schedule cannot run.
        StageError: an argument is wrong, there is not one cut between each two stages, none can be
            chosen, or a buffer has no data and cannot be made.
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

        Cuts may be left to fpipe, which then wants to know what a batch looks like:

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
    check_flags(measure=measure, is_compiling=is_compiling, has_key=has_key)
    if measure and mesh is not None and group is not None and mesh.size() > group.size():
        raise StageError(
            f"measure=True with a mesh of {mesh.size()} processes, in which a pipeline has "
            f"{group.size()}: each pipeline would choose cuts by times of its own, and then their "
            "gradients lie on other ranks; let one process choose, fpipe.balance(..., "
            "measure=True), broadcast its cuts, and pass those"
        )
    definition = declared(
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
        devices=placed(devices),
        group=group,
        timeout=timeout,
    )

    @cache
    def finished() -> Definition:
        # What may be wrong on this rank alone: where times are measured, the others hear of it.
        made = real_buffers(module, buffers, definition.device)
        if not has_state:  # which of them a state has is known when there is one
            refuse_missing(module, made)
            if definition.home is not None:
                refuse_elsewhere(module, made, definition.home)
        if cuts is None:
            _check_stages(stages, example, schedule)
        return with_buffers(definition, made)

    balance = cuts if isinstance(cuts, Balance) else None
    if cuts is None:
        balance = chosen(definition, example, memory=memory, measure=measure, finished=finished)
        log.info("chose the cuts of %s:\n%s", type(module).__name__, balance)
    elif stages is not None or example is not None or memory != inf or measure:
        raise StageError(
            f"cuts={cuts!r:.60} is given beside stages, example, memory or measure, by which cuts "
            "are chosen: give the cuts, or let them be chosen"
        )
    own = cuts is cut  # the function: its calls are the cuts
    names: Any = None if own else cuts if balance is None else balance.cuts
    return ModulePipeline(with_cuts(finished(), names), balance)


def _check_stages(stages: int | None, example: Any, schedule: Schedule) -> None:
    """Refuse to choose cuts without what that takes.

    Raises:
        StageError: `example` is missing, or `stages` is not the schedule's number.
    """
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
