"""A pipeline within transforms of `torch.func`: how each of their levels runs a call.

vmap        the call of the pipeline of all members, below this level
grad, vjp   loss and gradients with history
jvp         loss and gradients with their derivatives, from the pipeline of dual stages
others      refused

A call whose arguments do not depend on a level is made below it. Forward-mode autograd without
`torch.func` is a jvp too. `torch.compile` around a call leaves the call out of its graph: the
stages are compiled already.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._compile import _disable_dynamo

from fpipe import pytree
from fpipe.autograd.derived_pipelines import Callee, Method
from fpipe.autograd.history import has_history, is_tracked, tracked_step, tracked_value
from fpipe.autograd.operation import Call, refusal
from fpipe.dtensors import refuse_transformed
from fpipe.inputs.ambient import refuse_modes
from fpipe.spec.results import Step, StepAux
from fpipe.torch_internals import functorch, retrieve_current_functorch_interpreter


@_disable_dynamo
def call_within(pipe: Callee, method: Method, *arguments: Any, **options: Any) -> Any:
    """Call a method of a pipeline within the innermost transform of `torch.func`.

    Args:
        pipe: the pipeline.
        method: the name of the method, which calls this function within a transform.
        arguments: of the method.
        options: further ones, which no transform maps or differentiates by.

    Raises:
        FpipeError: it cannot run there; names the transform of fpipe to use instead.
    """
    with pipe.telling(method):
        # Below this level torch turns them off.
        refuse_modes(compiled=pipe.definition.compile is not False)
        return _call_within(pipe, method, *arguments, **options)


def _call_within(pipe: Callee, method: Method, *arguments: Any, **options: Any) -> Any:
    if functorch.peek_interpreter_stack() is None:
        return _call_outside(pipe, method, *arguments, **options)
    refuse_transformed(arguments, "a pipeline within a transform of torch.func")
    interpreter = retrieve_current_functorch_interpreter()
    kind, level = interpreter.key().name, interpreter.level()
    leaves, spec = pytree.flatten(arguments)
    if kind == "Vmap":
        if any(_is_mapped(leaf, level) for leaf in leaves):
            return Call(pipe, method, spec, options).enter(leaves)
    elif kind == "Grad":
        if is_tracked(leaves):
            return _call_tracked(pipe, method, kind, arguments, options)
    elif kind != "Jvp":
        raise refusal(kind)
    elif any(map(_has_tangent, leaves)):
        return _call_with_tangents(pipe, method, arguments, options)
    if kind != "Vmap":
        leaves = [
            functorch._unwrap_for_grad(leaf, level) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
    # No argument depends on this level.
    with interpreter.lower():
        return getattr(pipe, method)(*pytree.unflatten(spec, leaves), **options)


def _call_outside(pipe: Callee, method: Method, *arguments: Any, **options: Any) -> Any:
    """Call a method outside of transforms of `torch.func`."""
    is_forward_mode = forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()
    if not is_forward_mode:
        return getattr(pipe, method)(*arguments, **options)
    if any(map(_has_tangent, pytree.flatten(arguments)[0])):
        return _call_with_tangents(pipe, method, arguments, options)
    with forward_ad._set_fwd_grad_enabled(False):
        return getattr(pipe, method)(*arguments, **options)


def _call_tracked(
    pipe: Callee, method: Method, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Call a method whose result may be differentiated."""
    if not has_history(pipe) or method not in ("value", "run_value", "step", "run_step"):
        raise refusal(kind)
    if method in ("value", "run_value"):
        return tracked_value(pipe, *arguments, **options)
    if pipe.rank is not None:
        raise refusal(kind)
    loss, grads, *aux = tracked_step(pipe, pipe.definition.wanted, *arguments, **options)
    grads = pipe.definition.unwrap(grads)
    if method == "run_step":
        return loss, grads, *aux
    return StepAux(loss, grads, *aux) if aux else Step(loss, grads)


def _call_with_tangents(
    pipe: Callee, method: Method, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Call a method of arguments that have tangents."""
    if pipe.rank is not None:
        raise refusal("Jvp")
    if method in ("value", "run_value") and has_history(pipe):
        leaves, spec = pytree.flatten(arguments)
        return Call(pipe, "run_value", spec, options, differentiable=True).enter(leaves)
    return _call_tracked(pipe, method, "Jvp", arguments, options)


def _has_tangent(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and forward_ad.unpack_dual(leaf, level=0).tangent is not None


def _is_mapped(leaf: Any, level: int) -> bool:
    return isinstance(leaf, Tensor) and functorch._unwrap_batched(leaf, level)[1] is not None
