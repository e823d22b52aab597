"""Trace a stage: from a function over pytrees to its joint graph.

    function ── record ──► StageGraph ── finish ──► Joint

`record` runs the function under autograd. `finish` turns the tensors that it closes over into
arguments, drops operations that compute nothing and adds the sums over microbatches. The segments
of a function with cuts are finished alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import optree
import torch
from torch import Tensor, fx

from fpipe import pytree
from fpipe.checks.purity import name_in_closure, refuse_writes
from fpipe.errors import StageError, a_type
from fpipe.graph.joint import (
    BatchLeaf,
    Constant,
    Cotangent,
    Joint,
    Param,
    Source,
    Sum,
    SumSoFar,
    add_sums,
)
from fpipe.graph.rewrites import simplify
from fpipe.inputs.signature import is_differentiable
from fpipe.spec.objective import Objective
from fpipe.torch_internals import FakeTensor, FakeTensorMode, from_fun, functorch
from fpipe.trace.abstract import Leaves
from fpipe.trace.recorder import Way, record


@dataclass(frozen=True, eq=False)
class StageGraph:
    """A stage with its backward, as it was recorded.

    Attributes:
        module: its graph returns two lists, outputs and gradients.
        sources: where the value of each placeholder that is no cotangent comes from.
        cotangents: for each output what its readers hand back.
        owed: what each gradient is by, in order.
        owners: the fake tensor and the path of each of the caller's leaves among the sources.
        original: of an attribute of the module the tensor that the function closes over.
    """

    module: fx.GraphModule
    sources: Mapping[str, Source]
    cotangents: Sequence[Sequence[Cotangent]]
    owed: Sequence[Source]
    owners: Mapping[Source, tuple[Tensor, str]]
    original: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Traced:
    """A joint graph with the structure of the stage's output.

    Attributes:
        joint: the graph.
        spec: structure of the output.
        values: fake output leaves, contiguous.
        carries_gradient: whether each output leaf has a cotangent.
        depends: whether each output depends on something that gradients are taken by.
        lost: why an output cannot be differentiated, by its number.
    """

    joint: Joint
    spec: optree.PyTreeSpec
    values: tuple[Tensor, ...]
    carries_gradient: tuple[bool, ...]
    depends: tuple[bool, ...] = ()
    lost: Mapping[int, StageError] = field(default_factory=dict)


def trace(
    name: str,
    function: Callable[[Sequence[Any]], Any],
    leaves: Leaves,
    mode: FakeTensorMode,
    objective: Objective,
    *,
    differentiate: bool,
    origin: Any,
    readers: Callable[[int], Sequence[int]],
    rows: int = 0,
) -> Traced:
    """Trace `function`, which takes flat leaves and returns a pytree, into a `Joint`.

    Args:
        name: the stage in messages, such as ``"stage 2 (block)"``.
        function: the stage on flat leaves.
        leaves: its abstract arguments.
        mode: the fake-tensor mode that they live in.
        objective: how gradients are collected.
        differentiate: record the backward too.
        origin: the user's own function, or several in a tuple, searched for the name of a
            closed-over tensor.
        readers: the stages that read an output leaf, by its index; each hands a cotangent back.
        rows: of the microbatch, for a sink that repeats the parameters.

    Raises:
        StageError: the function cannot be traced or is not pure; says which stage, op or leaf.
    """
    sink = objective.sink
    # Those that are not trained too: the function takes one kind of parameters.
    lifted = [
        isinstance(source, Param) and is_differentiable(value)
        for value, source in zip(leaves.values, leaves.sources, strict=True)
    ]
    specs: list[optree.PyTreeSpec] = []

    def flat(arguments: list[Any]) -> list[Tensor]:
        outputs, spec = check_output(name, function(arguments))
        specs[:] = [spec]
        return outputs

    way = Way(
        lambda index, value: sink.lifted(value, rows) if lifted[index] else value,
        lambda index, gradient: sink.folded(gradient) if lifted[index] else gradient,
    )
    recording = record(
        name, flat, leaves, mode, readers, differentiate=differentiate, origin=origin, way=way
    )
    demand = recording.demand
    groups: list[list[Cotangent]] = [[] for _ in demand.carries]
    for (leaf, reader), node in zip(demand.cotangents, recording.cotangents, strict=True):
        groups[leaf].append(Cotangent(reader, node.name))
    named = zip(leaves.values, leaves.sources, leaves.paths, strict=True)
    nodes = zip(recording.arguments, leaves.sources, strict=True)
    stage = StageGraph(
        recording.module,
        {node.name: source for node, source in nodes},
        groups,
        list(demand.places) if differentiate else [],
        {source: (value, path) for value, source, path in named},
        recording.original,
    )
    joint = finish(name, stage, objective, origin=origin)
    values = tuple(joint.nodes[output].meta["val"] for output in joint.outputs)
    fakes = tuple(contiguous_like(value, mode) for value in values)
    return Traced(joint, specs[0], fakes, demand.carries, recording.depends, recording.lost)


def finish(
    name: str,
    stage: StageGraph,
    objective: Objective,
    *,
    origin: Any,
    tied: Collection[Source] = (),
) -> Joint:
    """The joint graph of a stage that has been recorded.

    Args:
        name: the stage in messages.
        stage: its graph is changed in place.
        objective: how gradients are collected.
        origin: the user's own function, or several, searched for the name of a tensor.
        tied: parameters of whose gradients other stages have a part.

    Raises:
        StageError: the function closes over what it may not, or is not pure.
    """
    module = stage.module
    refuse_writes(name, module.graph)
    constants, constant_sources = lift_constants(name, module, origin, stage.original)
    sources = dict(stage.sources) | constant_sources
    owners = [
        stage.owners[source][0] if isinstance(source, Param | BatchLeaf) else None
        for source in stage.owed
    ]
    private = [
        node
        for node in module.graph.find_nodes(op="placeholder")
        if isinstance(sources.get(node.name), Param | Constant)
    ]
    outputs, nodes = simplify(module.graph, owners, private)
    gradients = dict(zip(stage.owed, nodes, strict=True))
    _check_can_be_summed(name, stage, objective)
    sums = _sums(module.graph, gradients, objective, tied)
    sources |= {
        entry.so_far: SumSoFar(source.leaf)
        for source, entry in sums.items()
        if isinstance(source, Param) and entry.so_far is not None
    }
    return Joint(
        graph=module.graph,
        sources=sources,
        constants=constants,
        outputs=tuple(node.name for node in outputs),
        cotangents=tuple(map(tuple, stage.cotangents)),
        gradients={source: node.name for source, node in gradients.items()},
        sums=sums,
    )


def _check_can_be_summed(name: str, stage: StageGraph, objective: Objective) -> None:
    """Refuse to sum gradients in a dtype in which torch adds nothing, or one that is narrower."""
    chosen = objective.accum_dtype
    for source in stage.owed:
        value, path = stage.owners.get(source, (None, ""))
        if not isinstance(source, Param) or value is None:
            continue
        if chosen is not None and torch.finfo(chosen).bits < torch.finfo(value.dtype).bits:
            raise StageError(
                f"accum_dtype={chosen} is narrower than {value.dtype}, which {name} has as {path}: "
                "gradients would lose what the parameter keeps; leave it out, or say "
                "mp_policy=MixedPrecisionPolicy(param_dtype=…, reduce_dtype=…)"
            )
        if objective.sum_dtype is None and value.itemsize == 1:
            raise StageError(
                f"{name} has {path} of {value.dtype}, in which torch sums no gradients: say "
                "accum_dtype=torch.float32"
            )


def _sums(
    graph: fx.Graph,
    gradients: Mapping[Source, fx.Node],
    objective: Objective,
    tied: Collection[Source],
) -> dict[Source, Sum]:
    """How the gradients of the caller's leaves are collected; nodes that add up join the graph."""
    summed = {
        source: node
        for source, node in gradients.items()
        if isinstance(source, Param) and objective.sink.join is None
    }
    # The others are kept microbatch by microbatch: each has leaves of the batch of its own.
    sums = add_sums(graph, summed, objective.sum_dtype) | {
        source: Sum(node.name, None, node.name)
        for source, node in gradients.items()
        if isinstance(source, Param | BatchLeaf) and source not in summed
    }
    return sums | {source: sums[source]._replace(folded=False) for source in tied if source in sums}


def check_output(name: str, output: Any) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """Flatten what a stage returned.

    Raises:
        StageError: a leaf is no dense tensor.
    """
    leaves, spec = pytree.flatten(output)
    for path, leaf in zip(pytree.paths(spec), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            raise StageError(
                f"{name} returns y{path}={leaf!r:.60}, {a_type(leaf)}: a stage must "
                f"return a pytree of tensors ({pytree.advice(leaf)})"
            )
        if leaf.layout != torch.strided:
            raise StageError(
                f"{name} returns y{path} in layout {leaf.layout}: a stage must return dense "
                "tensors (call .to_dense())"
            )
    return leaves, spec


def contiguous_like(value: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor of the same shape, as every value at a boundary lies."""
    with mode:
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def lift_constants(
    name: str, module: fx.GraphModule, origin: Any, original: Callable[[Tensor], Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Source]]:
    """Turn tensors that the function closes over into placeholders.

    The graph then depends on their shapes only, so stages that differ in them share an artefact.

    Args:
        name: the stage in messages.
        module: the traced stage; its graph is changed in place.
        origin: the user's own function, or several.
        original: of a tensor that the graph names, the one that it stands for, perhaps on another
            device.

    Raises:
        StageError: one of them is sparse, or abstract.
    """
    graph = module.graph
    lifted: dict[str, fx.Node] = {}
    constants: list[Tensor] = []
    sources: dict[str, Source] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(module, node.target)
        if not isinstance(value, Tensor):
            raise StageError(
                f"{name} closes over {a_type(value)} that the tracer keeps as an "
                "attribute: use plain tensor operations in a stage"
            )
        value = original(value)
        if isinstance(value, FakeTensor) or _is_traced(value):
            raise StageError(
                f"{name} closes over an abstract tensor ({name_in_closure(value, origin)}, shape "
                f"{tuple(value.shape)}), which a cache outside of it, such as functools.cache, has "
                "kept while it was traced: clear that cache, and call the function once on real "
                "data before it is traced, or do not cache what torch computes"
            )
        if value.layout is not torch.strided:
            raise StageError(
                f"{name} closes over a sparse tensor ({name_in_closure(value, origin)}, layout "
                f"{value.layout}), which cannot be traced: close over a dense one (.to_dense()), "
                "or over its indices and values, and use index_add or scatter_add"
            )
        if node.target not in lifted:
            with graph.inserting_before(_first_computation(graph)):
                placeholder = graph.placeholder(f"constant_{len(constants)}")
                placeholder.meta["val"] = from_fun(node.meta["val"])
                sources[placeholder.name] = Constant(len(constants))
                memory, lifted[node.target] = _as_it_lies(value.detach(), placeholder)
            constants.append(memory)
        node.replace_all_uses_with(lifted[node.target])
        graph.erase_node(node)
    return tuple(constants), sources


def _as_it_lies(value: Tensor, placeholder: fx.Node) -> tuple[Tensor, fx.Node]:
    """A view of the memory of a constant, and the node that makes the constant of it.

    They differ where torch has put off a negation or a conjugation, of which kernels know nothing.
    The view is for what is written to the constant later.
    """
    node = placeholder
    for is_put_off, undo, do in _PUT_OFF:
        if is_put_off(value):
            value, fake = undo(value), placeholder.meta["val"]
            placeholder.meta["val"] = undo(fake) if is_put_off(fake) else fake
            node = placeholder.graph.call_function(do, (node,))
            node.meta["val"] = fake
    return value, node


_PUT_OFF: Final = (
    (Tensor.is_neg, torch._neg_view, torch.ops.aten._neg_view.default),
    (Tensor.is_conj, torch._conj, torch.ops.aten._conj.default),
)


def _is_traced(value: Tensor) -> bool:
    """Whether `value` belongs to a transform of `torch.func`, or to a trace."""
    return functorch.is_functorch_wrapped_tensor(value) or torch._is_functional_tensor(value)


def _first_computation(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op != "placeholder")
