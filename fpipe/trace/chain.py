"""A chain of stage functions, each traced on what the one before it returns.

    microbatch ─► stage 0 ─► stage 1 ─► … ─► last stage, fused with the loss

Stages with one function and one kind of inputs share a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.checks.explain import describe, explain
from fpipe.dtensors import as_parameters
from fpipe.errors import StageError
from fpipe.graph.joint import BatchLeaf, Joint, Key, Param, Source, Upstream
from fpipe.graph.nodes import is_zero
from fpipe.inputs.ambient import ambient
from fpipe.inputs.signature import Goal, TreeShape
from fpipe.live_line import advance
from fpipe.spec.objective import Objective
from fpipe.spec.user_functions import Numbering, Stage, Taken
from fpipe.trace.abstract import Abstract, Leaves, Places, abstract_key
from fpipe.trace.tracer import Traced, check_output, trace


@dataclass(frozen=True, eq=False)
class Chain:
    """Traced stages.

    Attributes:
        stages: one per stage, in order.
        labels: each stage in messages.
        goal: ``"step"`` for loss and gradients, ``"value"`` for the loss alone, ``"forward"`` for
            the last stage's output.
        results: where each value that the caller gets of a microbatch comes from.
        numbering: how those are numbered.
        depends: whether each result depends on something that gradients are taken by.
        updates: where the new value of each leaf of the state comes from.
    """

    stages: tuple[Traced, ...]
    labels: tuple[str, ...]
    goal: Goal
    results: tuple[Upstream, ...]
    numbering: Numbering
    depends: tuple[bool, ...]
    updates: Mapping[int, Upstream] = field(default_factory=dict)

    def value(self, source: Upstream) -> Tensor:
        """The fake tensor that stands for an output of a stage."""
        return self.stages[source.stage].values[source.leaf]

    @property
    def is_constant(self) -> bool:
        """Whether the loss of a step depends on nothing that it is differentiated by."""
        joint = self.stages[-1].joint
        return all(is_zero(joint.nodes[name]) for name in joint.gradients.values())

    @property
    def is_swapped(self) -> bool:
        """Whether the weight of a step's loss depends on what the sum does not."""
        return self.numbering.heads > 1 and self.depends[:2] == (False, True)


NEXT = -1
"""Stands for the stage that follows, in a trace that several stages share."""


class _StageInputs(NamedTuple):
    """The arguments that a stage is traced on.

    Attributes:
        params: its parameters.
        trained: whether each leaf of `params` is trained.
        x: what the stage before returns; of the first stage the microbatch.
        x_sources: where each leaf of `x` comes from.
        carries: whether each leaf of `x` carries a gradient.
        batch: the microbatch.
        rows: of the microbatch.
    """

    params: Abstract
    trained: Sequence[bool]
    x: Abstract
    x_sources: Sequence[Source]
    carries: Sequence[bool]
    batch: Abstract
    rows: int

    @property
    def key(self) -> Hashable:
        """Equal for what a stage cannot tell apart; where `x` comes from does not matter."""
        trees = self.params.key, self.x.key, self.batch.key
        return trees, tuple(self.trained), tuple(self.carries), self.rows


class ChainTracer:
    """Traces chains; stages with one function and one kind of inputs are traced once.

    Args:
        stages: the stage functions.
        loss: ``(y, microbatch) -> loss``.
        objective: what they are differentiated for.
        devices: the device of each stage, None to leave all values where they are.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        loss: Callable[[Any, Any], Any],
        objective: Objective,
        *,
        devices: Sequence[torch.device] | None = None,
    ) -> None:
        self._stages = tuple(stages)
        self._labels = tuple(f"stage {n} ({stage.label})" for n, stage in enumerate(stages))
        self._loss = loss
        self._objective = objective
        self._places = Places(devices)
        self._mode = self._places.mode
        self._traces: dict[Any, Traced] = {}

    def __call__(
        self, shapes: Sequence[TreeShape], microbatch: TreeShape, goal: Goal, rows: int = 1
    ) -> Chain:
        """Trace all stages for one shape of microbatch.

        Args:
            shapes: the parameters of each stage.
            microbatch: one microbatch.
            goal: what the chain is for.
            rows: of the microbatch.

        Raises:
            StageError: a stage or the loss cannot be traced; names the stage.
        """
        self._places.begin()
        params = [Abstract.of(shape, self._mode) for shape in shapes]
        batch = Abstract.of(microbatch, self._mode)
        flags = self._objective.trainable.flags([shape.spec for shape in shapes], shared=False)
        traced: list[Traced] = []
        labels = self._labels
        x = batch
        x_sources: list[Source] = [BatchLeaf(i) for i in range(len(batch.values))]
        carries = [self._objective.is_by("batch", value) for value in batch.values]
        last = len(self._stages) - 1
        for index, stage in enumerate(self._stages):
            advance(labels[index])
            with_loss = index == last and goal != "forward"
            x, here = (
                replace(tree, values=self._places.bring(tree.values, index)) for tree in (x, batch)
            )
            self._check_device(labels[index], params[index], index)
            how = (stage.reads_batch, stage.reads_key, with_loss, index == 0)
            inputs = _StageInputs(params[index], flags[index], x, x_sources, carries, here, rows)
            kind = (id(stage.fn), how, inputs.key, ambient())
            result = self._traces.get((kind, goal == "step"))
            if result is None and not with_loss:
                result = self._traces.get((kind, True))  # its forward is a part of that
            if result is None:
                giver = f"what {labels[index - 1]} returns" if index else "a microbatch"
                with self._places.at(index):
                    result = self._trace(
                        labels[index],
                        stage,
                        inputs,
                        giver,
                        with_loss=with_loss,
                        differentiate=goal == "step",
                    )
            self._traces[kind, goal == "step"] = result
            result = replace(result, joint=_seen_from(result.joint, index))
            traced.append(result)
            x = Abstract(result.values, result.spec)
            x_sources = [Upstream(index, leaf) for leaf in range(len(x.values))]
            carries = list(result.carries_gradient)
        _check_differentiated(traced)
        numbering = Numbering(0, x.spec)
        if goal != "forward":
            heads, _, aux = x.spec.children()
            numbering = Numbering(heads.num_leaves, aux)
        results = tuple(Upstream(last, leaf) for leaf in range(len(x.values)))
        depends = traced[-1].depends
        return Chain(tuple(traced), labels, goal, results, numbering, depends)

    @property
    def evaluation(self) -> Goal | None:
        """The goal for which a step returns just what is asked, beside its gradients."""
        return None if self._objective.returns.aux else "value"

    def frozen(self, shapes: Sequence[TreeShape]) -> frozenset[tuple[int, int]]:
        """Stage and leaf of the parameters that are not trained."""
        return self._objective.trainable.frozen([shape.spec for shape in shapes], shared=False)

    def _check_device(self, label: str, params: Abstract, index: int) -> None:
        device = self._places.device(index)
        if device is None:
            return
        for path, value in zip(pytree.paths(params.spec), params.values, strict=True):
            if value.device != device:
                raise StageError(
                    f"params{path} of {label} lies on {value.device}, but its rank has the device "
                    f"{device}: move it there first"
                )

    def _trace(
        self,
        label: str,
        stage: Stage,
        inputs: _StageInputs,
        giver: str,
        *,
        with_loss: bool,
        differentiate: bool,
    ) -> Traced:
        params, x, batch = inputs.params, inputs.x, inputs.batch
        objective = self._objective
        n_params, n_x, n_b = len(params.values), len(x.values), len(batch.values)
        keys = [abstract_key(batch, self._mode)] if stage.reads_key else []
        x_text = describe("x", pytree.unflatten(x.spec, x.values))
        params_text = describe("params", pytree.unflatten(params.spec, params.values))

        def function(leaves: Sequence[Any]) -> Any:
            p = as_parameters(params.spec, leaves[:n_params])
            value = pytree.unflatten(x.spec, leaves[n_params : n_params + n_x])
            microbatch = pytree.unflatten(batch.spec, leaves[n_params + n_x : n_params + n_x + n_b])
            arguments = (p, value, microbatch) if stage.reads_batch else (p, value)
            y = stage.fn(*arguments, **({"key": leaves[-1]} if keys else {}))
            if not with_loss:
                return y
            taken = self._loss_of(label, y, microbatch)
            return taken if differentiate else taken._replace(aux=None)

        return trace(
            label,
            function,
            Leaves(
                values=(*params.values, *x.values, *batch.values, *keys),
                sources=(
                    *(Param(i) for i in range(n_params)),
                    *inputs.x_sources,
                    *(BatchLeaf(i) for i in range(n_b)),
                    *(Key(of_stage=True) for _ in keys),
                ),
                paths=(
                    *("params" + path for path in pytree.paths(params.spec)),
                    *("x" + path for path in pytree.paths(x.spec)),
                    *("microbatch" + path for path in pytree.paths(batch.spec)),
                    *("key" for _ in keys),
                ),
                differentiable=(
                    *(
                        flag and objective.is_by("params", value)
                        for flag, value in zip(inputs.trained, params.values, strict=True)
                    ),
                    *inputs.carries,
                    *(objective.is_by("batch", v) for v in batch.values),
                    *(False for _ in keys),
                ),
                arguments=f"{giver} ({x_text}) with {params_text}",
                called=_called(stage),
            ),
            self._mode,
            objective,
            differentiate=differentiate,
            origin=(stage.fn, self._loss) if with_loss else stage.fn,
            # Only the loss is differentiated, and not what comes with it.
            readers=lambda leaf: () if with_loss and leaf else (NEXT,),
            rows=inputs.rows,
        )

    def _loss_of(self, label: str, y: Any, microbatch: Any) -> Taken:
        """The loss of the last stage's output, and what comes with it."""
        check_output(label, y)
        name = f"the loss after {label}"
        try:
            loss = self._loss(y, microbatch)
        except Exception as error:
            arguments = f"{describe('y', y)}, {describe('microbatch', microbatch)}"
            called = "loss(y, microbatch), with the output and all of the microbatch"
            raise explain(name, error, arguments, called) from error
        returns, shape = self._objective.returns, self._objective.loss_shape
        return returns.take(f"{name} is", "loss(y, microbatch)", loss, shape)


def _check_differentiated(stages: Sequence[Traced]) -> None:
    """Refuse outputs that cannot be differentiated, if a reader differentiates them.

    Raises:
        StageError: what autograd said of the first.
    """
    for index, traced in enumerate(stages):
        for leaf, why in traced.lost.items():
            readers = stages[index + 1 : index + 2]
            if not readers:
                raise why
            joint = readers[0].joint
            gradient = joint.gradients.get(Upstream(index, leaf))
            if gradient is not None and not is_zero(joint.nodes[gradient]):
                raise why


def _called(stage: Stage) -> str:
    """How the function of a stage is called."""
    batch = ", microbatch" if stage.reads_batch else ""
    return f"fn(params, x{batch}{', key=key' if stage.reads_key else ''})"


def _seen_from(joint: Joint, index: int) -> Joint:
    """A trace shared between stages, with its upstream sources named for stage `index`."""

    def rename(source: Source) -> Source:
        return Upstream(index - 1, source.leaf) if isinstance(source, Upstream) else source

    return joint.renamed(rename, [[index + 1]] * len(joint.cotangents))
