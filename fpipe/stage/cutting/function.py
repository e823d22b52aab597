"""Trace a whole loss function with cuts into the same chain that stage functions make.

    loss_fn(params, batch) ── recording ──► segments ── trace each ──► Chain

Every stage sees all parameter leaves by their own number, so a parameter that several stages read
is one leaf with several contributors; a value may be read by any later stage.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.arguments.ambient import without_autocast
from fpipe.arguments.shapes import Goal, TreeShape
from fpipe.draws import draws
from fpipe.errors import StageError
from fpipe.stage.cutting.alike import likeness, seen_from
from fpipe.stage.cutting.moved import Move, Moved
from fpipe.stage.cutting.recording import Recorder
from fpipe.stage.cutting.segments import Segment
from fpipe.stage.cutting.updates import updates_of
from fpipe.stage.declared.objective import Objective
from fpipe.stage.graphs.sources import BatchLeaf, Key, Param, Source, StateLeaf, Upstream
from fpipe.stage.tracing.abstract import Abstract, Leaves, Places, abstract_key
from fpipe.stage.tracing.chain import Chain
from fpipe.stage.tracing.tracer import Traced, trace

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
            and its parts are moved. None to leave all values where they are.
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
        own = objective.trainable
        within = (0, *own.within) if objective.returns.state else own.within
        self._trainable = replace(own, within=within)

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
        with self._places.at(0):
            parts, results, numbering, changed = record(params, batch, goal, rows)
        if goal == "step" and not _reads_parameters(parts[-1]) and len(parts) > 1:
            log.warning(
                "stage %d (%s), the last, reads no parameter: a stage ends where fpipe.cut is "
                "called, or after the submodule that cuts= names",
                len(parts) - 1,
                name,
            )
        updates = updates_of(name, record.paths(params), parts, results, changed)
        results = results[: len(results) - len(updates)]
        frozen = self.frozen(shapes)
        trained = [
            (0, leaf) not in frozen and self._objective.is_by("params", value)
            for leaf, value in enumerate(params.values)
        ]
        tied = self._tied(parts)
        traced: list[Traced] = []
        labels = [f"stage {index} ({name})" for index in range(len(parts))]
        known: dict[Hashable, tuple[Traced, tuple[Source, ...]]] = {}
        for index, (label, part) in enumerate(zip(labels, parts, strict=True)):
            leaves = self._leaves(part, params, trained, batch, traced)
            leaves = replace(leaves, values=self._places.bring(leaves.values, index))
            kind = (
                likeness(part, leaves),
                tuple(source in tied for source in part.sources),
                self._places.device(index),
            )
            if kind not in known:
                with self._places.at(index):
                    own = self._trace(
                        index, label, part, leaves, tied, differentiate=goal == "step", rows=rows
                    )
                known[kind] = own, part.sources
            first, sources = known[kind]
            traced.append(seen_from(first, sources, part))
        return Chain(tuple(traced), tuple(labels), goal, results, numbering, updates)

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
        """The parts between the cuts, as they were recorded, to be measured."""
        batch = Abstract.of(microbatch, self._mode)
        return self._record(Abstract.of(params, self._mode), batch, "step", rows=0).parts

    def _tied(self, parts: Sequence[Segment]) -> frozenset[Source]:
        """The parameters that several parts read, where their gradients are not kept whole."""
        if self._objective.sink.fold is None:
            return frozenset()
        counts = Counter(source for part in parts for source in part.sources)
        return frozenset(source for source, count in counts.items() if count > 1)

    def _trace(
        self,
        index: int,
        label: str,
        part: Segment,
        leaves: Leaves,
        tied: Collection[Source],
        *,
        differentiate: bool,
        rows: int,
    ) -> Traced:
        move = Move(self._places.device(0), self._places.device(index))
        traced = trace(
            label,
            lambda values: _replayed(Moved(part.graph, move), values),
            leaves,
            self._mode,
            self._objective,
            differentiate=differentiate,
            origin=self._record.loss_fn,
            readers=part.readers.__getitem__,
            rows=rows,
            tied=[source for source in part.sources if source in tied],
            original=move.original,
            returned=self._places.bring(part.returned, index),
        )
        nodes = traced.joint.graph.nodes
        if self._record.keyed and any(draws(n.target, n.args, n.kwargs) for n in nodes):
            raise StageError(
                f"{label} draws in the backward of a torch.autograd.Function, which a pipeline "
                "that draws from keys cannot follow: draw before, and give what is drawn as an "
                "argument of apply"
            )
        return traced

    def _leaves(
        self,
        part: Segment,
        params: Abstract,
        trained: Sequence[bool],
        batch: Abstract,
        before: Sequence[Traced],
    ) -> Leaves:
        """The abstract arguments of a segment."""
        values: list[Tensor] = []
        paths: list[str] = []
        differentiable: list[bool] = []
        param_paths, batch_paths = self._record.paths(params), tree.paths(batch.spec)
        for source in part.sources:
            match source:
                case Param(leaf):
                    values.append(params.values[leaf])
                    paths.append(param_paths[leaf])
                    differentiable.append(trained[leaf])
                case StateLeaf(leaf):
                    values.append(params.values[leaf])
                    paths.append(param_paths[leaf])
                    differentiable.append(False)
                case BatchLeaf(leaf):
                    values.append(batch.values[leaf])
                    paths.append("batch" + batch_paths[leaf])
                    differentiable.append(self._objective.is_by("batch", batch.values[leaf]))
                case Key():
                    values.append(abstract_key(batch, self._mode))  # each is an argument of its own
                    paths.append("key")
                    differentiable.append(False)
                case Upstream(stage, leaf):
                    # Of stages that are alike these are the same tensors, which a tracer would
                    # take for the same argument.
                    with self._mode:
                        values.append(before[stage].values[leaf].clone())
                    paths.append(f"value {leaf} of stage {stage}")
                    differentiable.append(before[stage].carries_gradient[leaf])
                case _:
                    raise AssertionError(f"a segment reads {source}")
        return Leaves(
            tuple(values), part.sources, tuple(paths), tuple(differentiable), "what it reads"
        )


def _reads_parameters(part: Segment) -> bool:
    return any(isinstance(source, Param) for source in part.sources)


def _replayed(part: Moved, values: Sequence[Tensor]) -> list[Tensor]:
    """What a recorded function returns: the casts of autocast are in it, and not made again."""
    with without_autocast():
        return list(part.run(*values))
