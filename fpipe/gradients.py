"""What the sinks of a finished run hold, as the gradients of the caller's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.dtensors import add_up_replicated, placements_of
from fpipe.inputs.params import Parameters
from fpipe.inputs.signature import is_differentiable
from fpipe.plan.gradient_kinds import Kind, kinds_of
from fpipe.plan.plan import Plan
from fpipe.plan.total import divided_
from fpipe.program.interpreter import Run


def collected(plan: Plan, runs: Sequence[Run]) -> dict[tuple[int, int], Tensor]:
    """What the sinks hold, by stage and leaf; those that are not summed are concatenated.

    What reads a leaf may depend on the shape of a microbatch: one that does not has zeros.

    It is taken out of the slots, so that each can go when the caller's gradient is made of it.
    """
    parts: dict[tuple[int, int], dict[int, Any]] = {}
    for run in runs:
        for stage, leaf, microbatch, slot in run.program.results.grads:
            parts.setdefault((stage, leaf), {})[microbatch] = run.slots[slot]
        for *_, slot in run.program.results.grads:
            run.slots[slot] = None
    if plan.sink.join is None:
        return {key: part[-1] for key, part in parts.items()}
    return {key: _whole(plan, part, plan.sink.join) for key, part in sorted(parts.items())}


def gradients(
    plan: Plan, runs: Sequence[Run], params: Parameters, weight: Tensor | None
) -> list[Tensor | None]:
    """The gradient of each leaf of `params`, flat: zeros where the loss does not depend on it.

    They are divided by `weight`, if there is one.

    None stands for a leaf that is not trained or cannot have a gradient, and for one whose gradient
    belongs to ranks of other processes, or of the state, which comes with the parameters.
    """
    kinds = iter(kinds_of(plan, runs, params))
    found = {
        (0 if params.shared else stage, leaf): value
        for (stage, leaf), value in collected(plan, runs).items()
    }
    grads: list[Tensor | None] = []
    for stage, leaves in enumerate(params.stages[:1] if params.shared else params.stages):
        for index, leaf in enumerate(leaves):
            kind = next(kinds)
            if kind == Kind.SUM and (stage, index) not in found:
                grads.append(None)  # the optimizer has used it
            elif kind == Kind.SUM:
                own = found.pop((stage, index))
                grads.append(divided_(own, weight).to(leaf.device, leaf.dtype))
                del own
            elif kind == Kind.ZEROS:
                grads.append(torch.zeros_like(plan.sink.lifted(leaf, sum(plan.rows))))
            else:
                grads.append(None)
    reduced = () if plan.data is None else plan.data.dims
    add_up_replicated(grads, placements_of(params.spec), but=reduced)
    return grads


def batch_gradients(
    plan: Plan, runs: Sequence[Run], batch: Any, in_dims: Any, weight: Tensor | None
) -> Any:
    """The gradient of each leaf of the batch, in its structure; None for one that cannot have one.

    They are divided by `weight`, if there is one.

    A leaf that several stages read gets the sum of their parts; one that is split, its rows in
    order; one that is not, the sum over all microbatches; and one of `fpipe.Microbatches` that of
    its microbatch. What reads a leaf may depend on the rows of a microbatch: those of one that does
    not have zeros.
    """
    leaves, spec = pytree.flatten(batch)
    dims = pytree.broadcast_prefix("in_dims", in_dims, batch, "batch")
    apart = pytree.number_of_parts(batch)
    places = None if apart is None else pytree.places_of_parts(spec, apart)
    rest = None if apart is None else frozenset(pytree.places_of_rest(spec))
    parts: dict[int, dict[int, Any]] = {}
    for run in runs:
        for _, leaf, microbatch, slot in sorted(run.program.results.batch_grads):
            own = parts.setdefault(leaf if places is None else places[microbatch][leaf], {})
            part = run.slots[slot]
            own[microbatch] = own[microbatch] + part if microbatch in own else part
    found: list[Tensor | None] = []
    for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        own = parts.get(index, {})
        if not is_differentiable(leaf):
            found.append(None)
        elif not own:
            # On the meta device it is one that no rank reads.
            found.append(None if leaf.is_meta else torch.zeros_like(leaf))
        else:
            along = dim if rest is None or index in rest else None
            whole = divided_(_whole(plan, own, along), weight)
            # Of a leaf that other ranks alone read, this one may have no data.
            device = whole.device if leaf.is_meta else leaf.device
            found.append(whole.to(device, leaf.dtype))
    return pytree.unflatten(spec, found)


def _whole(plan: Plan, parts: Mapping[int, Tensor], dim: int | None) -> Tensor:
    """The sum of the parts of microbatches, or their rows in order along `dim`."""
    if dim is None:
        return torch.stack([part for _, part in sorted(parts.items())]).sum(0)
    like = next(iter(parts.values()))

    def zeros(rows: int) -> Tensor:
        shape = list(like.shape)
        shape[dim] = rows
        return like.new_zeros(shape)

    every = enumerate(plan.rows)
    return torch.cat([parts[m] if m in parts else zeros(rows) for m, rows in every], dim)
