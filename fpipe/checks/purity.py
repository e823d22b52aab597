"""Refuse stages that write to what is not theirs: their inputs, and tensors that they close over.

In-place ops on a stage's own intermediate values are fine; tracing turns them into pure ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.checks.closure_names import name_in_closure
from fpipe.checks.explain import ImpureError, Untraceable, impure
from fpipe.inputs.signature import memory_of
from fpipe.torch_internals import FakeTensor, FunctionalTensor
from fpipe.trace.overrides.standin import Seeing

_LITERAL = torch.ops.aten.lift_fresh.default


class WriteGuard(Seeing):
    """Raises `ImpureError` at the op that writes, before it does, so that nothing is changed.

    What draws from a generator that is not torch's writes to that, and is `Untraceable`, as are
    collectives of torch.distributed that write to their arguments.

    Args:
        inputs: fake inputs by how a user would write them.
        origin: the user's function, or several, searched for the name of a closed-over tensor.
    """

    def __init__(self, inputs: Mapping[str, Tensor], origin: Any) -> None:
        super().__init__()
        self._origin = origin
        self._foreign = {memory_of(v): f"its input {path}" for path, v in inputs.items()}
        self._kept_alive = list(inputs.values())

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Check the arguments that `func` writes to, then call it."""
        if kwargs and isinstance(kwargs.get("generator"), torch.Generator):
            raise Untraceable(
                "draws from a torch.Generator of its own",
                "a stage is traced once, and cannot keep the generator's state; draw without "
                "generator=, which under a key gives the same numbers whatever the schedule, or "
                "draw before and keep what is drawn in a buffer or in the batch",
            )
        if func.namespace == "c10d":
            raise Untraceable(
                f"calls one of torch.distributed's own collectives ({func})",
                "what it writes to is waited for outside of any trace; take those of "
                "torch.distributed._functional_collectives, which return new tensors",
            )
        arguments = list(_arguments(func, args, kwargs or {}))
        for declared, value in arguments:
            if declared.is_write and func.namespace not in ("aten", "prims"):
                raise Untraceable(
                    f"calls {func}, an operation of torch.library that writes to its arguments",
                    "register one that returns a new tensor, with mutates_args=()",
                )
            if declared.is_write and (owner := self._owner(value)):
                raise ImpureError(owner, str(func))
        result = func(*args, **(kwargs or {}))
        for declared, value in arguments:
            if func is _LITERAL:
                continue  # what torch.tensor has made within the function is its own
            if declared.alias_info is not None and isinstance(result, Tensor):
                owner = self._owner(value)
                if owner is not None:
                    self._foreign[memory_of(result)] = owner
                    self._kept_alive.append(result)
        return result

    def _owner(self, value: Any) -> str | None:
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return None
        if not isinstance(value, FakeTensor | FunctionalTensor):
            return f"a tensor that it closes over ({name_in_closure(value, self._origin)})"
        return self._foreign.get(memory_of(value))


def refuse_writes(name: str, graph: fx.Graph) -> None:
    """Refuse any op that still writes, whatever tracing left.

    Raises:
        StageError: names the op.
    """
    for node in writes(graph):
        where = "what the backward of a torch.autograd.Function is given"
        raise impure(name, where, str(node.target))


def writes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that write to one of their inputs."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            yield node


def _arguments(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch.Argument, Any]]:
    """Each given argument with its declaration."""
    declared = func._schema.arguments
    yield from zip(declared, args, strict=False)
    yield from ((a, kwargs[a.name]) for a in declared if a.name in kwargs)
