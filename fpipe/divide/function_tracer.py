"""Trace a whole loss function with cuts into the same chain that stage functions make.

    loss_fn(params, batch) ── record ──► segments ── finish each ──► Chain

Every stage sees all parameter leaves by their own number, so a parameter that several stages read
is one leaf with several contributors; a value may be read by any later stage.

Segments that differ only in what they read, the layers of a model, share one graph. The graph of
one serves the other with its sources renamed, so that pieces and compiled artefacts are shared too.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fpipe import pytree
from fpipe.divide.dividing import Segment
from fpipe.divide.function_recorder import Recorded, Recorder, updates_of
from fpipe.errors import StageError
from fpipe.graph.inlining import Inliner
from fpipe.graph.joint import BatchLeaf, Constant, Joint, Param, Source, SumSoFar
from fpipe.graph.nodes import CHECKPOINT, fingerprint, places_of, value_of
from fpipe.graph.rewrites import propagate
from fpipe.inputs.signature import Goal, TreeShape, is_differentiable
from fpipe.spec.objective import Objective
from fpipe.torch_internals import FakeTensorMode, LazyGraphModule
from fpipe.trace.abstract import Abstract, Places
from fpipe.trace.chain import Chain
from fpipe.trace.tracer import StageGraph, Traced, contiguous_like, finish

log = logging.getLogger("fpipe")


class FunctionTracer:
    """Traces a loss function into a chain.

    Args:
        loss_fn: ``(params, batch) -> scalar``, with a `fpipe.cut` between stages; with a state
            ``(params, state, batch) -> (scalar, state)``.
        num_stages: of the schedule: one more than the cuts that it must execute.
        objective: what it is differentiated for.
        has_key: it is called with the key of the microbatch, as the keyword argument ``key``.
        keyed: what it draws, it draws from the key of the microbatch, which it is not called with.
        devices: the device of each stage, all of one type: the function is recorded on the first,
            and its segments are moved. None to leave all values where they are.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        num_stages: int,
        objective: Objective,
        *,
        has_key: bool = False,
        keyed: bool = False,
        devices: Sequence[torch.device] | None = None,
    ) -> None:
        self._objective = objective
        self._places = Places(devices)
        self._record = Recorder(
            loss_fn=loss_fn,
            num_stages=num_stages,
            objective=objective,
            has_key=has_key,
            keyed=keyed,
            mode=self._places.mode,
        )
        self._mode = self._places.mode
        # The state comes with the parameters, after them.
        trainable = objective.trainable
        within = (0, *trainable.within) if objective.returns.state else trainable.within
        self._trainable = replace(trainable, within=within)

    def __call__(
        self, shapes: Sequence[TreeShape], microbatch: TreeShape, goal: Goal, rows: int = 1
    ) -> Chain:
        """Trace the function for one shape of microbatch.

        Args:
            shapes: the whole parameters, once for each stage; or the pair of parameters and state.
            microbatch: one microbatch.
            goal: what the chain is for.
            rows: of the microbatch.

        Raises:
            StageError: the function cannot be traced or executes another number of cuts.
        """
        record = self._record
        name = record.name
        if goal == "forward" and not record.returns.aux:
            raise StageError(
                f"{name} returns a loss and no output: pipe.value gives the loss without "
                "gradients; for outputs return (loss, aux), under has_aux=True, of which "
                "pipe.forward gives both (of a module: loss=lambda output, batch: (..., output))"
            )
        self._places.begin()
        params = Abstract.of(shapes[0], self._mode)
        batch = Abstract.of(microbatch, self._mode)
        frozen = self.frozen(shapes)
        trained = [
            (0, leaf) not in frozen and self._objective.is_by("params", value)
            for leaf, value in enumerate(params.values)
        ]
        with self._places.at(0):
            recorded = record(params, batch, trained, goal, rows)
        segments, results = recorded.segments, recorded.results
        reads_params = any(isinstance(s, Param) for s in segments[-1].sources.values())
        if goal == "step" and not reads_params and len(segments) > 1:
            log.warning(
                "stage %d (%s), the last, reads no parameter: a stage ends where fpipe.cut is "
                "called, or after the submodule that cuts= names",
                len(segments) - 1,
                name,
            )
        updates = updates_of(name, record.paths(params), segments, results, recorded.changed)
        results = results[: len(results) - len(updates)]
        owners = self._owners(params, batch)
        tied = self._tied(segments)
        traced: list[Traced] = []
        labels = [f"stage {index} ({name})" for index in range(len(segments))]
        known: dict[Hashable, tuple[Joint, Segment]] = {}
        for index, (label, segment) in enumerate(zip(labels, segments, strict=True)):
            kind = (
                likeness(segment),
                tuple(source in tied for source in segment.sources.values()),
                self._places.device(index),
            )
            if kind not in known:
                with self._places.at(index):
                    known[kind] = (
                        self._finished(index, label, segment, recorded, owners, tied),
                        segment,
                    )
            joint = seen_from(*known[kind], segment)
            values = tuple(
                contiguous_like(value_of(joint.nodes[output]), self._mode)
                for output in joint.outputs
            )
            flags = tuple(bool(group) for group in joint.cotangents)
            traced.append(Traced(joint, pytree.flatten(values)[1], values, flags))
        return Chain(
            tuple(traced),
            tuple(labels),
            goal,
            results,
            recorded.numbering,
            recorded.depends,
            updates,
        )

    @property
    def evaluation(self) -> Goal | None:
        """The goal for which a step returns just what is asked, beside its gradients."""
        return "forward" if self._objective.returns.aux else "value"

    def frozen(self, shapes: Sequence[TreeShape]) -> frozenset[tuple[int, int]]:
        """Stage and leaf of what is not trained, the state's included; the stage is 0."""
        frozen = self._trainable.frozen([shapes[0].spec], shared=True)
        count, states = len(shapes[0].leaves), self._record.num_states(shapes[0].spec)
        return frozen | {(0, leaf) for leaf in range(count - states, count)}

    def segments(self, params: TreeShape, microbatch: TreeShape) -> tuple[Segment, ...]:
        """The stages between the cuts, forward only, to be measured."""
        fake_params, batch = (Abstract.of(shape, self._mode) for shape in (params, microbatch))
        count = len(fake_params.values) - self._record.num_states(fake_params.spec)
        trained = [
            n < count and is_differentiable(value) for n, value in enumerate(fake_params.values)
        ]
        return self._record(fake_params, batch, trained, "forward", rows=0).segments

    def _owners(self, params: Abstract, batch: Abstract) -> dict[Source, tuple[Tensor, str]]:
        """The fake tensor and the path of each of the caller's leaves."""
        named = zip(params.values, self._record.paths(params), strict=True)
        rows = zip(batch.values, pytree.paths(batch.spec), strict=True)
        return {
            **{Param(leaf): owner for leaf, owner in enumerate(named)},
            **{BatchLeaf(n): (value, f"batch{path}") for n, (value, path) in enumerate(rows)},
        }

    def _tied(self, segments: Sequence[Segment]) -> frozenset[Source]:
        """The parameters that several segments read, where their gradients are not kept whole."""
        if self._objective.sink.fold is None:
            return frozenset()
        counts = Counter(source for segment in segments for source in {*segment.sources.values()})
        return frozenset(source for source, count in counts.items() if count > 1)

    def _finished(
        self,
        index: int,
        label: str,
        segment: Segment,
        recorded: Recorded,
        owners: Mapping[Source, tuple[Tensor, str]],
        tied: Collection[Source],
    ) -> Joint:
        """The joint graph of a part."""
        module, original = LazyGraphModule(recorded.module, segment.graph), recorded.original
        home, device = self._places.device(0), self._places.device(index)
        if home is not None and device is not None and home != device:
            original = move(module, home, device, self._mode, original)
        elif segment.is_stale:
            propagate(module.graph, self._mode)
        fold = self._objective.sink.fold
        if fold is not None:
            self._fold(module.graph, segment, fold, tied)
        stage = StageGraph(
            module, segment.sources, segment.cotangents, segment.owed, owners, original
        )
        return finish(label, stage, self._objective, origin=self._record.loss_fn, tied=tied)

    def _fold(
        self,
        graph: fx.Graph,
        segment: Segment,
        fold: Callable[[Tensor], Tensor],
        tied: Collection[Source],
    ) -> None:
        """Keep of the gradients of parameters what the sink keeps, where they are whole."""
        inline = Inliner(self._mode)
        end = graph.output_node()
        returned: Any = end.args[0]
        outputs, gradients = returned
        kept = [
            inline.call(end, fold, node)
            if isinstance(source, Param) and source not in tied
            else node
            for source, node in zip(segment.owed, gradients, strict=True)
        ]
        end.args = ((outputs, kept),)


def move(
    module: fx.GraphModule,
    home: torch.device,
    device: torch.device,
    mode: FakeTensorMode,
    original: Callable[[Tensor], Tensor],
) -> Callable[[Tensor], Tensor]:
    """Let a graph run on another device.

    Args:
        module: changed in place; its placeholders are brought to the device.
        home: where it was recorded.
        device: where it is to run.
        mode: the fake-tensor mode of its values.
        original: of an attribute of the module the tensor that the function closes over.

    Returns:
        The same for the attributes that the module has then, which are copies.
    """
    names = (home, torch.device(home.type))
    texts = tuple(map(str, names))
    copies: list[tuple[Tensor, Tensor]] = []

    def place(value: Any) -> Any:
        # A name stands for a device too, and a device of no number for the current one.
        if isinstance(value, torch.device) and value in names:
            return device
        return str(device) if isinstance(value, str) and value in texts else value

    for node in module.graph.nodes:
        if node.op == "placeholder" and node.meta["val"].device == home:
            with mode:
                node.meta["val"] = node.meta["val"].to(device)
        elif node.op == "get_attr":
            value = getattr(module, node.target)
            if isinstance(value, Tensor) and value.device == home:
                copies.append((value.to(device), original(value)))
                name = f"{node.target}_{len(copies)}".replace(".", "_")
                module.register_buffer(name, copies[-1][0])
                node.target = name
                with mode:
                    node.meta["val"] = node.meta["val"].to(device)
    propagate(module.graph, mode, place)

    def of(value: Tensor) -> Tensor:
        return next((constant for copy, constant in copies if copy is value), original(value))

    return of


def likeness(segment: Segment) -> Hashable:
    """Equal for segments of one function whose graphs differ only in the names of their sources."""
    placeholders = segment.graph.find_nodes(op="placeholder")
    return (
        fingerprint(segment.graph),
        _checkpoints(segment.graph),
        places_of(segment.graph),
        tuple(type(segment.sources.get(node.name)) for node in placeholders),
        tuple(map(len, segment.cotangents)),
        tuple(map(type, segment.owed)),
        tuple(
            isinstance(source, Param) and source in segment.sources.values()
            for source in segment.owed
        ),
    )


def _checkpoints(graph: fx.Graph) -> tuple[tuple[int, bool] | None, ...]:
    """For each node the call of checkpoint that it is in, and whether it is saved."""
    calls = [node.meta.get(CHECKPOINT) for node in graph.nodes]
    numbers = {call.number: 0 for call in calls if call is not None}
    numbers = {number: index for index, number in enumerate(numbers)}
    return tuple(call and (numbers[call.number], call.saved) for call in calls)


def seen_from(joint: Joint, other: Segment, segment: Segment) -> Joint:
    """The finished graph of a segment, made from `joint`, that of the other, which is like it."""
    names = dict(zip(other.sources.values(), segment.sources.values(), strict=True))
    names |= dict(zip(other.owed, segment.owed, strict=True))

    def rename(source: Source) -> Source:
        match source:
            case Constant():
                return source
            case SumSoFar(leaf):
                return SumSoFar(names[Param(leaf)].leaf)  # type: ignore[union-attr]
            case _:
                return names[source]

    return joint.renamed(
        rename, [[cotangent.reader for cotangent in group] for group in segment.cotangents]
    )
