"""`ModulePipeline`: the pipeline of a module knows the names of its parameters and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import unwrap
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fpipe import pytree
from fpipe.checkpoint.checkpoint_reader import Naming, reading
from fpipe.dtensors import is_dtensor, local, placements_of
from fpipe.engine import Engine
from fpipe.errors import BatchError, StageError, a_type
from fpipe.execute.fault import odd_one_out, refusal
from fpipe.execute.gathering import connected
from fpipe.execute.offer import warn_of_other_copies
from fpipe.execute.requests import Gather
from fpipe.execute.sample import Sample, numbers
from fpipe.inputs.signature import memory_of
from fpipe.modules.module_buffers import (
    check_state,
    naming_of_buffers,
    naming_of_parameters,
    real_buffers,
    refuse_missing,
)
from fpipe.modules.module_loss import ModuleLoss
from fpipe.modules.stage_shares import Balance
from fpipe.nn import buffers_of, state_of, with_buffers
from fpipe.parameters.holding import Make, whole
from fpipe.pipelines import Pipeline
from fpipe.spec.definition import Definition
from fpipe.spec.placing import device_of


class ModulePipeline(Pipeline):
    """A pipeline of a module; `from_module` makes one.

    Attributes:
        module: the module; training neither reads nor changes its parameters.
        cuts: the submodules after which a stage ends; None where the forward calls `fpipe.cut`.
        balance: the table of the stages whose cuts were chosen; None if the user named them, and
            for a pipeline that `with_schedule` or a transform has made of another.

    Example:
        >>> import torch, fpipe
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
        >>> pipe = fpipe.from_module(
        ...     net, loss=lambda y, _: y.mean(), schedule=schedule, cuts=["1"], compile=False
        ... )
        >>> pipe.cuts
        ('1',)
    """

    def __init__(
        self,
        definition: Definition,
        balance: Balance | None = None,
        like: Engine | None = None,
    ) -> None:
        # Transforms wrap the loss.
        loss, schedule = unwrap(definition.loss), definition.schedule
        assert isinstance(loss, ModuleLoss)
        if loss.cuts is not None and schedule.num_stages != len(loss.cuts) + 1:
            raise StageError(
                f"cuts has {len(loss.cuts)} names, which make {len(loss.cuts) + 1} stages, but "
                f"the schedule {schedule.name} has {schedule.num_stages}: name one submodule "
                "between each two stages, or pass cuts=fpipe.cut where the forward calls that"
            )
        super().__init__(definition, like)
        self.module = loss.module
        self.cuts = loss.cuts
        self._buffers = loss.buffers
        self.balance = balance

    def __deepcopy__(self, memo: dict[int, Any]) -> ModulePipeline:
        """The pipeline of the copy of its module, where a module that holds it is copied.

        The copy has traced nothing yet. Over a process group all ranks copy such a module, in the
        order in which they make pipelines.

        Raises:
            FpipeError: it is copied without its module, or a transform has made it.
        """
        if id(self.module) not in memo or not isinstance(self._engine.definition.loss, ModuleLoss):
            self.__reduce_ex__(4)
        # In the memo before the module is copied, for the copy of the module holds it.
        pipe = memo[id(self)] = type(self).__new__(type(self))
        definition = self._engine.definition
        loss, modes = copy.deepcopy((definition.loss, definition.modes), memo)
        definition = replace(definition, loss=loss, modes=modes)
        pipe.__init__(definition, self.balance)  # type: ignore[misc]
        return pipe

    def _shapes(self, shapes: Any) -> Any:
        # The parameters of an ensemble have other shapes than the module's.
        if shapes is None and not self._engine.definition.trainable.within:
            return dict(self.module.named_parameters())
        return super()._shapes(shapes)

    def _naming(self) -> Naming:
        return naming_of_parameters(self.module)

    def init_state(self) -> dict[str, Any]:
        """Make the state of the first step: ``fpipe.nn.state_of(module)``, with data.

        Over a process group all ranks call this.

        Returns:
            The state that `step` takes with ``has_state=True``, on the default device, the first
            of several ``devices``, or the device of the process group. Buffers on the meta device
            are those of ``from_module(..., buffers=)``, or as the module's ``_init_weights`` or
            ``reset_parameters`` makes them.

        Raises:
            StageError: a buffer has no data and cannot be made, or the pipeline has no state.
            PipelineError: over a process group, another rank has raised one of these.

        Example:
            >>> import torch, fpipe
            >>> with torch.device("meta"):
            ...     module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
            >>> pipe = fpipe.from_module(
            ...     module,
            ...     schedule=fpipe.schedules.gpipe(ranks=2, microbatches=2),
            ...     cuts=["0"],
            ...     loss=lambda output, batch: output.square().mean(),
            ...     has_state=True,
            ... )
            >>> pipe.init_state()["1"].var
            tensor([1., 1.])
        """
        state = state_of(self.module)
        make = partial(self._fresh, stored=True)
        return with_buffers(state, whole(self._engine, lambda _: make, buffers_of(state)))

    def load_state(
        self,
        path: str | PathLike[str],
        *,
        shapes: Mapping[str, Any] | None = None,
        rename: Callable[[str], str] | None = None,
    ) -> dict[str, Any]:
        """Read a state from files: the buffers, by the names of ``module.named_buffers()``.

        Args:
            path: as for `load`.
            shapes: the entries of ``fpipe.nn.state_of(module)`` to read; None for all.
            rename: from the name of a buffer to that in the checkpoint.

        Returns:
            The state, as from `init_state`. Buffers that both ``module.state_dict()`` and the
            checkpoint lack are those of `init_state`.

        Raises:
            BatchError: a buffer is missing or has another shape; says which.
            StageError: a buffer has no data and cannot be made, or the pipeline has no state.
            PipelineError: over a process group, another rank has raised one of these.

        Example:
            >>> import os, tempfile, torch, fpipe
            >>> from safetensors.torch import save_file
            >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
            >>> pipe = fpipe.from_module(
            ...     module,
            ...     schedule=fpipe.schedules.gpipe(ranks=2, microbatches=2),
            ...     cuts=["0"],
            ...     loss=lambda output, batch: output.square().mean(),
            ...     has_state=True,
            ... )
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = os.path.join(folder, "model.safetensors")
            ...     save_file(module.state_dict(), path)
            ...     state = pipe.load_state(path)
            >>> state["1"].mean
            tensor([0., 0.])
        """
        state = state_of(self.module) if shapes is None else shapes
        check_state(self.module, state)

        def maker(names: Sequence[str]) -> Make:
            read = reading(path, names, naming_of_buffers(self.module), rename, strict=False)

            def make(wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
                values = read(wanted)
                return values | self._fresh(wanted.keys() - values.keys(), stored=False)

            return make

        return with_buffers(state, whole(self._engine, maker, buffers_of(state)))

    def _fresh(self, names: Iterable[str], *, stored: bool) -> dict[str, Tensor]:
        """Buffers of these names without a checkpoint: the user's, the module's, or made anew."""
        device = self._engine.definition.device
        numbers = real_buffers(self.module, self._buffers, device, stored=stored)
        held, names = dict(self.module.named_buffers()), set(names)
        refuse_missing(self.module, numbers.keys() | (held.keys() - names))
        return {name: numbers.get(name, held[name]).clone() for name in names}

    def load_into(
        self,
        module: nn.Module,
        params: Mapping[str, Tensor],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy parameters into a module, in place: to evaluate, save or train it by itself.

        Over a process group every rank calls this, and gets all parameters: each from the first
        rank that reads it in a step, which has trained it.

        Args:
            module: the module of the pipeline, or another with the same parameters.
            params: tensors of the parameters' shapes, as for `step`; over a process group those of
                other ranks may be missing, as from `own`.
            state: as for `step`; None leaves the module's buffers as they are.

        Raises:
            BatchError: names or shapes differ, a parameter has no data on the rank that reads it,
                or no step has shown yet which rank that is; nothing has been copied then.
            PipelineError: over a process group, names or shapes differ on another rank.

        Example:
            >>> import torch, fpipe
            >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
            >>> pipe = fpipe.from_module(
            ...     module,
            ...     schedule=fpipe.schedules.gpipe(ranks=2, microbatches=2),
            ...     cuts=["0"],
            ...     loss=lambda output, batch: output.square().mean(),
            ... )
            >>> params = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
            >>> pipe.load_into(module, params)
            >>> module(torch.ones(1, 2)).detach()
            tensor([[0., 0.]])
        """
        params = self._with_shapes_of_others(module, params)

        def check() -> None:
            _check_fit(module, params, state)
            self._check_data(params)

        def copy(gather: Gather) -> int | None:
            named = [(name, tuple(p.shape), p.dtype) for name, p in _in_order(params)]
            ranks, copies = zip(*gather((named, self._copies(params))), strict=True)
            warn_of_other_copies(copies)
            odd = odd_one_out([tuple((name, shape) for name, shape, _ in rank) for rank in ranks])
            if odd is None:
                dtypes = [{name: dtype for name, _, dtype in rank} for rank in ranks]
                self._copy(module, params, state or {}, dtypes)
            return odd

        self._engine.each("load its parameters", check)
        odd = self._engine.together("pipe.load_into", copy)
        if odd is not None:
            raise refusal(
                odd,
                f"rank {odd} got parameters of other names or shapes than the other ranks, so "
                "nothing was copied: pass the same on all, of which those without data may lie on "
                "the meta device",
            )

    def _with_shapes_of_others(self, module: Any, params: Any) -> Any:
        """Parameters with meta tensors in place of those of other ranks that are missing."""
        fit = isinstance(params, Mapping) and isinstance(module, nn.Module)
        if self.rank is None or not fit:
            return params
        held = dict(module.named_parameters())
        if not params.keys() <= held.keys():
            return params
        missing = {n: p.detach().to("meta") for n, p in held.items() if n not in params}
        return {**params, **missing}

    def _copies(self, params: Mapping[str, Tensor]) -> Sample:
        """Numbers of the parameters that this process and others read."""
        readers = self._engine.readers()
        copies = {}
        for leaf, (name, value) in enumerate(_in_order(params)):
            ranks = readers.get((0, leaf), ())
            if len(ranks) > 1 and self.rank in ranks:
                copies[f"[{name!r}]"] = numbers(value)
        return copies

    def _check_data(self, params: Mapping[str, Tensor]) -> None:
        """Refuse parameters of which this rank has no data that the others get from it."""
        readers = self._engine.readers()
        for leaf, path in enumerate(pytree.key_paths(pytree.structure(params))):
            gives = self.rank is None or readers.get((0, leaf), (self.rank,))[0] == self.rank
            if gives and params[path[0]].is_meta:
                text = f"params[{path[0]!r}] lies on the meta device and has no data"
                if self.rank is not None and not readers:
                    text += (
                        ", and this pipeline has not run, so it is not known on which rank it has "
                        "some: call pipe.programs(params, batch) on all ranks first"
                    )
                raise BatchError(text)

    def _copy(
        self,
        module: nn.Module,
        params: Mapping[str, Tensor],
        state: Mapping[str, Any],
        dtypes: Sequence[Mapping[str, torch.dtype]],
    ) -> None:
        """Copy parameters, of which this rank has some, and the state, of which it has all.

        Over a process group all ranks do so at once; `dtypes` are those of the parameters on each.
        """
        group = self._engine.definition.group
        readers = self._engine.readers()
        held = dict(module.named_parameters())
        memories = {memory_of(local(parameter)) for parameter in held.values()}
        places = placements_of(pytree.structure(params))
        with torch.no_grad():
            # A value may be another parameter of the module, which is overwritten too.
            values = [
                value.clone() if memory_of(value) in memories and value is not held[name] else value
                for name, value in _in_order(params)
            ]
            for leaf, (name, _) in enumerate(_in_order(params)):
                value = values[leaf]
                if group is not None and (0, leaf) in readers:
                    source = readers[0, leaf][0]
                    value = _received(value, dtypes[source][name], source, group)
                place = places[leaf]
                _copy_into(held[name], value if place is None else place.made_of(value))
            # A step returns the whole state on every rank.
            buffers = dict(module.named_buffers())
            for name, value in buffers_of(state).items():
                buffers[name].copy_(value)


def _in_order(params: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Parameters in the order in which trees are flattened, the same on all ranks."""
    return [
        (path[0], local(params[path[0]])) for path in pytree.key_paths(pytree.structure(params))
    ]


def _copy_into(parameter: Any, value: Any) -> None:
    """Copy a value into a parameter, which may have other placements over the same mesh."""
    if is_dtensor(parameter) and is_dtensor(value):
        value = value.redistribute(parameter.device_mesh, parameter.placements)
    elif is_dtensor(value):
        value = value.full_tensor()
    parameter.copy_(value)


def _received(value: Tensor, dtype: torch.dtype, source: int, group: dist.ProcessGroup) -> Tensor:
    """The value of rank `source` of the group, of its dtype there."""
    device = device_of(group)
    if group.rank() == source:
        sent = value.detach().to(device).contiguous()
    else:
        sent = torch.empty(value.shape, dtype=dtype, device=device)
    connected(lambda: dist.broadcast(sent, group_src=source, group=group))
    return sent


def _check_fit(module: nn.Module, params: Mapping[str, Tensor], state: Any) -> None:
    """Refuse `params` and `state` that cannot be copied into `module`."""
    if not isinstance(module, nn.Module):
        raise BatchError(
            f"module is {a_type(module)}: pass the torch.nn.Module to copy into first, "
            "and params after it"
        )
    held = dict(module.named_parameters())
    if not isinstance(params, Mapping):
        raise BatchError(
            f"params is {a_type(params)}: it must be a dict of the parameters by name, as for step"
        )
    if held.keys() != params.keys():
        odd = sorted(held.keys() ^ params.keys())
        raise BatchError(
            f"params and {type(module).__name__} differ in {len(odd)} names, such as "
            f"{odd[0]!r}: load into a module with the parameters of the pipeline's"
        )
    for name, tensor in (*held.items(), *(module.named_buffers() if state else ())):
        if tensor.is_meta:
            raise BatchError(
                f"{name!r} of {type(module).__name__} lies on the meta device, to which nothing "
                "can be copied: make the module anew, not under torch.device('meta') "
                "(module.to_empty(...) leaves buffers without numbers, and unties parameters)"
            )
    for name, parameter in held.items():
        if not isinstance(params[name], Tensor):
            fact = f"params[{name!r}]={params[name]!r:.60} is {a_type(params[name])}"
            raise BatchError(f"{fact}: it must be a tensor")
        if parameter.shape != params[name].shape:
            raise BatchError(
                f"params[{name!r}] has shape {tuple(params[name].shape)}, but that of "
                f"{type(module).__name__} has {tuple(parameter.shape)}: load into a module of "
                "the same configuration"
            )
        if not torch.can_cast(params[name].dtype, parameter.dtype):
            raise _uncastable(module, f"params[{name!r}]", params[name], parameter)
    check_state(module, {} if state is None else state)
    buffers = dict(module.named_buffers())
    for name, value in buffers_of(state or {}).items():
        if value.is_meta:
            raise BatchError(
                f"the buffer {name!r} of state lies on the meta device and has no data: pass what "
                "pipe.init_state, pipe.load_state or a step has returned"
            )
        if not torch.can_cast(value.dtype, buffers[name].dtype):
            raise _uncastable(module, f"the buffer {name!r} of state", value, buffers[name])


def _uncastable(module: nn.Module, name: str, value: Tensor, held: Tensor) -> BatchError:
    return BatchError(
        f"{name} is {value.dtype}, but that of {type(module).__name__} is {held.dtype}, which "
        "cannot hold it: load into a module of its dtype"
    )
