"""What a loss function returns beside the loss: declared by the user, never guessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
from torch import Tensor

from fpipe import tree
from fpipe.errors import StageError
from fpipe.stage.explain import describe
from fpipe.stage.joint import is_differentiable


class Layout(NamedTuple):
    """How the values that the caller gets of each microbatch are numbered.

    Attributes:
        heads: those that make the loss come first: the loss, or the sum and its weight; none where
            the loss is not computed.
        spec: structure of the others, an output or aux.
    """

    heads: int
    spec: optree.PyTreeSpec


class Taken(NamedTuple):
    """What a loss function returned, taken apart.

    Attributes:
        heads: the loss, or the sum and its weight.
        aux: a pytree of tensors; None where nothing was declared.
    """

    heads: tuple[Tensor, ...]
    aux: Any

    def flat(self) -> tuple[list[Tensor], Layout]:
        """All tensors, and how they are numbered."""
        leaves, spec = tree.flatten(self.aux)
        return [*self.heads, *leaves], Layout(len(self.heads), spec)


@dataclass(frozen=True)
class Returns:
    """What a loss function returns, as it was declared.

    Attributes:
        weighted: ``(sum, weight)`` in place of the loss.
        aux: a pair of the loss and a pytree of tensors.
    """

    weighted: bool = False
    aux: bool = False

    @property
    def form(self) -> str:
        """How it is written."""
        loss = "(sum, weight)" if self.weighted else "loss"
        return f"({loss}, aux)" if self.aux else loss

    @property
    def declared(self) -> str:
        """The options that say so."""
        options = {'reduction="weighted"': self.weighted, "has_aux=True": self.aux}
        return " and ".join(name for name, given in options.items() if given)

    def take(self, subject: str, call: str, value: Any, shape: Sequence[int | None] = ()) -> Taken:
        """Take apart what a loss function returned.

        Args:
            subject: the function in messages, with a verb, such as ``"loss_fn returns"``.
            call: how it is called, such as ``"loss_fn(params, batch)"``.
            value: what it returned.
            shape: of the loss, with None for a size that the arguments tell.

        Raises:
            StageError: it is not what was declared.
        """
        loss, aux = self._pair(subject, call, value) if self.aux else (value, None)
        heads = self._pair(subject, call, loss) if self.weighted else (loss,)
        loss = heads[0]
        if not isinstance(loss, Tensor) or not _fits(loss, shape) or not _is_real(loss):
            hint = ""
            if not self.declared and isinstance(loss, tuple | list):
                hint = ", or declare what comes beside it: has_aux=True for (loss, aux)"
            form = f"{self.form}, whose {'sum' if self.weighted else 'loss'} is "
            raise StageError(
                f"{subject} {_found(loss)}: {call} must return {form if self.declared else ''}one "
                f"floating-point scalar (take .mean() or .sum() of it{hint})"
            )
        for weight in heads[1:]:
            if not isinstance(weight, Tensor) or weight.dim() or weight.is_complex():
                raise StageError(
                    f"{subject} a sum with the weight {_found(weight)}: {call} must return "
                    f"{self.form}, whose weight is one real number, a tensor without dimensions "
                    "(such as mask.sum())"
                )
        for path, leaf in _leaves(aux):
            if not isinstance(leaf, Tensor):
                raise StageError(
                    f"{subject} aux{path}={leaf!r:.60}, a {type(leaf).__name__}: aux must be "
                    "a pytree of tensors (torch.as_tensor makes one)"
                )
        return Taken(heads, aux)

    def _pair(self, subject: str, call: str, value: Any) -> tuple[Any, Any]:
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise StageError(
                f"{subject} {_found(value)}: with {self.declared} {call} must return {self.form}"
            )
        return value[0], value[1]


LOSS = Returns()
"""The loss alone."""


def _fits(value: Tensor, shape: Sequence[int | None]) -> bool:
    return value.dim() == len(shape) and all(
        expected in (None, size) for size, expected in zip(value.shape, shape, strict=True)
    )


def _is_real(value: Tensor) -> bool:
    return is_differentiable(value) and not value.is_complex()


def _found(value: Any) -> str:
    """What a value is, for messages."""
    if isinstance(value, Tensor):
        return describe("it", value).removeprefix("it: ")
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{size}"


def _leaves(aux: Any) -> list[tuple[str, Any]]:
    leaves, spec = tree.flatten(aux)
    return list(zip(tree.paths(spec), leaves, strict=True))
