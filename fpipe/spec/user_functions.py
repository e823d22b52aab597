"""The user's functions: the inputs of a stage, and the results of a loss function.

Both are declared by the user, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fpipe import dtensors, pytree
from fpipe.checks.explain import describe
from fpipe.errors import StageError, a_type, check_flags, label_of
from fpipe.inputs.signature import is_differentiable


@dataclass(frozen=True)
class Stage:
    """A stage function with what fpipe needs to know about it.

    A plain function ``(params, x) -> y`` is already a stage; this class is for those that also
    read the microbatch or draw random numbers.

    Attributes:
        fn: ``(params, x) -> y``, or ``(params, x, microbatch) -> y`` where `reads_batch`. Params,
            x, y and microbatch are pytrees of tensors of any shape and dtype; floating-point and
            complex leaves carry gradients, others pass without. It must be pure: no input is
            written to, and the result depends on nothing else (random numbers are allowed).
        reads_batch: pass the microbatch as third argument. Its leaves are read where they are
            needed and never sent between ranks.
        reads_key: pass a key of `fpipe.random`, as the keyword argument ``key``. Stage `s` gets
            ``fold_in(fold_in(key, m), s)`` for microbatch `m`, from the key of the step.

    Raises:
        StageError: `fn` is not callable, or a module with parameters to be trained; or the others
            are neither True nor False.

    Example:
        >>> import fpipe
        >>> masked = Stage(lambda params, x, batch: x * batch["mask"], reads_batch=True)
        >>> masked.reads_batch
        True
        >>> def noisy(params, x, key):
        ...     return fpipe.random.dropout(key, x @ params, 0.1)
        >>> Stage(noisy, reads_key=True).label
        'noisy'
    """

    fn: Callable[..., Any]
    reads_batch: bool = False
    reads_key: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise StageError(
                f"fn={self.fn!r:.60} is not callable: a stage is a function (params, x) -> y"
            )
        if isinstance(self.fn, nn.Module) and any(p.requires_grad for p in self.fn.parameters()):
            raise StageError(
                f"a stage is {a_type(self.fn)}, a module with parameters of its own, "
                "which would get no gradient: pass a function (params, x) -> "
                "torch.func.functional_call(module, params, (x,)), or the whole model to "
                "fpipe.from_module, which makes its stages"
            )
        check_flags(reads_batch=self.reads_batch, reads_key=self.reads_key)

    @property
    def label(self) -> str:
        """The function's name, for messages."""
        return label_of(self.fn)


class Numbering(NamedTuple):
    """How the values that the caller gets of each microbatch are numbered.

    Attributes:
        heads: those that make the loss come first: the loss, or the sum and its weight; none where
            the loss is not computed.
        spec: structure of the others, an output or aux.
    """

    heads: int
    spec: optree.PyTreeSpec


class Taken(NamedTuple):
    """The results of a loss function, taken apart.

    Attributes:
        heads: the loss, or the sum and its weight.
        state: a pytree of tensors; None where nothing was declared.
        aux: a pytree of tensors; None where nothing was declared.
    """

    heads: tuple[Tensor, ...]
    state: Any
    aux: Any

    def flat(self) -> tuple[list[Tensor], Numbering]:
        """All tensors, and how they are numbered."""
        leaves, spec = pytree.flatten(self.aux)
        return [*self.heads, *leaves], Numbering(len(self.heads), spec)


@dataclass(frozen=True)
class Returns:
    """The declared results of a loss function.

    Attributes:
        weighted: ``(sum, weight)`` in place of the loss.
        state: the new state follows the loss.
        aux: a pytree of tensors comes last.
    """

    weighted: bool = False
    state: bool = False
    aux: bool = False

    @property
    def form(self) -> str:
        """How it is written."""
        parts = ["(sum, weight)" if self.weighted else "loss"]
        parts += ["state"] * self.state + ["aux"] * self.aux
        return f"({', '.join(parts)})" if len(parts) > 1 else parts[0]

    @property
    def beside(self) -> int:
        """How many things come beside the loss."""
        return self.state + self.aux

    @property
    def call(self) -> str:
        """How a whole loss function is called."""
        return "loss_fn(params, state, batch)" if self.state else "loss_fn(params, batch)"

    @property
    def declared(self) -> str:
        """The options that say so."""
        options = {
            'reduction="weighted"': self.weighted,
            "has_state=True": self.state,
            "has_aux=True": self.aux,
        }
        return " and ".join(name for name, is_declared in options.items() if is_declared)

    def take(self, subject: str, call: str, value: Any, shape: Sequence[int | None] = ()) -> Taken:
        """Take apart what a loss function returned.

        Args:
            subject: the function in messages, with a verb, such as ``"loss_fn returns"``.
            call: how it is called, such as ``"loss_fn(params, batch)"``.
            value: what it returned.
            shape: of the loss, with None for a size that the arguments tell: for how many losses
                there are under a transform, each of which has a weight of its own.

        Raises:
            StageError: it is not what was declared.
        """
        whole: tuple[Any, ...] = (value,)
        if self.beside:
            whole = self._several(subject, call, value, 1 + self.beside)
        state = whole[1] if self.state else None
        aux = whole[-1] if self.aux else None
        heads = self._several(subject, call, whole[0], 2) if self.weighted else (whole[0],)
        heads = tuple(map(dtensors.whole, heads))
        loss = heads[0]
        is_real = isinstance(loss, Tensor) and is_differentiable(loss) and not loss.is_complex()
        if not is_real or not _fits(loss, shape):
            hint = ""
            if not self.weighted and isinstance(loss, tuple | list):
                ways = ['reduction="weighted" for (sum, weight)']
                ways += ["has_aux=True for (loss, aux)"] * (not self.declared)
                hint = f", or declare what comes beside it: {', '.join(ways)}"
            shown = _shown(loss)
            if shape and isinstance(loss, Tensor):
                shown += f" under a transform, which has added {len(shape)} of these dimensions"
            form = f"{self.form}, whose {'sum' if self.weighted else 'loss'} is "
            raise StageError(
                f"{subject} {shown}: {call} must return {form if self.declared else ''}one "
                f"floating-point scalar (take .mean() or .sum() of it{hint})"
            )
        several = tuple(size for size in shape if size is None)
        for weight in heads[1:]:
            if not isinstance(weight, Tensor) or not _fits(weight, several) or weight.is_complex():
                raise StageError(
                    f"{subject} a sum with the weight {_shown(weight)}: {call} must return "
                    f"{self.form}, whose weight is one real number, an int, a float or a tensor "
                    "without dimensions (such as mask.sum())"
                )
        for what, tree in (("state", state), ("aux", aux)):
            for path, leaf in _leaves(tree):
                if not isinstance(leaf, Tensor):
                    raise StageError(
                        f"{subject} {what}{path}={leaf!r:.60}, {a_type(leaf)}: {what} "
                        "must be a pytree of tensors (torch.as_tensor makes one)"
                    )
        return Taken(heads, state, aux)

    def with_tensors(self, value: Any) -> Any:
        """The results of a loss function, with a tensor for a weight that is a Python number.

        Other values stay as they are, for `take` to refuse.
        """
        several = isinstance(value, tuple | list) and bool(value)
        pair = value[0] if self.beside and several else value
        if not self.weighted or not isinstance(pair, tuple | list) or len(pair) != 2:
            return value
        loss, weight = pair
        if not isinstance(loss, Tensor) or type(weight) not in (int, float):
            return value
        weight = torch.full((), weight, dtype=torch.float64, device=loss.device)
        return ((loss, weight), *value[1:]) if self.beside else (loss, weight)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A loss function that returns what `with_tensors` makes of what this one returns."""

        @wraps(function)
        def loss(*arguments: Any, **named: Any) -> Any:
            return self.with_tensors(function(*arguments, **named))

        return loss

    def written(self, taken: Taken) -> Any:
        """The inverse of `take`: what a function returns that returns these."""
        loss = taken.heads if self.weighted else taken.heads[0]
        if not self.beside:
            return loss
        return (loss, *(taken.state,) * self.state, *(taken.aux,) * self.aux)

    def _several(self, subject: str, call: str, value: Any, count: int) -> tuple[Any, ...]:
        if not isinstance(value, tuple | list) or len(value) != count:
            raise StageError(
                f"{subject} {_shown(value)}: with {self.declared} {call} must return {self.form}"
            )
        return tuple(value)


def check_state(
    subject: str, before: Sequence[Tensor], spec: optree.PyTreeSpec, state: Any
) -> list[Tensor]:
    """The leaves of the new state, which must be like those of the state that was given.

    Raises:
        StageError: it has another structure, or a leaf has another shape or dtype.
    """
    leaves, returned_spec = pytree.flatten(state)
    if returned_spec != spec:
        raise StageError(
            f"{subject} a state of another structure than it was given: every leaf comes back, "
            f"changed or not (it got {spec}, and returns {returned_spec})"
        )
    for path, old, new in zip(pytree.paths(spec), before, leaves, strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise StageError(
                f"{subject} state{path} as {_shown(new)}, but was given {_shown(old)}: the state "
                "of one microbatch is what the next begins with, so shapes and dtypes must stay"
            )
    return leaves


LOSS = Returns()
"""The loss alone."""


def _fits(value: Tensor, shape: Sequence[int | None]) -> bool:
    return value.dim() == len(shape) and all(
        expected in (None, size) for size, expected in zip(value.shape, shape, strict=True)
    )


def _shown(value: Any) -> str:
    """Describe a value, for messages."""
    if isinstance(value, Tensor):
        return describe("it", value).removeprefix("it: ")
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"{a_type(value)}{size}"


def _leaves(aux: Any) -> list[tuple[str, Any]]:
    leaves, spec = pytree.flatten(aux)
    return list(zip(pytree.paths(spec), leaves, strict=True))
