"""Every exception that fpipe raises on purpose, and rules and words that many of them share.

Each one is also the built-in exception that fits (`ValueError`, `TypeError`, `RuntimeError`), so
callers may catch either. A message names the argument, its value, the rule and the fix.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any


class FpipeError(Exception):
    """Base of all fpipe exceptions."""


class ScheduleError(FpipeError, ValueError):
    """A schedule, or a request for one, breaks a rule of pipeline schedules."""


class StageError(FpipeError, ValueError):
    """A stage function cannot be traced, split or compiled, or does not fit its neighbours."""


class BatchError(FpipeError, ValueError):
    """A batch or a parameter pytree does not have the structure or the shapes that it must have."""


class PipelineError(FpipeError, RuntimeError):
    """An action failed while a step was running.

    Attributes:
        rank: the rank that ran the action, or None where no rank is to blame.
        stage: the stage of the action, or None.
        microbatch: the microbatch of the action, or None.
        action: the action in its text form, such as ``"2F0"``, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        action: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.stage = stage
        self.microbatch = microbatch
        self.action = action


def few(names: Sequence[str]) -> str:
    """Some names for a message: three of them, and how many more there are.

    Example:
        >>> few(["a", "b"]), few([])
        ("'a', 'b'", 'none')
    """
    shown = ", ".join(map(repr, names[:3])) or "none"
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def error_text(error: BaseException, text: str | None = None) -> str:
    """An error's kind and text, or another text, for a message.

    Example:
        >>> error_text(KeyError("w")), error_text(AssertionError())
        ("KeyError: 'w'", 'AssertionError')
    """
    text = str(error) if text is None else text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def a_type(value: object) -> str:
    """The type of a value with its article, for a message.

    Example:
        >>> a_type(3), a_type([])
        ('an int', 'a list')
    """
    name = type(value).__name__
    if name in ("FakeTensor", "FunctionalTensor"):  # what stands for one in a trace
        name = "Tensor"
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def shown(value: object) -> str:
    """The first 60 characters of what Python writes of a value, in one line, for a message.

    Example:
        >>> shown(list(range(3)))
        '[0, 1, 2]'
    """
    return " ".join(f"{value!r:.60}".split())


def label_of(function: Any) -> str:
    """The name of a function, or of the type of what is called like one, for a message.

    Example:
        >>> label_of(partial(few, [])), label_of(partial)
        ('few', 'partial')
    """
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__name__)


def check_flags(**flags: object) -> None:
    """Refuse what is neither True nor False.

    Raises:
        StageError: names the argument.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise StageError(f"{name}={value!r:.60} must be True or False")


def check_choice(name: str, value: object, choices: Collection[str], other: str = "") -> None:
    """Refuse what is none of some words; `other` is what may be given in place of one.

    Raises:
        StageError: names the argument.
    """
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise StageError(f"{name}={value!r:.60} must be one of {listed}{other}")
