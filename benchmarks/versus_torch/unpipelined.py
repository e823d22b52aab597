"""The same model without a pipeline, in one process: what a speed-up is counted from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.contest import Case, Outcome, Problem, trainable

# How the step is taken. "whole" is one pass over the batch; "parts" goes through the microbatches
# one after another, which needs less memory and may fit caches better.
WAYS: Final = ("eager, whole", "eager, parts", "compiled, whole", "compiled, parts")


def unpipelined(problem: Problem, way: str, microbatches: int, threads: int = 1) -> Case:
    """A step by plain autograd."""
    how, parts = way.split(", ")
    pieces = 1 if parts == "whole" else microbatches
    params, leaves = trainable(problem.params)
    inputs, targets = problem.inputs.chunk(pieces), problem.targets.chunk(pieces)

    def loss_of(params: Any, x: Any, target: Tensor) -> Tensor:
        for function, own in zip(problem.functions, params, strict=True):
            x = function(own, x)
        return problem.loss(x, target) / pieces

    # A function of its own for each case, so that none runs what was compiled for another.
    call: Callable[..., Tensor] = torch.compile(loss_of) if how == "compiled" else loss_of

    def run() -> Tensor:
        torch.set_num_threads(threads)
        for leaf in leaves:
            leaf.grad = None
        losses = []
        for x, target in zip(inputs, targets, strict=True):
            loss = call(params, x, target)
            loss.backward()
            losses.append(loss.detach())
        torch.set_num_threads(1)
        return torch.stack(losses).sum()

    def read(loss: Tensor) -> Outcome:
        return Outcome(loss, [leaf.grad for leaf in leaves if leaf.grad is not None])

    return Case(run, read)
