"""Trace a stage: from a function over pytrees to its joint graph.

One pass of the function under fake tensors tells what it returns; it is then recorded together with
its backward, as a graph without writes. What still writes to an input is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fpipe import tree
from fpipe.arguments.shapes import is_differentiable
from fpipe.errors import StageError, a_type
from fpipe.stage.declared.objective import Objective
from fpipe.stage.graphs.joint import Cotangent, Joint, Sum
from fpipe.stage.graphs.simplify import simplify
from fpipe.stage.graphs.sources import BatchLeaf, Constant, Param, Source, SumSoFar
from fpipe.stage.graphs.sums import add_sums
from fpipe.stage.refusing.drawing import undrawn
from fpipe.stage.refusing.explain import explain
from fpipe.stage.refusing.factors import OneDtype
from fpipe.stage.refusing.purity import WriteGuard, refuse_writes
from fpipe.stage.refusing.seeding import unseeded
from fpipe.stage.tracing.abstract import Leaves
from fpipe.stage.tracing.backward import Demand, WithBackward
from fpipe.stage.tracing.closure import lift_constants
from fpipe.stage.tracing.functional import record
from fpipe.stage.tracing.known import Known
from fpipe.stage.tracing.setting import tracing


@dataclass(frozen=True)
class Traced:
    """A joint graph with the structure of the stage's output.

    Attributes:
        joint: the graph.
        spec: structure of the output.
        values: fake output leaves, contiguous.
        carries_gradient: whether each output leaf has a cotangent.
    """

    joint: Joint
    spec: optree.PyTreeSpec
    values: tuple[Tensor, ...]
    carries_gradient: tuple[bool, ...]


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
    tied: Collection[Source] = (),
    original: Callable[[Tensor], Tensor] = lambda value: value,
    returned: Sequence[Tensor] | None = None,
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
        tied: parameters of whose gradients other stages have a part, so that it is not folded here.
        original: of a tensor that the function closes over, the one that it stands for.
        returned: what it returns, a list of fake tensors, where that is known: of a function that
            was recorded before, and so is pure.

    Raises:
        StageError: the function cannot be traced or is not pure; says which stage, op or leaf.
    """
    sink = objective.sink
    # Those that are not trained too: the function takes one kind of parameters.
    lifted = [
        isinstance(source, Param) and is_differentiable(value)
        for value, source in zip(leaves.values, leaves.sources, strict=True)
    ]

    def lift(arguments: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(arguments, lifted, strict=True)
        return [sink.lifted(value, rows) if flag else value for value, flag in pairs]

    def fold(index: int, gradient: Tensor) -> Tensor:
        whole = not lifted[index] or leaves.sources[index] in tied
        return gradient if whole else sink.folded(gradient)

    if returned is None:
        values, spec = _run_abstractly(name, lambda own: function(lift(own)), leaves, mode, origin)
    else:
        values, spec = check_output(name, list(returned))
    demand = Demand.of(leaves, values, readers) if differentiate else Demand.none(values)
    cotangents = [_contiguous_like(values[leaf], mode) for leaf, _ in demand.cotangents]
    module = _record(
        name, WithBackward(function, leaves, demand, lift, fold), leaves, cotangents, mode
    )
    refuse_writes(name, module.graph)
    constants, constant_sources = lift_constants(name, module, origin, original)
    nodes = iter(module.graph.nodes)
    named = {next(nodes).name: source for source in leaves.sources}
    groups: list[list[Cotangent]] = [[] for _ in values]
    for leaf, reader in demand.cotangents:
        groups[leaf].append(Cotangent(reader, next(nodes).name))
    sources = named | constant_sources
    outputs, gradients = _finish(module.graph, sources, demand, leaves)
    if objective.accum_dtype is None:
        _check_can_be_summed(name, leaves, gradients)
    sums = _sums(module.graph, gradients, objective, tied)
    sources |= {
        entry.so_far: SumSoFar(source.leaf)
        for source, entry in sums.items()
        if isinstance(source, Param) and entry.so_far is not None
    }
    joint = Joint(
        graph=module.graph,
        sources=sources,
        constants=constants,
        outputs=tuple(node.name for node in outputs),
        cotangents=tuple(map(tuple, groups)),
        gradients={source: node.name for source, node in gradients.items()},
        sums=sums,
    )
    fakes = tuple(_contiguous_like(value, mode) for value in values)
    return Traced(joint, spec, fakes, demand.carries)


def _finish(
    graph: fx.Graph, sources: Mapping[str, Source], demand: Demand, leaves: Leaves
) -> tuple[list[fx.Node], dict[Source, fx.Node]]:
    """Simplify a recorded graph; returns its outputs, and the gradients by source."""
    owners = [
        leaves.values[places[0]] if isinstance(source, Param | BatchLeaf) else None
        for source, places in demand.places.items()
    ]
    private = [
        node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(sources.get(node.name), Param | Constant)
    ]
    outputs, gradients = simplify(graph, owners, private)
    return outputs, dict(zip(demand.places, gradients, strict=True))


def _check_can_be_summed(name: str, leaves: Leaves, gradients: Collection[Source]) -> None:
    """Refuse gradients of parameters in whose dtype torch adds nothing."""
    for value, source, path in zip(leaves.values, leaves.sources, leaves.paths, strict=True):
        if isinstance(source, Param) and source in gradients and value.itemsize == 1:
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
    sums = add_sums(graph, summed, objective.accum_dtype) | {
        source: Sum(node.name, None, node.name)
        for source, node in gradients.items()
        if isinstance(source, Param | BatchLeaf) and source not in summed
    }
    return sums | {source: sums[source]._replace(folded=False) for source in tied if source in sums}


def _run_abstractly(
    name: str,
    function: Callable[[Sequence[Any]], Any],
    leaves: Leaves,
    mode: FakeTensorMode,
    origin: Any,
) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """What the function returns on fake tensors, or a clear refusal."""
    try:
        with unseeded(), undrawn(), tracing(mode, torch.no_grad()):
            # Clones, because one leaf may come in by several names.
            inputs = [value.clone() for value in leaves.values]
            guard = WriteGuard(dict(zip(leaves.paths, inputs, strict=True)), origin)
            with guard, OneDtype(), Known():
                output = function(inputs)
    except StageError:
        raise
    except Exception as error:
        raise explain(name, error, leaves.given, leaves.called) from error
    return check_output(name, output)


def check_output(name: str, output: Any) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """Flatten what a stage returned.

    Raises:
        StageError: a leaf is no dense tensor.
    """
    leaves, spec = tree.flatten(output)
    for path, leaf in zip(tree.paths(spec), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            raise StageError(
                f"{name} returns y{path}={leaf!r:.60}, {a_type(leaf)}: a stage must "
                f"return a pytree of tensors ({tree.advice(leaf)})"
            )
        if leaf.layout != torch.strided:
            raise StageError(
                f"{name} returns y{path} in layout {leaf.layout}: a stage must return dense "
                "tensors (call .to_dense())"
            )
    return leaves, spec


def _contiguous_like(value: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _record(
    name: str,
    stage: WithBackward,
    leaves: Leaves,
    cotangents: Sequence[Tensor],
    mode: FakeTensorMode,
) -> fx.GraphModule:
    """The graph of a stage and its backward, or a clear refusal."""
    count = len(leaves.values)

    def flat(*values: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        return stage(values[:count], values[count:])

    try:
        return record(flat, (*leaves.values, *cotangents), mode)
    except StageError:
        raise
    except Exception as error:
        raise explain(name, error, leaves.given, leaves.called) from error
