"""`from_module`: a pipeline of a module that nobody had to edit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from inspect import unwrap
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree
from fpipe.checkpoint.loading import Naming
from fpipe.controller.agreement import connected
from fpipe.definition import Definition, group_of
from fpipe.engine import Pipeline
from fpipe.errors import BatchError, PipelineError, StageError
from fpipe.modules.balancing import Balance, chosen
from fpipe.modules.buffers import real_buffers, refuse_missing
from fpipe.modules.loss import Loss, ModuleLoss, check_state, declared, with_buffers, with_cuts
from fpipe.nn import buffers_of
from fpipe.runtime.connect import device_of
from fpipe.schedule import Schedule
from fpipe.stage.compiler import Compile
from fpipe.stage.remat import Remat

log = logging.getLogger("fpipe")


class ModulePipeline(Pipeline):
    """A pipeline of a module; `from_module` makes one.

    Attributes:
        module: as it was given; training reads neither its parameters nor changes them.
        cuts: the submodules after which a stage ends.
        balance: how they were chosen, to be printed; None if they were named.
    """

    def __init__(self, definition: Definition, balance: Balance | None = None) -> None:
        # Beneath the functions that transforms have made of it.
        whole, schedule = unwrap(definition.loss), definition.schedule
        assert isinstance(whole, ModuleLoss)
        if schedule.num_stages != len(whole.cuts) + 1:
            raise StageError(
                f"cuts has {len(whole.cuts)} names, which make {len(whole.cuts) + 1} stages, but "
                f"the schedule {schedule.name} has {schedule.num_stages}: name one submodule "
                "between each two stages"
            )
        super().__init__(definition)
        self.module = whole.module
        self.cuts = whole.cuts
        self.balance = balance

    def _shapes(self, shapes: Any) -> Any:
        return dict(self.module.named_parameters()) if shapes is None else shapes

    def _naming(self) -> Naming:
        first: dict[int, str] = {}
        aliases: dict[str, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if first.setdefault(id(parameter), name) != name:
                aliases.setdefault(first[id(parameter)], []).append(name)
        return Naming(
            aliases,
            frozenset(name for name, _ in self.module.named_buffers(remove_duplicate=False)),
        )

    def load_into(
        self,
        module: nn.Module,
        params: Mapping[str, Tensor],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy parameters into a module, in place: to evaluate it, to save it, to go on without.

        Over a process group every rank calls it, and gets all parameters: each from the first rank
        that reads it in a step, which is the one that has trained it.

        Args:
            module: of the same parameters as the pipeline's, or that one itself.
            params: as for `step`.
            state: as for `step`; None leaves the module's buffers as they are.

        Raises:
            BatchError: the names or shapes differ; nothing has been copied then.
            PipelineError: over a process group, they differ on another rank.
        """
        problem = _misfit(module, params, state)
        if self.add_up(problem is not None):
            raise problem or PipelineError(
                "another rank cannot load its parameters, so nothing was copied on any: it says why"
            )
        self.together("pipe.load_into", lambda _: self._copy(module, params, state or {}))

    def _copy(
        self, module: nn.Module, params: Mapping[str, Tensor], state: Mapping[str, Any]
    ) -> None:
        """Copy what fits; over a process group all ranks do so at once."""
        group = self.definition.group
        # The order of the leaves: that in which trees are flattened, the same on all ranks.
        readers = self.readers()
        names = [path[0] for path in tree.structure(params).paths()]
        own = dict(module.named_parameters())
        with torch.no_grad():
            for leaf, name in enumerate(names):
                value = params[name]
                if group is not None and (0, leaf) in readers:
                    value = _received(value, own[name], readers[0, leaf][0], group)
                own[name].copy_(value)
            # Every rank gets the whole state of a step.
            buffers = dict(module.named_buffers())
            for name, value in buffers_of(state).items():
                buffers[name].copy_(value)


def _received(value: Tensor, like: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """The value on rank `source` of the group."""
    device = device_of(group)
    if group.rank() == source:
        sent = value.detach().to(device).contiguous()
    else:
        sent = torch.empty(like.shape, dtype=value.dtype, device=device)
    connected(lambda: dist.broadcast(sent, group_src=source, group=group))
    return sent


def _misfit(module: nn.Module, params: Mapping[str, Tensor], state: Any) -> BatchError | None:
    """Why `params` and `state` cannot be copied into `module`."""
    own = dict(module.named_parameters())
    if own.keys() != params.keys():
        odd = sorted(own.keys() ^ params.keys())
        return BatchError(
            f"params and {type(module).__name__} differ in {len(odd)} names, such as "
            f"{odd[0]!r}: load into a module with the parameters of the pipeline's"
        )
    for name, tensor in (*own.items(), *(module.named_buffers() if state else ())):
        if tensor.is_meta:
            return BatchError(
                f"{name!r} of {type(module).__name__} lies on the meta device, to which nothing "
                "can be copied: call module.to_empty(device=...) first"
            )
    for name, parameter in own.items():
        if parameter.shape != params[name].shape:
            return BatchError(
                f"params[{name!r}] has shape {tuple(params[name].shape)}, but that of "
                f"{type(module).__name__} has {tuple(parameter.shape)}: load into a module of "
                "the same configuration"
            )
    try:
        check_state(module, {} if state is None else state)
    except BatchError as error:
        return error
    return None


def from_module(
    module: nn.Module,
    *,
    schedule: Schedule,
    cuts: Sequence[str] | Balance | None = None,
    stages: int | None = None,
    example: Any = None,
    memory: float = inf,
    measure: bool = False,
    loss: Loss | None = None,
    buffers: Mapping[str, Tensor] | None = None,
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
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    timeout: float = 60.0,
) -> ModulePipeline:
    """Make a pipeline of a module as it is: any whose forward can be traced.

    ``step(params, batch)`` takes the dict of ``module.named_parameters()``, in which tied
    parameters come once, and as the batch the dict of the forward's keyword arguments. What the
    module itself holds is not changed. Parameters that require no gradient at this call are frozen,
    as with ``trainable`` of `fpipe.pipeline`. Buffers are constants; a forward that changes them
    (batch norm in training mode) is refused, unless they are a state. Call ``module.eval()`` or
    leave ``module.train()`` before: the mode is that of the time of tracing.

    Args:
        module: its forward is traced on abstract tensors at the first step, once for each set of
            shapes. Its buffers must lie on the device of the parameters, or on the meta device, as
            all of it does when it was built under ``torch.device("meta")``: what it holds is not
            read then, and takes no memory.
        schedule: who does what in which order.
        cuts: names of submodules, as ``module.named_modules()`` gives them: a stage ends after
            each. One fewer than the schedule has stages. Values that other stages read later (the
            encoder's output, masks, positions) go straight to them. Or a `Balance`, which
            `fpipe.balance` chooses with more options than there are here.
        stages: instead of `cuts`: so many stages, as many as the schedule has, of costs as even as
            can be. None for the schedule's number. `fpipe.balance` says how they are found; they
            are logged to ``fpipe`` at level INFO, and kept as `ModulePipeline.balance`.
        example: a batch, to choose cuts for; only its shapes count, unless times are measured.
        memory: bytes that a rank may hold, as for `fpipe.balance`.
        measure: balance measured times instead of counted costs. Over a process group the first
            rank measures, and the others take its cuts.
        loss: ``(output, batch) -> scalar``, of what the forward returns and the microbatch; None
            takes the output's own ``loss``, as Hugging Face models give it for ``labels``. Entries
            of the batch that the forward does not take are for `loss` alone.
        buffers: by the names of ``module.named_buffers()``, in place of the module's own. Those
            that lie on the meta device and are not given are made anew, as the module's
            ``_init_weights`` (of Hugging Face models) or ``reset_parameters`` makes them.
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
        remat: which values the backward may read.
        compile: how graphs are made callable.
        accum_dtype: dtype of the sums of gradients.
        group: a process group with one process per rank.
        mesh: instead of `group`, a mesh with a dimension ``"pp"``.
        timeout: seconds of silence after which a rank is given up.

    Returns:
        A `ModulePipeline`: a `Pipeline` with ``load_into(module, params)``.

    Raises:
        ScheduleError: the schedule cannot run.
        StageError: an argument is wrong, there is not one cut between each two stages, none can be
            chosen, or a buffer has no data and cannot be made.
        PipelineError: over a process group, the first rank cannot measure.

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
    group = group_of(group, mesh)
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
        reduction=reduction,
        remat=remat,
        compile=compile,
        accum_dtype=accum_dtype,
        group=group,
        timeout=timeout,
    )
    device = torch.device("cpu") if group is None else device_of(group)
    made = real_buffers(module, buffers, device)
    if not has_state:  # which of them a state has is known when there is one
        refuse_missing(module, made)
    definition = with_buffers(definition, made)
    balance = cuts if isinstance(cuts, Balance) else None
    if cuts is None:
        _check_stages(stages, example, schedule)
        balance = chosen(definition, example, memory=memory, measure=measure)
        log.info("chose the cuts of %s:\n%s", type(module).__name__, balance)
    elif stages is not None or example is not None or memory != inf or measure:
        raise StageError(
            f"cuts={cuts!r:.60} is given beside stages, example, memory or measure, by which cuts "
            "are chosen: give the cuts, or let them be chosen"
        )
    names: Any = cuts if balance is None else balance.cuts
    return ModulePipeline(with_cuts(definition, names), balance)


def _check_stages(stages: int | None, example: Any, schedule: Schedule) -> None:
    """Refuse to choose cuts without what that takes.

    Raises:
        StageError: `example` is missing, or `stages` is not the schedule's number.
    """
    if stages is not None and stages != schedule.num_stages:
        raise StageError(
            f"stages={stages!r}, but the schedule {schedule.name} has {schedule.num_stages} on "
            f"{schedule.num_ranks} ranks: leave stages out, or make the schedule for this number"
        )
    if example is None:
        raise StageError(
            "cuts and example are both missing: name the submodules after which a stage ends, "
            'cuts=["model.layers.4"], or give a batch, example=batch, for which cuts are chosen'
        )
