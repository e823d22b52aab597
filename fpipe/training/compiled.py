"""An optimizer's step of one parameter as one compiled kernel, whatever the parameter's shape.

recording ─┬─ numbers: computed in Python, in double precision
           └─ tensors: elementwise, so any parameter is one row of elements ──► kernel
                          ├─ Inductor: compiled for a symbolic size, called without dynamo
                          └─ another backend: torch.compile(dynamic=True)

An optimizer's step has a call for each parameter. Through dynamo, which looks at every argument,
one takes 200 microseconds and more; of Inductor's own callable it takes ten.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fpipe.graph.node_writer import write_graph
from fpipe.graph.nodes import value_of
from fpipe.pieces.backends import Compile, patches_of, without_own, without_regions
from fpipe.pieces.inductor import inner_artefacts
from fpipe.torch_internals import is_transformed, make_shape_env, row_of_any_size
from fpipe.training.recorded_step import Update
from fpipe.training.scalars import WithTensors

RowKernel = Callable[[list[Tensor]], Sequence[Tensor]]
"""Takes rows, and tensors without dimensions after them; may empty the list."""


class Kernels:
    """Compiles the steps of optimizers, each once for all shapes.

    Args:
        compile: as `fpipe.pipeline` takes it: options of `torch.compile`, or True.
    """

    def __init__(self, compile: bool | str | Mapping[str, Any]) -> None:
        chosen, _ = without_regions(compile)
        named = {"backend": chosen} if isinstance(chosen, str) else chosen
        self._options: Mapping[str, Any] = named if isinstance(named, Mapping) else {}
        self._split: dict[Hashable, _Split | None] = {}
        self._kernels: dict[Hashable, RowKernel] = {}

    def __call__(
        self,
        update: Update,
        leaves: Sequence[Tensor],
        numbers: Sequence[float],
        *,
        in_place: bool = False,
    ) -> list[Tensor] | None:
        """The next parameter and its state, or nothing if they are written in place.

        It is None where no kernel fits.

        Args:
            update: the recording.
            leaves: parameter, gradient and state.
            numbers: in the order of the recording.
            in_place: write the results into parameter and state.
        """
        shape, count = leaves[0].shape, leaves[0].numel()
        if not 1 < count < 2**31 or not all(
            leaf.shape == shape and leaf.is_contiguous() and not is_transformed(leaf)
            for leaf in leaves
        ):
            return None
        # Inductor writes the number of threads into its loops.
        key = update, in_place, torch.get_num_threads()
        if key not in self._split:
            self._split[key] = self._make(update, leaves, in_place=in_place)
        split = self._split[key]
        if split is None:
            return None
        with torch.no_grad():
            rows = [leaf.detach().view(count) for leaf in leaves]
            outputs = split.kernel([*rows, *split.tensors_of(numbers)])
            # No views, of which the caller could not write to one with a history.
            return [_UNSAFE_VIEW(output, shape) for output in outputs]

    def _make(self, update: Update, leaves: Sequence[Tensor], *, in_place: bool) -> _Split | None:
        nodes = update.graph.graph.nodes
        both = apart(update.graph.graph, len(leaves))
        if both is None or not all(map(is_elementwise, nodes)):
            return None
        scalars, tensors = both
        count = sum(node.op == "placeholder" for node in tensors.graph.nodes) - len(leaves)
        with torch.no_grad(), FakeTensorMode():
            rows = [torch.empty(8, dtype=leaf.dtype, device=leaf.device) for leaf in leaves]
            values = [torch.empty((), dtype=torch.float64) for _ in range(count)]
            graph = write_graph(WithTensors(tensors).run, [*rows, *values])
        # One compiled for eight elements serves any number of them if it names no size.
        if any(_names_size(node) for node in graph.graph.nodes):
            return None
        if in_place:
            _write_back(graph.graph, len(leaves))
            graph.recompile()
        kinds = tuple((leaf.dtype, leaf.device) for leaf in leaves)
        key = graph.code, kinds, torch.get_num_threads()
        if key not in self._kernels:
            self._kernels[key] = row_kernel(graph, leaves, count, self._options)
        return _Split(scalars, self._kernels[key])


class _Split:
    """A step as what it computes of numbers, and the kernel that takes their results.

    Args:
        scalars: ``numbers -> results``.
        kernel: ``[*rows, *results] -> rows``.
    """

    def __init__(self, scalars: fx.GraphModule, kernel: RowKernel) -> None:
        self.kernel = kernel
        self._scalars = scalars
        self._last: tuple[Sequence[float], list[Tensor]] | None = None

    def tensors_of(self, numbers: Sequence[float]) -> list[Tensor]:
        """The results, in float64; those of the last call where that had the same numbers."""
        if self._last is None or self._last[0] != numbers:
            results = self._scalars(*numbers)
            tensors = [torch.tensor(value, dtype=torch.float64, device="cpu") for value in results]
            self._last = numbers, tensors
        return self._last[1]


def kernels_of(compile: Compile) -> Kernels | None:
    """The compiler of updates for a pipeline with this option; None for none."""
    if compile is False or not isinstance(compile, bool | str | Mapping):
        return None
    return Kernels(compile)


def apart(graph: fx.Graph, count: int) -> tuple[fx.GraphModule, fx.GraphModule] | None:
    """A recording, whose first `count` inputs are tensors, as two graphs.

    Returns:
        ``numbers -> results`` and ``(*tensors, *results) -> outputs``; None where a tensor's value
        is read.
    """
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    is_number = set(inputs[count:])
    for node in nodes:
        if node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload):
            if not all(argument in is_number for argument in node.all_input_nodes):
                return None
            is_number.add(node)
    if reads_numbers(graph):
        return None
    read = [
        node for node in nodes if node in is_number and any(u not in is_number for u in node.users)
    ]
    scalars, tensors = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node in is_number:
            copies[node] = scalars.node_copy(node, copies.__getitem__)
    scalars.output([copies[node] for node in read])
    rest: dict[fx.Node, fx.Node] = {}
    for node in inputs[:count]:
        rest[node] = tensors.node_copy(node)
    for number, node in enumerate(read):
        rest[node] = tensors.placeholder(f"number_{number}")
    for node in nodes:
        if node not in rest and node not in is_number:
            rest[node] = tensors.node_copy(node, rest.__getitem__)
    empty = torch.nn.Module()
    return fx.GraphModule(empty, scalars), fx.GraphModule(empty, tensors)


def reads_numbers(graph: fx.Graph) -> bool:
    """Whether a recording makes a number of Python's of a tensor's value."""
    return any(node.target is torch.ops.aten._local_scalar_dense.default for node in graph.nodes)


def _write_back(graph: fx.Graph, count: int) -> None:
    """Write the outputs into the inputs that they replace: the parameter, and its state.

    The graph is ``(param, grad, *state, *numbers) -> (param, *state)``, with `count` tensors.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    old = [inputs[0], *inputs[2:count]]
    output = graph.output_node()
    [new] = output.args
    with graph.inserting_before(output):
        for before, after in zip(old, new, strict=True):  # type: ignore[arg-type]
            graph.call_function(torch.ops.aten.copy_.default, (before, after))
    output.args = ([],)


def _names_size(node: fx.Node) -> bool:
    """Whether an operation has a list of sizes among its arguments, as ``aten.full`` has."""
    return node.op == "call_function" and any(
        isinstance(value, (list, tuple)) for value in (*node.args, *node.kwargs.values())
    )


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of an operation's result depends on its like alone, and on numbers."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return True
    if torch.Tag.pointwise in node.target.tags or node.target in _ELEMENT_BY_ELEMENT:
        return True
    return not value_of(node).dim() if isinstance(node.meta.get("val"), Tensor) else False


_ATEN: Final = torch.ops.aten
_UNSAFE_VIEW: Final = _ATEN._unsafe_view.default
_ELEMENT_BY_ELEMENT: Final = frozenset(
    {
        _ATEN.clone.default,
        _ATEN.copy.default,
        _ATEN.full_like.default,
        _ATEN.index_put.default,  # where a mask says so
        _ATEN.zeros_like.default,
    }
)


# ── rows of any number of elements ──────────────────────────────────────────────────────────────


def row_kernel(
    graph: fx.GraphModule, rows: Sequence[Tensor], scalars: int, options: Mapping[str, Any]
) -> RowKernel:
    """A kernel of a graph that names no size: ``(*rows, *scalars) -> rows``.

    Args:
        graph: it may also write into its rows.
        rows: one of each, with any number of elements.
        scalars: how many float64 without dimensions, on the CPU, follow.
        options: of `torch.compile`: ``backend``, ``mode``, ``options``.
    """
    if options.get("backend", "inductor") != "inductor":
        compiled: Any = torch.compile(graph, dynamic=True, fullgraph=True, **options)
        return lambda inputs: compiled(*map(_without_base, inputs))

    from torch._inductor import config as inductor_config

    mode = FakeTensorMode(shape_env=make_shape_env())
    examples: list[Tensor] = [row_of_any_size(mode, row) for row in rows]
    with mode:
        examples += [torch.empty((), dtype=torch.float64) for _ in range(scalars)]
    with inductor_config.patch(patches_of(without_own(dict(options))[0])):
        _, [artefact] = inner_artefacts(graph, examples)
    call: RowKernel = artefact.current_callable
    return call


def _without_base(value: Tensor) -> Tensor:
    """The same elements as no view: dynamo compiles anew for other bases."""
    bare = value.new_empty(0)
    return bare.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
