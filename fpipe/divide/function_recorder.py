"""Record a whole loss function with its backward, and divide it at its cuts.

    loss_fn(params, batch) ── record ──► joint graph ── divide ──► a part for each stage

The function runs once, under autograd, from the first stage to the loss and back.

A function without a key may draw from keys what it would draw from torch's generator. Each drawing
op becomes the plain tensor operations of `fpipe.random`, on a key that comes in as an argument of
its own. So layers of one kind stay alike, and draws are computed where they are read, again or not,
as the remat policy likes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import isfunction
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, fx

from fpipe import pytree
from fpipe.checks.explain import Untraceable, describe, explain
from fpipe.divide.cuts import noting
from fpipe.divide.demand import Demand
from fpipe.divide.dividing import Segment, divide
from fpipe.dtensors import as_parameters
from fpipe.errors import StageError, label_of
from fpipe.graph.inlining import Inliner
from fpipe.graph.joint import BatchLeaf, Key, Param, Source, StateLeaf, Upstream
from fpipe.graph.nodes import marks_of
from fpipe.graph.rewrites import return_statistics
from fpipe.inputs.signature import Goal, is_differentiable
from fpipe.random.keyed_mode import OpenAttention
from fpipe.random.torch_draws import KEYED, draws, refusal
from fpipe.spec.objective import Objective
from fpipe.spec.user_functions import Numbering, Returns, check_state
from fpipe.torch_internals import FakeTensorMode
from fpipe.trace.abstract import Abstract, Leaves, abstract_key
from fpipe.trace.labels import Labels
from fpipe.trace.recorder import Recording, Way, record


class Recorded(NamedTuple):
    """A function, divided.

    Attributes:
        module: has what the function closes over as its attributes.
        segments: those between the cuts.
        results: where each value that the caller gets of a microbatch comes from; then the new
            values of the leaves of the state that change.
        numbering: how the former are numbered.
        changed: the leaves of the state that change, by their numbers after the parameters.
        depends: whether each result depends on something that gradients are taken by.
        original: of an attribute of the module the tensor that the function closes over.
    """

    module: fx.GraphModule
    segments: tuple[Segment, ...]
    results: tuple[Upstream, ...]
    numbering: Numbering
    changed: list[int]
    depends: tuple[bool, ...]
    original: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Recorder:
    """Records a loss function for one shape of its arguments.

    Parameters and state come as one tree, the pair of both where there is a state.

    Attributes:
        loss_fn: ``(params, batch) -> scalar``, with a `fpipe.cut` between stages; with a state
            ``(params, state, batch) -> (scalar, state)``.
        num_stages: one more than the cuts that it must execute.
        objective: what it is differentiated for.
        has_key: it is called with the key of the microbatch, as the keyword argument ``key``.
        keyed: what it draws, it draws from the key of the microbatch, which it is not called with.
        mode: in which everything is fake.
    """

    loss_fn: Callable[..., Any]
    num_stages: int
    objective: Objective
    has_key: bool
    keyed: bool
    mode: FakeTensorMode

    @property
    def name(self) -> str:
        """The function in messages."""
        return label_of(self.loss_fn)

    @property
    def returns(self) -> Returns:
        """The declared results of the function."""
        return self.objective.returns

    def num_states(self, spec: optree.PyTreeSpec) -> int:
        """How many of the last leaves of what comes in as parameters are the state's."""
        return spec.children()[1].num_leaves if self.returns.state else 0

    def paths(self, params: Abstract) -> list[str]:
        """How a user would write each leaf of parameters and state."""
        if not self.returns.state:
            return ["params" + path for path in pytree.paths(params.spec)]
        specs = params.spec.children()
        named = zip(("params", "state"), specs, strict=True)
        return [name + path for name, spec in named for path in pytree.paths(spec)]

    def __call__(
        self,
        params: Abstract,
        batch: Abstract,
        trained: Sequence[bool],
        goal: Goal,
        rows: int,
    ) -> Recorded:
        """Record the function, and divide it.

        Args:
            params: the whole parameters.
            batch: one microbatch.
            trained: whether each leaf of the parameters gets a gradient.
            goal: aux is left out of a ``"value"``.
            rows: of the microbatch.

        Raises:
            StageError: the function cannot be traced or executes another number of cuts.
        """
        labels = Labels()
        recording, numbering, leaves = self._record(params, batch, trained, goal, rows, labels)
        sources, changed = self._settle(recording, params, batch)
        module = recording.module
        try:
            demand = Demand(
                module.graph,
                labels,
                sources,
                list(leaves.places),
                self.mode,
                last=self.num_stages - 1,
                heads=numbering.heads,
                seed=recording.cotangents[0] if recording.cotangents else None,
            )
            segments, results = divide(demand)
        except Untraceable as error:
            raise explain(self.name, error, "") from error
        return Recorded(
            module, segments, results, numbering, changed, recording.depends, recording.original
        )

    def _record(
        self,
        params: Abstract,
        batch: Abstract,
        trained: Sequence[bool],
        goal: Goal,
        rows: int,
        labels: Labels,
    ) -> tuple[Recording, Numbering, Leaves]:
        """The graph of the function and what it returns."""
        keys = [abstract_key(batch, self.mode)] if self.has_key else []
        leaves = self._leaves(params, batch, keys, trained)
        sink = self.objective.sink
        count = len(params.values)
        numberings: list[Numbering] = []

        def lift(index: int, value: Tensor) -> Tensor:
            lifts = index < count and is_differentiable(value)
            return sink.lifted(value, rows) if lifts else value

        def flat(arguments: list[Any]) -> list[Tensor]:
            numberings.clear()
            labels.cuts.clear()
            with noting(labels.cut), OpenAttention() if self.keyed else nullcontext():
                value = self._called(params, batch, arguments)
            taken, numbering = self._taken(value, params, goal)
            numberings.append(numbering)
            return taken

        last = self.num_stages - 1
        recording = record(
            self.name,
            flat,
            leaves,
            self.mode,
            lambda leaf: () if leaf else (last + 1,),
            differentiate=goal == "step",
            origin=self.loss_fn,
            way=Way(lift),
            labels=labels,
        )
        if len(labels.cuts) != last:
            raise StageError(
                f"{self.name} executes {len(labels.cuts)} cuts, which make {len(labels.cuts) + 1} "
                f"stages, but the schedule has {self.num_stages}: place fpipe.cut(x) once between "
                "each two stages, or choose a schedule with that many stages"
            )
        return recording, numberings[0], leaves

    def _settle(
        self, recording: Recording, params: Abstract, batch: Abstract
    ) -> tuple[dict[str, Source], list[int]]:
        """Rewrite the graph; returns where placeholders come from, and the states that change."""
        graph = recording.module.graph
        return_statistics(self.name, graph)
        draws: list[fx.Node] = []
        if self.keyed:
            key = abstract_key(batch, self.mode)
            draws = draw_from_keys(self.name, graph, key, self.mode)
        merge_constants(recording.module)
        count = len(params.values)
        changed = keep_changed(graph, recording.arguments[:count], self.num_states(params.spec))
        # State that never changes is read like a parameter, in any stage.
        origins: list[Source] = [
            *(StateLeaf(leaf) if leaf in changed else Param(leaf) for leaf in range(count)),
            *(BatchLeaf(number) for number in range(len(batch.values))),
            *(Key(of_stage=False) for _ in recording.arguments[count + len(batch.values) :]),
            *(Key(of_stage=False, draw=number) for number in range(len(draws))),
        ]
        placed = zip([*recording.arguments, *draws], origins, strict=True)
        return {node.name: source for node, source in placed}, changed

    def _leaves(
        self,
        params: Abstract,
        batch: Abstract,
        keys: Sequence[Tensor],
        trained: Sequence[bool],
    ) -> Leaves:
        by = [self.objective.is_by("batch", value) for value in batch.values]
        return Leaves(
            values=(*params.values, *batch.values, *keys),
            sources=(
                *(Param(leaf) for leaf in range(len(params.values))),
                *(BatchLeaf(leaf) for leaf in range(len(batch.values))),
                *(Key(of_stage=False) for _ in keys),
            ),
            paths=(
                *self.paths(params),
                *("batch" + path for path in pytree.paths(batch.spec)),
                *("key" for _ in keys),
            ),
            differentiable=(*trained, *by, *(False for _ in keys)),
            arguments=describe("batch", pytree.unflatten(batch.spec, batch.values)),
            called=self._call,
        )

    @property
    def _call(self) -> str:
        """How the function is called, where it is the user's own."""
        if not isfunction(self.loss_fn):
            return ""
        return self.returns.call.replace("batch)", "batch, key=key)" if self.has_key else "batch)")

    def _called(self, params: Abstract, batch: Abstract, leaves: Sequence[Tensor]) -> Any:
        """Call the function with flat arguments."""
        count = len(params.values)
        end = count + len(batch.values)
        tree = as_parameters(params.spec, leaves[:count])
        return self.loss_fn(
            *(tree if self.returns.state else (tree,)),
            pytree.unflatten(batch.spec, leaves[count:end]),
            **({"key": leaves[end]} if self.has_key else {}),
        )

    def _taken(self, value: Any, params: Abstract, goal: Goal) -> tuple[list[Tensor], Numbering]:
        """Flatten the results, the new state last, and say how the others are numbered."""
        subject = f"{self.name} returns"
        taken = self.returns.take(subject, self.returns.call, value, self.objective.loss_shape)
        if goal == "value":
            taken = taken._replace(aux=None)
        flat, numbering = taken.flat()
        states = self.num_states(params.spec)
        if states:
            spec = params.spec.children()[1]
            flat += check_state(subject, params.values[-states:], spec, taken.state)
        return flat, numbering


def draw_from_keys(name: str, graph: fx.Graph, key: Tensor, mode: FakeTensorMode) -> list[fx.Node]:
    """Replace the ops of a graph that draw, in place.

    Returns:
        The placeholder of the key of each op that drew, in their order; they follow the others.

    Raises:
        StageError: an op draws that has no function of a key.
    """
    drawing = [node for node in graph.nodes if draws(node.target, node.args, node.kwargs)]
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    inline = Inliner(mode)
    keys: list[fx.Node] = []
    for node in drawing:
        if node.target not in KEYED:
            raise StageError(f"{name} {refusal(node.target)}")
        with graph.inserting_after(keys[-1] if keys else last):
            keys.append(graph.placeholder(f"key_{len(keys)}"))
        keys[-1].meta |= {"val": key} | marks_of(node)
        inline(node, KEYED[node.target], keys[-1])
    return keys


_COPIES = frozenset(
    {torch.ops.aten.clone.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default}
)


def keep_changed(graph: fx.Graph, inputs: Sequence[fx.Node], states: int) -> list[int]:
    """Return the leaves of the state that change alone, and say which they are.

    Args:
        graph: returns two lists, of which the first ends with the new state.
        inputs: the placeholders of parameters and state.
        states: how many leaves the state has, the last of `given` and of what is returned.
    """
    end = graph.output_node()
    returned: Any = end.args[0]
    results, gradients = list(returned[0]), returned[1]
    first, before = len(inputs) - states, len(results) - states
    changed = [
        leaf
        for leaf in range(first, len(inputs))
        if _copied(results[before + leaf - first]) is not inputs[leaf]
    ]
    results[before:] = [results[before + leaf - first] for leaf in changed]
    end.args = ((results, gradients),)
    return changed


def _copied(node: Any) -> Any:
    """The node that `node` is a copy of, itself if it is none."""
    while isinstance(node, fx.Node) and node.target in _COPIES:
        node = node.args[0]
    return node


def updates_of(
    name: str,
    paths: Sequence[str],
    segments: Sequence[Segment],
    results: Sequence[Upstream],
    changed: Sequence[int],
) -> dict[int, Upstream]:
    """Where each leaf of the state that changes is brought up to date: where it is read.

    Args:
        name: of the function, for messages.
        paths: how a user would write each leaf of parameters and state.
        segments: those between the cuts.
        results: where each result comes from, those of `changed` last.
        changed: the leaves of the state that change.

    Raises:
        StageError: another stage reads it.
    """
    updates: dict[int, Upstream] = {}
    for leaf, source in zip(changed, results[len(results) - len(changed) :], strict=True):
        updates[leaf] = source
        readers = [
            i for i, segment in enumerate(segments) if StateLeaf(leaf) in segment.sources.values()
        ]
        if any(reader != source.stage for reader in readers):
            raise StageError(
                f"{name} reads {paths[leaf]} in stage "
                f"{' and '.join(map(str, readers))} and makes its new value in stage "
                f"{source.stage}: a leaf of the state must be read and brought up to date in "
                "one stage, for the next microbatch begins with it there; move the work "
                "before or after the cut, or split the leaf"
            )
    return updates


_LITERAL = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


def merge_constants(module: fx.GraphModule) -> None:
    """Let equal literals of one element or none be read by one name.

    Literals alone, which the function makes anew in each call: a buffer is written to later.
    """
    names: dict[Hashable, str] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, node.target)
        if not isinstance(value, Tensor) or value.numel() > 1 or value.device.type != "cpu":
            continue
        if all(user.target in _LITERAL for user in node.users):
            key = (value.dtype, tuple(value.shape), repr(value.tolist()))
            node.target = names.setdefault(key, node.target)
