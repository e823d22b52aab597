"""Pipelines that calls of another pipeline need; each is made once, and kept by that pipeline.

with_argnums       the same, with gradients by other arguments
ensemble_of        the pipeline of all members
member_of          the pipeline of one member
jvp_of             the pipeline of dual stages: derivatives in a direction of the arguments
jvp_of_gradients   the same, in a direction of the gradients
vjp_of             the pipeline of a cotangent of the outputs
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, Protocol

from torch import Tensor

from fpipe import pytree
from fpipe.functional.dual import derivative
from fpipe.functional.ensemble import ensemble
from fpipe.functional.pullback import pullback
from fpipe.plan.stage_compiler import StageCompiler
from fpipe.spec.definition import ARGUMENTS, Alone, Definition
from fpipe.torch_internals import temporarily_clear_interpreter_stack

Method = Literal["step", "value", "forward", "run_step", "run_value", "run_forward"]
"""The methods of a pipeline that may be called within autograd and `torch.func`."""


class Callee(Protocol):
    """A pipeline, as a call of it sees it.

    Attributes:
        definition: all that it was made from.
        rank: as in `Engine`.
        derived: pipelines that calls of this one need, by what makes them differ.
        stage_compiler: what traces and compiles the stages.
    """

    definition: Definition
    rank: int | None
    derived: dict[Any, Any]
    stage_compiler: StageCompiler

    def __init__(
        self, definition: Definition, *, stage_compiler: StageCompiler | None = None
    ) -> None: ...

    def telling(self, method: str) -> AbstractContextManager[None]:
        """As in `Engine`."""

    def run_step(
        self, *arguments: Any, key: Tensor | None = None, name: str | None = None
    ) -> tuple[Any, ...]:
        """The loss and the gradients, and aux if there is any."""

    def run_value(self, *arguments: Any, key: Tensor | None = None) -> Any:
        """The loss."""

    def run_forward(self, *arguments: Any, key: Tensor | None = None, out_dims: Any = 0) -> Any:
        """The outputs."""


def with_argnums(pipe: Callee, names: tuple[str, ...]) -> Callee:
    """The pipeline whose gradients are by the arguments `names`.

    It is `pipe` itself where that has them. Over processes another pipeline is told from it by
    counting, which goes wrong where some ranks alone make it.
    """
    if pipe.definition.wanted == names:
        return pipe
    shares = set(names) == set(pipe.definition.wanted)
    stage_compiler = pipe.stage_compiler if shares else None
    return _kept(pipe, names, lambda: replace(pipe.definition, argnums=names), stage_compiler)


def ensemble_of(pipe: Callee, in_dims: tuple[Any, ...], randomness: str, key: Any) -> Callee:
    """The pipeline of all members, stacked as for `fpipe.vmap`.

    The key is hashable, and the same only for the same `in_dims` and `randomness`.
    """

    def make() -> Definition:
        # argnums are chosen last.
        member = replace(pipe.definition, argnums="params")
        members = ensemble(Alone(member, in_dims, randomness, None))
        return replace(members, argnums=pipe.definition.argnums)

    return _kept(pipe, key, make)


def member_of(pipe: Callee) -> Callee:
    """The pipeline of one member of an ensemble."""
    assert pipe.definition.alone is not None
    member = pipe.definition.alone.definition
    return _kept(pipe, "member", lambda: replace(member, schedule=pipe.definition.schedule))


def jvp_of(pipe: Callee) -> Callee:
    """The pipeline of dual stages: it takes a vector for the parameters and one for the batch."""
    return _kept(pipe, "jvp", lambda: _dual(pipe.definition, stacked=False))


def jvp_of_gradients(pipe: Callee) -> Callee:
    """The pipeline of dual stages, whose vectors have the shapes of the gradients.

    Members of an ensemble who share a parameter have a gradient each, and so a direction each.
    """
    if pipe.definition.alone is None:
        return jvp_of(pipe)
    return _kept(pipe, "jvp of gradients", lambda: _dual(pipe.definition, stacked=True))


def vjp_of(pipe: Callee, out_dims: Any) -> Callee:
    """The pipeline that takes a cotangent of the outputs, which are merged along `out_dims`."""
    key = "vjp", *pytree.hashable_prefix(out_dims)
    return _kept(pipe, key, lambda: pullback(replace(pipe.definition, argnums="params"), out_dims))


def _kept(
    pipe: Callee,
    key: Any,
    make: Callable[[], Definition],
    stage_compiler: StageCompiler | None = None,
) -> Callee:
    """The pipeline that `pipe` keeps under `key`, made at the first call."""
    if key not in pipe.derived:
        definition = make()
        # The tensors of a pipeline belong to no level of torch.func.
        with temporarily_clear_interpreter_stack():
            pipe.derived[key] = type(pipe)(definition, stage_compiler=stage_compiler)
    return pipe.derived[key]


def _dual(definition: Definition, *, stacked: bool) -> Definition:
    """The definition of dual stages; of an ensemble it is an ensemble, whose members are duals.

    If `stacked`, members who share a parameter have a direction each.
    """
    if definition.alone is None:
        return derivative("hvp", definition, ARGUMENTS)
    member, in_dims, *_ = definition.alone
    dual = _dual(replace(member, schedule=definition.schedule), stacked=stacked)
    params_dims, batch_dims = in_dims
    if stacked:
        params_dims = pytree.prefix_map(lambda dim: 0 if dim is None else dim, params_dims)
    vector_dims = params_dims, batch_dims
    return ensemble(definition.alone._replace(definition=dual, in_dims=(*in_dims, *vector_dims)))
