"""Trace a stage: from a function over pytrees to its joint graph.

One pass of the function under fake tensors tells what it returns; `make_fx` over `vjp` then
records forward and backward together. Functionalisation turns in-place updates of intermediates
into pure ops; what still writes to an input afterwards is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.func import functionalize, vjp
from torch.fx.experimental.proxy_tensor import make_fx

from fpipe import tree
from fpipe.errors import StageError
from fpipe.stage.joint import Constant, Joint, Param, Source, SumSoFar, is_differentiable
from fpipe.stage.simplify import simplify
from fpipe.stage.sums import add_sums


@dataclass(frozen=True)
class Leaves:
    """Flat abstract arguments of a stage function.

    Attributes:
        values: fake tensors.
        sources: where each comes from.
        paths: how a user would write each, for messages.
        differentiable: whether each gets a gradient.
    """

    values: tuple[Tensor, ...]
    sources: tuple[Source, ...]
    paths: tuple[str, ...]
    differentiable: tuple[bool, ...]


@dataclass(frozen=True)
class Traced:
    """A joint graph with the structure of the stage's output.

    Attributes:
        joint: the graph.
        spec: structure of the output.
        values: fake output leaves, contiguous.
        paths: how a user would write each output leaf.
        carries_gradient: whether each output leaf has a cotangent.
    """

    joint: Joint
    spec: optree.PyTreeSpec
    values: tuple[Tensor, ...]
    paths: tuple[str, ...]
    carries_gradient: tuple[bool, ...]


def trace(
    name: str,
    function: Callable[[Sequence[Any]], Any],
    leaves: Leaves,
    mode: FakeTensorMode,
    *,
    differentiate: bool,
    accum_dtype: torch.dtype | None,
    origin: Callable[..., Any],
) -> Traced:
    """Trace `function`, which takes flat leaves and returns a pytree, into a `Joint`.

    Args:
        name: the stage in messages, such as ``"stage 2 (block)"``.
        function: the stage on flat leaves.
        leaves: its abstract arguments.
        mode: the fake-tensor mode that they live in.
        differentiate: record the backward too.
        accum_dtype: dtype to sum parameter gradients in, None for their own.
        origin: the user's own function, searched for the name of a closed-over tensor.

    Raises:
        StageError: the function cannot be traced or is not pure; says which stage, op or leaf.
    """
    values, spec = _run_abstractly(name, function, leaves, mode)
    paths = tuple("y" + path for path in tree.paths(spec))
    carries = tuple(
        differentiate and any(leaves.differentiable) and is_differentiable(v) for v in values
    )
    wanted = [i for i, flag in enumerate(leaves.differentiable) if flag and differentiate]
    cotangents = [
        _contiguous_like(v, mode) for v, flag in zip(values, carries, strict=True) if flag
    ]

    def forward(*arguments: Tensor) -> list[Tensor]:
        outputs, _ = tree.flatten(function(arguments))
        # One layout at every stage boundary, decided here, lets the compiled graphs assume it.
        return [output.contiguous() for output in outputs]

    def joint(arguments: Sequence[Tensor], seeds: Sequence[Tensor]) -> Any:
        if not seeds or not wanted:
            return forward(*arguments), []

        def split(*chosen: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            full = list(arguments)
            for index, value in zip(wanted, chosen, strict=True):
                full[index] = value
            outputs = forward(*full)
            carried = [o for o, flag in zip(outputs, carries, strict=True) if flag]
            return carried, [o for o, flag in zip(outputs, carries, strict=True) if not flag]

        result: Any = vjp(split, *(arguments[i] for i in wanted), has_aux=True)
        carried, pullback, plain = result
        sides = {True: iter(carried), False: iter(plain)}
        return [next(sides[flag]) for flag in carries], list(pullback(list(seeds)))

    graph = _record(name, joint, leaves, cotangents, mode)
    _refuse_writes(name, graph, leaves)
    constants, constant_sources = _lift_constants(name, graph, origin)
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    argument_nodes = placeholders[: len(leaves.values)]
    cotangent_nodes = placeholders[len(leaves.values) : len(leaves.values) + len(cotangents)]
    sources: dict[str, Source] = {
        node.name: source for node, source in zip(argument_nodes, leaves.sources, strict=True)
    }
    sources.update(constant_sources)
    owned = [isinstance(leaves.sources[index], Param) for index in wanted]
    output_nodes, gradient_nodes = simplify(graph.graph, owned)
    gradients = {
        leaves.sources[index]: node for index, node in zip(wanted, gradient_nodes, strict=False)
    }
    sums = add_sums(
        graph.graph,
        {source.leaf: node for source, node in gradients.items() if isinstance(source, Param)},
        accum_dtype,
    )
    sources.update({entry.so_far: SumSoFar(leaf) for leaf, entry in sums.items()})
    seeds = iter(cotangent_nodes)
    result = Joint(
        graph=graph.graph,
        sources=sources,
        constants=constants,
        outputs=tuple(node.name for node in output_nodes),
        cotangents=tuple(next(seeds).name if flag else None for flag in carries),
        gradients={source: node.name for source, node in gradients.items()},
        sums=sums,
    )
    fakes = tuple(_contiguous_like(v, mode) for v in values)
    return Traced(result, spec, fakes, paths, carries)


def _run_abstractly(
    name: str, function: Callable[[Sequence[Any]], Any], leaves: Leaves, mode: FakeTensorMode
) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """What the function returns on fake tensors, or a clear refusal."""
    try:
        with mode, torch.no_grad():
            # Clones, so that a function which writes to its input spoils only its own copy.
            outputs, spec = tree.flatten(function([v.clone() for v in leaves.values]))
    except Exception as error:
        raise _explain(name, error, leaves) from error
    for path, output in zip(tree.paths(spec), outputs, strict=True):
        if not isinstance(output, Tensor):
            raise StageError(
                f"{name} returns y{path}={output!r:.60}, a {type(output).__name__}: a stage must "
                "return a pytree of tensors (torch.as_tensor makes one; register a container of "
                'your own with optree, namespace="fpipe")'
            )
        if output.layout != torch.strided:
            raise StageError(
                f"{name} returns y{path} in layout {output.layout}: a stage must return dense "
                "tensors (call .to_dense())"
            )
    return outputs, spec


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
        return joint(arguments[:count], arguments[count:])

    arguments = (*leaves.values, *cotangents)
    try:
        with mode, torch.enable_grad():
            try:
                return make_fx(functionalize(flat), tracing_mode="fake")(*arguments)
            except RuntimeError as error:
                # functionalize does not know a custom autograd.Function; plain vjp does.
                if "Functionalize rule" not in str(error):
                    raise
                return make_fx(flat, tracing_mode="fake")(*arguments)
    except Exception as error:
        raise _explain(name, error, leaves) from error


def _explain(name: str, error: Exception, leaves: Leaves) -> StageError:
    """A refusal that says what the stage was given, what went wrong and what to do."""
    text = str(error)
    if isinstance(error, StageError):
        return error
    if isinstance(error, DataDependentOutputException) or "data-dependent" in text:
        return StageError(
            f"{name} branches on data or reads a value back into Python ({text}) at "
            f"{_place(error)}: a stage is traced once with abstract tensors, so use torch.where, "
            "or pass the choice as a Python value bound with functools.partial"
        )
    if "in-place" in text and ("leaf Variable" in text or "captured Tensor" in text):
        return StageError(
            f"{name} writes in place to one of its inputs or to a tensor it closes over at "
            f"{_place(error)}: a stage is a pure function; work on a copy (x = x.clone()) and "
            "return it"
        )
    given = ", ".join(
        f"{path}: {str(v.dtype).removeprefix('torch.')}{list(v.shape)}"
        for path, v in zip(leaves.paths, leaves.values, strict=True)
        if not path.startswith("params")
    )
    return StageError(
        f"{name} cannot be traced on its inputs ({given or 'none'}) at {_place(error)}: "
        f"{type(error).__name__}: {text}"
    )


def _place(error: BaseException) -> str:
    """The innermost line of the user's code in the traceback of `error`."""
    place = "an unknown place"
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not any(part in file for part in ("/torch/", "/fpipe/stage/", "/fpipe/tree.py", "<")):
            place = f"{file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


def _refuse_writes(name: str, graph: fx.GraphModule, leaves: Leaves) -> None:
    """Refuse any op that writes to an input, whatever functionalisation left."""
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    for node in graph.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            continue
        written = node.args[0] if node.args else None
        where = "an intermediate value"
        if written in placeholders[: len(leaves.paths)]:
            where = f"its input {leaves.paths[placeholders.index(written)]}"
        raise StageError(
            f"{name} writes in place to {where} ({target}): a stage is a pure function; work on a "
            "copy (x = x.clone()) and return it"
        )


def _lift_constants(
    name: str, graph: fx.GraphModule, origin: Callable[..., Any]
) -> tuple[tuple[Tensor, ...], dict[str, Source]]:
    """Turn tensors that the function closes over into placeholders.

    The graph then depends on their shapes only, so stages that differ in them share an artefact.
    """
    found: dict[str, fx.Node] = {}
    constants: list[Tensor] = []
    sources: dict[str, Source] = {}
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(graph, node.target)
        if not isinstance(value, Tensor):
            raise StageError(
                f"{name} closes over a {type(value).__name__} that the tracer keeps as an "
                "attribute: use plain tensor operations in a stage"
            )
        if value.requires_grad:
            known = _name_in_closure(value, origin)
            raise StageError(
                f"{name} closes over a tensor that requires grad ({known}, shape "
                f"{tuple(value.shape)}): it would get no gradient; pass it as a parameter of the "
                "stage (torch.func.functional_call does so for a module), or detach it"
            )
        if node.target not in found:
            with graph.graph.inserting_before(_first_computation(graph.graph)):
                placeholder = graph.graph.placeholder(f"constant_{len(constants)}")
            placeholder.meta["val"] = node.meta["val"]
            sources[placeholder.name] = Constant(len(constants))
            constants.append(value.detach())
            found[node.target] = placeholder
        node.replace_all_uses_with(found[node.target])
        graph.graph.erase_node(node)
    return tuple(constants), sources


def _first_computation(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op != "placeholder")


def _name_in_closure(value: Tensor, origin: Callable[..., Any]) -> str:
    """What the user calls a tensor that a function closes over, as far as can be seen."""
    function = inspect.unwrap(getattr(origin, "func", origin))
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        function = owner.forward
    if isinstance(function, torch.nn.Module):
        owner = function
    if isinstance(owner, torch.nn.Module):
        for path, parameter in owner.named_parameters():
            if parameter is value:
                return f"{type(owner).__name__}.{path}"
    try:
        closure = inspect.getclosurevars(function)
    except TypeError:
        return "an unnamed tensor"
    scopes: list[Mapping[str, Any]] = [closure.nonlocals, closure.globals]
    for scope in scopes:
        for key, candidate in scope.items():
            if candidate is value:
                return repr(key)
            if isinstance(candidate, torch.nn.Module):
                for path, parameter in candidate.named_parameters():
                    if parameter is value:
                        return repr(f"{key}.{path}")
    return "an unnamed tensor"
