"""Write the operations that a function runs as a graph, with little work for each.

    operation ──► NodeWriter ──► a node ──► the abstract result
                      │
                      └──► torch's own mode: constants, symbolic sizes, what is decomposed

The nodes are those of `make_fx`, which handles every case and took half of the time of a recording.
Most operations take abstract tensors and numbers alone: this writes them at once. Nor does a
function of flat tensors need a signature, or patched classes of modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fpipe.graph.nodes import add
from fpipe.torch_internals import (
    FakeTensor,
    LazyGraphModule,
    ProxyTensor,
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    disable_autocast_cache,
    fetch_sym_proxy,
    fx_traceback,
    fx_tracing,
    is_composite,
    track_tensor_tree,
)

_LITERALS: Final = frozenset(
    {
        *(bool, int, float, complex, str, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
"""The types of arguments that stand in a node as they are."""
_RESULTS: Final = frozenset({FakeTensor, *_LITERALS})
"""The types of what an operation returns several of."""
_SHORT_NAMES: Final[dict[Any, str]] = {}
"""By operation; see `_short_name`."""


def write_graph(function: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule:
    """Record a function of abstract tensors.

    Args:
        function: runs operations that write to nothing, as functionalization leaves them, and
            returns a tensor, or lists and tuples of tensors.
        values: its arguments, in the fake-tensor mode that is at work. Some may be symbolic
            numbers.

    Returns:
        The graph, with a placeholder for each argument; what the function closes over are its
        attributes.
    """
    tracer = PythonKeyTracer()
    tracer.root, tracer.graph, tracer.tensor_attrs = nn.Module(), fx.Graph(), {}
    writer = NodeWriter(tracer, "real")
    with fx_tracing(), writer, disable_autocast_cache():
        for number, value in enumerate(values):
            writer.placeholder(f"arg{number}_1", value)
        results = function(*values)
    entries = tracer.tensor_tracker
    # To optree a list of fx's, which an interpreter of a graph returns, is a leaf.
    leaves, spec = tree_flatten(results)
    proxies = tree_unflatten([entries[v].proxy if v in entries else v for v in leaves], spec)
    tracer.create_node("output", "output", (tracer.create_arg(proxies),), {})
    return LazyGraphModule(tracer.root, tracer.graph)


class NodeWriter(ProxyTorchDispatchMode):
    """Writes each operation as a node; what has no short way, the mode of torch writes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # `tracing` keeps Dynamo out

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Write a node for `func`, and call it."""
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].device
        name = _SHORT_NAMES.get(func)
        if name is None:
            name = _SHORT_NAMES[func] = _short_name(func)
        options = dict(kwargs or {})
        if not name or fx_traceback.has_preserved_node_meta():
            return super().__torch_dispatch__(func, types, args, options)
        try:
            written = tuple(map(self._written, args))
            named = {key: self._written(value) for key, value in options.items()}
        except _Unwritten:
            return super().__torch_dispatch__(func, types, args, options)
        node = add(self.tracer.graph, func, written, named, name)
        result = func(*args, **options)
        if type(result) is FakeTensor:
            self._track(node, result)
        elif type(result) in (list, tuple) and _RESULTS.issuperset(map(type, result)):
            node.meta["val"] = result
            for place, item in enumerate(result):
                one = add(self.tracer.graph, getitem, (node, place), name="getitem")
                if type(item) is FakeTensor:
                    self._track(one, item)
        else:
            track_tensor_tree(
                result, fx.Proxy(node, self.tracer), constant=None, tracer=self.tracer
            )
        return result

    def placeholder(self, name: str, value: Any) -> fx.Node:
        """Let an abstract tensor or a symbolic number be an argument of the graph.

        The node stands where the recording is. `fx` wants placeholders first: the caller moves it.
        """
        node = self.tracer.graph.placeholder(name)
        self._track(node, value)
        return node

    def _track(self, node: fx.Node, value: Any) -> None:
        """Let a node stand for a value."""
        proxy = fx.Proxy(node, self.tracer)
        if not isinstance(value, Tensor) or value._has_symbolic_sizes_strides:
            track_tensor_tree(value, proxy, constant=None, tracer=self.tracer)
        else:
            # Nothing beneath functionalization writes to it, so the node keeps it, and no copy.
            node.meta["val"] = value
            self.tracer.tensor_tracker[value] = ProxyTensor(proxy, None)

    def _written(self, value: Any) -> Any:
        """An argument of an operation as one of its node."""
        kind = type(value)
        if kind in _LITERALS:
            return value
        if kind is FakeTensor:
            entry = self.tracer.tensor_tracker.get(value)
            if entry is None or entry.constant is not None:
                raise _Unwritten
            return entry.proxy.node
        if kind is torch.SymFloat:
            proxy = fetch_sym_proxy(self.tracer)(value)
            return proxy.node if isinstance(proxy, fx.Proxy) else proxy
        if kind is list or kind is tuple:
            return kind(map(self._written, value))
        raise _Unwritten


class _Unwritten(Exception):
    """An argument that torch's mode has to look at."""


def _short_name(func: Any) -> str:
    """The name of the nodes of an operation, empty where torch's mode writes them.

    torch decomposes some, tracks the constants and the data-dependent sizes of others, and notes
    the strides that a few ask for.
    """
    short = (
        isinstance(func, torch._ops.OpOverload)
        and func.namespace == "aten"
        and not _WATCHED.intersection(func.tags)
        and func not in _FRESH
        and not is_composite(func)
    )
    return fx.Graph()._target_to_str(func.overloadpacket.__name__) if short else ""


_WATCHED: Final = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.needs_exact_strides,
        torch.Tag.needs_fixed_stride_order,
    }
)
_DEVICE: Final = torch.ops.prim.device.default
_FRESH: Final = frozenset({torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default})
