"""What a finished run comes to, as the pipeline's convention returns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.definition import Definition
from fpipe.execute.controller import Finished
from fpipe.gradients import batch_gradients, collected, gradients
from fpipe.inputs.params import Moved
from fpipe.plan.gradient_kinds import Kind, kinds_of, updates_of
from fpipe.plan.total import divided
from fpipe.results import Step, StepAux, StepState, StepStateAux


@dataclass(frozen=True, eq=False)
class Outcome:
    """A run that is finished, and how to read it.

    Attributes:
        definition: of the pipeline.
        rank: that this process drives, None for all of them.
        done: what ran.
    """

    definition: Definition
    rank: int | None
    done: Finished

    @property
    def loss(self) -> Any:
        """The loss, or losses."""
        assert self.done.total is not None
        return self.definition.convention.loss(self.done.total.mean)

    def take_grads(self) -> Any:
        """The gradients by what was chosen: one, or a tuple. They can be taken once."""
        definition, done = self.definition, self.done
        if definition.sink.everywhere:
            parts = list(collected(done.plan, done.runs).values())
            if not parts:  # nothing that the loss depends on is trained
                assert done.total is not None
                return torch.zeros_like(done.total.mean)
            return divided(definition.convention.grads(parts), self._weight).abs()
        found = tuple(
            self._by_params() if argument == "params" else self._by_batch()
            for argument in definition.wanted
        )
        return definition.asked(found)

    @property
    def state(self) -> Any:
        """The state that the last microbatch has left."""
        done = self.done
        leaves = done.plan.state(done.runs, done.params, done.batch)
        with torch.no_grad():
            state = pytree.unflatten(done.params.spec.children()[1], leaves)
            return self.definition.convention.state(state)

    def aux(self, out_dims: Any) -> Any:
        """What the loss function returned beside the loss, its microbatches merged."""
        aux_dims = self.definition.convention.aux_dims(out_dims)
        return self.done.plan.outputs(self.done.runs, aux_dims, "aux")

    def output(self, out_dims: Any) -> Any:
        """What the last stage returned, its microbatches merged; None where another rank has it."""
        dims = self.definition.convention.out_dims(out_dims)
        output = self.done.plan.outputs(self.done.runs, dims, "output")
        return output if self.rank in (None, self.done.plan.last_rank) else None

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

    @property
    def norm(self) -> Tensor | None:
        """The norm of all gradients, where the plan was to find it."""
        squares = self.done.squares
        return None if squares is None else squares.norm

    def updates(self) -> dict[int, Moved]:
        """What the optimizer has made of leaves of the parameters, by their places."""
        return updates_of(self.done.runs, self.done.params)

    def leaves_gradients(self) -> bool:
        """Whether a leaf has a gradient, be it 0, and the step has not updated it."""
        updated = self.updates()
        kinds = kinds_of(self.done.plan, self.done.runs, self.done.params)
        return any(k != Kind.NONE and place not in updated for place, k in enumerate(kinds))

    def result(self) -> tuple[Any, Any, Any]:
        """The loss, the state and aux; None for what is not declared."""
        definition = self.definition
        aux = self.aux(definition.out_dims) if definition.has_aux else None
        return self.loss, self.state if definition.has_state else None, aux

    @property
    def _weight(self) -> Tensor | None:
        assert self.done.total is not None
        return self.done.total.weight

    def _by_params(self) -> Any:
        params = self.done.params
        flat = gradients(self.done.plan, self.done.runs, params, self._weight)
        return self.definition.convention.grads(pytree.unflatten(params.spec, flat))

    def _by_batch(self) -> Any:
        """They lie where the batch comes in."""
        if self.rank not in (None, self.definition.schedule.placement[0]):
            return None
        done, in_dims = self.done, self.definition.in_dims
        grads = batch_gradients(done.plan, done.runs, done.batch, in_dims, self._weight)
        return self.definition.convention.batch(grads)
