"""Experts that lie on several processes: stages with collectives of their own.

    torchrun --standalone --nproc-per-node 4 examples/experts.py   # two stages, experts on two
    torchrun --standalone --nproc-per-node 2 examples/experts.py   # one stage, experts on two
    python examples/experts.py --smoke                             # in this process alone

Each layer has as many experts as the mesh dimension "ep" has processes, one on each. A process has
a part of the rows, and sends each token to the process of its expert, by one all-to-all, and back
by another. So a stage communicates in its forward and in its backward, and says both itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fpipe

WIDTH = 16


class Exchange(torch.autograd.Function):
    """The n-th part of the rows goes to the n-th process; so do gradients, back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = collectives.all_to_all_single(x.contiguous(), None, None, group)
        return collectives.wait_tensor(received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        received = collectives.all_to_all_single(grad.contiguous(), None, None, ctx.group)
        return collectives.wait_tensor(received), None


def layer(params: dict[str, Any], x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Every expert sees as many tokens of each process: those with the highest scores for it.

    Args:
        params: ``router``, of shape (width, experts); ``up`` and ``down``, DTensors with the expert
            along dimension 0, of which this process has its own.
        x: tokens of this process, of shape (tokens, width).
        mesh: of the processes that have experts.
    """
    experts, group = mesh.size(), mesh.get_group()
    scores = torch.softmax(x @ params["router"], dim=-1)
    each = len(x) // experts
    weights, chosen = scores.topk(each, dim=0)  # experts choose their tokens: no expert idles
    sent = x[chosen.T.flatten()]  # (experts * each, width), expert after expert
    tokens = Exchange.apply(sent, group)
    up, down = params["up"].to_local()[0], params["down"].to_local()[0]
    answers = Exchange.apply(torch.relu(tokens @ up) @ down, group)
    weighted = answers * weights.T.flatten()[:, None]
    return x + torch.zeros_like(x).index_add(0, chosen.T.flatten(), weighted)


def join() -> DeviceMesh:
    """The processes of torchrun in two dimensions, of which the first one talks; or this one."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_rank() != 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the end)
    world = dist.get_world_size()
    parts = 2 if world > 1 else 1
    return init_device_mesh("cpu", (world // parts, parts), mesh_dim_names=("pp", "ep"))


def make(mesh: DeviceMesh, generator: torch.Generator) -> dict[str, Any]:
    """Parameters of a layer: all experts are drawn, and each process keeps its own."""
    place, experts = mesh.get_local_rank(), mesh.size()

    def expert(*shape: int) -> DTensor:
        whole = torch.randn(experts, *shape, generator=generator) / shape[0] ** 0.5
        return DTensor.from_local(whole[place : place + 1], mesh, [Shard(0)], run_check=False)

    router = torch.randn(WIDTH, experts, generator=generator) / 4
    return {"router": router, "up": expert(WIDTH, 64), "down": expert(64, WIDTH)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a few steps")
    steps = 20 if parser.parse_args().smoke else 200
    torch.set_num_threads(1)
    mesh = join()
    ranks, experts = mesh["pp"].size(), mesh["ep"]
    schedule = fpipe.schedules.zb_h1(ranks=ranks, microbatches=4)

    def stage(params: Any, x: Any) -> Tensor:
        return layer(params, x["x"] if isinstance(x, dict) else x, experts)

    def loss(y: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (y - batch["y"]).square().mean()

    pipe = fpipe.pipeline([stage] * ranks, loss, schedule, mesh=mesh, compile=False)
    generator = torch.Generator().manual_seed(0)
    params = pipe.local([make(experts, generator) for _ in range(ranks)])
    # The router is equal on all processes of a stage, which see other rows: gradients are averaged.
    rows = torch.Generator().manual_seed(experts.get_local_rank())
    rotation = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0]
    losses = []
    for step in range(steps):
        x = torch.randn(64, WIDTH, generator=rows)
        value, grads = pipe.step(params, {"x": x, "y": torch.relu(x) @ rotation})
        for part, grad in zip(params, grads, strict=True):
            if part is None:
                continue
            dist.all_reduce(grad["router"], group=experts.get_group())
            for name in part:
                part[name] = part[name] - 0.5 / experts.size() * grad[name]
        dist.all_reduce(value, group=experts.get_group())
        losses.append(value.item() / experts.size())
        if (step + 1) % max(1, steps // 5) == 0:
            print(f"step {step + 1:3}/{steps}   loss {losses[-1]:.3f}")
    assert losses[-1] < losses[0], "it learns"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
