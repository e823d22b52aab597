"""Trace a stage: from a function over pytrees to its joint graph.

One pass of the function under fake tensors tells what it returns; `make_fx` over `vjp` then
records forward and backward together. Functionalisation turns in-place updates of intermediates
into pure ops; what still writes to an input afterwards is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize, vjp
from torch.fx.experimental.proxy_tensor import make_fx

from fpipe import tree
from fpipe.errors import StageError
from fpipe.stage.closure import lift_constants
from fpipe.stage.combined import with_contexts
from fpipe.stage.explain import Untraceable, explain
from fpipe.stage.factors import OneDtype
from fpipe.stage.joint import (
    BatchLeaf,
    Constant,
    Cotangent,
    Joint,
    Param,
    Source,
    Sum,
    SumSoFar,
    is_differentiable,
)
from fpipe.stage.known import Known
from fpipe.stage.nograd import undifferentiated, with_gradients
from fpipe.stage.peeking import WithoutPeeking
from fpipe.stage.purity import WriteGuard, refuse_writes, writes
from fpipe.stage.seeding import unseeded
from fpipe.stage.simplify import simplify
from fpipe.stage.sink import SUM, Sink
from fpipe.stage.sums import add_sums


@dataclass(frozen=True)
class Leaves:
    """Flat abstract arguments of a stage function.

    Attributes:
        values: fake tensors.
        sources: where each comes from.
        paths: how a user would write each, for messages.
        differentiable: whether each gets a gradient.
        given: where the stage's input comes from and what it is, for messages.
    """

    values: tuple[Tensor, ...]
    sources: tuple[Source, ...]
    paths: tuple[str, ...]
    differentiable: tuple[bool, ...]
    given: str


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
    *,
    differentiate: bool,
    accum_dtype: torch.dtype | None,
    origin: Any,
    readers: Callable[[int], Sequence[int]],
    sink: Sink = SUM,
    rows: int = 0,
    tied: Collection[Source] = (),
) -> Traced:
    """Trace `function`, which takes flat leaves and returns a pytree, into a `Joint`.

    Args:
        name: the stage in messages, such as ``"stage 2 (block)"``.
        function: the stage on flat leaves.
        leaves: its abstract arguments.
        mode: the fake-tensor mode that they live in.
        differentiate: record the backward too.
        accum_dtype: dtype to sum parameter gradients in, None for their own.
        origin: the user's own function, or several in a tuple, searched for the name of a
            closed-over tensor.
        readers: the stages that read an output leaf, by its index; each hands a cotangent back.
        sink: how parameter gradients are collected.
        rows: of the microbatch, for a sink that repeats the parameters.
        tied: parameters of whose gradients other stages have a part, so that it is not folded here.

    Raises:
        StageError: the function cannot be traced or is not pure; says which stage, op or leaf.
    """
    # Those that are not trained too: the function takes one kind of parameters.
    lifted = [
        isinstance(source, Param) and is_differentiable(value)
        for value, source in zip(leaves.values, leaves.sources, strict=True)
    ]

    def lift(arguments: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(arguments, lifted, strict=True)
        return [sink.lifted(value, rows) if flag else value for value, flag in pairs]

    values, spec = _run_abstractly(name, lambda own: function(lift(own)), leaves, mode, origin)
    carries = tuple(
        differentiate
        and any(leaves.differentiable)
        and is_differentiable(value)
        and bool(readers(leaf))
        for leaf, value in enumerate(values)
    )
    # A leaf of the batch may come in by two names, as the first stage's input and by itself.
    places: dict[Source, list[int]] = {}
    for index, (flag, source) in enumerate(zip(leaves.differentiable, leaves.sources, strict=True)):
        if flag and differentiate:
            places.setdefault(source, []).append(index)
    wanted = [indices[0] for indices in places.values()]
    handed = [
        (leaf, reader) for leaf, flag in enumerate(carries) if flag for reader in readers(leaf)
    ]
    cotangents = [_contiguous_like(values[leaf], mode) for leaf, _ in handed]

    def forward(*arguments: Tensor) -> list[Tensor]:
        outputs, _ = tree.flatten(function(arguments))
        # One layout at every stage boundary, decided here, lets the compiled graphs assume it.
        return [o.resolve_conj().resolve_neg().contiguous() for o in outputs]

    def joint(arguments: Sequence[Tensor], seeds: Sequence[Tensor]) -> Any:
        arguments = lift(arguments)
        if not seeds:
            # Earlier stages wait for what is wanted all the same, as where an output is constant.
            zeros = [torch.zeros_like(arguments[i]) for i in wanted]
            return undifferentiated(lambda: forward(*arguments)), zeros

        def split(*chosen: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            full = list(arguments)
            for indices, value in zip(places.values(), chosen, strict=True):
                for index in indices:
                    full[index] = value
            outputs = forward(*full)
            carried = [o for o, flag in zip(outputs, carries, strict=True) if flag]
            return carried, [o for o, flag in zip(outputs, carries, strict=True) if not flag]

        result: Any = vjp(split, *(arguments[i] for i in wanted), has_aux=True)
        carried, pullback, plain = result
        sides = {True: iter(carried), False: iter(plain)}
        totals: dict[int, Tensor] = {}
        for (leaf, _), seed in zip(handed, seeds, strict=True):
            totals[leaf] = totals[leaf] + seed if leaf in totals else seed
        returned = [totals[leaf] for leaf, flag in enumerate(carries) if flag]
        pulled = pullback(returned)
        for index, gradient in zip(wanted, pulled, strict=True):
            if gradient.layout is not torch.strided:
                raise Untraceable(
                    f"has a sparse gradient by {leaves.paths[index]}",
                    "gradients are summed as dense tensors; of an embedding, say sparse=False",
                )
        found = [
            sink.folded(gradient)
            if lifted[index] and leaves.sources[index] not in tied
            else gradient
            for index, gradient in zip(wanted, pulled, strict=True)
        ]
        return [next(sides[flag]) for flag in carries], found

    graph = _record(name, joint, leaves, cotangents, mode)
    refuse_writes(name, graph.graph)
    constants, constant_sources = lift_constants(name, graph, origin)
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    argument_nodes = placeholders[: len(leaves.values)]
    cotangent_nodes = placeholders[len(leaves.values) : len(leaves.values) + len(cotangents)]
    sources: dict[str, Source] = {
        node.name: source for node, source in zip(argument_nodes, leaves.sources, strict=True)
    }
    sources.update(constant_sources)
    owned = [isinstance(source, Param | BatchLeaf) for source in places]
    private = {n for n in placeholders if isinstance(sources.get(n.name), Param | Constant)}
    output_nodes, gradient_nodes = simplify(graph.graph, owned, private)
    gradients = dict(zip(places, gradient_nodes, strict=False))
    sums = add_sums(
        graph.graph,
        {source: node for source, node in gradients.items() if isinstance(source, Param)},
        accum_dtype,
        apart=sink.join is not None,
    )
    sources.update(
        {
            entry.so_far: SumSoFar(source.leaf)
            for source, entry in sums.items()
            if isinstance(source, Param) and entry.so_far is not None
        }
    )
    sums |= {source: sums[source]._replace(folded=False) for source in tied if source in sums}
    # Every microbatch has leaves of its own.
    sums |= {
        source: Sum(node.name, None, node.name)
        for source, node in gradients.items()
        if isinstance(source, BatchLeaf)
    }
    groups: list[list[Cotangent]] = [[] for _ in values]
    for (leaf, reader), node in zip(handed, cotangent_nodes, strict=True):
        groups[leaf].append(Cotangent(reader, node.name))
    result = Joint(
        graph=graph.graph,
        sources=sources,
        constants=constants,
        outputs=tuple(node.name for node in output_nodes),
        cotangents=tuple(map(tuple, groups)),
        gradients={source: node.name for source, node in gradients.items()},
        sums=sums,
    )
    fakes = tuple(_contiguous_like(v, mode) for v in values)
    return Traced(result, spec, fakes, carries)


def _run_abstractly(
    name: str,
    function: Callable[[Sequence[Any]], Any],
    leaves: Leaves,
    mode: FakeTensorMode,
    origin: Any,
) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """What the function returns on fake tensors, or a clear refusal."""
    try:
        with unseeded(), mode, torch.no_grad(), with_contexts(), WithoutPeeking():
            # Clones, because one leaf may come in by several names.
            inputs = [value.clone() for value in leaves.values]
            guard = WriteGuard(dict(zip(leaves.paths, inputs, strict=True)), origin)
            with guard, OneDtype(), Known():
                output = function(inputs)
    except StageError:
        raise
    except Exception as error:
        raise explain(name, error, leaves.given) from error
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
                f"{name} returns y{path}={leaf!r:.60}, a {type(leaf).__name__}: a stage must "
                "return a pytree of tensors (torch.as_tensor makes one; register a container of "
                'your own with optree, namespace="fpipe")'
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
    joint: Callable[..., Any],
    leaves: Leaves,
    cotangents: Sequence[Tensor],
    mode: FakeTensorMode,
) -> fx.GraphModule:
    def flat(*arguments: Tensor) -> Any:
        count = len(leaves.values)
        with Known():
            return joint(arguments[:count], arguments[count:])

    arguments = (*leaves.values, *cotangents)
    try:
        with mode, with_gradients(), with_contexts(), WithoutPeeking():
            try:
                graph = make_fx(functionalize(flat), tracing_mode="fake")(*arguments)
            except Exception as error:
                # functionalize does not know a custom autograd.Function; plain vjp does.
                if "Functionalize rule" not in str(error):
                    raise
                graph = make_fx(flat, tracing_mode="fake")(*arguments)
            # Those have not been made functional. And where nothing is differentiated, composite
            # ops are taken apart after they have been, and may write to what they have made. Nor
            # has what is made of tensors alone that the function closes over.
            return _functional(graph, arguments) if any(writes(graph.graph)) else graph
    except StageError:
        raise
    except Exception as error:
        raise explain(name, error, leaves.given) from error


def _functional(module: fx.GraphModule, arguments: Sequence[Tensor]) -> fx.GraphModule:
    """The same without writes, made functional with what it closes over among its arguments."""
    found = {
        node.target: getattr(module, node.target)
        for node in module.graph.nodes
        if node.op == "get_attr"
    }
    held = {target: value for target, value in found.items() if type(value) in _DENSE}

    def run(*values: Tensor) -> Any:
        own = dict(zip(held, values[len(arguments) :], strict=True))
        return _Given(module, own).run(*values[: len(arguments)])

    made = make_fx(functionalize(run), tracing_mode="fake")(*arguments, *held.values())
    placeholders = [node for node in made.graph.nodes if node.op == "placeholder"]
    for node, (target, value) in zip(placeholders[len(arguments) :], held.items(), strict=True):
        made.register_buffer(f"held{target}", value)
        with made.graph.inserting_after(placeholders[-1]):
            constant = made.graph.get_attr(f"held{target}")
        constant.meta |= node.meta
        node.replace_all_uses_with(constant)
        made.graph.erase_node(node)
    return made


_DENSE = (Tensor, torch.nn.Parameter)
"""Not abstract; others are refused by name later."""


class _Given(fx.Interpreter):
    """Runs a graph with other tensors in place of those that it closes over."""

    def __init__(self, module: fx.GraphModule, given: Mapping[str, Tensor]) -> None:
        super().__init__(module)
        self._given = given

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The tensor of this name."""
        if target in self._given:
            return self._given[target]
        return super().get_attr(target, args, kwargs)
