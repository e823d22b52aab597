"""grad: the choice of what gradients are taken by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fpipe.definition import ARGUMENTS
from fpipe.errors import StageError
from fpipe.functional.stagewise import P, check_pipeline


def grad(pipe: P, argnums: Any = "params") -> P:
    """A pipeline whose ``step`` differentiates by what `argnums` names, in place of the parameters.

    It takes a pipeline, not a function as `torch.func.grad` does, and names, not numbers. Gradients
    by the batch serve saliency and adversarial training. They flow through every stage
    that reads a leaf, and come together where the batch comes in.

    Args:
        pipe: a pipeline, such as `fpipe.pipeline` or `fpipe.vmap` makes.
        argnums: ``"params"``, ``"batch"``, or a tuple of both in any order. What is not named costs
            nothing.

    Returns:
        A pipeline of the same kind whose ``step`` returns ``(loss, grads)``: one gradient for a
        name, a tuple of them for a tuple. That of the batch has its structure, with None for leaves
        that are no floating-point or complex numbers; the rows of a leaf that is split are the
        gradients of the (weighted) loss of the batch by those rows, and a leaf that is not split
        gets the sum over all microbatches. In an ensemble, a leaf that members share gets the sum
        over the members. Over a process group it is returned on the rank of the first stage, and
        None on the others.

    Raises:
        StageError: `pipe` is no pipeline, `argnums` names anything else, or the pipeline takes a
            vector, goes by rows, or is an ensemble of weighted losses.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
        >>> stages = [lambda w, x: x * w, lambda w, x: x * w]
        >>> pipe = fpipe.pipeline(stages, lambda y, _: y.sum(), schedule, reduction="sum",
        ...                       compile=False)
        >>> params, batch = [torch.tensor(2.0), torch.tensor(3.0)], torch.ones(3)
        >>> fpipe.grad(pipe, "batch").step(params, batch).grads
        tensor([6., 6., 6.])
    """
    check_pipeline("grad", pipe)
    chosen = argnums if isinstance(argnums, tuple) else (argnums,)
    if not chosen or any(name not in ARGUMENTS or chosen.count(name) > 1 for name in chosen):
        raise StageError(
            f"argnums={argnums!r:.60} must be 'params', 'batch' or a tuple of both, such as "
            "('params', 'batch'): names, for a state may come between the two"
        )
    definition = pipe.definition
    if definition.convention.vectors or definition.sink.join is not None:
        raise StageError(
            "fpipe.grad of a pipeline that takes a vector or goes by rows is not defined: choose "
            "argnums for fpipe.pipeline's own pipeline, or for fpipe.vmap of it; for second "
            "derivatives by the batch first, as in fpipe.hvp(fpipe.grad(pipe, argnums))"
        )
    if "batch" in chosen and definition.loss_shape and definition.reduction == "weighted":
        raise StageError(
            'fpipe.grad by the batch of an ensemble with reduction="weighted" is not defined: '
            "members who share a leaf weigh its gradients differently; torch.func.vmap of "
            "torch.func.grad of pipe.value gives each member its own"
        )
    return type(pipe)(replace(definition, argnums=argnums))
