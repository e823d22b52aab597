"""The cost of each part of a module: counted on its recorded graph, or measured on real inputs.

To count, the module is recorded once, with a cut after every candidate, on abstract tensors:
nothing is computed, and parameters may lie on the meta device.
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
from fpipe.definition import Definition
from fpipe.divide.dividing import Part as Recorded
from fpipe.divide.function_tracer import FunctionTracer
from fpipe.errors import StageError, shown
from fpipe.graph.joint import Param, Upstream
from fpipe.graph.nodes import nbytes_of
from fpipe.inputs.signature import TreeShape
from fpipe.modules.module_buffers import shaped_buffers
from fpipe.modules.module_loss import ModuleLoss, held_by
from fpipe.modules.operation_costs import (
    Saved,
    flops_of,
    is_uncounted,
    is_work,
    made_by,
    origin_of,
    saved_of,
)
from fpipe.spec.objective import Objective
from fpipe.trace.abstract import Abstract
from fpipe.trace.constant_propagation import Known
from fpipe.trace.interrupts import held_back

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


def candidates_of(
    loss: ModuleLoss,
    named: Sequence[str] | None,
    fewest: int,
    given: TreeShape,
    microbatch: TreeShape,
    *,
    has_state: bool,
) -> list[str]:
    """Submodules behind which the module may be cut, in the order in which they end.

    Args:
        loss: of the module, which is not cut.
        named: submodules to choose from. None takes the children of the outermost `ModuleList`s and
            `Sequential`s; where these make fewer than `fewest` places for a cut, those of the lists
            within them too, and then submodules of any kind, the outer ones first.
        fewest: places that are wanted.
        given: shapes of the parameters, and of the state where the module has one.
        microbatch: shapes of the keyword arguments of its forward.
        has_state: `given` is the pair of both.

    Returns:
        Those that are called once; of several that end at the same place, the outermost.

    Raises:
        StageError: there is none.
    """
    given_names = None if named is None else list(named)
    if isinstance(named, str) or not all(isinstance(name, str) for name in given_names or ()):
        raise StageError(
            f"candidates={shown(named)} must be a list of names of submodules, as those of "
            "module.named_modules()"
        )
    order: list[str] = []
    for names in _choices(loss.module) if given_names is None else [given_names]:
        order, places = _called_once(loss, names, given, microbatch, has_state=has_state)
        if places >= fewest:
            break
    if not order:
        raise StageError(
            f"{type(loss.module).__name__} has no submodule, of those that may be candidates, that "
            "its forward calls once (a layer that is called again and again is no place for a "
            "cut): name others with candidates=, or call fpipe.cut, in a function for "
            "fpipe.pipeline"
        )
    return order


def _choices(module: nn.Module) -> Iterator[list[str]]:
    """Names to choose from, ever more of them."""
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
    found: list[str] = []
    lists: list[str] = []
    for name, submodule in module.named_modules():
        around = sum(not outer or name.startswith(f"{outer}.") for outer in lists)
        if isinstance(submodule, nn.ModuleList | nn.Sequential) and around < depth:
            lists.append(name)
            prefix = f"{name}." if name else ""
            found += [prefix + child for child, _ in submodule.named_children()]
    return found


class _Operations(TorchDispatchMode):
    """Counts them."""

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
    loss: ModuleLoss,
    names: Sequence[str],
    given: TreeShape,
    microbatch: TreeShape,
    *,
    has_state: bool,
) -> tuple[list[str], int]:
    """Those of `names` that are called once, and how many of them end before the module does."""
    loss.with_cuts(names)  # names the one that does not exist
    operations = _Operations()
    ended: list[tuple[str, int]] = []
    handles = [
        loss.module.get_submodule(name).register_forward_hook(
            lambda _, __, ___, name=name: ended.append((name, operations.count))
        )
        for name in ("", *names)
    ]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        own, batch = Abstract.of(given, mode), Abstract.of(microbatch, mode)
        params = pytree.unflatten(own.spec, own.values)
        # Without the guard a buffer on the CPU would really be written to.
        with mode, torch.no_grad(), WriteGuard({}, loss), Known(), operations:
            loss(
                *(params if has_state else (params,)),
                pytree.unflatten(batch.spec, batch.values),
            )
    except Exception:
        # It is said, with its place, when the module is recorded.
        return list(names), len(names)
    finally:
        for handle in handles:
            handle.remove()
    times = Counter(name for name, _ in ended)
    last = {place: name for name, place in ended if name and place and times[name] == 1}
    end = max((place for name, place in ended if not name), default=operations.count)
    return [last[place] for place in sorted(last)], sum(place < end for place in last)
