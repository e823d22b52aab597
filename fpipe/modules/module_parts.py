"""The parts of a module: where it may be cut, and the costs of what lies between two such places.

    candidates_of ── run the forward ──► submodules that the forward calls once
    parts_of      ── record it, with a cut after every candidate ──► costs of each part

Both run the forward on abstract tensors: nothing is computed, and parameters may lie on the meta
device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe import pytree
from fpipe.checks.purity import WriteGuard
from fpipe.divide.dividing import Segment as Recorded
from fpipe.divide.function_tracer import FunctionTracer
from fpipe.errors import StageError, shown
from fpipe.graph.joint import Param, Upstream
from fpipe.graph.nodes import nbytes_of
from fpipe.inputs.signature import TreeShape
from fpipe.modules.module_buffers import shaped_buffers
from fpipe.modules.module_loss import ModuleLoss, held_by, with_buffers, with_cuts
from fpipe.modules.operation_costs import (
    Saved,
    flops_of,
    is_uncounted,
    moved_by,
    origin_of,
    saved_by,
    written_by,
)
from fpipe.spec.definition import Definition
from fpipe.spec.objective import Objective
from fpipe.trace.abstract import Abstract
from fpipe.trace.data_dependence import Known
from fpipe.trace.functional import Checked
from fpipe.trace.isolation import held_back


class Crossing(NamedTuple):
    """A value that one part computes and another reads.

    Attributes:
        part: the number of the part that computes it.
        leaf: its number among the outputs of that part.
        nbytes: its size.
        is_kept: whether the part that computes it keeps it for its own backward.
    """

    part: int
    leaf: int
    nbytes: int
    is_kept: bool


@dataclass(frozen=True)
class Part:
    """The computation between two candidates for a cut.

    Attributes:
        name: the candidate that ends it; empty for what follows the last.
        flops: of the forward, as `flops_of` counts them.
        uncounted: names of operations that may be heavy and count as no FLOPs.
        moved: bytes that the forward reads and writes, operation by operation.
        kept: bytes of the values that it computes and some backward needs, of whichever part.
        left: bytes that the gradients of parameters need alone, as `Saved` says.
        prepared: bytes of values computed from parameters alone, once a step.
        biggest: bytes of the biggest value that it computes.
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


@held_back()
def parts_of(
    definition: Definition, microbatch: TreeShape, candidates: Sequence[str] | None
) -> tuple[Part, ...]:
    """The parts of a module in the order in which they run.

    Args:
        definition: of a pipeline of the module, without cuts; its parameters may lie on any device.
        microbatch: shapes of the keyword arguments of its forward.
        candidates: names of submodules, as `candidates_of` takes them.

    Raises:
        StageError: the module cannot be traced, or has no candidate.
    """
    assert isinstance(definition.loss, ModuleLoss)
    module = definition.loss.module
    arguments, _ = definition.convention.enter(*held_by(definition), None)
    leaves, spec = pytree.flatten(arguments)
    # Only shapes count, so all is traced on one device: that of the module.
    tensors = (*module.buffers(), *module.parameters())
    device = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
    shape = TreeShape.of(spec, leaves).with_data(device).brought_to(device)
    microbatch = microbatch.with_data(device).brought_to(device)
    definition = with_buffers(definition, shaped_buffers(module, device))
    names = sorted(dict(module.named_parameters()))
    order = candidates_of(definition, candidates, shape, microbatch)
    loss = with_cuts(definition, order).loss
    tracer = FunctionTracer(loss, len(order) + 1, Objective(definition.returns))
    stages = tracer.segments(shape, microbatch)
    saved = list(map(saved_by, stages))
    reads = [_reads(stage, stages, saved) for stage in stages]
    widths = _widths(reads)
    return tuple(
        Part(
            name=name,
            flops=sum(map(flops_of, stage.graph.nodes)),
            uncounted=frozenset(str(n.target) for n in stage.graph.nodes if is_uncounted(n)),
            moved=sum(map(moved_by, stage.graph.nodes)),
            kept=sum(map(written_by, needed.values)),
            left=needed.left,
            prepared=needed.prepared,
            biggest=max(map(written_by, stage.graph.nodes), default=0),
            params=frozenset(
                names[source.leaf]
                for source in stage.sources.values()
                if isinstance(source, Param) and source.leaf < len(names)
            ),
            reads=frozenset(read),
            saves=frozenset(value for value, node in read.items() if node in needed.values),
            width=width,
        )
        for name, stage, needed, read, width in zip(
            (*order, ""), stages, saved, reads, widths, strict=True
        )
    )


def _reads(
    stage: Recorded, stages: Sequence[Recorded], saved: Sequence[Saved]
) -> dict[Crossing, fx.Node]:
    """The values of other parts that a part reads, with their placeholders in it."""
    reads = {}
    for node in stage.graph.find_nodes(op="placeholder"):
        source = stage.sources[node.name]
        if isinstance(source, Upstream):
            returned: Any = stages[source.stage].graph.output_node().args[0]
            output = returned[0][source.leaf]
            is_kept = origin_of(output) in saved[source.stage].values
            reads[Crossing(source.stage, source.leaf, nbytes_of(output), is_kept)] = node
    return reads


def _widths(reads: Sequence[Iterable[Crossing]]) -> list[int]:
    """Bytes over each boundary: of values computed before it that are read behind it."""
    ends = {value: index for index, read in enumerate(reads) for value in read}
    widths = [0] * len(reads)
    for value, end in ends.items():
        for boundary in range(value.part, end):
            widths[boundary] += value.nbytes
    return widths


# ── places for a cut ────────────────────────────────────────────────────────────────────────────


def candidates_of(
    definition: Definition,
    candidates: Sequence[str] | None,
    arguments: TreeShape,
    microbatch: TreeShape,
) -> list[str]:
    """Submodules behind which the module may be cut, in the order in which they end.

    The forward runs on abstract tensors, with hooks that note after how many operations each
    submodule has ended.

    Args:
        definition: of a pipeline of the module, without cuts.
        candidates: submodules to choose from. None takes the children of the outermost
            `ModuleList`s and `Sequential`s; where these make fewer places for a cut than the
            schedule needs, those of the lists within them too, and then submodules of any kind,
            the outer first.
        arguments: shapes of the parameters, or of the pair of parameters and state.
        microbatch: shapes of the keyword arguments of its forward.

    Returns:
        The submodules that are called once; of several that end at one place, the outermost.

    Raises:
        StageError: there is none.
    """
    listed = None if candidates is None else list(candidates)
    if isinstance(candidates, str) or not all(isinstance(name, str) for name in listed or ()):
        raise StageError(
            f"candidates={shown(candidates)} must be a list of names of submodules, as those of "
            "module.named_modules()"
        )
    assert isinstance(definition.loss, ModuleLoss)
    module = definition.loss.module
    order: list[str] = []
    for names in _choices(module) if listed is None else [listed]:
        order, places = _called_once(definition, names, arguments, microbatch)
        if places >= definition.schedule.num_stages - 1:
            break
    if not order:
        raise StageError(
            f"{type(module).__name__} has no submodule, of those that may be candidates, that "
            "its forward calls once (a layer that is called again and again is no place for a "
            "cut): name others with candidates=, or call fpipe.cut, in a function for "
            "fpipe.pipeline"
        )
    return order


def _choices(module: nn.Module) -> Iterator[list[str]]:
    """Lists of names to choose from, each longer than the one before."""
    listed: list[str] = []
    for depth in count(1):
        deeper = _in_lists(module, depth)
        if len(deeper) == len(listed):
            break
        yield (listed := deeper)
    names = [name for name, _ in module.named_modules() if name]
    for depth in sorted({name.count(".") for name in names}):
        yield [name for name in names if name in listed or name.count(".") <= depth]


def _in_lists(module: nn.Module, depth: int) -> list[str]:
    """The children of `ModuleList`s and `Sequential`s that lie in fewer than `depth` others."""
    children: list[str] = []
    lists: list[str] = []
    for name, submodule in module.named_modules():
        around = sum(not outer or name.startswith(f"{outer}.") for outer in lists)
        if isinstance(submodule, nn.ModuleList | nn.Sequential) and around < depth:
            lists.append(name)
            prefix = f"{name}." if name else ""
            children += [prefix + child for child, _ in submodule.named_children()]
    return children


class _OperationCount(TorchDispatchMode):
    """Counts the operations that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _called_once(
    definition: Definition, names: Sequence[str], arguments: TreeShape, microbatch: TreeShape
) -> tuple[list[str], int]:
    """Those of `names` that are called once, and how many of them end before the module does."""
    loss = definition.loss
    assert isinstance(loss, ModuleLoss)
    loss.with_cuts(names)  # which refuses a name of no submodule
    operations = _OperationCount()
    ended: list[tuple[str, int]] = []
    handles = [
        loss.module.get_submodule(name).register_forward_hook(
            lambda _, __, ___, name=name: ended.append((name, operations.count))
        )
        for name in ("", *names)
    ]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        abstract, batch = Abstract.of(arguments, mode), Abstract.of(microbatch, mode)
        params = pytree.unflatten(abstract.spec, abstract.values)
        # Without the guard a buffer on the CPU would really be written to.
        with mode, torch.no_grad(), Checked(Known(), WriteGuard({}, loss)), operations:
            loss(
                *(params if definition.has_state else (params,)),
                pytree.unflatten(batch.spec, batch.values),
            )
    except Exception:
        # The recording raises it again, and names the place.
        return list(names), len(names)
    finally:
        for handle in handles:
            handle.remove()
    times = Counter(name for name, _ in ended)
    last = {place: name for name, place in ended if name and place and times[name] == 1}
    end = max((place for name, place in ended if not name), default=operations.count)
    return [last[place] for place in sorted(last)], sum(place < end for place in last)
