"""Functions of `torch.autograd` whose forward takes ctx, within transforms of `torch.func`.

Plain autograd calls them as they are, and so does a trace. Within a transform, the function's own
or the pipeline's, `torch.func` wants ``setup_context`` beside ``forward``, or a rule for `vmap`. So
one Function stands for all that have it combined: its forward runs theirs with a ctx that
remembers, and returns what that has kept beside what is returned; its setup_context saves it; its
backward runs theirs with a ctx that gives it back.

torch makes a Function of the backward that ``register_autograd`` was given too, as hand-written
kernels have one. `torch.func` refuses it in reverse mode, because its forward takes ctx, and in
forward mode silently treats its result as constant.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.autograd import make_autograd_impl
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.function import _SingleLevelFunction

from fpipe import pytree
from fpipe.checks.explain import Untraceable
from fpipe.errors import a_type
from fpipe.inputs.signature import is_differentiable
from fpipe.torch_internals import (
    custom_function_call,
    enable_single_level_autograd_function,
    functorch,
    innermost_transform,
    is_within_vmap,
)
from fpipe.trace.overrides.checkpointed import called_plainly
from fpipe.trace.overrides.standin import StandIn

_MODULE: Any = torch.autograd.function

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    type,
    type(Ellipsis),
    Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
    dist.ProcessGroup,
)


@contextmanager
def with_contexts() -> Iterator[None]:
    """Within it Functions whose forward takes ctx can be called within `torch.func`.

    However they are called, by ``Class.apply`` or by a name for it: what ``apply`` asks of the
    class stands in. From torch 2.14 on ``apply`` asks nothing in Python, and ``Class.apply`` alone
    is taken. Calls in other threads are as before.
    """
    with ExitStack() as stack:
        # A registered operation on what is differentiated in a direction is refused.
        for stand_in in (_ASKS, _CALLS, *_APPLIES, _GRADIENT_QUERIES):
            stack.enter_context(stand_in.active())
        with called_plainly():
            yield


class _AtLast:
    """False when it is first asked, and True from then on.

    So ``apply`` takes the arguments as they are, as those of a forward with ctx, and then calls
    `custom_function_call`, which it does of a class with setup_context.
    """

    def __init__(self) -> None:
        self._asked = False

    def __bool__(self) -> bool:
        before, self._asked = self._asked, True
        return before


def _has_setup_context(setup_context: Any) -> Any:
    answer = _ASKS.original(_MODULE)(setup_context)
    within = _ASKS.is_active and torch._C._are_functorch_transforms_active()
    return _AtLast() if within and not answer else answer


def _apply(function: Any, *args: Any, **options: Any) -> Any:
    (applies,) = _APPLIES
    within = applies.is_active and torch._C._are_functorch_transforms_active()
    if within and not _ASKS.original(_MODULE)(function.setup_context):
        return _call(function, *args, **options)
    return applies.original(torch.autograd.Function).__get__(None, function)(*args, **options)


def _call(function: Any, *args: Any, **options: Any) -> Any:
    original = _CALLS.original(_MODULE)
    if not _CALLS.is_active:
        return original(function, *args, **options)
    if innermost_transform() == "Vmap" and not (_has(function, "vmap") or _generates(function)):
        raise Untraceable(
            f"calls {name_of(function)}, a torch.autograd.Function that has no rule for vmap, "
            "over several members or rows",
            "write its vmap, a staticmethod; or setup_context beside forward, with "
            "generate_vmap_rule = True",
        )
    if innermost_transform() == "Jvp" and any(map(_moves, args)) and not _has(function, "jvp"):
        raise Untraceable(
            f"calls {name_of(function)}, a torch.autograd.Function that has no jvp of its own, "
            "within a derivative in a direction (jvp, hvp, ggnvp, a second derivative)",
            "that of what its forward computes would be another; write its jvp, a staticmethod, or "
            "compute it in plain operations",
        )
    if _ASKS.original(_MODULE)(function.setup_context):
        return original(function, *args, **options)
    if is_registered(function):
        return apply_at_one_level(function, *args)
    if innermost_transform() == "Vmap":
        return original(function, *args, **options)
    if is_within_vmap():
        raise Untraceable(
            f"calls {name_of(function)}, a torch.autograd.Function whose forward takes ctx, in a "
            "derivative of torch.func within vmap",
            "write setup_context beside forward",
        )
    check_plain(function, (args, options))
    *values, form = custom_function_call(_Combined, function, *args, **options)
    outputs = tuple(values[: form.count])
    return outputs if form.several else outputs[0]


def _has(function: Any, rule: str) -> bool:
    """Whether a class, or one that it is made of, has a rule of its own."""
    classes = function.__mro__[: function.__mro__.index(torch.autograd.Function)]
    return any(rule in vars(kind) for kind in classes)


def _generates(function: Any) -> bool:
    """Whether torch makes a class its rule for vmap."""
    has_context = _ASKS.original(_MODULE)(function.setup_context)
    return bool(function.generate_vmap_rule and has_context) or is_registered(function)


def _moves(value: Any) -> bool:
    return isinstance(value, Tensor) and unpack_dual(value, level=0).tangent is not None


_ASKS = StandIn("_is_setup_context_defined", {_MODULE: _has_setup_context})
_APPLIES: tuple[StandIn, ...] = ()
if not isinstance(vars(torch.autograd.Function)["apply"], classmethod):
    _APPLIES = (StandIn("apply", {torch.autograd.Function: classmethod(_apply)}),)
_CALLS = StandIn("custom_function_call", {_MODULE: _call})


@dataclass(frozen=True)
class _Place:
    """Where a tensor that is kept lies, among the tensors of a list."""

    number: int


@dataclass(frozen=True)
class _Form:
    """Everything that a forward has done, except for the tensors.

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
                places = [n for n, other in enumerate(values) if other is value]
                if places:
                    kept.append((kind, places[0]))
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
            {name: pytree.tree_map(place, value) for name, value in attributes.items()},
            tuple(
                n
                for n, output in enumerate(outputs)
                if any(output is c for c in ctx._fpipe_constant)
            ),
            ctx._fpipe_materialize,
        )
        detached = [v.detach() if isinstance(v, Tensor) else v for v in (*outputs, *extras)]
        return (*detached, replace(form, kept=tuple(kept)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.function, *args = inputs
        *values, form = output
        ctx.form = form
        outputs, extras = values[: form.count], values[form.count :]
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

        context = _Context(ctx.needs_input_grad[1:], tuple(map(back, form.saved)))
        for name, value in form.attributes.items():
            setattr(context, name, _put_back(back, value))
        gradients = ctx.function.backward(context, *cotangents[: form.count])
        return None, *(gradients if isinstance(gradients, tuple) else (gradients,))


def _requiring(value: Any, needed: bool) -> Any:
    """An argument as a forward sees it in autograd: what needs a gradient says that it does."""
    if not needed:
        return value
    allowed = functorch.get_inplace_requires_grad_allowed()
    functorch.set_inplace_requires_grad_allowed(True)
    try:
        return value.detach().requires_grad_()
    finally:
        functorch.set_inplace_requires_grad_allowed(allowed)


def _put_back(back: Any, value: Any) -> Any:
    leaves, spec = pytree.flatten(value)
    return pytree.unflatten(spec, list(map(back, leaves)))


def _check_attribute(function: Any, name: str, value: Any) -> None:
    try:
        check_plain(function, value)
    except Untraceable:
        raise Untraceable(
            f"calls {name_of(function)}, a torch.autograd.Function that sets ctx.{name} to a "
            f"{type(value).__name__}",
            "tensors that it holds would not be seen; keep tensors and plain values",
        ) from None


def name_of(function: Any) -> str:
    """A class as a user knows it."""
    return f"{function.__module__}.{function.__qualname__}"


def check_plain(function: Any, values: Any) -> None:
    """Refuse arguments in which tensors may hide.

    Raises:
        Untraceable: one is neither a tensor nor a plain value.
    """
    for leaf in pytree.flatten(values)[0]:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise Untraceable(
                f"gives {a_type(leaf)} to {name_of(function)}, a torch.autograd.Function",
                "tensors that it holds would not be seen; give it tensors and plain values, such "
                "as numbers, strings, dtypes and process groups, in tuples, lists and dicts",
            )


def check_returned(function: Any, returned: Any) -> None:
    """Refuse tensors that no gradient would come back to.

    Raises:
        Untraceable: what is returned is neither a tensor nor a tuple that has them as its elements.
    """
    for element in returned if isinstance(returned, tuple) else (returned,):
        inside = [] if isinstance(element, Tensor) else pytree.flatten(element)[0]
        if any(isinstance(leaf, Tensor) for leaf in inside):
            raise Untraceable(
                f"gets {a_type(element)} of tensors from {name_of(function)}, a "
                "torch.autograd.Function",
                "autograd knows no gradient of them; return a tensor, or a tuple of tensors",
            )


def is_registered(function: Any) -> bool:
    """Whether torch has made this Function of a backward that was registered."""
    return bool(function.__module__ == make_autograd_impl.__module__)


def apply_at_one_level(function: Any, *args: Any) -> Any:
    """Call such a Function within the innermost transform of `torch.func`, a derivative."""
    with enable_single_level_autograd_function():
        return _of_one_level(function).apply(*args)


@functools.cache
def _of_one_level(function: Any) -> Any:
    """The same Function for one transform alone, which calls the operation of the next.

    It is called there with gradients, as its caller has called it, and not without as a forward is.
    """
    forward = torch.enable_grad()(function.forward)
    methods = {"forward": staticmethod(forward), "backward": staticmethod(function.backward)}
    return type(function.__name__, (_SingleLevelFunction,), methods)


def _any_requires_grad(*args: Any, **options: Any) -> bool:
    """torch calls this before it calls such a Function, at each transform."""
    if _GRADIENT_QUERIES.is_active and innermost_transform() == "Jvp":
        for value in (*args, *options.values()):
            if isinstance(value, Tensor) and unpack_dual(value, level=0).tangent is not None:
                raise Untraceable(
                    "calls an operation of torch.library with a registered backward, within a "
                    "derivative in a direction (jvp)",
                    "torch knows no such derivative of it; compute it in plain operations",
                )
    return bool(_GRADIENT_QUERIES.original(torch._C)(*args, **options))


_GRADIENT_QUERIES = StandIn("_any_requires_grad", {torch._C: _any_requires_grad})
