"""Functions with a backward of their own, `torch.autograd.Function`, in what is recorded.

A function with cuts is recorded forward only, and each of its parts is differentiated by itself
later. So a call is recorded as one operation, of which nothing is seen, and made again when the
part is traced: its backward is then the one that was written.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._functorch.autograd_function import custom_function_call
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe import tree
from fpipe.draws import draws
from fpipe.errors import a_type
from fpipe.stage.refusing.explain import ImpureError, Untraceable
from fpipe.stage.refusing.purity import WriteGuard

CALL = custom_function_call
"""What `apply` of a Function calls within `torch.func`, with the class and the arguments."""

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    type,
    type(Ellipsis),
    Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
    dist.ProcessGroup,
)

_TENSOR = object()
"""Stands for the next tensor among the arguments of a call."""

_CALLS: ContextVar[Calls | None] = ContextVar("fpipe.custom", default=None)

_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define("applied(int number, Tensor[] tensors) -> Tensor[]")


class Applied:
    """A call of a Function with the tensors among its arguments left out: they are what it takes.

    Args:
        function: the class.
        written: the one that it stands for, itself unless it does for another.
        leaves: of the arguments, with a mark in the place of each tensor.
        spec: the structure of the arguments.
        autocast: for each kind of device whether and to which dtype it casts.
        label: equal, among the calls of a recorded function, for calls that compute the same.
    """

    __name__ = "applied"

    def __init__(
        self,
        function: Any,
        written: Any,
        leaves: Sequence[Any],
        spec: optree.PyTreeSpec,
        autocast: Sequence[tuple[str, bool, torch.dtype]],
        label: str,
    ) -> None:
        self.made: Any = None  # what it returned last, with a mark in the place of each tensor
        self._function, self._written = function, written
        self._leaves, self._spec = leaves, spec
        self._autocast, self._label = autocast, label
        self._attributes = _attributes(written)

    def __repr__(self) -> str:
        return self._label

    @property
    def name(self) -> str:
        """The class, in messages."""
        return name_of(self._written)

    def placed(self, place: Callable[[Any], Any]) -> Applied:
        """The same call with other arguments in the place of some that are no tensors."""
        other = copy.copy(self)
        other._leaves = [place(leaf) for leaf in self._leaves]
        return other

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that it returns."""
        now = _attributes(self._written)
        if len(now) != len(self._attributes) or any(map(operator.is_not, now, self._attributes)):
            raise Untraceable(
                f"changes attributes of the class {self.name}",
                "a call of a torch.autograd.Function is made again when it is differentiated; "
                "pass what differs from call to call as an argument of apply",
            )
        given = iter(tensors)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self._leaves]
        with ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                if (enabled, dtype) != _casts(kind):
                    cast = torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)
                    stack.enter_context(cast)
            returned = self._function.apply(*tree.unflatten(self._spec, leaves))
        check_returned(self._written, returned)
        elements = returned if isinstance(returned, tuple) else (returned,)
        marked = tuple(_TENSOR if isinstance(e, Tensor) else e for e in elements)
        self.made = marked if isinstance(returned, tuple) else marked[0]
        return [element for element in elements if isinstance(element, Tensor)]

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """What it returned, with these tensors."""
        given = iter(tensors)
        if not isinstance(self.made, tuple):
            return next(given) if self.made is _TENSOR else self.made
        return tuple(next(given) if element is _TENSOR else element for element in self.made)


class Calls:
    """The calls of Functions in what is being recorded.

    It is made within the transforms of `torch.func` that it is recorded in.
    """

    def __init__(self) -> None:
        self._made: list[Applied] = []
        self._numbers: dict[Hashable, int] = {}
        self._depth = _depth()

    def __getitem__(self, number: int) -> Applied:
        return self._made[number]

    def record(self, function: Any, *args: Any, **options: Any) -> Any:
        """Record a call as one operation; returns what it does.

        Raises:
            Untraceable: the call cannot be made again, or does more than to return tensors.
        """
        written = _written(function, args)
        if _depth() != self._depth:
            raise Untraceable(
                f"calls {name_of(written)}, a torch.autograd.Function, within a transform of "
                "torch.func or of the pipeline",
                "in a function with cuts, and in a module, it has no other derivative than its "
                "backward, and no batch rule; compute it in plain operations",
            )
        leaves, spec = tree.flatten(args)
        check_plain(written, (leaves, options))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        marked = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        kinds = sorted({tensor.device.type for tensor in tensors} & {"cpu", "cuda"})
        autocast = tuple((kind, *_casts(kind)) for kind in kinds)
        attributes = tuple(map(id, _attributes(written)))
        key = (function, tuple(map(_exact, marked)), spec, autocast, attributes)
        label = f"{name_of(written)}#{self._numbers.setdefault(key, len(self._numbers))}"
        call = Applied(function, written, marked, spec, autocast, label)
        self._made.append(call)
        made = torch.ops.fpipe.applied.default(len(self._made) - 1, tensors)
        return call.result(made)

    def put_into(self, graph: fx.Graph) -> None:
        """Let the nodes of a recorded graph make the calls that they stand for."""
        target = torch.ops.fpipe.applied.default
        for node in graph.find_nodes(op="call_function", target=target):
            number, tensors = node.args
            node.target, node.args = self[number], (tensors,)


@contextmanager
def recording_calls(calls: Calls) -> Iterator[None]:
    """Within it `calls` can record."""
    token = _CALLS.set(calls)
    try:
        yield
    finally:
        _CALLS.reset(token)


def name_of(function: Any) -> str:
    """A class as a user knows it."""
    return f"{function.__module__}.{function.__qualname__}"


def _written(function: Any, args: Sequence[Any]) -> Any:
    """The class that a user wrote: one that stands for others takes it as its first argument."""
    first = args[0] if args else None
    is_function = isinstance(first, type) and issubclass(first, torch.autograd.Function)
    return first if is_function else function


def check_plain(function: Any, values: Any) -> None:
    """Refuse arguments in which tensors may hide.

    Raises:
        Untraceable: one is neither a tensor nor a plain value.
    """
    for leaf in tree.flatten(values)[0]:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise Untraceable(
                f"gives {a_type(leaf)} to {name_of(function)}, a torch.autograd.Function",
                "tensors that it holds would not be seen; give it tensors and plain values, such "
                "as numbers, strings, dtypes and process groups, in tuples, lists and dicts",
            )


def check_returned(function: Any, returned: Any) -> None:
    """Refuse tensors that no gradient would come back to.

    Raises:
        Untraceable: what is returned is neither a tensor nor a tuple that has them as its elements.
    """
    for element in returned if isinstance(returned, tuple) else (returned,):
        inside = [] if isinstance(element, Tensor) else tree.flatten(element)[0]
        if any(isinstance(leaf, Tensor) for leaf in inside):
            raise Untraceable(
                f"gets {a_type(element)} of tensors from {name_of(function)}, a "
                "torch.autograd.Function",
                "autograd knows no gradient of them; return a tensor, or a tuple of tensors",
            )


def _run(number: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make a call while it is recorded, on what lies below all transforms."""
    calls = _CALLS.get()
    assert calls is not None
    call = calls[number]
    token = _CALLS.set(None)
    try:
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return [tensor.clone() for tensor in call(tensors)]
        given = {f"{index}": tensor for index, tensor in enumerate(tensors)}
        with WriteGuard(given, None), _OnlyGiven(call), _WithoutDraws(call):
            made = call(tensors)
        # An argument that is returned as it came would be taken for the result from now on.
        return [tensor.clone() for tensor in made]
    except ImpureError as error:
        raise Untraceable(
            f"calls {call.name}, a torch.autograd.Function that writes in place to a tensor which "
            "it was given, or closes over",
            "that would be lost; write to a copy, x.clone(), and return it",
        ) from error
    finally:
        _CALLS.reset(token)


_LIBRARY.impl("applied", _run, "CompositeExplicitAutograd")
torch.library.register_fake("fpipe::applied", _run, lib=_LIBRARY)


class _OnlyGiven(TorchFunctionMode):
    """Refuses tensors of the function that is being recorded which did not come as arguments."""

    def __init__(self, call: Applied) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Check the arguments, then call `func`."""
        for leaf in tree.flatten((args, dict(kwargs or {})))[0]:
            if isinstance(leaf, Tensor) and is_traced(leaf):
                raise Untraceable(
                    f"calls {self._call.name}, a torch.autograd.Function that closes over a tensor "
                    "which depends on the parameters or on the batch",
                    "it would get no gradient; give it as an argument of apply",
                )
        return func(*args, **(kwargs or {}))


class _WithoutDraws(TorchDispatchMode):
    """Refuses random operations."""

    def __init__(self, call: Applied) -> None:
        super().__init__()
        self._call = call

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Check what it is, then call `func`."""
        if draws(func, args, kwargs or {}):
            raise Untraceable(
                f"calls {self._call.name}, a torch.autograd.Function that draws ({func})",
                "a call is made again when it is differentiated; draw before, and give what is "
                "drawn as an argument of apply",
            )
        return func(*args, **(kwargs or {}))


def is_traced(value: Tensor) -> bool:
    """Whether `value` belongs to a transform of `torch.func`, such as one that records."""
    return torch._C._functorch.is_functorch_wrapped_tensor(value) or torch._is_functional_tensor(
        value
    )


def _depth() -> int:
    return len(torch._C._functorch.get_interpreter_stack() or ())


def _casts(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _attributes(function: Any) -> list[Any]:
    """What is set on a class, and on those that it is made of."""
    own = function.__mro__[: function.__mro__.index(torch.autograd.Function)]
    return [value for part in own for value in vars(part).values()]


def _exact(leaf: Any) -> Hashable:
    """Equal for the same plain values alone: 1 is neither 1.0 nor True."""
    return (type(leaf), leaf if isinstance(leaf, type) or leaf is _TENSOR else repr(leaf))
