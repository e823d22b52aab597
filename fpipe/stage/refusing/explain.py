"""Say why a stage was refused: what it was given, what went wrong, where, and what to do."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from fpipe import tree
from fpipe.arguments.shapes import in_words
from fpipe.errors import StageError

log = logging.getLogger("fpipe")

# Frames of these are not the user's own.
_MACHINERY = (
    *(str(Path(file).parent) for file in (torch.__file__, optree.__file__, tree.__file__)),
    contextlib.__file__,
    "<eval_with_key>",
    "<frozen ",
)

_HIGHER_ORDER = re.compile(r"no rule registered for HigherOrderOperator (\w+)")
# Of a value, into Python or C.
_READS = (".numpy()", "tolist()", "data pointer")
# Of autograd, about a trace.
_AUTOGRAD = ("does not require grad", "have been used in the graph", "backward() called inside")
_LAYERS = str(Path(torch.nn.__file__).parent)


class ImpureError(Exception):
    """An op that writes to memory which the stage did not make."""

    def __init__(self, where: str, op: str) -> None:
        super().__init__(f"{op} writes to {where}")
        self.where = where
        self.op = op


class Untraceable(Exception):
    """What a function does that a trace would lose.

    Attributes:
        deed: the end of a sentence about the function.
        instead: what to do about it.
    """

    def __init__(self, deed: str, instead: str) -> None:
        super().__init__(f"{deed}: {instead}")
        self.deed = deed
        self.instead = instead


@contextmanager
def unreported() -> Iterator[None]:
    """Within it torch does not print what a fake operation raises, which `explain` says.

    It would do so with a traceback of its own, before the refusal, and also of what is tried only
    to be caught.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def raises_nothing(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    log.addFilter(raises_nothing)
    try:
        yield
    finally:
        log.removeFilter(raises_nothing)


def explain(name: str, error: Exception, given: str) -> StageError:
    """The refusal of a function that raised `error` while it was traced.

    The error keeps those frames of its traceback that are the user's, if any are; logged with all
    of them at level DEBUG.

    Args:
        name: the function in messages, such as ``"stage 2 (block)"``.
        error: what it raised.
        given: what it was called with, such as ``"what stage 1 (f) returns (x: float32[3, 4])"``.
    """
    refusal = _refusal(name, error, given)
    log.debug("%s is refused", name, exc_info=error)
    error.__traceback__ = _own(error.__traceback__) or error.__traceback__
    return refusal


def _refusal(name: str, error: Exception, given: str) -> StageError:
    text = str(error)
    at = place(error)
    if isinstance(error, ImpureError):
        return impure(f"{name}{at}", error.where, error.op)
    if isinstance(error, Untraceable):
        return StageError(f"{name} {error.deed}{at}: {error.instead}")
    if (
        isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
        or "data-dependent" in text
        or any(words in text for words in _READS)
    ):
        return StageError(
            f"{name} branches on data or reads a value back into Python ({text}){at}: a stage is "
            "traced once with abstract tensors, so use torch.where or a mask, or pass the choice "
            "as a Python value bound with functools.partial"
        )
    operator = _HIGHER_ORDER.search(text)
    if operator is not None or (isinstance(error, KeyError) and "TransformType." in text):
        called = f" {operator[1]}" if operator is not None else ", such as torch.cond"
        return StageError(
            f"{name} uses torch's higher-order operator{called}{at}, which torch.func does "
            "not differentiate: use plain operations, such as torch.where for a choice, a Python "
            "loop for a scan, scaled_dot_product_attention for flex_attention"
        )
    if "dynamo-optimized function" in text:
        return StageError(
            f"{name} is compiled by torch.compile{at}: pass the function as it is, which "
            "fpipe.pipeline compiles (compile=)"
        )
    if "inside a function being vmapped" in text or "functorch/Interpreter.cpp" in text:
        return StageError(
            f"{name} closes over a tensor that a transform of torch.func maps or differentiates"
            f"{at}: pass it in the parameters or in the batch, where transforms can see it"
        )
    if any(words in text for words in _AUTOGRAD):
        return StageError(
            f"{name} differentiates with torch.autograd ({text}){at}: a stage is traced without "
            "autograd's own history, so take derivatives inside of it with torch.func.grad or "
            "torch.func.vjp"
        )
    if "setup_context" in text:
        return StageError(
            f"{name} uses a torch.autograd.Function whose forward takes ctx{at}, within a "
            "transform of torch.func or of the pipeline, or by a name for its apply, or an "
            "operation of torch.library that takes or returns lists of tensors, or a module with "
            "backward hooks: torch.func takes none of these; write setup_context beside forward, "
            "or call Class.apply(…) itself outside of transforms, and remove the hooks"
        )
    if "requires_grad_()" in text:
        return StageError(
            f"{name} calls requires_grad_(False){at}, and a stage is traced without autograd's own "
            "history: use x.detach(), and say with trainable= which parameters are frozen"
        )
    if "saved tensor hooks" in text:
        return StageError(
            f"{name} uses saved-tensor hooks{at}: a stage keeps no tensors of autograd's; choose "
            "what is computed again with remat= of fpipe.pipeline, or with torch.utils.checkpoint"
        )
    return StageError(f"{name} cannot be traced on {given}{at}: {type(error).__name__}: {text}")


def impure(name: str, where: str, op: str) -> StageError:
    """The refusal of a function that writes to `where`."""
    module = ""
    if "closes over" in where:
        module = "; a module whose buffers change needs module.eval(), or has_state=True to train"
    return StageError(
        f"{name} writes in place to {where} ({op}): a stage is a pure function; work on a copy "
        f"(x = x.clone()), and return what is to be kept{module}"
    )


def describe(name: str, value: Any) -> str:
    """The tensors of a pytree as text, such as ``"x['a']: float32[3, 4]"``."""
    leaves, spec = tree.flatten(value)
    found = [
        f"{name}{path}: {in_words(leaf)}"
        for path, leaf in zip(tree.paths(spec), leaves, strict=True)
        if isinstance(leaf, Tensor)
    ]
    return ", ".join(found) or f"{name}: no tensor"


def place(error: BaseException) -> str:
    """Where in the user's own code an error came from, as the middle of a sentence.

    If no frame is the user's, as for a `torch.nn` module that is itself the stage, it is the place
    in that module.
    """
    found = layer = ""
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if _is_own(traceback.tb_frame):
            found = f" at {file}:{traceback.tb_lineno}"
        elif file.startswith(_LAYERS):
            layer = f" at {file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found or layer


def _is_own(frame: FrameType) -> bool:
    """Whether a frame is the user's."""
    code = frame.f_code
    # make_fx wraps what it traces in such a lambda.
    wrapper = (code.co_filename, code.co_name) == ("<string>", "<lambda>")
    return not wrapper and not code.co_filename.startswith(_MACHINERY)


def _own(traceback: TracebackType | None) -> TracebackType | None:
    """The frames of a traceback that are the user's, None if none are."""
    found = []
    while traceback is not None:
        if _is_own(traceback.tb_frame):
            found.append(traceback)
        traceback = traceback.tb_next
    kept: TracebackType | None = None
    for one in reversed(found):
        kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept


def _passed_through(error: BaseException, file: str) -> bool:
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename.endswith(file):
            return True
        traceback = traceback.tb_next
    return False
