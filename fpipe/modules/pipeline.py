"""`from_module`: a pipeline of a module that nobody had to edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree
from fpipe.checkpoint.loading import Naming
from fpipe.definition import Definition, group_of
from fpipe.engine import Pipeline
from fpipe.errors import BatchError, PipelineError, StageError
from fpipe.modules.buffers import real_buffers
from fpipe.modules.loss import Loss, ModuleLoss
from fpipe.runtime.connect import device_of
from fpipe.schedule import Schedule
from fpipe.stage.compiler import Compile
from fpipe.stage.remat import Remat
from fpipe.stage.trainable import Trainable


class ModulePipeline(Pipeline):
    """A pipeline of a module; `from_module` makes one.

    Attributes:
        module: as it was given; training reads neither its parameters nor changes them.
        cuts: the submodules after which a stage ends.
    """

    def __init__(self, definition: Definition) -> None:
        whole, schedule = definition.loss, definition.schedule
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

    def _shapes(self, shapes: Any) -> Any:
        return dict(self.module.named_parameters()) if shapes is None else shapes

    def _naming(self) -> Naming:
        first: dict[int, str] = {}
        aliases: dict[str, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if first.setdefault(id(parameter), name) != name:
                aliases.setdefault(first[id(parameter)], []).append(name)
        return Naming(aliases, frozenset(name for name, _ in self.module.named_buffers()))

    def load_into(self, module: nn.Module, params: Mapping[str, Tensor]) -> None:
        """Copy parameters into a module, in place: to evaluate it, to save it, to go on without.

        Over a process group every rank calls it, and gets all parameters: each from the first rank
        that reads it in a step, which is the one that has trained it.

        Args:
            module: of the same parameters as the pipeline's, or that one itself.
            params: as for `step`.

        Raises:
            BatchError: the names or shapes differ; nothing has been copied then.
            PipelineError: over a process group, they differ on another rank.
        """
        problem = _misfit(module, params)
        if self.add_up(problem is not None):
            raise problem or PipelineError(
                "another rank cannot load its parameters, so nothing was copied on any: it says why"
            )
        group = self.definition.group
        # The order of the leaves: that in which trees are flattened, the same on all ranks.
        readers = self.readers()
        names, _ = tree.flatten({name: name for name in params})
        own = dict(module.named_parameters())
        with torch.no_grad():
            for leaf, name in enumerate(names):
                value = params[name]
                if group is not None and (0, leaf) in readers:
                    value = _received(value, own[name], readers[0, leaf][0], group)
                own[name].copy_(value)


def _received(value: Tensor, like: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """The value on rank `source` of the group."""
    device = device_of(group)
    if group.rank() == source:
        sent = value.detach().to(device).contiguous()
    else:
        sent = torch.empty(like.shape, dtype=value.dtype, device=device)
    dist.broadcast(sent, group_src=source, group=group)
    return sent


def _misfit(module: nn.Module, params: Mapping[str, Tensor]) -> BatchError | None:
    """Why `params` cannot be copied into `module`."""
    own = dict(module.named_parameters())
    if own.keys() != params.keys():
        odd = sorted(own.keys() ^ params.keys())
        return BatchError(
            f"params and {type(module).__name__} differ in {len(odd)} names, such as "
            f"{odd[0]!r}: load into a module with the parameters of the pipeline's"
        )
    for name, parameter in own.items():
        if parameter.shape != params[name].shape:
            return BatchError(
                f"params[{name!r}] has shape {tuple(params[name].shape)}, but that of "
                f"{type(module).__name__} has {tuple(parameter.shape)}: load into a module of "
                "the same configuration"
            )
    return None


def _trained(module: Any) -> dict[str, bool] | None:
    """Which parameters of a module require a gradient; None for all."""
    if not isinstance(module, nn.Module):
        return None
    found = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    return None if all(found.values()) else found


def from_module(
    module: nn.Module,
    *,
    schedule: Schedule,
    cuts: Sequence[str],
    loss: Loss | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    in_dims: Any = 0,
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
    (batch norm in training mode) is refused. Call ``module.eval()`` or leave ``module.train()``
    before: the mode is that of the time of tracing.

    Args:
        module: its forward is traced on abstract tensors at the first step, once for each set of
            shapes. Its buffers must lie on the device of the parameters, or on the meta device, as
            all of it does when it was built under ``torch.device("meta")``: what it holds is not
            read then, and takes no memory.
        schedule: who does what in which order.
        cuts: names of submodules, as ``module.named_modules()`` gives them: a stage ends after
            each. One fewer than the schedule has stages. Values that other stages read later (the
            encoder's output, masks, positions) go straight to them.
        loss: ``(output, batch) -> scalar``, of what the forward returns and the microbatch; None
            takes the output's own ``loss``, as Hugging Face models give it for ``labels``.
        buffers: by the names of ``module.named_buffers()``, in place of the module's own. Those
            that lie on the meta device and are not given are made anew, as the module's
            ``_init_weights`` (of Hugging Face models) or ``reset_parameters`` makes them.
        in_dims: as for `fpipe.pipeline`, as are all arguments from here on.
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
        StageError: an argument is wrong, there is not one cut between each two stages, or a buffer
            has no data and cannot be made.

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
    """
    group = group_of(group, mesh)
    whole = ModuleLoss(module, cuts, loss)
    device = torch.device("cpu") if group is None else device_of(group)
    whole.buffers = real_buffers(module, buffers, device)
    return ModulePipeline(
        Definition(
            stages=(),
            loss=whole,
            function=True,
            trainable=Trainable(_trained(module)),
            schedule=schedule,
            in_dims=in_dims,
            reduction=reduction,
            remat=remat,
            compile=compile,
            accum_dtype=accum_dtype,
            group=group,
            timeout=timeout,
        )
    )
