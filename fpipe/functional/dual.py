"""Dual stages: a stage that computes its output and the output's derivative in a direction.

    (p, v), (x, ẋ)  ──►  (y, ẏ),   ẏ = ∂y/∂p · v + ∂y/∂x · ẋ

A chain of them, and a loss that is taken the same way, computes a loss and its directional
derivative. The gradient of that derivative by v is the gradient of the loss, and by p the Hessian's
product with v: one backward gives both.

Where the derivative is cut off from p (``stop``), the second one is J'Hv through the first output
alone, which is the Gauss–Newton product.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jvp

from fpipe import pytree
from fpipe.errors import label_of
from fpipe.functional.forward_mode import differentiable_twice
from fpipe.inputs.signature import is_differentiable
from fpipe.spec.returns import Returns, Taken
from fpipe.torch_internals import beneath_forward_mode


def load_rules() -> None:
    """Let torch load its forward-mode rules now: it warns of its own code when it does so."""
    with warnings.catch_warnings(), beneath_forward_mode():
        for kind in (DeprecationWarning, FutureWarning):  # the latter from torch 2.14 on
            warnings.simplefilter("ignore", kind)
        zero = torch.zeros((), device="cpu")
        jvp(torch.sin, (zero,), (zero,))


def dual_stage(
    function: Callable[..., Any], *, first: bool, moves: bool, stop: bool
) -> Callable[..., Any]:
    """The dual of a stage function.

    Args:
        function: ``(params, x)`` or ``(params, x, microbatch)`` to ``y``.
        first: whether it is the first stage's, whose input is the microbatch.
        moves: a microbatch comes with its direction; otherwise it has none.
        stop: cut the derivative off from parameters and inputs.
    """

    @wraps(function)
    def stage(packed: Any, value: Any, *microbatch: Any, **key: Tensor) -> Any:
        inputs = [value if moves or not first else (value, None)]
        inputs += [own if moves else (own, None) for own in microbatch]
        arguments, directions = zip(packed, *inputs, strict=True)

        def run(*own: Any) -> Any:
            return function(*own, **key)

        with differentiable_twice():
            if not stop:
                return _push(run, arguments, directions)
            y = run(*arguments)
            fixed = pytree.tree_map(torch.Tensor.detach, arguments)
            return y, _push(run, fixed, directions)[1]

    return stage


class Takes(NamedTuple):
    """How what a loss function returns is taken apart.

    Attributes:
        returns: what it declares.
        shape: of its loss, with None for a size that the arguments tell.
    """

    returns: Returns
    shape: tuple[int | None, ...]

    def paired(self, taken: Taken, derivative: Tensor) -> Any:
        """What the function returns, with the derivative beside the loss."""
        pair = torch.stack([taken.heads[0], derivative], -1)
        return self.returns.written(taken._replace(heads=(pair, *taken.heads[1:])))


def dual_loss(
    function: Callable[[Any, Any], Any], takes: Takes, *, moves: bool
) -> Callable[[Any, Any], Any]:
    """The loss and its directional derivative, along a new last dimension; the rest stays.

    The arguments are those of `dual_stage`, and what the function declares.
    """

    @wraps(function)
    def loss(value: Any, microbatch: Any) -> Any:
        inputs = microbatch if moves else (microbatch, None)
        arguments, directions = zip(value, inputs, strict=True)
        with differentiable_twice():
            taken, derivatives = _push(
                lambda *own: _taken(function, takes, *own), arguments, directions
            )
        return takes.paired(taken, derivatives.heads[0])

    return loss


def _taken(function: Callable[[Any, Any], Any], takes: Takes, y: Any, microbatch: Any) -> Taken:
    found = function(y, microbatch)
    return takes.returns.take("the loss is", "loss(y, microbatch)", found, takes.shape)


def dual_function(function: Callable[..., Any], takes: Takes, *, moves: bool) -> Callable[..., Any]:
    """A whole loss function and its directional derivative, along a new last dimension.

    It is the first stage of a chain, and what it returns is the loss already; the rest stays. The
    arguments are those of `dual_loss`.
    """
    name, returns = label_of(function), takes.returns

    def run(params: Any, microbatch: Any, **key: Tensor) -> Taken:
        found = function(params, microbatch, **key)
        return returns.take(f"{name} returns", returns.call, found, takes.shape)

    pair = dual_stage(run, first=True, moves=moves, stop=False)

    @wraps(function)
    def loss(packed: Any, microbatch: Any, **key: Tensor) -> Any:
        taken, derivatives = pair(packed, microbatch, **key)
        return takes.paired(taken, derivatives.heads[0])

    return loss


def gauss_newton_loss(
    function: Callable[[Any, Any], Any], takes: Takes
) -> Callable[[Any, Any], Any]:
    """What `dual_loss` returns, with other gradients: of y the product with the loss's Hessian.

    The gradient by ẏ is that of the loss, and the gradient by y is Hẏ, H the second derivative of
    the loss by y.
    """

    @wraps(function)
    def loss(value: Any, microbatch: Any) -> Any:
        y, y_dot = value
        leaves, spec = pytree.flatten(y)
        chosen = [index for index, leaf in enumerate(leaves) if is_differentiable(leaf)]
        point = tuple(leaves[index] for index in chosen)
        tangents = tuple(pytree.flatten(y_dot)[0])

        def taken(*own: Tensor) -> Taken:
            full = list(leaves)
            for index, leaf in zip(chosen, own, strict=True):
                full[index] = leaf
            return _taken(function, takes, pytree.unflatten(spec, full), microbatch)

        with differentiable_twice():
            here = tuple(leaf.detach() for leaf in point)
            bent: Any = jvp(
                grad(lambda *own: taken(*own).heads[0], tuple(range(len(here)))),
                here,
                tuple(t.detach() for t in tangents),
            )
            slopes, products = bent
            derivative = _dot(slopes, tangents)
            # Nothing in value, but the gradient by y.
            bend = _dot(products, point)
            return takes.paired(taken(*point), derivative + bend - bend.detach())

    return loss


def _push(
    function: Callable[..., Any], arguments: tuple[Any, ...], directions: tuple[Any, ...]
) -> tuple[Any, Any]:
    """`function` of pytrees, and its derivative in a direction, None for leaves without one.

    Args:
        function: from pytrees to a pytree.
        arguments: its arguments.
        directions: of each argument, with None for a leaf that has none, or for all of them.
    """
    leaves, spec = pytree.flatten(arguments)
    along = [d for own in zip(arguments, directions, strict=True) for d in _aligned(*own)]
    chosen = [index for index, direction in enumerate(along) if direction is not None]
    tangents = [direction for direction in along if direction is not None]
    made: list[Any] = []

    def flat(*own: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        full = list(leaves)
        for index, leaf in zip(chosen, own, strict=True):
            full[index] = leaf
        outputs, structure = pytree.flatten(function(*pytree.unflatten(spec, full)))
        made[:] = [structure, [is_differentiable(leaf) for leaf in outputs]]
        smooth = [leaf for leaf in outputs if is_differentiable(leaf)]
        return smooth, [leaf for leaf in outputs if not is_differentiable(leaf)]

    if chosen:
        primals = tuple(leaves[index] for index in chosen)
        pushed: Any = jvp(flat, primals, tuple(tangents), has_aux=True)
        smooth, derivatives, plain = pushed
    else:
        smooth, plain = flat()
        derivatives = [torch.zeros_like(leaf) for leaf in smooth]
    structure, flags = made
    sides = {True: iter(smooth), False: iter(plain)}
    outputs = [next(sides[flag]) for flag in flags]
    rest = iter(derivatives)
    tangent = [next(rest) if flag else None for flag in flags]
    return pytree.unflatten(structure, outputs), pytree.unflatten(structure, tangent)


def _aligned(value: Any, direction: Any) -> list[Tensor | None]:
    """The direction of each leaf, None for one that has none."""
    leaves = pytree.flatten_prefix(value)
    found = [None] * len(leaves) if direction is None else pytree.flatten_prefix(direction)
    return [d for leaf, d in zip(leaves, found, strict=True) if leaf is not None]


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """The real inner product of two lists of tensors."""
    parts = [(a.conj() * b).sum().real for a, b in zip(left, right, strict=True)]
    return torch.stack(parts).sum()
