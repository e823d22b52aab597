"""Steps without end, until one fails: the other end of a test that cuts the cable."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

import fpipe
from tests.models import mlp


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = mlp(2, 4)
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(
        model.stages, model.loss, schedule, compile=False, group=dist.group.WORLD, timeout=4.0
    )
    pipe.step(model.params, model.batch)
    print("first step", flush=True)
    try:
        while True:
            pipe.step(model.params, model.batch)
            time.sleep(0.01)
    except fpipe.PipelineError as error:
        print(f"PipelineError: {error}", flush=True)
    os._exit(0)  # a tidy end would wait for the other host


if __name__ == "__main__":
    main()
