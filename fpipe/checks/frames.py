"""Whose code an error came from: the frames of a traceback that are the user's."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import FrameType, TracebackType

import optree
import torch

from fpipe import pytree

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
    code = frame.f_code
    # make_fx wraps what it traces in such a lambda.
    wrapper = (code.co_filename, code.co_name) == ("<string>", "<lambda>")
    return not wrapper and not code.co_filename.startswith(_MACHINERY)


def own_traceback(traceback: TracebackType | None) -> TracebackType | None:
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
