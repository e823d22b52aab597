"""Functions of `torch.autograd` whose forward takes ctx, as torch.func takes them.

`torch.func` wants ``setup_context`` beside ``forward``. So one Function stands for all that have it
combined: its forward runs theirs with a ctx that remembers, and returns what that has kept beside
what is returned; its setup_context saves it; its backward runs theirs with a ctx that gives it
back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.arguments.shapes import is_differentiable
from fpipe.stage.foreign.checkpointed import called_plainly, is_reentrant, plainly
from fpipe.stage.foreign.custom import check_plain, check_returned, name_of
from fpipe.stage.foreign.registered import apply_at_one_level, is_registered, without_forward_mode
from fpipe.stage.refusing.explain import Untraceable
from fpipe.stage.standin import StandIn


@contextmanager
def with_contexts() -> Iterator[None]:
    """Within it Functions whose forward takes ctx can be called within `torch.func`.

    torch refuses them before a mode sees them. Those of torch's own are refused as ever, but for
    those that it makes of registered backwards, and that of `torch.utils.checkpoint`. Calls in
    other threads are as before.
    """
    with _APPLIES.active(), without_forward_mode(), called_plainly():
        yield


def _apply(function: Any, *args: Any, **options: Any) -> Any:
    own = _APPLIES.own(torch.autograd.Function)
    apply = own.__get__(None, function)
    if _APPLIES.is_active and is_reentrant(function):
        return plainly(*args, **options)
    if not (_APPLIES.is_active and torch._C._are_functorch_transforms_active()):
        return apply(*args, **options)
    if is_registered(function):
        return apply_at_one_level(function, *args)
    combined = function.setup_context is torch.autograd.Function.setup_context
    theirs = function.__module__.startswith("torch.") and function.__module__ not in _LIKE_OWN
    if combined and not theirs:
        check_plain(function, (args, options))
        *made, form = own.__get__(None, _Combined)(function, *args, **options)
        outputs = tuple(made[: form.count])
        return outputs if form.several else outputs[0]
    return apply(*args, **options)


# Of torch's modules, those with Functions of values alone, such as a user may write.
_LIKE_OWN = frozenset({"torch.distributions.dirichlet"})

_APPLIES = StandIn("apply", {torch.autograd.Function: classmethod(_apply)})


@dataclass(frozen=True)
class _Place:
    """Where a tensor that is kept lies, among the tensors of a list."""

    number: int


@dataclass(frozen=True)
class _Form:
    """What a forward has done, but for the tensors.

    Attributes:
        count: how many values it has returned.
        several: they are the elements of a tuple.
        kept: where each tensor that it keeps comes from: the number of an argument, of what is
            returned, or of what comes after that.
        saved: what it has saved, with places for tensors.
        attributes: what it has set on ctx, with places for tensors.
        constant: what is returned that has no gradient, by number.
        materialize: absent gradients come as zeros.
    """

    count: int
    several: bool
    kept: tuple[tuple[str, int], ...]
    saved: tuple[Any, ...]
    attributes: dict[str, Any]
    constant: tuple[int, ...]
    materialize: bool


class _Context:
    """The ctx of a forward or of a backward."""

    def __init__(self, needs_input_grad: tuple[bool, ...], saved: tuple[Any, ...] = ()) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors = saved
        self._fpipe_constant: tuple[Tensor, ...] = ()
        self._fpipe_materialize = True

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """There is no forward mode of it."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self._fpipe_constant = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self._fpipe_materialize = value

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise Untraceable(
            "calls a torch.autograd.Function that writes to its arguments (mark_dirty)",
            "write to a copy, x.clone(), and return it",
        )


_OWN = frozenset(vars(_Context(())))


class _Combined(torch.autograd.Function):
    """Stands for a Function, its first argument."""

    @staticmethod
    def forward(function: Any, *args: Any) -> Any:
        needed = tuple(isinstance(a, Tensor) and is_differentiable(a) for a in args)
        ctx = _Context(needed)
        args = tuple(map(_requiring, args, needed))
        with torch.no_grad():
            returned = function.forward(ctx, *args)
        check_returned(function, returned)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        extras: list[Tensor] = []
        kept: list[tuple[str, int]] = []

        def place(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            for kind, values in (("argument", args), ("output", outputs), ("extra", extras)):
                found = [n for n, other in enumerate(values) if other is value]
                if found:
                    kept.append((kind, found[0]))
                    return _Place(len(kept) - 1)
            extras.append(value)
            kept.append(("extra", len(extras) - 1))
            return _Place(len(kept) - 1)

        attributes = {n: value for n, value in vars(ctx).items() if n not in _OWN}
        for name, value in attributes.items():
            _check_attribute(function, name, value)
        form = _Form(
            len(outputs),
            isinstance(returned, tuple),
            (),
            tuple(map(place, ctx.saved_tensors)),
            {name: tree.tree_map(place, value) for name, value in attributes.items()},
            tuple(
                n
                for n, output in enumerate(outputs)
                if any(output is c for c in ctx._fpipe_constant)
            ),
            ctx._fpipe_materialize,
        )
        made = [v.detach() if isinstance(v, Tensor) else v for v in (*outputs, *extras)]
        return (*made, replace(form, kept=tuple(kept)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.function, *args = inputs
        *made, form = output
        ctx.form = form
        outputs, extras = made[: form.count], made[form.count :]
        ctx.mark_non_differentiable(*(outputs[n] for n in form.constant), *extras)
        ctx.set_materialize_grads(form.materialize)
        sources = {"argument": args, "output": outputs, "extra": extras}
        ctx.save_for_backward(*(sources[kind][number] for kind, number in form.kept))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        form = ctx.form
        tensors = ctx.saved_tensors

        def back(value: Any) -> Any:
            return tensors[value.number] if isinstance(value, _Place) else value

        own = _Context(ctx.needs_input_grad[1:], tuple(map(back, form.saved)))
        for name, value in form.attributes.items():
            setattr(own, name, _put_back(back, value))
        found = ctx.function.backward(own, *cotangents[: form.count])
        return None, *(found if isinstance(found, tuple) else (found,))


def _requiring(value: Any, needed: bool) -> Any:
    """An argument as a forward sees it in autograd: what needs a gradient says that it does."""
    if not needed:
        return value
    allowed = torch._C._functorch.get_inplace_requires_grad_allowed()
    torch._C._functorch.set_inplace_requires_grad_allowed(True)
    try:
        return value.detach().requires_grad_()
    finally:
        torch._C._functorch.set_inplace_requires_grad_allowed(allowed)


def _put_back(back: Any, value: Any) -> Any:
    leaves, spec = tree.flatten(value)
    return tree.unflatten(spec, list(map(back, leaves)))


def _check_attribute(function: Any, name: str, value: Any) -> None:
    try:
        check_plain(function, value)
    except Untraceable:
        raise Untraceable(
            f"calls {name_of(function)}, a torch.autograd.Function that sets ctx.{name} to a "
            f"{type(value).__name__}",
            "tensors that it holds would not be seen; keep tensors and plain values",
        ) from None
