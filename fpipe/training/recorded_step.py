"""One step of an optimizer of torch, recorded for one parameter as a pure function.

    param, grad, state, numbers ──► step() of torch.optim, on abstract tensors ──► param, state

Optimizers treat each parameter by itself, so a step is recorded once for each kind of parameter.
Hyperparameters and the count of steps are symbols: the graph takes them as Python floats, and
computes with them as the optimizer does, to the same bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from fpipe.errors import FpipeError, error_text, label_of
from fpipe.graph.node_writer import write_graph
from fpipe.graph.nodes import value_of
from fpipe.inputs.signature import LeafShape
from fpipe.torch_internals import (
    FakeTensorMode,
    from_fun,
    innermost_value,
    is_transformed,
    temporarily_clear_interpreter_stack,
    to_fun,
)
from fpipe.trace.functional import Functional
from fpipe.training.scalars import Guard, Symbols

COUNT: Final = "count"
"""The name of the number of steps that were made before this one."""

STEP: Final = "step"
"""The name under which optimizers of torch count their steps, in each parameter's state."""


@dataclass(frozen=True, eq=False)
class Update:
    """An optimizer's step of one kind of parameter.

    Attributes:
        graph: ``(param, grad, *state, *numbers) -> (param, *state)``.
        state: the names of the tensors of the state that come out, in order. They come in too,
            but for the first step.
        shapes: theirs.
        numbers: the names of the numbers that it takes.
        guards: conditions on them under which it is right.
    """

    graph: fx.GraphModule
    state: tuple[str, ...]
    shapes: tuple[LeafShape, ...]
    numbers: tuple[str, ...]
    guards: tuple[Guard, ...]

    def holds(self, values: Mapping[str, float]) -> bool:
        """Whether it is right for these values of its numbers."""
        return all(guard(values) for guard in self.guards)


def numbers_of(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that are floats or tensors, by name; of a tuple each: ``betas.0``."""
    numbers: dict[str, Any] = {}
    for name, value in hyper.items():
        several = isinstance(value, (tuple, list))
        entries = {f"{name}.{i}": v for i, v in enumerate(value)} if several else {name: value}
        numbers |= {key: v for key, v in entries.items() if isinstance(v, (float, Tensor))}
    return numbers


def name_of_state(name: str) -> str:
    """The name of the number that a tensor without dimensions of the state holds."""
    return f"state.{name}"


def numbers_in(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The numbers in tensors of the state that have no dimensions and lie on the CPU, by name."""
    return {
        name_of_state(name): value if is_transformed(value) else float(value)
        for name, value in state.items()
        if not value.dim() and value.device.type == "cpu"
    }


def concrete(value: Any) -> Any:
    """The float in a tensor without dimensions; of one that is mapped, that of its first member."""
    if isinstance(value, (tuple, list)):
        return tuple(concrete(entry) for entry in value)
    if not isinstance(value, Tensor):
        return value
    return innermost_value(value).flatten()[0].item()


def _with_numbers(hyper: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
    def value_of(name: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(numbers.get(f"{name}.{i}", v) for i, v in enumerate(value))
        return numbers.get(name, value)

    return {name: value_of(name, value) for name, value in hyper.items()}


def one_by_one(optimizer: type, hyper: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters, with which it updates one parameter after another, if it can choose."""
    accepted = inspect.signature(optimizer).parameters
    return dict(hyper) | {name: False for name in ("foreach", "fused") if name in accepted}


def record_update(
    optimizer: Callable[..., torch.optim.Optimizer],
    hyper: Mapping[str, Any],
    param: Tensor,
    state: Mapping[str, Tensor] | None,
    count: int,
) -> Update:
    """Record one step for a parameter like `param`.

    Args:
        optimizer: a class of `torch.optim`, or derived from it.
        hyper: its hyperparameters, all that a group of parameters has.
        param: shape, dtype and device of the parameter, and how it lies; on the meta device or not.
        state: tensors like those of its state; None for the first step, which makes them.
        count: of the steps before; the recording is right for others too, as its guards say.

    Raises:
        FpipeError: the optimizer cannot be recorded; says why, and what to pass instead.
    """
    symbols = Symbols()
    kinds = [LeafShape.of(value) for value in (param, param, *(state or {}).values())]
    accepted = inspect.signature(optimizer).parameters
    arguments = {name: value for name, value in hyper.items() if name in accepted}
    values = numbers_of(hyper)
    if state is not None:
        values |= {COUNT: float(count), **numbers_in(state)}
    values = {name: concrete(value) for name, value in values.items()}
    names: list[str] = []

    def step(param: Tensor, grad: Tensor, leaves: Sequence[Tensor], chosen: Any) -> list[Tensor]:
        instance = optimizer([param], **arguments)
        instance.param_groups[0].update(_with_numbers(hyper, chosen))
        param.grad = grad
        leaf_state = instance.state[param]
        if state is not None:
            leaf_state.clear()
            leaf_state.update(zip(state, leaves, strict=True))
            leaf_state[STEP] = param.new_zeros((), dtype=torch.float64, device="cpu")
        with _Reading(symbols, leaf_state, chosen):
            instance.step()
        kept = {name: v for name, v in leaf_state.items() if name != STEP and v is not None}
        odd = {name: v for name, v in kept.items() if not isinstance(v, Tensor)}
        if odd:
            raise ValueError(f"its state has {odd}, which is no tensor")
        names[:] = kept
        return [param, *kept.values()]

    def without_writes(*inputs: Any) -> list[Tensor]:
        chosen = dict(zip(values, inputs[len(kinds) :], strict=True))
        with Functional(lambda _: "a tensor"):
            param, grad, *leaves = (to_fun(value) for value in inputs[: len(kinds)])
            outputs = step(param.clone(), grad, [leaf.clone() for leaf in leaves], chosen)
            for output in outputs:
                torch._sync(output)
            return [from_fun(output) for output in outputs]

    try:
        # Whoever calls may be within transforms, of which the recording knows nothing.
        with (
            torch.no_grad(),
            temporarily_clear_interpreter_stack(),
            FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols.env),
        ):
            likes = [kind.empty() for kind in kinds]
            numbers = [symbols.new(name, value) for name, value in values.items()]
            graph = write_graph(without_writes, [*likes, *numbers])
        guards = symbols.guards()
    except Exception as error:
        raise FpipeError(
            f"optimizer={label_of(optimizer)} cannot be recorded as a pure function: "
            f"{error_text(error)}; pass a pair of functions (init, update) instead"
        ) from error
    graph = _tidied(graph)
    outputs: Any = graph.graph.output_node().args[0]
    shapes = tuple(LeafShape.of(value_of(node)) for node in outputs[1:])
    return Update(graph, tuple(names), shapes, tuple(values), guards)


def _tidied(module: fx.GraphModule) -> fx.GraphModule:
    """Without the marks of profilers, what nobody reads, and what would end a history."""
    for node in reversed(module.graph.nodes):
        if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            node.replace_all_uses_with(node.args[0])
        if node.op not in ("output", "placeholder") and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return module


class _Reading(TorchFunctionMode):
    """Answers what an optimizer reads of tensors: the count of steps, and numbers of the state."""

    def __init__(
        self, symbols: Symbols, state: Mapping[str, Any], numbers: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self._symbols = symbols
        self._state = state
        self._count = numbers.get(COUNT, 0.0)
        # As long as nothing is written to them.
        self._known = {
            id(value): (numbers[name_of_state(name)], value)
            for name, value in state.items()
            if name_of_state(name) in numbers
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if func in (torch.tensor, torch.as_tensor) and isinstance(first, torch.SymFloat):
            # It would take the number for a constant.
            return torch.full((), first, **(kwargs or {}))  # type: ignore[call-overload]
        if isinstance(first, Tensor) and not first.dim():
            counts = first is self._state.get(STEP)
            if func in (Tensor.item, Tensor.__float__):
                if counts:
                    return self._count
                known = self._known.get(id(first))
                return self._symbols.item(first) if known is None else known[0]
            if counts and func in (Tensor.add_, Tensor.__iadd__):
                self._count = self._count + args[1]
            elif func.__name__.endswith("_"):
                self._known.pop(id(first), None)
        result = func(*args, **(kwargs or {}))
        if func in _CONSTANT and not result.dim():
            self._known[id(result)] = _CONSTANT[func], result
        return result


_CONSTANT: Final[Mapping[Any, float]] = {torch.ones: 1.0, torch.zeros: 0.0}
