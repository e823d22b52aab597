"""Stages, the pure functions that a user writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fpipe.errors import StageError, a_type, check_flags, label_of


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
