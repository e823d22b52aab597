"""Pipelines that calls of another one need: each is made once, and kept by the one it is made of.

choosing     the same, with gradients by other arguments
of_members   the pipeline of all members
alone        the pipeline of one member
moving       the pipeline of dual stages: derivatives in a direction of the arguments
bent         the same in a direction of the gradients
pulled       the pipeline of a cotangent of the outputs
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, Protocol

from torch import Tensor

from fpipe import pytree
from fpipe.definition import ARGUMENTS, Alone, Definition
from fpipe.functional.dual import derivative
from fpipe.functional.ensemble import ensemble
from fpipe.functional.pullback import pullback
from fpipe.plan.workshop import Workshop
from fpipe.torch_internals import temporarily_clear_interpreter_stack

Method = Literal["step", "value", "forward", "run_step", "run_value", "run_forward"]
"""The methods of a pipeline that calls within autograd and `torch.func` are made of."""


class Callee(Protocol):
    """What a pipeline is to a call of it.

    Attributes:
        definition: all that it was made from.
        rank: as in `Pipeline`.
        derived: pipelines that calls of this one need, by what makes them differ.
        workshop: what traces and compiles the stages.
    """

    definition: Definition
    rank: int | None
    derived: dict[Any, Any]
    workshop: Workshop

    def __init__(self, definition: Definition, *, workshop: Workshop | None = None) -> None: ...

    def telling(self, method: str) -> AbstractContextManager[None]:
        """As in `Pipeline`."""

    def run_step(
        self, *arguments: Any, key: Tensor | None = None, name: str | None = None
    ) -> tuple[Any, ...]:
        """The loss and the gradients, and aux if there is any."""

    def run_value(self, *arguments: Any, key: Tensor | None = None) -> Any:
        """The loss."""

    def run_forward(self, *arguments: Any, key: Tensor | None = None, out_dims: Any = 0) -> Any:
        """The outputs."""


def choosing(pipe: Callee, names: tuple[str, ...]) -> Callee:
    """The pipeline whose gradients are those by the arguments that `names` has.

    That is the pipeline itself where it can be: over processes another one is told from it by
    counting, which goes wrong where some ranks alone make it.
    """
    if pipe.definition.wanted == names:
        return pipe
    shares = set(names) == set(pipe.definition.wanted)
    workshop = pipe.workshop if shares else None
    return _kept(pipe, names, lambda: replace(pipe.definition, argnums=names), workshop)


def of_members(pipe: Callee, in_dims: tuple[Any, ...], randomness: str, key: Any) -> Callee:
    """The pipeline of all members.

    Args:
        pipe: that of one.
        in_dims: as for `ensemble`, as is `randomness`.
        key: hashable, and the same only for the same `in_dims` and `randomness`.
    """

    def make() -> Definition:
        # What is differentiated by is chosen last.
        one = replace(pipe.definition, argnums="params")
        made = ensemble(Alone(one, in_dims, randomness, None))
        return replace(made, argnums=pipe.definition.argnums)

    return _kept(pipe, key, make)


def alone(pipe: Callee) -> Callee:
    """The pipeline of one member of an ensemble."""
    assert pipe.definition.alone is not None
    one = pipe.definition.alone.definition
    return _kept(pipe, "alone", lambda: replace(one, schedule=pipe.definition.schedule))


def moving(pipe: Callee) -> Callee:
    """The pipeline of dual stages, which takes a vector for the parameters and one for the batch.

    Raises:
        StageError: it has none.
    """
    return _kept(pipe, "moving", lambda: _dual(pipe.definition, stacked=False))


def bent(pipe: Callee) -> Callee:
    """The same of a pipeline with vectors in the shapes of the gradients.

    Members of an ensemble who share a parameter have a gradient each, and so a direction each.

    Raises:
        StageError: it has none.
    """
    if pipe.definition.alone is None:
        return moving(pipe)
    return _kept(pipe, "bent", lambda: _dual(pipe.definition, stacked=True))


def pulled(pipe: Callee, out_dims: Any) -> Callee:
    """The pipeline that takes a cotangent of the outputs, which are merged along `out_dims`.

    Raises:
        StageError: it has none.
    """
    key = "pulled", *pytree.hashable_prefix(out_dims)
    return _kept(pipe, key, lambda: pullback(replace(pipe.definition, argnums="params"), out_dims))


def _kept(
    pipe: Callee, key: Any, make: Callable[[], Definition], workshop: Workshop | None = None
) -> Callee:
    """The pipeline that `pipe` keeps under `key`, made when it is first asked for."""
    if key not in pipe.derived:
        definition = make()
        # What it makes for itself belongs to no level of torch.func.
        with temporarily_clear_interpreter_stack():
            pipe.derived[key] = type(pipe)(definition, workshop=workshop)
    return pipe.derived[key]


def _dual(definition: Definition, *, stacked: bool) -> Definition:
    """That of dual stages; of an ensemble it is an ensemble too, whose members are duals.

    Args:
        definition: of the pipeline.
        stacked: members who share a parameter have a direction each.
    """
    if definition.alone is None:
        return derivative("hvp", definition, ARGUMENTS)
    one, in_dims, *_ = definition.alone
    dual = _dual(replace(one, schedule=definition.schedule), stacked=stacked)
    along, along_batch = in_dims
    if stacked:
        along = pytree.prefix_map(lambda dim: 0 if dim is None else dim, along)
    own = definition.alone._replace(definition=dual, in_dims=(*in_dims, along, along_batch))
    return ensemble(own)
