"""Say why a stage was refused: what it was given, what went wrong, where, and what to do."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, NamedTuple

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from fpipe import pytree
from fpipe.errors import StageError, error_text
from fpipe.inputs.signature import in_words

log = logging.getLogger("fpipe")


SHOWN: Final = 8
"""How many tensors of one pytree a message tells of."""


class ImpureError(Exception):
    """An op that writes to memory which the stage did not make."""

    def __init__(self, where: str, op: str) -> None:
        super().__init__(f"{op} writes to {where}")
        self.where = where
        self.op = op


class Untraceable(Exception):
    """A function does something that a trace would lose.

    Attributes:
        deed: the end of a sentence about the function.
        instead: what to do about it.
    """

    def __init__(self, deed: str, instead: str) -> None:
        super().__init__(f"{deed}: {instead}")
        self.deed = deed
        self.instead = instead


SPARSE: Final = (
    "has a sparse gradient",
    "gradients are summed as dense tensors; of an embedding, say sparse=False",
)
"""The deed and the advice of an `Untraceable`."""


_SHAPED_BY_DATA: Final = {
    "aten.linalg_lstsq": "take torch.linalg.pinv(a) @ b, or q, r = torch.linalg.qr(a) and "
    "torch.linalg.solve_triangular(r, q.mT @ b, upper=True)",
    "aten.repeat_interleave": "say output_size= of torch.repeat_interleave, or pass the repeats as "
    "a Python number",
    "aten.bincount": "take torch.nn.functional.one_hot(x, number).sum(0)",
    "aten.masked_select": "take torch.where(mask, x, 0)",
    "aten.nonzero": "in place of x[mask] weigh by the mask, as (x * mask).sum() / mask.sum() does, "
    "or take torch.where(mask, x, 0); of a mask that is always the same keep the places, "
    "mask.nonzero(as_tuple=True)",
    "aten._unique2": "find the values outside, and pass what is made of them in the batch",
}


def told_apart(error: Exception) -> str | None:
    """The end of a sentence about what looks at data in a way that is known, if it is.

    Args:
        error: what tracing raised.
    """
    if calls(error, "_detect_is_causal_mask"):
        return (
            f"gives a mask to a Transformer of torch.nn{place(error)}, which looks whether it is "
            "causal: say so, is_causal=True or False (tgt_is_causal= of a decoder)"
        )
    for op, instead in _SHAPED_BY_DATA.items():
        if isinstance(error, DynamicOutputShapeException) and str(error).startswith(op + "."):
            return f"calls {op}{place(error)}, whose result's shape depends on data: {instead}"
    return None


@contextmanager
def unreported() -> Iterator[None]:
    """Within it torch does not print what a fake operation raises, which `explain` says.

    It would do so with a traceback of its own, before the refusal, and also of what is tried only
    to be caught.
    """
    theirs = logging.getLogger("torch._subclasses.fake_tensor")

    def raises_nothing(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    theirs.addFilter(raises_nothing)
    try:
        yield
    finally:
        theirs.removeFilter(raises_nothing)


def explain(name: str, error: Exception, arguments: str, called: str = "") -> StageError:
    """The refusal of a function that raised `error` while it was traced.

    The error keeps those frames of its traceback that are the user's, if any are; logged with all
    of them at level DEBUG.

    Args:
        name: the function in messages, such as ``"stage 2 (block)"``.
        error: what it raised.
        arguments: of the call, such as ``"what stage 1 (f) returns (x: float32[3, 4])"``.
        called: how it is called, such as ``"fn(params, x)"``; empty where its user knows.
    """
    refusal = _refusal(name, error, arguments, called)
    log.debug("%s is refused", name, exc_info=error)
    error.__traceback__ = own_traceback(error.__traceback__) or error.__traceback__
    return refusal


def _refusal(name: str, error: Exception, arguments: str, called: str) -> StageError:
    text = str(error).partition("\nPlease file an issue to PyTorch")[0]
    at = place(error)
    if isinstance(error, ImpureError):
        return impure(f"{name}{at}", error.where, error.op)
    if isinstance(error, Untraceable):
        return StageError(f"{name} {error.deed}{at}: {error.instead}")
    operator = _HIGHER_ORDER.search(text)
    if operator is not None or (isinstance(error, KeyError) and "TransformType." in text):
        called = f" {operator[1]}" if operator is not None else ", such as torch.cond"
        return StageError(
            f"{name} uses torch's higher-order operator{called}{at}, which no trace of "
            "a backward goes into: use plain operations, such as torch.where for a choice, a "
            "Python loop for a scan, scaled_dot_product_attention for flex_attention"
        )
    if not at and "aten.nonzero" in text:
        return StageError(
            f"{name} has a backward that looks at data ({text}), as that of an embedding with "
            "sparse=True and padding_idx does: say sparse=False"
        )
    if (known := told_apart(error)) is not None:
        return StageError(f"{name} {known}")
    for reason in _REASONS:
        if isinstance(error, reason.kinds) or any(words in text for words in reason.words):
            what = reason.deed.format(text=text)
            return StageError(f"{name} {what}{at}: {reason.instead}")
    if called and isinstance(error, _OF_ARGUMENTS):
        lacks = called.startswith("fn(") and re.search(r"missing \d required", text)
        more = "; fpipe.Stage(fn, reads_batch=True) takes the microbatch too, reads_key=True a key"
        text += f" (it is called as {called}{more if lacks else ''})"
    return StageError(f"{name} cannot be traced on {arguments}{at}: {error_text(error, text)}")


# Errors of a function that mistakes its arguments for others.
_OF_ARGUMENTS: Final = (TypeError, KeyError, IndexError, AttributeError)
_HIGHER_ORDER = re.compile(r"no rule registered for HigherOrderOperator (\w+)")


class _Reason(NamedTuple):
    """Why torch could not trace a function, told by what it raised.

    Attributes:
        words: one of them is in the text of the error.
        deed: the end of a sentence about the function; ``{text}`` is that of the error.
        instead: what to do about it.
        kinds: of errors for which it is the reason too, whatever they say.
    """

    words: tuple[str, ...]
    deed: str
    instead: str
    kinds: tuple[type[Exception], ...] = ()


_REASONS: Final = (
    _Reason(
        ("data-dependent", ".numpy()", "tolist()", "data pointer"),
        "branches on data or reads a value back into Python ({text})",
        "a stage is traced once with abstract tensors, so use torch.where or a mask, or pass the "
        "choice as a Python value bound with functools.partial",
        (DataDependentOutputException, DynamicOutputShapeException),
    ),
    _Reason(
        ("Expected all tensors to be on the same device", "FakeTensor Device Propagation"),
        "computes with tensors on several devices ({text})",
        "what it closes over, such as a constant or a buffer, must lie where its arguments do; "
        "with devices= what one function closes over must lie on that of its first stage, and a "
        "torch.autograd.Function takes tensors as arguments of apply",
    ),
    _Reason(
        ("a leaf Variable that requires grad", "a view of a leaf Variable"),
        "writes in place to a tensor by which gradients are taken, such as a parameter",
        "a stage is a pure function; work on a copy (x = x.clone()), and return what is to be kept",
    ),
    _Reason(
        ("its data is not allocated yet",),
        "reads the memory of a tensor outside of torch's operations, as torch.tensor of a list of "
        "tensors does, and a kernel that torch does not know",
        "a stage is traced once with abstract tensors, so put tensors together with torch.stack, "
        "and make an operation of a kernel, with torch.library.custom_op and register_fake",
    ),
    _Reason(
        (),
        "calls an operation whose name is a word of Python's, which no graph can write down",
        "draw with torch.randint(low, high, x.shape) in place of x.random_(low, high)",
        (SyntaxError,),
    ),
    _Reason(
        ("Trying to use forward AD",),
        "calls an operation for which torch has no forward-mode derivative ({text})",
        "fpipe.jvp, hvp and ggnvp take directional derivatives of each stage, so write it in "
        "operations that have one",
    ),
    _Reason(
        ("inside a function being vmapped", "functorch/Interpreter.cpp"),
        "closes over a tensor that a transform of torch.func maps or differentiates",
        "pass it in the parameters or in the batch, where transforms can see it",
    ),
    _Reason(
        ("does not require grad", "have been used in the graph", "backward() called inside"),
        "differentiates with torch.autograd ({text})",
        "what it differentiates by must require a gradient, which under a transform of torch.func, "
        "its own or the pipeline's, nothing does: take derivatives there with torch.func.grad",
    ),
    _Reason(
        ("setup_context",),
        "uses a torch.autograd.Function whose forward takes ctx (or what torch makes of one: an "
        "operation of torch.library on lists of tensors, a module with backward hooks)",
        "torch.func takes none within a transform, its own or the pipeline's, nor by a name for "
        "its apply; write setup_context beside forward, or call Class.apply(…) itself outside of "
        "transforms, and remove the hooks",
    ),
    _Reason(
        ("random operation while in randomness error mode",),
        "draws random numbers for several members or examples at once",
        "say whether these are the same for all of them, with randomness= of fpipe.vmap or of what "
        'maps over examples ("same" or "different"), or draw from a key',
    ),
    _Reason(
        ("new_fn INTERNAL ASSERT FAILED",),
        "writes to a tensor after it has called detach_() on it",
        "torch cannot record that; say y = y.detach().clone()",
    ),
    _Reason(
        ("as_strided() is non-compositional",),
        "writes in place to a view by way of as_strided(), or of an operation that does, as to "
        "the parts of a complex tensor",
        "work on a copy (x = x.clone())",
    ),
    _Reason(
        ("requires_grad_()", "only change requires_grad flags of leaf variables"),
        "calls requires_grad_(False)",
        "use x.detach(), and say with trainable= which parameters are frozen",
    ),
    _Reason(
        ("has been modified by an inplace operation",),
        "writes in place to a value that its backward needs ({text})",
        "as for plain autograd, write to a copy (x = x.clone())",
    ),
    _Reason(
        ("Sparse CSR tensors do not", "Sparse CSC", "SparseCsrTensorImpl", "SparseCsr"),
        "computes with a compressed sparse tensor ({text})",
        "close over a dense one (.to_dense()), or over its indices and values, and use index_add",
    ),
    _Reason(
        ("SparseCooTensorWithDimsAndTensors",),
        "differentiates a tensor in layout torch.sparse_coo by its values",
        "close over a dense one, or use its indices and values with index_add",
    ),
)


def impure(name: str, where: str, op: str) -> StageError:
    """The refusal of a function that writes to `where`."""
    if op.startswith("aten.embedding_renorm_"):
        return StageError(
            f"{name} looks up an embedding with max_norm, which writes to its weight ({op}): leave "
            "max_norm out, and renormalise the rows of the weight after a step"
        )
    module = ""
    if "closes over" in where:
        module = (
            "; a module whose buffers change trains with has_state=True and a state that has all "
            "of them, or in module.eval()"
        )
    return StageError(
        f"{name} writes in place to {where} ({op}): a stage is a pure function; work on a copy "
        f"(x = x.clone()), and return what is to be kept{module}"
    )


def describe(name: str, value: Any) -> str:
    """The tensors of a pytree as text, such as ``"x['a']: float32[3, 4]"``; of many the first."""
    leaves, spec = pytree.flatten(value)
    texts = [
        f"{name}{path}: {in_words(leaf)}"
        for path, leaf in zip(pytree.paths(spec), leaves, strict=True)
        if isinstance(leaf, Tensor)
    ]
    if len(texts) > SHOWN:
        texts[SHOWN:] = [f"and {len(texts) - SHOWN} more"]
    nothing = "None" if value is None else "no tensor"
    return ", ".join(texts) or f"{name}: {nothing}"


# Frames of these are not the user's own.
_MACHINERY = (
    *(str(Path(file).parent) for file in (torch.__file__, optree.__file__, pytree.__file__)),
    contextlib.__file__,
    "<eval_with_key>",
    "<frozen ",
)

_LAYERS = str(Path(torch.nn.__file__).parent)


def place(error: BaseException) -> str:
    """Where in the user's own code an error came from, as the middle of a sentence.

    If no frame is the user's, as for a `torch.nn` module that is itself the stage, it is the place
    in that module.
    """
    user_place = layer_place = ""
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if _is_own(traceback.tb_frame):
            user_place = f" at {file}:{traceback.tb_lineno}"
        elif file.startswith(_LAYERS):
            layer_place = f" at {file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return user_place or layer_place


def calls(error: BaseException, function: str) -> bool:
    """Whether an error came from within a function of this name."""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_name == function:
            return True
        traceback = traceback.tb_next
    return False


def _is_own(frame: FrameType) -> bool:
    """Whether a frame is the user's."""
    return not frame.f_code.co_filename.startswith(_MACHINERY)


def own_traceback(traceback: TracebackType | None) -> TracebackType | None:
    """The frames of a traceback that are the user's, None if none are."""
    frames = []
    while traceback is not None:
        if _is_own(traceback.tb_frame):
            frames.append(traceback)
        traceback = traceback.tb_next
    kept: TracebackType | None = None
    for one in reversed(frames):
        kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept
