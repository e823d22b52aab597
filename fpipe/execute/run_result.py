"""The result of a finished run: what its slots hold, in the caller's view.

slots ── losses, weights ── add up ──────────────► loss
      ── sums of gradients ── divide by weight ──► gradients of parameters and batch
      ── outputs of microbatches ── merge ───────► output, aux
      ── the last microbatch's state ────────────► state
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe import dtensors, pytree
from fpipe.inputs.params import Moved, Parameters
from fpipe.inputs.signature import is_differentiable, memory_of
from fpipe.inputs.split_batch import merge
from fpipe.plan.plan import Plan
from fpipe.program.interpreter import Run
from fpipe.spec.convention import PLAIN
from fpipe.spec.definition import Definition
from fpipe.spec.results import Step, StepAux, StepState, StepStateAux


class LossSum(NamedTuple):
    """The losses of all microbatches, put together.

    Attributes:
        loss: the weighted sum of them, or all of them.
        weight: the divisor of loss and gradients, one number for each of several losses; None for
            no division.
    """

    loss: Tensor
    weight: Tensor | None

    @property
    def mean(self) -> Tensor:
        """The loss of the batch."""
        if self.weight is None:
            return self.loss
        return divided(self.loss, self.weight).to(self.loss.dtype)


def loss_sum(plan: Plan, runs: Sequence[Run]) -> LossSum | None:
    """Put the losses of the microbatches together; None where no run has any."""
    if not plan.numbering.heads or plan.schedule.placement[-1] not in [
        run.program.rank for run in runs
    ]:
        return None
    columns = columns_of(plan, runs, 0, plan.numbering.heads)
    # A replica may have fewer rows than there are microbatches.
    losses, *weights = ([value for value in column if value is not None] for column in columns)
    if not losses:
        none = torch.zeros(plan.loss_shape, dtype=plan.weights.dtype)
        shape = plan.weight_shape
        return LossSum(none, None if shape is None else torch.zeros(shape, dtype=torch.float64))
    if plan.sink.join is not None:
        weight = torch.cat(weights[0], plan.sink.join).double() if weights else None
        return LossSum(torch.cat(losses, plan.sink.join), weight)
    weight = torch.stack(weights[0]).double().sum(0) if weights else None
    stacked, shares = torch.stack(losses), plan.weights[: len(losses)]
    total = shares.dot(stacked) if stacked.dim() == 1 else torch.tensordot(shares, stacked, 1)
    return LossSum(total, weight)


class GradientKind(Enum):
    """How this process gets the gradient of a leaf."""

    SUM = "the sum over microbatches"
    ZEROS = "zeros: the loss does not depend on the leaf"
    NONE = "none: the leaf is not trained, or belongs to other processes, or to the state"


@dataclass(eq=False)
class RunResult:
    """The result of a finished run.

    Attributes:
        definition: of the pipeline.
        rank: that this process drives, None for all of them.
        plan: what ran.
        runs: of this process's ranks, with their results in their slots.
        params: the parameters that it ran on.
        batch: as stages take it.
        total: the losses, where the goal has one.
        norm: of the gradients of all ranks, where the plan clips.
    """

    definition: Definition
    rank: int | None
    plan: Plan
    runs: Sequence[Run]
    params: Parameters
    batch: Any
    total: LossSum | None
    norm: Tensor | None = None

    # ── what calls return ───────────────────────────────────────────────────────────────────────

    def step(self) -> Any:
        """The named tuple of all that was declared."""
        loss, grads, definition = self.loss, self.take_grads(), self.definition
        if not definition.has_aux and not definition.has_state:
            return Step(loss, grads)
        aux = self.aux(definition.out_dims) if definition.has_aux else None
        if not definition.has_state:
            return StepAux(loss, grads, aux)
        if not definition.has_aux:
            return StepState(loss, grads, self.state)
        return StepStateAux(loss, grads, self.state, aux)

    def without_grads(self) -> tuple[Any, Any, Any]:
        """The loss, the state and aux; None for what is not declared."""
        definition = self.definition
        aux = self.aux(definition.out_dims) if definition.has_aux else None
        return self.loss, self.state if definition.has_state else None, aux

    @property
    def loss(self) -> Any:
        """The loss, or losses."""
        assert self.total is not None
        convention = self.definition.convention
        return self.total.mean if convention is PLAIN else convention.loss(self.total.mean)

    def take_grads(self) -> Any:
        """The gradients by what was chosen: one, or a tuple. They can be taken once."""
        assert self.total is not None
        definition, weight = self.definition, self.total.weight
        if definition.sink.everywhere:
            sums = list(self._take_sums().values())
            if not sums:  # nothing that the loss depends on is trained
                return torch.zeros_like(self.total.mean)
            return divided(definition.convention.grads(sums), weight).abs()
        names = definition.argnums
        if names == "params":
            return self._by_params(weight)
        return definition.unwrap(
            tuple(
                self._by_params(weight) if name == "params" else self._by_batch(weight)
                for name in definition.wanted
            )
        )

    @property
    def state(self) -> Any:
        """The state that the last microbatch has left.

        Each leaf has memory of its own, though what a function returns may be what it was given,
        and lies where the given one does.
        """
        spec, leaves = self.params.spec.children(), self.params.stages[0]
        slots = dict(self.runs[0].program.results.states)
        taken = {memory_of(leaf) for leaf in (*leaves, *pytree.flatten(self.batch)[0])}
        values: list[Tensor] = []
        for leaf in range(spec[0].num_leaves, len(leaves)):
            value = self.runs[0].slots[slots[leaf]] if leaf in slots else leaves[leaf]
            value = value.to(leaves[leaf].device)
            values.append(value.clone() if memory_of(value) in taken else value)
            taken.add(memory_of(values[-1]))
        with torch.no_grad():
            return self.definition.convention.state(pytree.unflatten(spec[1], values))

    def aux(self, out_dims: Any) -> Any:
        """The loss function's aux outputs, merged over microbatches."""
        return self._merged(self.definition.convention.aux_dims(out_dims), "aux")

    def output(self, out_dims: Any) -> Any:
        """The last stage's output, merged over microbatches; None where another rank has it."""
        output = self._merged(self.definition.convention.out_dims(out_dims), "output")
        return output if self.rank in (None, self.plan.last_rank) else None

    def updates(self) -> dict[int, Moved]:
        """The leaves of the parameters that the optimizer has updated, by their places."""
        return {
            self.params.place(stage, leaf): run.slots[slot]
            for run in self.runs
            for stage, leaf, slot in run.program.results.updates
        }

    def leaves_gradients(self) -> bool:
        """Whether a leaf has a gradient, be it 0, and the step has not updated it."""
        updated = self.updates()
        none = GradientKind.NONE
        return any(k != none and place not in updated for place, k in enumerate(self.kinds))

    # ── gradients ───────────────────────────────────────────────────────────────────────────────

    @cached_property
    def kinds(self) -> list[GradientKind]:
        """How this process gets the gradient of each leaf of the parameters, flat."""
        plan, params = self.plan, self.params
        summed = {
            (0 if params.shared else stage, leaf)
            for run in self.runs
            for results in [run.program.results]
            for stage, leaf, *_ in (*results.grads, *results.updates)
        }
        alone = len(self.runs) == len(plan.programs)
        elsewhere = self._read_elsewhere() if params.shared and not alone else frozenset()
        kinds: list[GradientKind] = []
        for stage, leaves in enumerate(params.stages[:1] if params.shared else params.stages):
            for index, leaf in enumerate(leaves):
                if (stage, index) in summed:
                    kinds.append(GradientKind.SUM)
                elif (
                    index in elsewhere
                    or (stage, index) in plan.frozen
                    or not is_differentiable(leaf)
                    or leaf.is_meta  # no rank reads it, and another process has its data
                ):
                    kinds.append(GradientKind.NONE)
                else:
                    kinds.append(GradientKind.ZEROS)
        return kinds

    def _read_elsewhere(self) -> frozenset[int]:
        """The leaves of shared parameters whose gradient, if they get none here, is with others.

        Those ranks have the gradient, or read what the loss need not depend on.
        """
        here = {leaf for run in self.runs for _, leaf, _ in run.program.bindings.params}
        return frozenset(
            leaf
            for program in self.plan.programs
            for leaf in (
                *(leaf for _, leaf, *_ in (*program.results.grads, *program.results.updates)),
                *(leaf for _, leaf, _ in program.bindings.params if leaf not in here),
            )
        )

    def _take_sums(self) -> dict[tuple[int, int], Tensor]:
        """The sums of gradients, by stage and leaf, or their rows where they are not summed.

        They leave the slots, so that each can go when the caller's gradient is made of it.
        """
        sums: dict[tuple[int, int], dict[int, Any]] = {}
        for run in self.runs:
            for stage, leaf, microbatch, slot in run.program.results.grads:
                sums.setdefault((stage, leaf), {})[microbatch] = run.slots[slot]
            for *_, slot in run.program.results.grads:
                run.slots[slot] = None
        join = self.plan.sink.join
        if join is None:
            return {key: by_microbatch[-1] for key, by_microbatch in sums.items()}
        return {
            key: _whole(self.plan, by_microbatch, join)
            for key, by_microbatch in sorted(sums.items())
        }

    def _by_params(self, weight: Tensor | None) -> Any:
        """The gradients by the parameters: zeros where the loss does not depend on a leaf.

        None stands for a leaf that is not trained or cannot have a gradient, and for one whose
        gradient belongs to ranks of other processes, or of the state, which comes with the
        parameters.
        """
        plan, params = self.plan, self.params
        kinds = iter(self.kinds)
        sums = self._take_sums()
        if params.shared:
            sums = {(0, leaf): value for (_, leaf), value in sums.items()}
        grads: list[Tensor | None] = []
        for stage, leaves in enumerate(params.stages[:1] if params.shared else params.stages):
            for index, leaf in enumerate(leaves):
                kind = next(kinds)
                if kind == GradientKind.ZEROS:
                    grads.append(torch.zeros_like(plan.sink.lifted(leaf, sum(plan.rows))))
                elif kind == GradientKind.SUM and (stage, index) in sums:
                    gradient = divided_(sums.pop((stage, index)), weight)
                    grads.append(gradient.to(leaf.device, leaf.dtype))
                    del gradient
                else:
                    grads.append(None)  # the optimizer may have used it
        if plan.over_meshes:
            reduced = () if plan.data is None else plan.data.dims
            dtensors.add_up_replicated(grads, dtensors.placements_of(params.spec), but=reduced)
        convention, tree = self.definition.convention, pytree.unflatten(params.spec, grads)
        return tree if convention is PLAIN else convention.grads(tree)

    def _by_batch(self, weight: Tensor | None) -> Any:
        """The gradients by the batch, on the rank where it comes in; None for a leaf without.

        A leaf that several stages read gets the sum of their parts; one that is split, its rows in
        order; one that is not, the sum over all microbatches; and one of `fpipe.Microbatches` that
        of its microbatch. Whether a stage reads a leaf may depend on the rows of a microbatch:
        those of one in which it does not have zeros.
        """
        if self.rank not in (None, self.definition.schedule.placement[0]):
            return None
        leaves, spec = pytree.flatten(self.batch)
        dims = pytree.broadcast_prefix("in_dims", self.definition.in_dims, self.batch, "batch")
        apart = pytree.number_of_parts(self.batch)
        places = None if apart is None else pytree.places_of_parts(spec, apart)
        rest = None if apart is None else frozenset(pytree.places_of_rest(spec))
        parts: dict[int, dict[int, Any]] = {}
        for run in self.runs:
            for _, leaf, microbatch, slot in sorted(run.program.results.batch_grads):
                place = leaf if places is None else places[microbatch][leaf]
                of_leaf, grad = parts.setdefault(place, {}), run.slots[slot]
                before = of_leaf.get(microbatch)
                of_leaf[microbatch] = grad if before is None else before + grad
        grads: list[Tensor | None] = []
        for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
            of_leaf = parts.get(index, {})
            if not is_differentiable(leaf):
                grads.append(None)
            elif not of_leaf:
                # On the meta device it is one that no rank reads.
                grads.append(None if leaf.is_meta else torch.zeros_like(leaf))
            else:
                along = dim if rest is None or index in rest else None
                whole = divided_(_whole(self.plan, of_leaf, along), weight)
                # A leaf that only other ranks read may have no data here.
                device = whole.device if leaf.is_meta else leaf.device
                grads.append(whole.to(device, leaf.dtype))
        return self.definition.convention.batch(pytree.unflatten(spec, grads))

    def _merged(self, out_dims: Any, name: str) -> Any:
        """Outputs or aux of all microbatches, merged; None for leaves of other processes."""
        start, spec = self.plan.numbering
        end = start + spec.num_leaves
        columns = columns_of(self.plan, self.runs, start, end)
        return merge(columns, self.plan.shapes[start:end], spec, out_dims, name)


def columns_of(plan: Plan, runs: Sequence[Run], start: int, end: int) -> list[list[Any]]:
    """For each of the numbered values from `start` to `end`, those of all microbatches."""
    columns: list[list[Any]] = [[None] * len(plan.seeds) for _ in range(start, end)]
    for run in runs:
        for microbatch, number, slot in run.program.results.outputs:
            if start <= number < end:
                columns[number - start][microbatch] = run.slots[slot]
    return columns


def _whole(plan: Plan, parts: Mapping[int, Tensor], dim: int | None) -> Tensor:
    """The sum of the parts of microbatches, or their rows in order along `dim`."""
    if dim is None:
        return torch.stack([value for _, value in sorted(parts.items())]).sum(0)
    like = next(iter(parts.values()))

    def zeros(rows: int) -> Tensor:
        shape = list(like.shape)
        shape[dim] = rows
        return like.new_zeros(shape)

    every = enumerate(plan.rows)
    return torch.cat([parts[m] if m in parts else zeros(rows) for m, rows in every], dim)


def divided(value: Tensor, weight: Tensor | None) -> Tensor:
    """Divide by the weight. With several losses, the leading dimensions of both index the loss."""
    return value if weight is None else value / _divisor(value, weight)


def divided_(value: Tensor, weight: Tensor | None) -> Tensor:
    """The same in the memory of `value`, nobody else's, unless its dtype is too narrow."""
    if weight is None:
        return value
    divisor = _divisor(value, weight)
    fits = torch.result_type(value, divisor) == value.dtype
    return value.div_(divisor) if fits else value / divisor


def _divisor(value: Tensor, weight: Tensor) -> Tensor:
    weight = weight.to(value.device, non_blocking=value.is_cuda)
    if not weight.dim():
        return weight
    wide = weight.to(torch.promote_types(value.dtype, torch.float32))
    return wide.reshape(*wide.shape, *(1 for _ in value.shape[wide.dim() :]))
