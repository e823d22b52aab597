"""The pipeline in use: `fpipe.step` without naming one."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any

from torch import Tensor

from fpipe.errors import FpipeError
from fpipe.pipelines import Pipeline, check_is_pipeline

_CURRENT: ContextVar[Pipeline | None] = ContextVar("fpipe.current", default=None)


class use:
    """Make a pipeline the one that `fpipe.step` runs: ``with fpipe.use(pipe): …``.

    It holds for the current thread or task and may be nested; each thread has one of its own.

    Args:
        pipe: what `fpipe.pipeline` or `fpipe.from_module` returns, or a transform whose ``step``
            takes no vector and returns gradients, such as `fpipe.vmap`.

    Raises:
        FpipeError: `pipe` is no pipeline.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
        >>> stage, loss = (lambda w, x: x * w), (lambda y, _: y.mean())
        >>> pipe = fpipe.pipeline([stage], loss, schedule, compile=False)
        >>> with fpipe.use(pipe) as used:
        ...     used is pipe
        True
    """

    def __init__(self, pipe: Pipeline) -> None:
        check_is_pipeline("pipe", pipe, "fpipe.use")
        self._pipe = pipe
        self._tokens: list[Token[Pipeline | None]] = []

    def __enter__(self) -> Pipeline:
        self._tokens.append(_CURRENT.set(self._pipe))
        return self._pipe

    def __exit__(self, *exception: object) -> None:
        _CURRENT.reset(self._tokens.pop())


def in_use() -> Pipeline | None:
    """The pipeline that `use` names, if it names one."""
    return _CURRENT.get()


def step(
    params: Any,
    *arguments: Any,
    key: Tensor | None = None,
    pipe: Pipeline | None = None,
    **named: Any,
) -> Any:
    """Loss and gradients of one batch, by `pipe` or the one that `fpipe.use` names.

    Arguments, result and errors are those of `Pipeline.step`.

    Raises:
        FpipeError: no pipeline is given or in use.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.gpipe(ranks=1, microbatches=2)
        >>> stage, loss = (lambda w, x: x * w), (lambda y, _: y.mean())
        >>> with fpipe.use(fpipe.pipeline([stage], loss, schedule, compile=False)):
        ...     value, grads = fpipe.step([torch.tensor(2.0)], torch.ones(4))
        >>> value.item(), grads[0].item()
        (2.0, 1.0)
    """
    chosen = pipe or in_use()
    if chosen is None:
        raise FpipeError(
            "fpipe.step needs a pipeline: call it within `with fpipe.use(pipe):`, or pass pipe=pipe"
        )
    check_is_pipeline("pipe", chosen, "fpipe.step")
    return chosen.step(params, *arguments, key=key, **named)
