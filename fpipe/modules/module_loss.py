"""A module as a loss function that is cut after some of its submodules, and its definition.

params, batch ── called_with ──► output ── output.loss | loss(output, batch) ──► scalar
                      └── forward hooks on the named submodules execute fpipe.cut
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fpipe.divide.cuts import cut
from fpipe.errors import BatchError, FpipeError, StageError, a_type, check_flags, few
from fpipe.modules.module_buffers import check_state, refuse_missing
from fpipe.modules.module_forward import (
    explaining,
    refuse_aliases,
    refuse_global_hooks,
    unchanged,
)
from fpipe.modules.module_mode import Mode, refuse_lost
from fpipe.modules.own_loss import OwnLoss, loss_of
from fpipe.nn import buffers_of, call_and_note, called_with, state_of
from fpipe.schedule import Schedule
from fpipe.spec.convention import called
from fpipe.spec.definition import Definition
from fpipe.spec.objective import Trainable
from fpipe.spec.policies import Precision
from fpipe.spec.user_functions import LOSS, Returns

Loss = Callable[[Any, Any], Any]

_HALF: Final = frozenset({torch.bfloat16, torch.float16})


class ModuleLoss:
    """``(params, batch) -> scalar`` of a module, cut into stages.

    With a state it is ``(params, state, batch) -> (scalar, state)``, or ``(scalar, state, aux)``.

    Args:
        module: its forward is called with the batch's entries as keyword arguments. With a `loss`,
            the forward gets those entries that it takes.
        cuts: names of submodules, as in ``module.get_submodule``: a stage ends after each. None
            where the forward calls `fpipe.cut` itself.
        loss: ``(output, batch) -> scalar``; None takes the attribute ``loss`` of the output. If
            `returns` is weighted, that comes as a sum and its weight.
        returns: the results beside the loss. Aux comes from `loss`.
        in_dims: how the batch is split.
        is_compiling: the value of `torch.compiler.is_compiling` while the forward is traced; None
            for True if it looks at data otherwise.
        precision: the dtypes to which parameters, arguments and output are cast.

    Attributes:
        module: as given.
        cuts: as given.
        buffers: in place of the module's own, by name.

    Raises:
        StageError: an argument is wrong, or names no submodule.
    """

    def __init__(
        self,
        module: nn.Module,
        cuts: Sequence[str] | None,
        loss: Loss | None,
        returns: Returns = LOSS,
        *,
        in_dims: Any = 0,
        is_compiling: bool | None = None,
        precision: Precision | None = None,
    ) -> None:
        self.module = module
        self.cuts = None if cuts is None else _checked_cuts(module, cuts)
        if loss is not None and not callable(loss):
            raise StageError(
                f"loss={loss!r:.60} is not callable: it is a function (output, batch) -> scalar, "
                "or None for the output's own loss"
            )
        if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
            raise StageError(
                f"loss is {a_type(loss)} with parameters to be trained, which would get "
                "no gradient: make it part of the module, whose forward calls it, or freeze it "
                "(loss.requires_grad_(False))"
            )
        self.__qualname__ = type(module).__name__
        self._in_dims = in_dims
        self._loss, self._returns, self._is_compiling = loss, returns, is_compiling
        self._precision = precision or Precision()
        self._casts = precision is not None
        self.buffers: Mapping[str, Tensor] = {}
        self._signature = signature(module.forward)
        takes = self._signature.parameters
        leaves_some = loss is not None and all(p.kind != p.VAR_KEYWORD for p in takes.values())
        self._takes = frozenset(takes) if leaves_some else None
        # Tied parameters have several names; the first is the one that named_parameters() gives.
        self._names = frozenset(name for name, _ in module.named_parameters())

    def __call__(self, params: Mapping[str, Tensor], *arguments: Any) -> Any:
        """The loss of one microbatch, the last of the arguments, after a state if there is one.

        Raises:
            BatchError: `params`, state or batch is no dict with the right keys.
            StageError: the forward does not call each of the cuts' submodules once, or cannot be
                traced.
        """
        *states, batch = arguments
        self._check(params, batch)
        with unchanged(*_modules_among(self.module, self._loss)):
            return self._compute(params, states, batch)

    def _compute(self, params: Mapping[str, Tensor], states: Sequence[Any], batch: Any) -> Any:
        refuse_global_hooks(self.__qualname__)
        is_own = self._loss is None and self._returns.weighted
        own_loss = OwnLoss(self.__qualname__, self._in_dims) if is_own else None
        with (
            explaining(self.__qualname__, is_compiling=self._is_compiling),
            self._naming_shapes(params),
            self._cutting(),
            self._naming_entries(batch),
            own_loss.noting() if own_loss is not None else nullcontext(),
        ):
            tensors = {**self.buffers, **self._precision.params(params)}
            options = {n: v for n, v in batch.items() if self._takes is None or n in self._takes}
            options = self._precision.inputs(options)
            if not states:
                output = called_with(self.module, tensors, {}, (), options)
            else:
                check_state(self.module, states[0])
                self._check_averages()
                refuse_missing(self.module, {*self.buffers, *buffers_of(states[0])})
                output, state, written = call_and_note(self.module, tensors, states[0], (), options)
                refuse_aliases(self.module, written)
        if own_loss is None:
            value = self._loss_of(self._precision.output(output), batch)
        else:
            total, weight = own_loss.weighted(loss_of(output, self.__qualname__), batch)
            value = self._precision.output(total), weight
        loss = replace(self._returns, state=False).with_tensors(value)
        if not states:
            return loss
        if not self._returns.aux:
            return loss, state
        # If the loss is no pair, the caller that takes it apart says so.
        pair = isinstance(loss, tuple | list) and len(loss) == 2
        return (loss[0], state, loss[1]) if pair else loss

    def with_cuts(self, cuts: Sequence[str] | None) -> ModuleLoss:
        """The same loss with other cuts.

        Raises:
            StageError: one of them names no submodule.
        """
        loss = copy.copy(self)
        loss.cuts = None if cuts is None else _checked_cuts(self.module, cuts)
        return loss

    def with_buffers(self, buffers: Mapping[str, Tensor]) -> ModuleLoss:
        """The same loss with more buffers; it keeps those that it has."""
        loss = copy.copy(self)
        loss.buffers = {**buffers, **self.buffers}
        return loss

    def _check(self, params: Any, batch: Any) -> None:
        if not isinstance(params, Mapping):
            raise BatchError(
                f"params is {a_type(params)}: the parameters of a module are a dict, "
                "dict(module.named_parameters())"
            )
        if not isinstance(batch, Mapping):
            raise BatchError(
                f"batch is {a_type(batch)}: the batch of a module is a dict of the "
                "keyword arguments of its forward, such as {'input': x}; what only the loss reads, "
                "labels for one, may be an entry too"
            )
        if params.keys() != self._names:
            missing, extra = (
                sorted(self._names - params.keys()),
                sorted(params.keys() - self._names),
            )
            faults = [f"lacks {few(missing)} of {self.__qualname__}"] if missing else []
            faults += [f"has {few(extra)}, which {self.__qualname__} has not"] if extra else []
            if {name for name, _ in self.module.named_parameters()} != self._names:
                raise BatchError(
                    f"params {' and '.join(faults)} as from_module was given it: since then "
                    "parameters of the module were tied, added or removed: make the pipeline anew"
                )
            raise BatchError(
                f"params {' and '.join(faults)}: pass dict(module.named_parameters()), in which "
                "tied parameters come once"
            )
        for name, value in params.items():
            if not isinstance(value, Tensor):
                raise BatchError(
                    f"params[{name!r}] is {a_type(value)}: it must be a tensor, as in "
                    "dict(module.named_parameters())"
                )
        if not self._casts:
            self._check_width(params)

    def _check_width(self, params: Mapping[str, Tensor]) -> None:
        """Refuse wide parameters for a module of half precision that nothing casts."""
        for name, held in self.module.named_parameters():
            value = params[name]
            if held.dtype in _HALF and value.is_floating_point() and value.itemsize > held.itemsize:
                raise BatchError(
                    f"params[{name!r}] is {value.dtype}, and the module has it in {held.dtype}: to "
                    "compute in that with parameters in the other, give from_module "
                    f"mp_policy=MixedPrecisionPolicy(param_dtype={held.dtype}) of "
                    "torch.distributed.fsdp; to compute in the other, convert the module"
                )

    def _check_averages(self) -> None:
        """Refuse layers that divide by a count that they read from a tensor."""
        for name, layer in self.module.named_modules():
            if isinstance(layer, _NormBase) and layer.training and layer.momentum is None:
                raise StageError(
                    f"{name!r} is {a_type(layer)} with momentum=None, whose running "
                    "statistics are averages over all steps so far: their weight depends on a "
                    "count in the state, which torch reads back into Python; give it a momentum"
                )

    @contextmanager
    def _naming_shapes(self, params: Mapping[str, Tensor]) -> Iterator[None]:
        """Add to errors which parameters have other shapes than the module's."""
        try:
            yield
        except (RuntimeError, ValueError, AssertionError, IndexError) as error:
            misshapen = [
                f"{name!r} has shape {tuple(params[name].shape)} in place of {tuple(held.shape)}"
                for name, held in self.module.named_parameters()
                if name in params and params[name].shape != held.shape
            ]
            if misshapen and not isinstance(error, FpipeError):
                more = f" and {len(misshapen) - 3} more" if len(misshapen) > 3 else ""
                error.args = (f"{error} (of params {', '.join(misshapen[:3])}{more})",)
            raise

    @contextmanager
    def _naming_entries(self, batch: Mapping[str, Any]) -> Iterator[None]:
        """Refuse a batch whose entries do not suit the arguments of the forward."""
        try:
            yield
        except TypeError as error:
            takes = self._takes
            try:
                # After the call: a wrapper of the forward may take more than its signature says.
                self._signature.bind(**{n: batch[n] for n in batch if takes is None or n in takes})
            except TypeError:
                rest = "; without a loss= nothing else reads an entry" if self._loss is None else ""
                raise BatchError(
                    f"batch has {few(sorted(map(str, batch)))}, which the arguments of the forward "
                    f"of {self.__qualname__}, {self._signature}, do not suit ({error}): the batch "
                    f"of a module is a dict of the keyword arguments of its forward{rest}; for a "
                    "forward that takes arguments by position alone, wrap the module in one whose "
                    "arguments have names"
                ) from error
            raise

    @contextmanager
    def _cutting(self) -> Iterator[None]:
        """Cut after the named submodules, and check that the forward calls each once."""
        called: Counter[str] = Counter()
        names = self.cuts or ()

        def hook(name: str) -> Callable[[nn.Module, Any, Any], Any]:
            def after(module: nn.Module, arguments: Any, output: Any) -> Any:
                called[name] += 1
                return cut(output)

            return after

        handles = [
            self.module.get_submodule(name).register_forward_hook(hook(name)) for name in names
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for name in names:
            if called[name] != 1:
                raise StageError(
                    f"cuts names {name!r}, which the forward of {self.__qualname__} calls "
                    f"{called[name]} times: a stage ends after a submodule that is called once; "
                    "to end one after each call of a layer, call fpipe.cut in a forward hook of "
                    "it, and pass cuts=fpipe.cut"
                )

    def _loss_of(self, output: Any, batch: Mapping[str, Any]) -> Any:
        """The result of the loss function, or the loss that the output holds."""
        if self._loss is not None:
            try:
                return self._loss(output, batch)
            except (TypeError, AttributeError, IndexError) as error:
                error.args = (
                    f"{error} (it is called as loss(output, batch), with what the forward returns, "
                    "and the batch, a dict)",
                )
                raise
        return loss_of(output, self.__qualname__)


def _modules_among(*functions: Any) -> list[nn.Module]:
    return [function for function in functions if isinstance(function, nn.Module)]


def _checked_cuts(module: nn.Module, cuts: Any) -> tuple[str, ...]:
    if isinstance(cuts, str) or not isinstance(cuts, Sequence):
        raise StageError(
            f"cuts={cuts!r:.60} is {a_type(cuts)}: it must be a list of names of "
            "submodules, one fewer than stages, or fpipe.cut where the forward calls that"
        )
    known = {name for name, _ in module.named_modules(remove_duplicate=False)} - {""}
    for name in cuts:
        if name not in known:
            near = _nearest(str(name), known)
            raise StageError(
                f"cuts names {name!r}, which is no submodule of {type(module).__name__}; "
                f"module.named_modules() lists them{near}"
            )
    if len(set(cuts)) != len(cuts):
        raise StageError(f"cuts={list(cuts)!r} names a submodule twice: each cut ends one stage")
    return tuple(cuts)


def _nearest(name: str, known: set[str]) -> str:
    from difflib import get_close_matches

    matches = get_close_matches(name, sorted(known), n=3)
    return f" (near it: {', '.join(map(repr, matches))})" if matches else ""


# ── the definition of a pipeline of a module ────────────────────────────────────────────────────


def definition_of(
    module: Any,
    loss: Loss | None,
    schedule: Schedule,
    *,
    batch_norm: str = "microbatch",
    is_compiling: bool | None = None,
    **options: Any,
) -> Definition:
    """The definition of a pipeline of a module, without cuts.

    Args:
        module: its parameters that require no gradient are frozen.
        loss: as for `ModuleLoss`.
        schedule: of the pipeline.
        batch_norm: as for `fpipe.pipeline`.
        is_compiling: as for `ModuleLoss`.
        options: other fields of the definition.

    Raises:
        ScheduleError: the schedule cannot run.
        StageError: an argument is wrong.
    """
    if not isinstance(module, nn.Module):
        raise StageError(
            f"module={module!r:.60} is {a_type(module)}: from_module takes a "
            "torch.nn.Module; fpipe.pipeline takes functions"
        )
    if is_compiling is not None:
        check_flags(is_compiling=is_compiling)
    refuse_lost(module)
    options = _of_own_loss(options) if loss is None else options
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    definition = Definition(
        stages=(),
        loss=ModuleLoss(module, (), loss),
        function=True,
        trainable=Trainable(None if all(trained.values()) else trained),
        schedule=schedule,
        convention=called(options.get("has_state") is True, batch_norm),
        modes=Mode(*_modules_among(module, loss)),
        **options,
    )
    whole = ModuleLoss(
        module,
        (),
        loss,
        definition.returns,
        in_dims=definition.in_dims,
        is_compiling=is_compiling,
        precision=definition.precision,
    )
    return replace(definition, loss=whole)


def _of_own_loss(options: dict[str, Any]) -> dict[str, Any]:
    """The options with which a pipeline has the loss that its module computes."""
    reduction = options.get("reduction", "mean")
    returns = Returns(weighted=reduction == "weighted", aux=options.get("has_aux") is True)
    if returns.declared:
        raise StageError(
            f"{returns.declared} is about what the loss function returns, and loss=None: give "
            f"from_module a loss=(output, batch) -> {returns.form}"
        )
    return options | {"reduction": "weighted"} if reduction == "mean" else options


def held_by(definition: Definition) -> tuple[Any, ...]:
    """The parameters of the module of a definition, and its state if it has one, for a step."""
    assert isinstance(definition.loss, ModuleLoss)
    module = definition.loss.module
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return (params, state_of(module)) if definition.has_state else (params,)


def with_cuts(definition: Definition, cuts: Sequence[str] | None) -> Definition:
    """The definition with these cuts of the module.

    Raises:
        StageError: one of them names no submodule.
    """
    assert isinstance(definition.loss, ModuleLoss)
    return replace(definition, loss=definition.loss.with_cuts(cuts))


def with_buffers(definition: Definition, buffers: Mapping[str, Tensor]) -> Definition:
    """The definition with these buffers in place of the module's own."""
    assert isinstance(definition.loss, ModuleLoss)
    return replace(definition, loss=definition.loss.with_buffers(buffers))
