"""What each part of a module costs, counted on its recorded graph.

The module is recorded once, with a cut after every candidate, on abstract tensors: nothing is
computed, and parameters may lie on the meta device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fpipe import tree
from fpipe.arguments.shapes import TreeShape
from fpipe.definition import Definition
from fpipe.modules.buffers import shaped_buffers
from fpipe.modules.candidates import candidates_of
from fpipe.modules.flops import flops_of, is_uncounted
from fpipe.modules.loss import ModuleLoss, held_by
from fpipe.stage.cutting.function import FunctionTracer
from fpipe.stage.cutting.segments import Segment
from fpipe.stage.declared.objective import Objective
from fpipe.stage.foreign.custom import Applied
from fpipe.stage.graphs.nodes import is_view, nbytes_of
from fpipe.stage.graphs.sources import Param, Upstream

log = logging.getLogger("fpipe")

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    """What lies between two candidates for a cut.

    Attributes:
        name: the candidate that ends it; empty for what follows the last.
        flops: of the forward, as `flops_of` counts them.
        uncounted: names of operations that may be heavy and count as no FLOPs.
        moved: bytes that the forward reads and writes, op by op.
        kept: bytes of the values that it makes: at most this is kept for the backward.
        params: names of the parameters that it reads.
        width: bytes of all values that cross the boundary behind it, skip values included.
    """

    name: str
    flops: int
    uncounted: frozenset[str]
    moved: int
    kept: int
    params: frozenset[str]
    width: int


Loads = Callable[[Sequence[Part]], Sequence[float]]
"""What each part is taken to cost, all in one unit: `counted`, or `measured`."""


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
    leaves, spec = tree.flatten(given)
    # Numbers do not count: what has none is traced as if it had, on the CPU.
    shape = TreeShape.of(spec, leaves).with_data(_CPU)
    microbatch = microbatch.with_data(_CPU)
    whole = definition.loss.with_buffers(shaped_buffers(module))
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
    segments = tracer.segments(shape, microbatch)
    widths = _widths(segments)
    return tuple(
        Part(
            name=name,
            flops=sum(flops_of(node) for node in segment.graph.nodes),
            moved=sum(_moved(node) for node in segment.graph.nodes),
            kept=sum(_made(node) for node in segment.graph.nodes),
            uncounted=frozenset(
                str(node.target) for node in segment.graph.nodes if is_uncounted(node)
            ),
            params=frozenset(
                names[source.leaf]
                for source in segment.sources
                if isinstance(source, Param) and source.leaf < len(names)
            ),
            width=width,
        )
        for name, segment, width in zip((*order, ""), segments, widths, strict=True)
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


def _widths(segments: Sequence[Segment]) -> list[int]:
    """Bytes over each boundary: of values made before it that are read behind it."""
    ends: dict[Upstream, int] = {}
    for index, segment in enumerate(segments):
        for source in segment.sources:
            if isinstance(source, Upstream):
                ends[source] = index
    widths = [0] * len(segments)
    for source, end in ends.items():
        (outputs,) = segments[source.stage].graph.output_node().args
        size = nbytes_of(outputs[source.leaf])  # type: ignore[index, arg-type]
        for boundary in range(source.stage, end):
            widths[boundary] += size
    return widths


def _is_work(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload | Applied) and not is_view(node)


def _moved(node: fx.Node) -> int:
    return nbytes_of(node) + sum(map(nbytes_of, node.all_input_nodes)) if _is_work(node) else 0


def _made(node: fx.Node) -> int:
    return nbytes_of(node) if _is_work(node) else 0
