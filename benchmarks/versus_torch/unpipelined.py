"""The same model without a pipeline, in one process: what a speed-up is counted from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

import fpipe
from benchmarks.contest import Case, Outcome, Problem, fpipe_pipeline, trainable

# How the step is taken. "whole" is one pass over the batch; "parts" goes through the microbatches
# one after another, which needs less memory and may fit caches better.
WAYS: Final = ("eager, whole", "eager, parts", "compiled, whole", "compiled, parts")
# The kernels of fpipe without its pipeline: one stage on one rank.
OWN_WAYS: Final = ("fpipe, whole", "fpipe, parts")


def unpipelined(
    problem: Problem, way: str, microbatches: int, threads: int = 1, compile: bool = True
) -> Case:
    """A step in one process.

    Args:
        problem: what is computed.
        way: of `WAYS` or of `OWN_WAYS`.
        microbatches: how many "parts" are.
        threads: of the step alone; one afterwards.
        compile: whether fpipe compiles.
    """
    how, parts = way.split(", ")
    pieces = 1 if parts == "whole" else microbatches
    case = _fpipe(problem, pieces, compile) if how == "fpipe" else _torch(problem, how, pieces)

    def run() -> object:
        torch.set_num_threads(threads)
        result = case.run()
        torch.set_num_threads(1)
        return result

    return case._replace(run=run)


def _fpipe(problem: Problem, pieces: int, compile: bool) -> Case:
    """All stages as one, on one rank."""

    def whole(params: Any, x: Any) -> Tensor:
        for function, own in zip(problem.functions, params, strict=True):
            x = function(own, x)
        return x

    one = replace(problem, functions=[whole], params=[problem.params])
    schedule = fpipe.schedules.one_f_one_b(ranks=1, microbatches=pieces)
    return fpipe_pipeline(one, schedule, compile, alone=True)


def _torch(problem: Problem, how: str, pieces: int) -> Case:
    """Plain autograd."""
    params, leaves = trainable(problem.params)
    inputs, targets = problem.inputs.chunk(pieces), problem.targets.chunk(pieces)

    def loss_of(params: Any, x: Any, target: Tensor) -> Tensor:
        for function, own in zip(problem.functions, params, strict=True):
            x = function(own, x)
        return problem.loss(x, target) / pieces

    # A function of its own for each case, so that none runs what was compiled for another.
    call: Callable[..., Tensor] = torch.compile(loss_of) if how == "compiled" else loss_of

    def run() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        losses = []
        for x, target in zip(inputs, targets, strict=True):
            loss = call(params, x, target)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def read(loss: Tensor) -> Outcome:
        return Outcome(loss, [leaf.grad for leaf in leaves if leaf.grad is not None])

    return Case(run, read)
