"""Optimizers of torch as pure functions of one parameter, its gradient and its state.

hyperparameters ─┐
param, grad, state, count ──► which recording? ──► param, state
                                  └ none is right: record a step

An average of the parameter over the steps is one more tensor of its state:

    average ── average + (1 - ema) * (param - average) ──► average
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fpipe.errors import FpipeError, error_text, label_of
from fpipe.inputs.ambient import autocasts
from fpipe.inputs.signature import LeafShape
from fpipe.torch_internals import is_transformed
from fpipe.training.compiled import Kernels, is_elementwise, reads_numbers
from fpipe.training.recorded_step import (
    COUNT,
    Update,
    concrete,
    numbers_in,
    numbers_of,
    one_by_one,
    record_update,
)
from fpipe.training.scalars import WithTensors

Moments = dict[str, Tensor]
"""The state of one parameter, by the names that the optimizer gives: ``exp_avg``."""


class Adafactor(torch.optim.Adafactor):
    """`torch.optim.Adafactor`, whose step reads no tensor to decide what to do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        assert param.grad is not None
        grad = -param.grad if group["maximize"] else param.grad
        state = self.state[param]
        if not state:
            self._init_group({"params": [param]}, [], [], [], [], [], [])
        state["step"] += 1
        steps = state["step"].item()
        lr, decay = group["lr"], group["weight_decay"]
        eps1, eps2 = group["eps"]
        if eps1 is None:
            eps1 = torch.finfo(param.dtype).eps
        rate = min(lr, 1 / steps**0.5)
        scale = _root_mean_square(param).clamp(min=eps2).item() * rate
        if decay != 0:
            param.mul_(1 - lr * decay)
        variance = _second_moment(grad, state, steps ** group["beta2_decay"], eps1)
        update = variance.clamp(min=eps1 * eps1).rsqrt() * grad
        excess = (_root_mean_square(update) / group["d"]).clamp(min=1.0).item()
        param.add_(update, alpha=-scale / excess)


def _root_mean_square(value: Tensor) -> Tensor:
    return value.norm(2).double() / value.numel() ** 0.5


def _second_moment(grad: Tensor, state: dict[str, Any], weight: float, eps: float) -> Tensor:
    """The running mean of the squares; of a matrix the product of those of rows and columns."""
    if grad.dim() < 2:
        variance: Tensor = state["variance"].lerp_(grad * grad, weight)
        return variance
    rows, columns = state["row_var"], state["col_var"]
    for moment, dim in ((rows, -1), (columns, -2)):
        moment.lerp_(grad.norm(dim=dim, keepdim=True).square() / grad.size(dim), weight)
    return (rows @ columns) / rows.mean(dim=-2, keepdim=True).clamp(min=eps)


_RECORDABLE: Final[Mapping[type, type]] = {torch.optim.Adafactor: Adafactor}
"""The class that is recorded in place of one that cannot be."""

EMA: Final = "ema"
"""The name of the average in a parameter's state."""

_REFUSED: Final[Mapping[type, str]] = {
    torch.optim.LBFGS: "it calls the loss several times a step; AdamW and SGD do not",
    torch.optim.SparseAdam: "it takes sparse gradients alone; a pipeline's are dense: take Adam",
}


class _Hyper(NamedTuple):
    """Hyperparameters, which all leaves of a group share in a step.

    Attributes:
        by_name: all of them.
        numbers: those that are floats or tensors.
        fixed: the others, as a recording depends on them.
    """

    by_name: Mapping[str, Any]
    numbers: Mapping[str, Any]
    fixed: Hashable

    @classmethod
    def of(cls, hyper: Mapping[str, Any]) -> _Hyper:
        """Those of a call."""
        fixed = tuple((name, _fixed(value)) for name, value in sorted(hyper.items()))
        return cls(hyper, numbers_of(hyper), fixed)


class Updates:
    """The step of one optimizer, as a pure function, recorded once for each kind of parameter.

    All trainers of a process share the recordings of an optimizer of torch's own.

    Args:
        optimizer: a class of `torch.optim`, or one derived from `torch.optim.Optimizer`.
        hyper: what it is called with, beside the parameters.
        kernels: compiles it; None for nothing.
        ema: the share that stays in each step of an exponential moving average of the parameter, as
            `torch.optim.swa_utils.get_ema_multi_avg_fn` makes it (Polyak and Juditsky, 1992), which
            begins with the parameters before the first step; None for no average.

    Attributes:
        defaults: hyperparameters by default.

    Raises:
        FpipeError: it is no such class, refuses `hyper`, or is one that cannot be had.
    """

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        hyper: Mapping[str, Any],
        kernels: Kernels | None = None,
        ema: float | None = None,
    ) -> None:
        if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
            raise FpipeError(
                f"optimizer={optimizer!r:.60} is no class of torch.optim or derived from "
                "torch.optim.Optimizer (pass the class, torch.optim.AdamW, and not an instance), "
                "and no pair of functions (init, update)"
            )
        for kind, why in _REFUSED.items():
            if issubclass(optimizer, kind):
                raise FpipeError(f"optimizer={label_of(optimizer)} cannot be a pure update: {why}")
        self._name = label_of(optimizer)
        self._arguments = inspect.signature(optimizer).parameters
        self._optimizer = _RECORDABLE.get(optimizer, optimizer)
        # A class of a user's may read what its module has changed since.
        self._shares = optimizer.__module__.startswith("torch.optim.")
        self._recorded: dict[Hashable, list[Update]] = {}
        self._kernels = kernels
        self._ema = ema
        self._hyper = _Hyper.of({})
        self.defaults = self.checked(hyper)

    def checked(self, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """All hyperparameters, those that are missing by their defaults.

        Raises:
            FpipeError: the optimizer refuses one of them.
        """
        for name, value in hyper.items():
            if isinstance(value, Tensor) and value.numel() > 1:
                raise FpipeError(
                    f"{name} has {value.numel()} numbers and a step of {self._name} takes one: for "
                    "a number for each member of an ensemble, train with fpipe.vmap(trainer)"
                )
        chosen = one_by_one(self._optimizer, hyper)
        try:
            instance = self._optimizer(
                [torch.zeros(1, 1)], **{n: concrete(v) for n, v in chosen.items()}
            )
        except (TypeError, ValueError) as error:
            names = ", ".join(f"{name}={value!r:.40}" for name, value in hyper.items())
            raise FpipeError(f"{self._name} does not take {names}: {error_text(error)}") from error
        defaults = {n: v for n, v in instance.param_groups[0].items() if n != "params"}
        return defaults | chosen

    def replaced(self, hyper: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
        """All hyperparameters, of which some are replaced.

        Raises:
            FpipeError: the optimizer does not have one of them, or refuses it.
        """
        if by:
            known = {name: value for name, value in hyper.items() if name in self._arguments}
            self.checked(known | dict(by))
        return dict(hyper) | dict(by)

    def init(self, param: Tensor, hyper: Mapping[str, Any]) -> Moments:
        """The state before the first step, in which every number is 0: that step reads none."""
        update = self._at_first(param, hyper)
        state = {
            name: kind.empty().zero_()
            for name, kind in zip(update.state, update.shapes, strict=True)
        }
        if self._ema is None:
            return state
        if EMA in state:
            raise FpipeError(f"the optimizer has {EMA!r} in its state, the name of fpipe's average")
        return state | {EMA: param.detach().clone()}

    def names(self, param: Tensor, hyper: Mapping[str, Any]) -> list[str]:
        """The names of what `init` makes, without making it."""
        return [*self._at_first(param, hyper).state, *[EMA] * (self._ema is not None)]

    def takes_stacked(self, params: Tensor, hyper: Mapping[str, Any]) -> bool:
        """Whether parameters along dimension 0 may be taken for one, to the same bits.

        An optimizer may go by the number of dimensions.
        """
        if params.dim() < 2 or not len(params):
            return False
        one, all_ = (self._at_first(p, hyper) for p in (params[0], params))
        nodes = all_.graph.graph.nodes
        return one.graph.code == all_.graph.code and all(map(is_elementwise, nodes))

    def check_divided(self, name: str, param: Tensor, hyper: Mapping[str, Any]) -> None:
        """Refuse to update a part of a parameter by itself, where the whole would move otherwise.

        Raises:
            FpipeError: the optimizer computes with more than the elements one by one.
        """
        update = self._at_first(param, hyper)
        odd = [node for node in update.graph.graph.nodes if not is_elementwise(node)]
        if odd:
            raise FpipeError(
                f"optimizer={self._name} computes {odd[0].target} of the parameter {name!r}, which "
                "is a DTensor of which this process has a part: take one that treats each element "
                "by itself, such as AdamW, for it, with groups={...: None} for the others"
            )

    def __call__(
        self,
        param: Tensor,
        grad: Tensor,
        moments: Moments,
        hyper: Mapping[str, Any],
        count: int,
        *,
        in_place: bool = False,
    ) -> tuple[Tensor, Moments]:
        """The parameter and its state after one step.

        Args:
            param: any shape and floating-point dtype.
            grad: like `param`.
            moments: what `init` or the step before has returned.
            hyper: all hyperparameters. A float may be a tensor without dimensions, which may be
                mapped by `torch.func.vmap` or have a history of autograd.
            count: how many steps were made before.
            in_place: write into `param` and `moments`, and return them.
        """
        if self._ema is None:
            return self._moved(param, grad, moments, hyper, count, in_place)
        if EMA not in moments:
            raise FpipeError(
                f"state.moments has no {EMA!r}: the state is that of a trainer without ema=; make "
                "one by trainer.init(params)"
            )
        others = {name: value for name, value in moments.items() if name != EMA}
        moved, state = self._moved(param, grad, others, hyper, count, in_place)
        average, share = moments[EMA], 1 - self._ema
        after = average.lerp_(moved, share) if in_place else average.lerp(moved, share)
        return moved, state | {EMA: after}

    def _moved(
        self,
        param: Tensor,
        grad: Tensor,
        moments: Moments,
        hyper: Mapping[str, Any],
        count: int,
        in_place: bool,
    ) -> tuple[Tensor, Moments]:
        """Parameter and state after the optimizer's step."""
        state = moments if count else None
        known = self._known(hyper)
        numbers = {**known.numbers, COUNT: float(count)}
        if state is not None:
            numbers |= numbers_in(state)
        update = self._recording(param, state, known, count, numbers)
        leaves = [param, grad, *(() if state is None else (state[name] for name in state))]
        values = [numbers[name] for name in update.numbers]
        follows = is_transformed(param) and reads_numbers(update.graph.graph)
        if follows or any(isinstance(value, Tensor) for value in values):
            tensors = [torch.as_tensor(v, dtype=torch.float64) for v in values]
            outputs = WithTensors(update.graph).run(*leaves, *tensors)
        else:
            compiled = None
            if self._kernels is not None and state is not None:  # the first step is made once
                compiled = self._kernels(update, leaves, values, in_place=in_place)
                if compiled is not None and in_place:
                    return param, moments
            outputs = update.graph(*leaves, *values) if compiled is None else compiled
        after = dict(zip(update.state, outputs[1:], strict=True))
        return written(param, moments, outputs[0], after) if in_place else (outputs[0], after)

    def _known(self, hyper: Mapping[str, Any]) -> _Hyper:
        """Hyperparameters as a recording takes them: often those of the leaf before."""
        if self._hyper.by_name is hyper:
            return self._hyper
        known = _Hyper.of(hyper)
        if not any(isinstance(number, Tensor) for number in known.numbers.values()):
            self._hyper = known  # a tensor may belong to a transform that has ended
        return known

    def _at_first(self, param: Tensor, hyper: Mapping[str, Any]) -> Update:
        """The recording of the first step of a parameter."""
        known = _Hyper.of(hyper)
        return self._recording(param, None, known, 0, known.numbers)

    def _recording(
        self,
        param: Tensor,
        state: Moments | None,
        hyper: _Hyper,
        count: int,
        numbers: Mapping[str, Any],
    ) -> Update:
        values = {name: concrete(value) for name, value in numbers.items()}
        kind = LeafShape.of(param), None if state is None else tuple(state), hyper.fixed
        known = self._recorded.setdefault(kind, [])
        for update in known:
            if update.holds(values):
                return update
        kinds = tuple(map(LeafShape.of, (state or {}).values()))
        everywhere = self._optimizer, kind, kinds, torch.get_default_dtype(), autocasts()
        shared = _recordings(everywhere) if self._shares else []
        recorded = next((update for update in shared if update.holds(values)), None)
        if recorded is None:
            chosen = {name: concrete(value) for name, value in hyper.by_name.items()}
            recorded = record_update(self._optimizer, chosen, param, state, count)
            shared.append(recorded)
        known.append(recorded)
        return recorded


def written(
    param: Tensor, moments: Moments, value: Tensor, state: Moments
) -> tuple[Tensor, Moments]:
    """A parameter and its state, with the values after a step written into them."""
    param.copy_(value)
    for name, after in state.items():
        moments[name].copy_(after)
    return param, moments


@lru_cache(maxsize=1024)
def _recordings(key: Hashable) -> list[Update]:
    """The recordings so far of one optimizer of torch and one kind of parameter."""
    return []


def _fixed(value: Any) -> Hashable:
    if isinstance(value, (tuple, list)):
        return tuple(_fixed(entry) for entry in value)
    return float if isinstance(value, (float, Tensor)) else repr(value)
