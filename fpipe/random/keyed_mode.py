"""Draw from a key within a block of code: `keyed`, and what keeps pipelines out of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe.errors import FpipeError
from fpipe.random.key_tensors import check_key, fold_in, unwrapped
from fpipe.random.torch_draws import KEYED, KEYED_IN_PLACE, RRELU, draws, refusal, rrelu
from fpipe.torch_internals import temporarily_clear_interpreter_stack


class OpenAttention(TorchFunctionMode):
    """Compute attention with dropout operation by operation.

    The fused kernels of CUDA draw inside the kernel, which no function of a key can replace.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`."""
        options = kwargs or {}
        dropped = args[4] if len(args) > 4 else options.get("dropout_p")
        if func is not F.scaled_dot_product_attention or not dropped:
            return func(*args, **options)
        with sdpa_kernel(SDPBackend.MATH):
            return func(*args, **options)


PIPELINES_AROUND: ContextVar[int] = ContextVar("fpipe.pipelines", default=0)
"""How many calls of pipelines surround the current code: what runs within them does not draw from
the key of a `keyed` outside of them."""


class _KeyedMode(TorchDispatchMode):
    """Replace each random operation by its function of the key."""

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self._key = key
        self._drawn = 0
        self._pipelines = PIPELINES_AROUND.get()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if not draws(func, args, options):
            return func(*args, **options)
        if PIPELINES_AROUND.get() != self._pipelines:
            raise FpipeError(
                "a pipeline that draws from torch's generator was called within fpipe.nn.keyed, "
                "whose key it does not see: let it draw from its own, Stage(fn, reads_key=True) or "
                "has_key=True, or call it outside"
            )
        if options.get("generator") is not None:
            raise FpipeError("the block draws from a torch.Generator of its own: leave it out")
        if func not in KEYED and func not in KEYED_IN_PLACE and func is not RRELU:
            raise FpipeError(f"the block {refusal(func)}")
        if _will_be_recomputed():
            raise FpipeError(
                "the block draws within torch.utils.checkpoint, which calls the function again for "
                "the backward, where it would draw other numbers: leave the checkpoint out, which "
                "changes no number (model.gradient_checkpointing_disable() of Hugging Face)"
            )
        # Transforms of torch.func have already acted: this runs below them.
        with temporarily_clear_interpreter_stack():
            key = fold_in(self._key, self._drawn)
            self._drawn += 1
            if func is RRELU:
                output, slopes = rrelu(key, *args, **options)
                args[1].copy_(slopes)
                return output
            if func in KEYED_IN_PLACE:
                return args[0].copy_(KEYED_IN_PLACE[func](key, *args, **options))
            return KEYED[func](key, *args, **options)


def _will_be_recomputed() -> bool:
    """Whether the caller is within a `torch.utils.checkpoint` that will call it again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == torch.utils.checkpoint.__file__:
            # The reentrant variant is an autograd.Function, which runs without grad mode.
            return torch.is_grad_enabled() or code.co_name in ("forward", "backward")
        frame = frame.f_back
    return False


@contextmanager
def keyed(key: Tensor) -> Iterator[None]:
    """Let torch's own random operations draw from a key: the n-th from ``fold_in(key, n)``.

    A pipeline of a module with ``has_key=True`` draws for each microbatch the numbers that this
    draws from the microbatch's key. A pipeline that is called within this context draws from its
    own key, as it does outside.

    Args:
        key: int64, shape ``(2,)``, of `fpipe.random`.

    Returns:
        A context manager.

    Raises:
        FpipeError: `key` is not a key, or `torch.func.vmap` maps it; or an operation draws that has
            no function of a key, or with arguments that torch refuses, within
            `torch.utils.checkpoint`, or in a pipeline that has no key.

    Example:
        >>> import torch, fpipe
        >>> with fpipe.nn.keyed(fpipe.random.key(0)):
        ...     first = torch.nn.functional.dropout(torch.ones(5))
        >>> derived = fpipe.random.fold_in(fpipe.random.key(0), 0)
        >>> torch.equal(first, fpipe.random.dropout(derived, torch.ones(5)))
        True
    """
    check_key(key)
    plain = unwrapped(key)
    if plain is None:
        raise FpipeError(
            "key is mapped by torch.func.vmap, or is the key of a stage while it is traced, but "
            "torch's operations draw from one key: call the functions of fpipe.random with the "
            "key, or let a module draw from the key of the step (fpipe.from_module, has_key=True)"
        )
    with OpenAttention(), _KeyedMode(plain):
        yield
