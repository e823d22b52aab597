"""Refuse stages that are not pure: that write to others' tensors, or draw numbers without torch.

In-place ops on a stage's own intermediate values are fine; tracing turns them into pure ones. Ops
that write to inputs, or to tensors that the function closes over, are refused by the name that its
user knows. A seed would be set while the function is traced, and not in a step. A number that the
generator of Python or numpy draws would be kept in the trace: all microbatches of all steps would
get the same, and each rank another.
"""

from __future__ import annotations

import inspect
import logging
import pickle
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, fx

from fpipe.checks.explain import ImpureError, Untraceable, impure
from fpipe.inputs.signature import memory_of
from fpipe.torch_internals import FakeTensor, FunctionalTensor, functorch
from fpipe.trace.overrides.standin import StandIn

_LITERAL = torch.ops.aten.lift_fresh.default


class WriteGuard:
    """Raises `ImpureError` at the op that writes, before it does, so that nothing is changed.

    An operation that draws from a generator that is not torch's writes to it, and is `Untraceable`,
    as are collectives of torch.distributed that write to their arguments.

    Args:
        inputs: fake inputs by how a user would write them.
        origin: the user's function, or several, searched for the name of a closed-over tensor.
    """

    def __init__(self, inputs: Mapping[str, Tensor], origin: Any) -> None:
        self._origin = origin
        self._foreign = {memory_of(v): f"its input {path}" for path, v in inputs.items()}
        self._kept_alive = list(inputs.values())

    def __call__(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[Any],
        options: Mapping[str, Any],
        run: Callable[[torch._ops.OpOverload, Any, Any], Any],
    ) -> Any:
        """Check the arguments that `func` writes to, then run it."""
        if isinstance(options.get("generator"), torch.Generator):
            raise Untraceable(
                "draws from a torch.Generator of its own",
                "a stage is traced once, and cannot keep the generator's state; draw without "
                "generator=, which under a key gives the same numbers whatever the schedule, or "
                "draw before and keep what is drawn in a buffer or in the batch",
            )
        if func.namespace == "c10d":
            raise Untraceable(
                f"calls one of torch.distributed's own collectives ({func})",
                "what it writes to is waited for outside of any trace; take those of "
                "torch.distributed._functional_collectives, which return new tensors",
            )
        if not (func.is_view or func._schema.is_mutable):
            return run(func, args, options)
        arguments = list(_arguments(func, args, options))
        for declared, value in arguments:
            if declared.is_write and func.namespace not in ("aten", "prims"):
                raise Untraceable(
                    f"calls {func}, an operation of torch.library that writes to its arguments",
                    "register one that returns a new tensor, with mutates_args=()",
                )
            if declared.is_write and (owner := self._owner(value)):
                raise ImpureError(owner, str(func))
        result = run(func, args, options)
        if func is _LITERAL or not isinstance(result, Tensor):
            return result  # what torch.tensor has made within the function is its own
        for declared, value in arguments:
            if declared.alias_info is not None and (owner := self._owner(value)):
                self._foreign[memory_of(result)] = owner
                self._kept_alive.append(result)
        return result

    def _owner(self, value: Any) -> str | None:
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return None
        if not isinstance(value, FakeTensor | FunctionalTensor):
            return f"a tensor that it closes over ({name_in_closure(value, self._origin)})"
        return self._foreign.get(memory_of(value))


def refuse_writes(name: str, graph: fx.Graph) -> None:
    """Refuse any op that still writes, whatever tracing left.

    Raises:
        StageError: names the op.
    """
    for node in writes(graph):
        where = "what the backward of a torch.autograd.Function is given"
        raise impure(name, where, str(node.target))


def writes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that write to one of their inputs."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            yield node


def _arguments(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch.Argument, Any]]:
    """Each given argument with its declaration."""
    declared = func._schema.arguments
    yield from zip(declared, args, strict=False)
    yield from ((a, kwargs[a.name]) for a in declared if a.name in kwargs)


_MOST = 2_000  # objects to look at: an error must not take long to write


def name_in_closure(value: Tensor, origin: Any) -> str:
    """The name by which a function reaches a tensor, the shortest way first.

    Looked through are what it closes over, its bound and default arguments, containers, modules,
    the attributes of objects, and functions that it may call.

    Args:
        value: the tensor.
        origin: the function, or several.

    Example:
        >>> weights = [torch.ones(2), torch.ones(2)]
        >>> name_in_closure(weights[1], lambda p, x: x * weights[1])
        "'weights[1]'"
    """
    names = (repr(name) for name, reached in _reached(origin) if reached is value)
    return next(names, "an unnamed tensor")


def refuse_mapped(origin: Any) -> None:
    """Refuse functions that close over tensors of a transform of `torch.func` around the trace.

    A trace stands outside of it, and its level might be taken for one of the trace's own.

    Raises:
        Untraceable: a function does.
    """
    for name, value in _reached(origin):
        if isinstance(value, Tensor) and functorch.is_functorch_wrapped_tensor(value):
            raise Untraceable(
                "closes over a tensor that a transform of torch.func maps or differentiates "
                f"({name!r})",
                "pass it in the parameters or in the batch, where transforms can see it",
            )


def _reached(origin: Any) -> Iterator[tuple[str, Any]]:
    """All objects that functions reach, each with a name, the shortest way first."""
    waiting: deque[tuple[str, Any]] = deque(("", one) for one in _several(origin))
    seen: set[int] = set()
    while waiting and len(seen) < _MOST:
        name, value = waiting.popleft()
        yield name, value
        if id(value) not in seen:
            seen.add(id(value))
            # A cell may be empty yet, and not every callable tells its signature.
            with suppress(TypeError, ValueError):
                waiting.extend(_within(name, value))


def _several(origin: Any) -> tuple[Any, ...]:
    return origin if isinstance(origin, tuple) else (origin,)


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The objects within an object, each with its name."""
    if isinstance(value, Tensor | str | bytes | type | ModuleType):
        return
    if isinstance(value, partial):
        yield "", value.func
        bound = inspect.signature(value.func).bind_partial(*value.args, **value.keywords)
        yield from bound.arguments.items()
    elif isinstance(value, MethodType):
        yield "", value.__func__
        yield name or _of(value.__self__), value.__self__
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, torch.nn.Module):
        owner = name or type(value).__name__
        for path, tensor in chain(value.named_parameters(), value.named_buffers()):
            yield f"{owner}.{path}", tensor
        if not name:
            yield "", value.forward
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{index}]", item) for index, item in enumerate(value))
    elif not inspect.isroutine(value):
        attributes = getattr(value, "__dict__", {})
        yield from ((f"{name or _of(value)}.{key}", item) for key, item in attributes.items())


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or (function.__module__ or "").startswith("torch."):
        return
    closure = inspect.getclosurevars(function)
    yield from closure.nonlocals.items()
    yield from closure.globals.items()
    defaults = inspect.signature(function).parameters.values()
    yield from ((p.name, p.default) for p in defaults if p.default is not p.empty)


def _of(value: Any) -> str:
    """A name for an object that has none."""
    return type(value).__name__


_JUPYTER: Final = ("IOPub", "Heartbeat", "Control", "IPythonHistorySavingThread")

QUIET: Final = ("fpipe ", "tqdm_monitor", *_JUPYTER)
"""How the names of threads start that draw nothing: fpipe's own, tqdm's and those of notebooks."""


@contextmanager
def unseeded() -> Iterator[None]:
    """Refuse what seeds torch's generator, or leaves it in another state, which is put back.

    A call of `torch.manual_seed` is refused where it stands, before any device is seeded. Other
    ways to seed show in the state of the CPU's generator alone, for abstract tensors draw nothing;
    but other threads, which load data or train, may have drawn or seeded meanwhile, so that is
    looked at while there are none.

    Raises:
        Untraceable: it was seeded, or left in another state.
    """
    before, alone = torch.get_rng_state(), not others()
    calls: list[int] = []
    token = _CALLS.set(calls)
    changed = False
    try:
        with _SEEDS.active():
            yield
    finally:
        _CALLS.reset(token)
        if alone and not others() and not torch.equal(torch.get_rng_state(), before):
            torch.set_rng_state(before)
            changed = True
    if calls or changed:  # where it was called, the function has caught the refusal
        raise _refusal()


def others() -> list[threading.Thread]:
    """The other threads that run and may draw.

    Those do not that watch other ranks for fpipe, in which Inductor compiles, that look after the
    bars of tqdm, and that carry messages of a notebook.
    """
    compile = sys.modules.get("torch._inductor.async_compile")
    pool = None if compile is None else compile.AsyncCompile.pool
    quiet = {threading.current_thread()}
    if pool is not None and pool.cache_info().currsize:
        quiet |= pool()._threads
    return [t for t in threading.enumerate() if t not in quiet and not t.name.startswith(QUIET)]


def _refusing(module: Any) -> Callable[[int], Any]:
    def manual_seed(seed: int) -> Any:
        calls = _CALLS.get()
        if calls is None:
            return _SEEDS.original(module)(seed)
        calls.append(seed)
        raise _refusal()

    return manual_seed


def _refusal() -> Untraceable:
    return Untraceable(
        "seeds torch's generator",
        "a step draws what was traced from a stream of its own; draw from a key, with fpipe.random "
        "and has_key=True (fpipe.Stage(fn, reads_key=True) for a stage), or seed before the step",
    )


_CALLS: ContextVar[list[int] | None] = ContextVar("fpipe.seeds", default=None)
_SEEDS = StandIn("manual_seed", {module: _refusing(module) for module in (torch, torch.random)})


log = logging.getLogger("fpipe")

_INSTEAD: Final = (
    "what the trace draws would be drawn in every step, the same for all microbatches; draw with "
    "torch (from a key, with has_key=True), or draw before the step and pass it in the batch"
)


@contextmanager
def undrawn() -> Iterator[None]:
    """Refuse what leaves one of these generators in another state, which is put back.

    Other threads, which load data for one, may draw meanwhile: while there are such, nothing is
    refused or put back, and the log has a warning.

    Raises:
        Untraceable: it was drawn from, or seeded.
    """
    python, alone = random.getstate(), not others()
    numpy: Any = sys.modules.get("numpy")
    before = _state_of(numpy)
    drew: list[str] = []
    try:
        yield
    finally:
        alone = alone and not others()
        if random.getstate() != python:
            drew.append("Python's random")
            if alone:
                random.setstate(python)
        if _state_of(numpy) != before:
            drew.append("numpy.random")
            if alone:
                numpy.random.set_state(pickle.loads(before))
    if drew and alone:
        raise Untraceable(f"draws from {drew[0]}", _INSTEAD)
    if drew:
        log.warning(
            "%s was drawn from while a stage was traced, by the stage or by another thread; if by "
            "the stage: %s",
            drew[0],
            _INSTEAD,
        )


def _state_of(numpy: Any) -> bytes:
    return b"" if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))
