"""grad, vjp: gradients by other arguments, and gradients of outputs in place of a loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fpipe.errors import StageError
from fpipe.functional.pullback import pullback
from fpipe.spec.definition import ARGUMENTS
from fpipe.transforms.wrapped_pipelines import P, definition_of


def grad(pipe: P, argnums: Any = "params") -> P:
    """A pipeline whose ``step`` differentiates by `argnums` in place of the parameters.

    It takes a pipeline, not a function as `torch.func.grad` does, and names, not numbers. Gradients
    by the batch serve saliency maps and adversarial training. They flow through every stage that
    reads a leaf, and come together where the batch comes in.

    Args:
        pipe: a pipeline, such as `fpipe.pipeline` or `fpipe.vmap` makes.
        argnums: ``"params"``, ``"batch"``, or a tuple of both in any order. An argument that is not
            named costs nothing.

    Returns:
        A pipeline of the same kind whose ``step`` returns ``(loss, grads)``: one gradient for a
        name, a tuple of gradients for a tuple. The gradient by the batch has its structure, shapes
        and dtypes, with None for leaves that are no floating-point or complex numbers. The rows of
        a leaf that is split are the gradients of the (weighted) loss of the batch by those rows; a
        leaf that is not split gets the sum over all microbatches; a leaf that the members of an
        ensemble share gets the sum over the members. Over a process group it is returned on the
        rank of the first stage, and None on the others.

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
    definition = definition_of("grad", pipe)
    names = argnums if isinstance(argnums, tuple) else (argnums,)
    if not names or any(name not in ARGUMENTS or names.count(name) > 1 for name in names):
        raise StageError(
            f"argnums={argnums!r:.60} must be 'params', 'batch' or a tuple of both, such as "
            "('params', 'batch'): names, for a state may come between the two"
        )
    if definition.convention.vectors or definition.sink.join is not None:
        raise StageError(
            "fpipe.grad of a pipeline that takes a vector or goes by rows is not defined: choose "
            "argnums for fpipe.pipeline's own pipeline, or for fpipe.vmap of it; for second "
            "derivatives by the batch first, as in fpipe.hvp(fpipe.grad(pipe, argnums))"
        )
    if "batch" in names and definition.loss_shape and definition.reduction == "weighted":
        raise StageError(
            'fpipe.grad by the batch of an ensemble with reduction="weighted" is not defined: '
            "members who share a leaf weigh its gradients differently; torch.func.vmap of "
            "torch.func.grad of pipe.value gives each member its own"
        )
    return type(pipe)(replace(definition, argnums=argnums))


def vjp(pipe: P) -> P:
    """A pipeline whose ``step`` takes a cotangent of the outputs of `pipe`, in place of a loss.

    It is the backward of a loss over the whole batch that is no mean over microbatches, such as the
    loss of contrastive learning: ``pipe.forward`` gives the outputs of all rows, the caller the
    gradient of the loss by them, and ``vjp(pipe).step`` the gradients by the parameters. The
    forward runs twice, so activations are held for a microbatch at a time (Gao et al., 2021,
    "Scaling deep contrastive learning batch size under memory limited setup"). In one process
    ``pipe.forward`` under autograd does all this by itself.

    Args:
        pipe: a pipeline, such as `fpipe.pipeline` or `fpipe.grad` makes. A pipeline of one function
            must declare ``has_aux``: its outputs are aux.

    Returns:
        A pipeline of the same kind, whose ``step(params, batch, cotangent)`` returns
        ``(product, grads)``: the sum over all elements of cotangent times output (of complex ones
        the real part of the product with the conjugate), a scalar in float32 at least, and its
        gradients. The cotangent has the structure, shapes and dtypes of the output, with None for
        leaves that are to have none, such as integers. With a state, which follows the parameters,
        the new state is returned. Over a process group every rank that passes the batch passes a
        cotangent of these shapes; only the ranks whose stages make outputs read its numbers.

    Raises:
        StageError: `pipe` is no pipeline, has no outputs, takes a vector already, is an ensemble,
            or goes by rows.
        BatchError: when it is called, the cotangent does not fit.

    Example:
        >>> import torch, fpipe
        >>> schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
        >>> stages = [lambda w, x: x * w, lambda w, x: x * w]
        >>> pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, compile=False)
        >>> params, batch = [torch.tensor(2.0), torch.tensor(3.0)], torch.tensor([1.0, 2.0])
        >>> pipe.forward(params, batch)
        tensor([ 6., 12.])
        >>> product, grads = fpipe.vjp(pipe).step(params, batch, torch.tensor([1.0, -1.0]))
        >>> product.item(), [g.item() for g in grads]
        (-6.0, [-3.0, -2.0])
    """
    definition = definition_of("vjp", pipe)
    return type(pipe)(pullback(definition, definition.out_dims))
