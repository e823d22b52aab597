"""The private names of torch that fpipe stands on, in one place.

Tested on torch 2.11, 2.13 and 2.14. A new version of torch that moves one of them fails here, when
fpipe is imported, and not within a trace. The exceptions are the modules that import sympy, for
half as long as torch itself takes: they are imported at the first trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._C import _functorch as functorch
from torch._functorch import eager_transforms
from torch._functorch.autograd_function import custom_function_call
from torch._functorch.pyfunctorch import (
    retrieve_current_functorch_interpreter,
    temporarily_clear_interpreter_stack,
)
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import _symbolic_trace
from torch.fx import traceback as fx_traceback
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    TorchFunctionMetadataMode,
    disable_autocast_cache,
    disable_proxy_modes_tracing,
    fetch_sym_proxy,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.fx.experimental.proxy_tensor import _ProxyTensor as ProxyTensor

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "LazyGraphModule",
    "ProxyTensor",
    "ProxyTorchDispatchMode",
    "PythonKeyTracer",
    "TorchFunctionMetadataMode",
    "autograd_counter",
    "beneath_forward_mode",
    "current_autograd_node",
    "custom_function_call",
    "disable_autocast_cache",
    "disable_proxy_modes_tracing",
    "dtensor_on_the_cpu",
    "enable_single_level_autograd_function",
    "fetch_sym_proxy",
    "from_fun",
    "functionalized",
    "functorch",
    "fx_traceback",
    "fx_tracing",
    "get_proxy_mode",
    "innermost_transform",
    "innermost_value",
    "is_composite",
    "is_transformed",
    "is_within_vmap",
    "make_shape_env",
    "node_of",
    "nodes_after",
    "retrieve_current_functorch_interpreter",
    "symbol_of",
    "temporarily_clear_interpreter_stack",
    "to_fun",
    "track_symbol",
    "transforms",
]


def to_fun(value: Any) -> Any:
    """A tensor as a functional one, within `FunctionalTensorMode`."""
    from torch._functorch._aot_autograd import functional_utils

    return functional_utils.to_fun(value)


def from_fun(value: Any) -> Any:
    """The value of a functional tensor; any other tensor itself."""
    from torch._functorch._aot_autograd import functional_utils

    return functional_utils.from_fun(value)


def make_shape_env(**options: Any) -> ShapeEnv:
    """An environment for symbolic sizes and numbers, with the options of torch's `ShapeEnv`."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv(**options)


def row_of_any_size(mode: FakeTensorMode, like: Tensor) -> FakeTensor:
    """A fake tensor of one dimension, whose size is the symbol that other such rows have.

    Args:
        mode: has a shape environment.
        like: has its dtype and device.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK])
    row = torch.empty(8, dtype=like.dtype, device=like.device)
    return mode.from_tensor(row, symbolic_context=context, source=ConstantSource("row"))


def dtensor_on_the_cpu(
    local: Tensor,
    mesh: Any,
    placements: Sequence[Any],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> Tensor:
    """A DTensor over a mesh of other devices, to which torch's own function would move it."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(shape, stride, local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=local.requires_grad)


def autograd_counter() -> int:
    """The sequence number that autograd gives to the next node that it makes."""
    return torch.autograd._get_sequence_nr()


def current_autograd_node() -> Any:
    """The node of autograd's graph whose turn it is in a backward, None outside of one."""
    return torch._C._current_autograd_node()


@contextmanager
def beneath_forward_mode() -> Iterator[None]:
    """Let `torch.func.jvp` run while a level of forward-mode autograd is open.

    It would open another one, which torch refuses, where it is not within itself; and what is
    traced has no part in the level that is open.
    """
    opened = torch.autograd.forward_ad._current_level >= 0 and eager_transforms.JVP_NESTING == 0
    eager_transforms.JVP_NESTING += opened
    try:
        yield
    finally:
        eager_transforms.JVP_NESTING -= opened


@contextmanager
def functionalized() -> Iterator[None]:
    """Within it operations on functional tensors are those of torch's own functionalization."""
    key = torch._C.DispatchKey.Functionalize
    include = torch._C._dispatch_tls_local_include_set() | torch._C.DispatchKeySet(key)
    exclude = torch._C._dispatch_tls_local_exclude_set().remove(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude - FunctionalTensor._extra_dispatch_keys):
        reapplied = torch._functionalize_enable_reapply_views(True)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch._disable_functionalization()
            torch._functionalize_enable_reapply_views(reapplied)  # type: ignore[attr-defined]


def is_composite(operation: torch._ops.OpOverload) -> bool:
    """Whether torch makes an operation of others, for autograd too."""
    name = operation.name()
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def innermost_transform() -> str | None:
    """The name of the innermost transform of `torch.func`, such as ``"Vmap"``, None for none."""
    interpreter = functorch.peek_interpreter_stack()
    return None if interpreter is None else interpreter.key().name


def innermost_value(value: Tensor) -> Tensor:
    """The tensor beneath all transforms of `torch.func`, with their dimensions."""
    while is_transformed(value):
        value = functorch.get_unwrapped(value)
    return value


def is_transformed(value: Tensor) -> bool:
    """Whether a transform of `torch.func` maps or differentiates by a tensor."""
    wrapped: bool = functorch.is_functorch_wrapped_tensor(value)
    return wrapped


def transforms() -> list[str]:
    """The names of the transforms of `torch.func` that are at work, the outermost first."""
    return [level.key().name for level in functorch.get_interpreter_stack() or ()]


def is_within_vmap() -> bool:
    """Whether `torch.func.vmap` is among them."""
    return "Vmap" in transforms()


@contextmanager
def fx_tracing() -> Iterator[None]:
    """Within it torch and libraries take the functions that they run for traced ones."""
    internals: Any = _symbolic_trace
    if hasattr(internals, "_is_fx_tracing_context"):  # since torch 2.14, in each thread apart
        with internals._is_fx_tracing_context(True):
            yield
        return
    before, internals._is_fx_tracing_flag = internals._is_fx_tracing_flag, True
    try:
        yield
    finally:
        internals._is_fx_tracing_flag = before


def node_of(value: Tensor) -> fx.Node | None:
    """The node of the graph that is being recorded which stands for a value, if there is one."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    value = getattr(value, "_local_tensor", value)  # of a DTensor
    while isinstance(value, FunctionalTensor):
        value = from_fun(value)
    entry = mode.tracer.tensor_tracker.get(value)
    return None if entry is None else entry.proxy.node


def nodes_after(graph: fx.Graph, node: fx.Node | None) -> Iterable[fx.Node]:
    """The nodes that have been recorded since `node`, all if it is None."""
    current = graph._root._next if node is None else node._next
    while current is not graph._root:
        yield current
        current = current._next


def symbol_of(env: ShapeEnv, name: str, value: float) -> Any:
    """A symbolic float, or integer, of this name; conditions on it are decided by `value`."""
    from torch._dynamo.source import ConstantSource  # all of dynamo, which most programs never need
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
    make = env.create_symintnode if isinstance(value, int) else env.create_symfloatnode
    return make(symbol, hint=value, source=source)


def track_symbol(number: Any, operation: Callable[..., Any], argument: fx.Node) -> None:
    """Let a symbolic number be the result of an operation in the graph that is being recorded."""
    mode = get_proxy_mode()
    assert mode is not None, "nothing is being recorded"
    tracer: Any = mode.tracer
    proxy = tracer.create_proxy("call_function", operation, (fx.Proxy(argument, tracer),), {})
    track_tensor_tree(number, proxy, constant=None, tracer=tracer)
