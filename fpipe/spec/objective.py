"""The objective of a pipeline: which parameters are trained, and how gradients are collected.

A parameter that is not trained has no gradient, and costs nothing that serves one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from fpipe import pytree
from fpipe.errors import BatchError, StageError, a_type, error_text
from fpipe.inputs.signature import is_differentiable
from fpipe.spec.policies import Precision
from fpipe.spec.user_functions import LOSS, Returns

Flags = tuple[tuple[bool, ...], ...]
"""For each stage, whether each of its leaves is trained."""


@dataclass(frozen=True)
class Trainable:
    """The user's choice of what is trained.

    Attributes:
        choice: None or True for everything; a pytree prefix of bools over the parameters, with None
            where those have None; or a function of the path of a leaf, a tuple of keys and indices.
        within: where in a stage's parameters those of the user lie, as the numbers of the nodes'
            children: transforms put others beside them.

    Raises:
        StageError: `choice` has something else than bools.
    """

    choice: Any = None
    within: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.choice is None or callable(self.choice):
            return
        for leaf in pytree.flatten_prefix(self.choice):
            if not isinstance(leaf, bool | None):
                raise StageError(
                    f"trainable has the leaf {leaf!r:.60}, a {_named(type(leaf))}: it must be a "
                    "pytree prefix of bools over the parameters, or a function of a leaf's path, "
                    'such as lambda path: "lora" in path'
                )

    def flags(self, specs: Sequence[optree.PyTreeSpec], *, shared: bool) -> Flags:
        """Whether each leaf is trained.

        Stages whose parameters are `shared` see the whole tree, which the choice is about.

        Raises:
            BatchError: the choice is no prefix of the parameters, or None for one of them.
        """
        if self.choice is None:
            return tuple((True,) * spec.num_leaves for spec in specs)
        if shared:
            return (self._under("trainable", self.choice, specs[0], (), self.within),) * len(specs)
        return tuple(
            self._under(f"trainable[{stage}]", choice, spec, (stage,), self.within)
            for stage, (choice, spec) in enumerate(zip(self._parts(len(specs)), specs, strict=True))
        )

    def frozen(
        self, specs: Sequence[optree.PyTreeSpec], *, shared: bool
    ) -> frozenset[tuple[int, int]]:
        """Stage and leaf of what is not trained."""
        return frozenset(
            (stage, leaf)
            for stage, flags in enumerate(self.flags(specs, shared=shared))
            for leaf, flag in enumerate(flags)
            if not flag
        )

    def requires(self, stages: int) -> list[str] | None:
        """The ops that a schedule must contain for each stage, as `fpipe.verify` takes them.

        None where that cannot be told before the parameters are there.
        """
        if not isinstance(self.choice, bool | list | tuple | None):
            return None
        parts = [True] * stages if self.choice is None else self._parts(stages)
        trained = [any(pytree.flatten_prefix(choice)) for choice in parts]
        return [
            "F" + "I" * any(trained[:stage]) + "W" * is_trained
            for stage, is_trained in enumerate(trained)
        ]

    def _parts(self, stages: int) -> Sequence[Any]:
        """The choice for each stage."""
        if callable(self.choice) or isinstance(self.choice, bool):
            return [self.choice] * stages
        if not isinstance(self.choice, list | tuple) or len(self.choice) != stages:
            size = f" of {len(self.choice)}" if hasattr(self.choice, "__len__") else ""
            raise BatchError(
                f"trainable is {a_type(self.choice)}{size}: it must be a bool, a list or "
                f"tuple with a prefix for each of the {stages} stages, or a function of a path"
            )
        return self.choice

    def _under(
        self,
        name: str,
        choice: Any,
        spec: optree.PyTreeSpec,
        before: tuple[int, ...],
        within: tuple[int, ...],
    ) -> tuple[bool, ...]:
        if not within:
            return self._of(name, choice, spec, before)
        flags: list[bool] = []
        for number, child in enumerate(spec.children()):
            if number == within[0]:
                flags += self._under(name, choice, child, before, within[1:])
            else:
                flags += [True] * child.num_leaves
        return tuple(flags)

    def _of(
        self, name: str, choice: Any, spec: optree.PyTreeSpec, before: tuple[int, ...]
    ) -> tuple[bool, ...]:
        if not spec.num_leaves:
            return ()  # such as a part of another process, which is None
        if callable(choice):
            return tuple(_decided(choice, (*before, *path)) for path in pytree.key_paths(spec))
        whole = pytree.unflatten(spec, range(spec.num_leaves))
        flags: list[bool | None] = pytree.broadcast_prefix(name, choice, whole, "params")
        if None in flags:
            path = pytree.paths(spec)[flags.index(None)]
            raise BatchError(
                f"{name} is None for the leaf params{path}: it must be True, to train it, or False"
            )
        return tuple(map(bool, flags))


ALL = Trainable()
"""Everything is trained."""


@dataclass(frozen=True)
class Sink:
    """How every parameter's gradients are collected.

    Attributes:
        lift: from a leaf and the rows of a microbatch to what the gradient is taken by, such as the
            leaf repeated for each row; None for the leaf itself.
        fold: what of a microbatch's gradient is kept, such as its norm; None for all of it.
        join: the dimension along which microbatches are concatenated, and their losses too; None
            for the weighted sum of both.
        everywhere: every rank gets all of them, and not those of its own stages alone.
    """

    lift: Callable[[Tensor, int], Tensor] | None = None
    fold: Callable[[Tensor], Tensor] | None = None
    join: int | None = None
    everywhere: bool = False

    def lifted(self, leaf: Tensor, rows: int) -> Tensor:
        """The tensor to differentiate by in place of a leaf, for a microbatch of `rows` rows."""
        return leaf if self.lift is None else self.lift(leaf, rows)

    def folded(self, gradient: Tensor) -> Tensor:
        """Reduce the gradient of a microbatch to what is kept."""
        return gradient if self.fold is None else self.fold(gradient)


SUM = Sink()
"""Sums the gradients, as a step does."""


@dataclass(frozen=True)
class Objective:
    """The function's results, the arguments to differentiate by, and the gradient reduction.

    Attributes:
        returns: what the loss function returns.
        loss_shape: shape of the loss, with None for a size that the arguments tell.
        argnums: what gradients are taken by, ``"params"`` and ``"batch"``.
        trainable: which parameters get a gradient.
        accum_dtype: dtype to sum parameter gradients in, None for their own.
        precision: which says so in its place, if there is one.
        sink: how parameter gradients are collected.
    """

    returns: Returns = LOSS
    loss_shape: tuple[int | None, ...] = ()
    argnums: tuple[str, ...] = ("params",)
    trainable: Trainable = ALL
    accum_dtype: torch.dtype | None = None
    precision: Precision | None = None
    sink: Sink = SUM

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """The dtype to sum parameter gradients in; None for their own."""
        return self.accum_dtype if self.precision is None else self.precision.sum_dtype

    def is_by(self, argument: str, value: Tensor) -> bool:
        """Whether the gradient by a leaf of an argument is asked for, and exists."""
        return argument in self.argnums and is_differentiable(value)


def _decided(decide: Callable[[tuple[Any, ...]], Any], path: tuple[Any, ...]) -> bool:
    """Whether a leaf is trained.

    Raises:
        BatchError: the function raises; the cause is what it raised.
    """
    try:
        return bool(decide(path))
    except Exception as error:
        raise BatchError(
            f"trainable raised {error_text(error)}, for the path {path!r:.100}: it "
            "must return whether the leaf at a path, a tuple of keys and indices, is trained"
        ) from error


def _named(kind: type) -> str:
    builtin = kind.__module__ == "builtins"
    return kind.__name__ if builtin else f"{kind.__module__}.{kind.__name__}"
