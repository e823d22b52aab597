"""A GPT on replicas of a pipeline, over which its parameters are divided.

    torchrun --standalone --nproc-per-node 4 examples/sharded.py   # two replicas of two stages
    torchrun --standalone --nproc-per-node 2 examples/sharded.py   # two replicas of one stage
    python examples/sharded.py --smoke                             # in this process alone

Each replica reads rows of its own. Each process holds half of the parameters of its stages, and of
the moments of AdamW; the schedule says when a stage is gathered and when its gradients are reduced.
"""

from __future__ import annotations

import argparse
import os
import sys
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fpipe

# Every Python carries its language reference.
TEXT = "\n\n".join(topics[name] for name in sorted(topics))
ALPHABET = sorted(set(TEXT))


class GPT(nn.Module):
    """Characters in, a logit for each next character out."""

    def __init__(self, width: int, blocks: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                4,
                4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.embed(tokens) + self.place.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.norm(x) @ self.embed.weight.T


def surprise(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The loss: mean surprise at the next character, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def join() -> DeviceMesh:
    """The processes of torchrun in two dimensions, of which the first one talks; or this one."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_rank() != 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the end)
    world = dist.get_world_size()
    replicas = 2 if world > 1 else 1
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("dp", "pp"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a few steps: takes seconds")
    smoke = parser.parse_args().smoke
    width, length, rows, steps = (32, 32, 8, 10) if smoke else (64, 64, 16, 200)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = join()
    replicas, ranks = mesh["dp"].size(), mesh["pp"].size()

    model = GPT(width, 2 * ranks, length)
    schedule = fpipe.schedules.interleaved_1f1b(ranks=ranks, microbatches=4, stages_per_rank=2)
    pipe = fpipe.from_module(
        model,
        # One stage of a rank is gathered at a time; gradients are reduced twice in a step.
        schedule=schedule.sharded(gather=1, reduce=2),
        cuts=[f"blocks.{i}" for i in range(2 * ranks - 1)],
        loss=surprise,
        mesh=mesh,
        data="dp",
        compile=False,
    )
    numbers = {character: i for i, character in enumerate(ALPHABET)}
    text = torch.tensor([numbers[character] for character in TEXT])
    # The ranks of a replica draw the same rows, and replicas different ones.
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))

    def next_batch() -> dict[str, Tensor]:
        starts = torch.randint(len(text) - length, (rows // replicas, 1), generator=generator)
        windows = text[starts + torch.arange(length + 1)]
        return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}

    batch = next_batch()
    held = pipe.place(dict(model.named_parameters()), batch)
    params: Any = pipe.shard({name: value.detach() for name, value in held.items()})
    trainer = fpipe.train(pipe, torch.optim.AdamW, lr=3e-3, max_norm=1.0)
    state = trainer.init(params)
    part = params["embed.weight"].to_local()
    print(f"{replicas} replicas of {2 * ranks} stages on {ranks} ranks")
    print(f"embed.weight here: {tuple(part.shape)} of {tuple(params['embed.weight'].shape)}")
    print(f"at most {pipe.programs(params, batch)[0].peak_bytes:,} bytes beside it in a step\n")

    first = loss = torch.tensor(0.0)
    for step in range(1, steps + 1):
        loss, params, state, norm = trainer.step(params, state, batch)
        batch = next_batch()
        first = loss if step == 1 else first
        if step % max(1, steps // 5) == 0:
            print(f"step {step:4}/{steps}   loss {loss.item():.3f}   norm {norm.item():.2f}")
    assert loss < first, "it learns"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
