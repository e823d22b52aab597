"""Operations of `torch.library` whose backward is registered, as those of hand-written kernels are.

torch makes a Function of what ``register_autograd`` was given. `torch.func` refuses it in reverse
mode, because its forward takes ctx, and in forward mode silently treats its result as constant.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import make_autograd_impl
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.function import _SingleLevelFunction

from fpipe.checks.explain import Untraceable
from fpipe.torch_internals import (
    enable_single_level_autograd_function,
    innermost_transform,
)
from fpipe.trace.overrides.standin import StandIn


def without_forward_mode() -> AbstractContextManager[None]:
    """Within it such an operation on what is differentiated in a direction is refused."""
    return _ASKS.active()


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
    own = {"forward": staticmethod(forward), "backward": staticmethod(function.backward)}
    return type(function.__name__, (_SingleLevelFunction,), own)


def _any_requires_grad(*args: Any, **options: Any) -> bool:
    """What torch asks before it calls such a Function, at each transform."""
    if _ASKS.is_active and innermost_transform() == "Jvp":
        for value in (*args, *options.values()):
            if isinstance(value, Tensor) and unpack_dual(value, level=0).tangent is not None:
                raise Untraceable(
                    "calls an operation of torch.library with a registered backward, within a "
                    "derivative in a direction (jvp)",
                    "torch knows no such derivative of it; compute it in plain operations",
                )
    return bool(_ASKS.own(torch._C)(*args, **options))


_ASKS = StandIn("_any_requires_grad", {torch._C: _any_requires_grad})
