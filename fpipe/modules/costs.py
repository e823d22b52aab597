"""The cost of each part of a module: counted on its recorded graph, or measured on real inputs.

To count, the module is recorded once, with a cut after every candidate, on abstract tensors:
nothing is computed, and parameters may lie on the meta device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)

from fpipe import pytree, random
from fpipe.definition import Definition
from fpipe.divide.dividing import Part as Recorded
from fpipe.divide.function_tracer import FunctionTracer
from fpipe.engine import Pipeline
from fpipe.errors import StageError
from fpipe.graph.joint import Param, Upstream
from fpipe.graph.nodes import nbytes_of
from fpipe.inputs.batch import split
from fpipe.inputs.signature import TreeShape
from fpipe.modules.candidates import candidates_of
from fpipe.modules.module_buffers import shaped_buffers
from fpipe.modules.module_config import held_by, with_cuts
from fpipe.modules.module_loss import ModuleLoss
from fpipe.modules.saving import Saved, is_work, made_by, origin_of, saved_of
from fpipe.profiling import profile
from fpipe.schedule.families.evaluation import all_forwards_first
from fpipe.spec.objective import Objective
from fpipe.trace.interrupts import held_back

log = logging.getLogger("fpipe")

_CPU = torch.device("cpu")


class Crossing(NamedTuple):
    """A value that one part makes and another reads.

    Attributes:
        part: the number of the part that makes it.
        leaf: its number among those of the part.
        nbytes: its size.
        is_kept: it is among what the part that makes it keeps.
    """

    part: int
    leaf: int
    nbytes: int
    is_kept: bool


@dataclass(frozen=True)
class Part:
    """What lies between two candidates for a cut.

    Attributes:
        name: the candidate that ends it; empty for what follows the last.
        flops: of the forward, as `flops_of` counts them.
        uncounted: names of operations that may be heavy and count as no FLOPs.
        moved: bytes that the forward reads and writes, op by op.
        kept: bytes that the backward needs of the values that it makes, whoever reads these.
        left: bytes that the gradients of parameters need alone, as `Saved` says.
        prepared: bytes that it makes of parameters alone, which is done once a step.
        biggest: bytes of the biggest value that it makes.
        params: names of the parameters that it reads.
        reads: values of earlier parts that it reads.
        saves: those of them that its backward needs.
        width: bytes of all values that cross the boundary behind it, skip values included.
    """

    name: str
    flops: int
    uncounted: frozenset[str]
    moved: int
    kept: int
    left: int
    prepared: int
    biggest: int
    params: frozenset[str]
    reads: frozenset[Crossing]
    saves: frozenset[Crossing]
    width: int


Loads = Callable[[Sequence[Part]], Sequence[float]]
"""What each part is taken to cost, all in one unit: `counted`, or `measured`."""


@held_back()
def parts_of(
    definition: Definition, microbatch: TreeShape, candidates: Sequence[str] | None
) -> tuple[Part, ...]:
    """The parts of a module in the order in which they run.

    Args:
        definition: of the module, which is not cut; its parameters may lie on any device.
        microbatch: shapes of the keyword arguments of its forward.
        candidates: names of submodules, as `candidates_of` takes them.

    Raises:
        StageError: the module cannot be traced, or has no candidate.
    """
    assert isinstance(definition.loss, ModuleLoss)
    module = definition.loss.module
    given, _ = definition.convention.enter(*held_by(definition), None)
    leaves, spec = pytree.flatten(given)
    # Numbers do not count, and so it does not where they lie: all is traced where the module is.
    held = (*module.buffers(), *module.parameters())
    device = next((own.device for own in held if not own.is_meta), _CPU)
    shape = TreeShape.of(spec, leaves).with_data(device).brought_to(device)
    microbatch = microbatch.with_data(device).brought_to(device)
    whole = definition.loss.with_buffers(shaped_buffers(module, device))
    names = sorted(dict(module.named_parameters()))
    order = candidates_of(
        whole,
        candidates,
        definition.schedule.num_stages - 1,
        shape,
        microbatch,
        has_state=definition.has_state,
    )
    tracer = FunctionTracer(whole.with_cuts(order), len(order) + 1, Objective(definition.returns))
    stages = tracer.parts(shape, microbatch)
    saved = list(map(saved_of, stages))
    reads = [_reads(stage, stages, saved) for stage in stages]
    widths = _widths(reads)
    return tuple(
        Part(
            name=name,
            flops=sum(flops_of(node) for node in stage.graph.nodes),
            moved=sum(_moved(node) for node in stage.graph.nodes),
            kept=sum(map(made_by, own.values)),
            left=own.left,
            prepared=own.prepared,
            biggest=max(map(made_by, stage.graph.nodes), default=0),
            uncounted=frozenset(
                str(node.target) for node in stage.graph.nodes if is_uncounted(node)
            ),
            params=frozenset(
                names[source.leaf]
                for source in stage.sources.values()
                if isinstance(source, Param) and source.leaf < len(names)
            ),
            reads=frozenset(read),
            saves=frozenset(value for value, node in read.items() if node in own.values),
            width=width,
        )
        for name, stage, own, read, width in zip(
            (*order, ""), stages, saved, reads, widths, strict=True
        )
    )


def counted(intensity: float) -> Loads:
    """Loads in FLOPs: those of a part, and so many for each byte that it reads or writes."""

    def loads(parts: Sequence[Part]) -> Sequence[float]:
        if uncounted := sorted(frozenset().union(*(part.uncounted for part in parts))):
            log.warning(
                "fpipe.balance counts no FLOPs for %s: measure=True balances times instead",
                ", ".join(uncounted),
            )
        return [part.flops + intensity * part.moved for part in parts]

    return loads


def measured(definition: Definition, batch: Any) -> Loads:
    """Loads in seconds: forward and backward of a part, of one microbatch.

    The parts run as the stages of a pipeline in this process, one after the other, compiled as the
    definition says.

    Args:
        definition: of the module, which is not cut; its schedule says how `batch` is split.
        batch: real tensors, as is the module.

    Raises:
        StageError: a parameter or a leaf of the batch has no data.
    """
    assert isinstance(definition.loss, ModuleLoss)
    held = held_by(definition)
    for name, value in (("batch", batch), ("module", held[0])):
        leaves, spec = pytree.flatten(value)
        for path, leaf in zip(pytree.paths(spec), leaves, strict=True):
            if leaf.is_meta:
                raise StageError(
                    f"measure=True runs the module, but {name}{path} is on the meta device: give "
                    "real tensors, or count with measure=False"
                )
    parts = split(batch, definition.in_dims, definition.schedule.num_microbatches)
    biggest = parts.biggest()
    microbatch = pytree.unflatten(parts.specs[biggest], parts.leaves[biggest])

    def loads(parts: Sequence[Part]) -> Sequence[float]:
        cut = with_cuts(definition, [part.name for part in parts[:-1]])
        one = all_forwards_first((0,) * len(parts), 1, split=False)
        key = random.key(0) if definition.reads_key else None
        probe = Pipeline(replace(cut, schedule=one, group=None, devices=None))
        cost = profile(probe, *held, microbatch, key=key).on(one.placement)
        return [forward + backward for forward, backward in zip(cost.f, cost.b, strict=True)]

    return loads


def _reads(
    stage: Recorded, stages: Sequence[Recorded], saved: Sequence[Saved]
) -> dict[Crossing, fx.Node]:
    """The values of others that a part reads, and where it has them."""
    found = {}
    for node in stage.graph.find_nodes(op="placeholder"):
        source = stage.sources[node.name]
        if isinstance(source, Upstream):
            returned: Any = stages[source.stage].graph.output_node().args[0]
            output = returned[0][source.leaf]
            is_kept = origin_of(output) in saved[source.stage].values
            found[Crossing(source.stage, source.leaf, nbytes_of(output), is_kept)] = node
    return found


def _widths(reads: Sequence[Iterable[Crossing]]) -> list[int]:
    """Bytes over each boundary: of values made before it that are read behind it."""
    ends = {value: index for index, read in enumerate(reads) for value in read}
    widths = [0] * len(reads)
    for value, end in ends.items():
        for boundary in range(value.part, end):
            widths[boundary] += value.nbytes
    return widths


def _moved(node: fx.Node) -> int:
    return nbytes_of(node) + sum(map(nbytes_of, node.all_input_nodes)) if is_work(node) else 0


# FLOPs of a recorded operation: torch's own formulas, and those that its counter lacks. The counter
# knows attention by the kernels of devices; what is recorded on the CPU calls another one.

aten = torch.ops.aten

_Shape = Sequence[int]

# Others' operations, and of torch's those that are neither products nor passes over their elements.
_OPAQUE = (
    "aten._cdist_forward",
    "aten._cudnn_rnn",
    "aten._fft_",
    "aten._linalg_",
    "aten._thnn_fused_",
    "aten._trilinear",
    "aten.linalg_",
    "aten.miopen_",
)
_KNOWN = ("aten.", "prims.", "fpipe.")


def flops_of(node: fx.Node) -> int:
    """FLOPs of what a node computes; 0 if there is no formula."""
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet) or _WRAPPED.get(packet)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def is_uncounted(node: fx.Node) -> bool:
    """Whether a node may be heavy and has no formula."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is None or packet in flop_registry or packet in _FORMULAS:
        return False
    name = str(packet)
    return name.startswith(_OPAQUE) or not name.startswith(_KNOWN)


def _attention(query: _Shape, key: _Shape, value: _Shape, *_: Any, **options: Any) -> int:
    return int(sdpa_flop_count(query, *_as_many_heads(query, key, value)))


def _attention_backward(
    grad: _Shape, query: _Shape, key: _Shape, value: _Shape, *_: Any, **options: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, *_as_many_heads(query, key, value)))


def _as_many_heads(query: _Shape, *others: _Shape) -> list[_Shape]:
    """Keys and values of grouped queries, as each query sees them; older torch has no such case."""
    return [(batch, query[1], *rest) for batch, _, *rest in others]


def _product(left: _Shape, right: _Shape, *_: Any, **options: Any) -> int:
    """A product whose rows, columns or terms may be divided into groups."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return int(2 * groups * left[-2] * left[-1] * right[-1])


def _recurrent(given: _Shape, inner: _Shape, hidden: _Shape, *_: Any, **options: Any) -> int:
    """A layer in one direction: at each place of each sequence, both matrices."""
    return 2 * prod(given[:-1]) * (prod(inner) + prod(hidden))


_FORMULAS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._grouped_mm: _product,
    aten._scaled_grouped_mm: _product,
    aten._int_mm: _product,
    aten.mkldnn_rnn_layer: _recurrent,
}
_WRAPPED: dict[Any, Callable[..., int]] = {
    packet: shape_wrapper(formula) for packet, formula in _FORMULAS.items()
}
