"""Steps without end, until one fails: the other end of a test that cuts the cable."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

import fpipe
from fpipe import pytree
from tests.models import mlp

RANKS = 2


def pipeline_of(group: Any) -> fpipe.Pipeline:
    """Two stages, one on each of two processes, or both in one."""
    model = mlp(RANKS, 4)
    schedule = fpipe.schedules.one_f_one_b(ranks=RANKS, microbatches=2)
    return fpipe.pipeline(
        model.stages, model.loss, schedule, compile=False, group=group, timeout=4.0
    )


def step_of(pipe: fpipe.Pipeline) -> fpipe.Step:
    """A step on the same numbers everywhere."""
    model = mlp(RANKS, 4)
    return pipe.step(model.params, model.batch)


def lines_of(step: fpipe.Step) -> list[str]:
    """For each rank the loss and all gradients of its stage."""
    numbers = [
        [value for leaf in pytree.flatten(own)[0] for value in leaf.flatten().tolist()]
        for own in step.grads
    ]
    return [f"first step: {step.loss.item()} {own}" for own in numbers]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pipe = pipeline_of(dist.group.WORLD)
    print(lines_of(step_of(pipe))[dist.get_rank()], flush=True)
    try:
        while True:
            step_of(pipe)
            time.sleep(0.01)
    except fpipe.PipelineError as error:
        print(f"PipelineError: {error}", flush=True)
    os._exit(0)  # a tidy end would wait for the other host


if __name__ == "__main__":
    main()
