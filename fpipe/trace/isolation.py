"""Isolate a trace: from the caller's hooks and modes, compiled code, other threads and signals.

Functions that torch.compile or torch.jit has compiled are called as they were written. torch
refuses to trace the first. After some calls TorchScript runs an optimised graph with gradients
disabled and a backward of its own, of which a recorded graph knows nothing.

Handlers of signals (Ctrl-C) are called where an operation begins. torch enters and leaves its modes
several times an operation. An exception in the midst of that leaves one behind, and then every
tensor that the process makes is an abstract one.

A function that looks at data is traced once more, as compiled code runs, which may not look:
libraries that have code to spare themselves work, such as a mask that masks nothing, look at data
for it, and leave that out where `torch.compiler.is_compiling()` says so.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.nn.utils.parametrize as parametrize
from torch._C import _autograd
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from fpipe.checks.explain import Untraceable, place, unreported
from fpipe.errors import StageError
from fpipe.torch_internals import FakeTensorMode
from fpipe.trace.overrides.functions import with_contexts
from fpipe.trace.overrides.standin import StandIn, Turns

one_at_a_time = Turns()
"""Within it no other thread traces: torch cannot do so in two at one time."""


@contextmanager
def apart() -> Iterator[None]:
    """Within it nothing of the caller's is called or filled that is not about what is traced.

    Those are hooks on saved tensors, such as `torch.utils.checkpoint` has around what it calls; and
    the cache of parametrized tensors, which would hold abstract ones from then on.
    """
    token = IS_TRACING.set(True)
    try:
        with _without_saving(), _with_own_cache():
            yield
    finally:
        IS_TRACING.reset(token)


def refuse_within() -> NoReturn:
    """Refuse a call of a pipeline in what is traced.

    Raises:
        Untraceable: always.
    """
    raise Untraceable(
        "calls a pipeline",
        "a stage is a function that is traced, and a pipeline runs what was: call the functions "
        "that it was made of",
    )


IS_TRACING: ContextVar[bool] = ContextVar("fpipe.tracing", default=False)
"""Whether this thread is tracing."""


@contextmanager
def _without_saving() -> Iterator[None]:
    pairs: list[Any] = []
    while (top := _autograd._top_saved_tensors_default_hooks(False)) is not None:
        pairs.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    disabled = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if disabled is not None:  # as torch.func.grad does
        _autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        if disabled is not None:
            _autograd._saved_tensors_hooks_disable(disabled)
        for pair in reversed(pairs):
            _autograd._push_saved_tensors_default_hooks(*pair)


@contextmanager
def _with_own_cache() -> Iterator[None]:
    # It is one for all threads, of which others may begin and end their use of it meanwhile.
    users, kept = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        parametrize._cache_enabled += users
        parametrize._cache = kept if parametrize._cache_enabled else {}


@contextmanager
def tracing(mode: FakeTensorMode) -> Iterator[None]:
    """Within it functions run on abstract tensors, and neither see nor change what is outside.

    Args:
        mode: of the abstract tensors.
    """
    with (
        unreported(),
        apart(),
        mode,
        # To torch 2.11 inference mode means no derivatives even where gradients are enabled again.
        torch.inference_mode(False),
        torch.enable_grad(),
        with_contexts(),
        # A compiled function is the Python function that it was made of, as to `torch.compile`. A
        # compiled module has none: its methods are refused. Other threads call what they did.
        _SCRIPTED.active(),
    ):
        yield


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within it what the caller has compiled is called as it was written, in other threads too.

    torch refuses to trace it otherwise, and what is traced is compiled with its stage.
    """
    frames: Any = torch._dynamo.eval_frame
    stance = frames.DynamoStance("force_eager")
    # The caller may be compiled itself, and what runs in it may not set a stance.
    caller = torch._C._dynamo.eval_frame.set_eval_frame(None)
    before = frames._set_stance(stance)
    try:
        with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
            yield
    finally:
        if frames._stance is stance:
            frames._set_stance(before)
        # Another thread that has set its own meanwhile comes back to this one.
        for name, value in vars(before).items():
            object.__setattr__(stance, name, value)
        torch._C._dynamo.eval_frame.set_eval_frame(caller)


def _looking(kind: Any) -> Any:
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if not _SCRIPTED.is_active:
            return _SCRIPTED.original(kind)(self, *arguments, **options)
        # Set by torch.jit, for torch.compile.
        written = getattr(self, "_torchdynamo_inline", None)
        if written is None:
            raise Untraceable(
                f"calls {self.name!r}, which torch.jit has compiled",
                "its derivative is not recorded; use the function or module that torch.jit.trace "
                "or torch.jit.script was given, which fpipe compiles by itself (compile=)",
            )
        return written(*arguments, **options)

    return call


_SCRIPTED = StandIn(
    "__call__",
    {kind: _looking(kind) for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod)},
)


log = logging.getLogger("fpipe")

Handler = Callable[[int, FrameType | None], Any]


class _Raised(BaseException):
    """Carries an error of a handler past the code that explains errors of a trace."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


_HELD: dict[int, Handler] = {}
"""The handlers that are to be called, by the signals that have come."""


@contextmanager
def held_back() -> Iterator[None]:
    """Within it handlers of signals are called where `let_through` is, at the latest at the end.

    Whoever insists, and sends SIGINT a second time, has its handler called at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    installed = {number: signal.getsignal(number) for number in signal.valid_signals()}
    before: dict[int, Handler] = {
        number: handler
        for number, handler in installed.items()
        if callable(handler) and not getattr(handler, "holds", False)
    }

    def hold(number: int, frame: FrameType | None) -> None:
        if not hold.holds:  # type: ignore[attr-defined]  # it could not be taken away
            before[number](number, frame)
        elif number == signal.SIGINT and number in _HELD:
            del _HELD[number]
            log.warning(
                "interrupted in the midst of an operation: where torch behaves oddly from here on, "
                "start the process anew"
            )
            before[number](number, frame)
        else:
            _HELD[number] = before[number]

    hold.holds = True  # type: ignore[attr-defined]
    try:
        for number in before:
            signal.signal(number, hold)
        yield
    except _Raised as raised:
        raise raised.error from None
    finally:
        hold.holds = False  # type: ignore[attr-defined]
        with ExitStack() as stack:
            for number in [number for number in _HELD if number in before]:
                stack.callback(_HELD.pop(number), number, sys._getframe())
            for number, handler in before.items():
                stack.callback(signal.signal, number, handler)


def let_through() -> None:
    """Call a handler that was held back, if there is one."""
    if _HELD and threading.current_thread() is threading.main_thread():
        number = next(iter(_HELD))
        try:
            _HELD.pop(number)(number, sys._getframe(1))
        except Exception as error:
            raise _Raised(error) from error


T = TypeVar("T")

_AS_COMPILED: ContextVar[bool] = ContextVar("fpipe.as_compiled", default=False)


@contextmanager
def is_compiling(choice: bool | None = None) -> Iterator[None]:
    """Within it `torch.compiler.is_compiling()` is what a user chose for a traced function.

    Args:
        choice: None for what it is, and True where the trace is made `once_more`.
    """
    before, again = torch.compiler._is_compiling_flag, _AS_COMPILED.get()
    wanted = again if choice is None else choice
    torch.compiler._is_compiling_flag = wanted or (before and not again)
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def once_more(attempt: Callable[[], T]) -> T:
    """Make a trace; one that looks at data is made once more, as compiled code runs.

    Args:
        attempt: makes the trace, in which functions run within `is_compiling`.

    Raises:
        StageError: the refusal of the second trace if it looks at data too, or of the first.
    """
    try:
        return attempt()
    except StageError as error:
        cause = _look(error)
        if cause is None or _AS_COMPILED.get():
            raise
        refusal: StageError | None = error
    token = _AS_COMPILED.set(True)
    try:
        value = attempt()
        log.info(
            "traced as compiled code runs, where torch.compiler.is_compiling() is True: otherwise "
            "the trace looks at data (%s)%s",
            cause,
            place(cause),
        )
        return value
    except StageError as error:
        if _look(error) is not None:
            raise
        assert refusal is not None
        raise refusal from refusal.__cause__
    finally:
        _AS_COMPILED.reset(token)
        # This frame is behind the traceback of what it raises, and would keep itself.
        refusal = cause = None


def _look(error: BaseException) -> BaseException | None:
    """The error of torch's that says that data was looked at, if that is why a trace failed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DataDependentOutputException | DynamicOutputShapeException):
            return cause
        cause = cause.__cause__
    return None
