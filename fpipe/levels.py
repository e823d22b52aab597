"""A pipeline within transforms of `torch.func`: what becomes of a call at each of their levels.

vmap        the call of the pipeline of all members, below this level
grad, vjp   of `value` a loss with history; whatever does not depend on what is differentiated
            by is called below this level
jvp, ...    refused, with the transform of ours to use
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from fpipe import tree
from fpipe.call import Call, refuse
from fpipe.history import has_history, is_tracked, tracked_value

_functorch = torch._C._functorch


def is_within() -> bool:
    """Whether any transform of `torch.func` is at work."""
    return _functorch.peek_interpreter_stack() is not None


def call_within(pipe: Any, method: str, *arguments: Any, **options: Any) -> Any:
    """Call a method of a pipeline within the innermost transform of `torch.func`.

    Args:
        pipe: the pipeline.
        method: the name of the method, which calls this function if a transform is at work.
        arguments: of the method.
        options: further ones, which no transform maps or differentiates by.

    Raises:
        FpipeError: it cannot run there; names the transform of ours to use instead.
    """
    interpreter = retrieve_current_functorch_interpreter()
    kind, level = interpreter.key().name, interpreter.level()
    leaves, spec = tree.flatten(arguments)
    if kind == "Vmap":
        if any(_is_mapped(leaf, level) for leaf in leaves):
            return Call(pipe, method, spec, options).enter(leaves)
    elif kind == "Grad":
        if is_tracked(leaves):
            if method != "value" or not has_history(pipe):
                raise refuse(kind)
            return tracked_value(pipe, *arguments, **options)
        leaves = [
            _functorch._unwrap_for_grad(leaf, level) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
    else:
        raise refuse(kind)
    # Nothing depends on this level: what is below it answers.
    with interpreter.lower():
        return getattr(pipe, method)(*tree.unflatten(spec, leaves), **options)


def _is_mapped(leaf: Any, level: int) -> bool:
    return isinstance(leaf, Tensor) and _functorch._unwrap_batched(leaf, level)[1] is not None
