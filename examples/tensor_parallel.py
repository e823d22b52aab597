"""A GPT whose layers are divided over processes, and which is pipelined beside that.

    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py   # two stages by two
    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py   # one stage by two
    python examples/tensor_parallel.py --smoke                             # in this process alone

The module knows nothing of either. `parallelize_module` of torch makes its parameters DTensors over
the mesh dimension "tp", and fpipe pipelines what comes of it over the dimension "pp".
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import fpipe

# Every Python carries its language reference.
TEXT = "\n\n".join(topics[name] for name in sorted(topics))
ALPHABET = sorted(set(TEXT))
VOCABULARY = len(ALPHABET) + len(ALPHABET) % 2  # two processes have as many columns
HEADS = 4


class Block(nn.Module):
    """Attention and a perceptron. A process computes some of the heads, and some hidden units."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.ModuleDict({n: nn.Linear(width, width) for n in "qkvo"})
        self.size = width // HEADS
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.gather1, self.gather2 = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.gather1(self.norm1(x))
        q, k, v = (
            self.attention[n](h).unflatten(-1, (-1, self.size)).transpose(1, 2) for n in "qkv"
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention["o"](y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.gather2(self.norm2(x)))
        return out


class GPT(nn.Module):
    """Characters in, a logit for each next character out."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def divide(model: GPT, mesh: DeviceMesh) -> None:
    """Heads, hidden units and logits are divided; between them, positions are."""
    positions, whole = Shard(1), Replicate()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=positions),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=positions, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for i in range(len(model.blocks)):
        block = f"blocks.{i}."
        for n in "12":
            plan[block + f"norm{n}"] = SequenceParallel()
            plan[block + f"gather{n}"] = PrepareModuleInput(
                input_layouts=positions, desired_input_layouts=whole, use_local_output=True
            )
        plan |= {block + f"attention.{n}": ColwiseParallel() for n in "qkv"}
        plan[block + "attention.o"] = RowwiseParallel(output_layouts=positions)
        plan[block + "mlp.0"] = ColwiseParallel()
        plan[block + "mlp.2"] = RowwiseParallel(output_layouts=positions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mesh is part of another
        parallelize_module(model, mesh, plan)


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
    parts = 2 if world > 1 else 1
    return init_device_mesh("cpu", (world // parts, parts), mesh_dim_names=("pp", "tp"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a few steps: takes seconds")
    smoke = parser.parse_args().smoke
    width, length, rows, steps = (32, 32, 8, 10) if smoke else (64, 64, 16, 200)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # every process makes the same module, and keeps its part
    mesh = join()
    ranks = mesh["pp"].size()

    model = GPT(width, blocks=2 * ranks)
    divide(model, mesh["tp"])
    pipe = fpipe.from_module(
        model,
        schedule=fpipe.schedules.zb_h1(ranks=ranks, microbatches=4),
        cuts=[f"blocks.{2 * i - 1}" for i in range(1, ranks)],
        loss=surprise,
        mesh=mesh,
        compile=False,
    )
    trainer = fpipe.train(pipe, torch.optim.AdamW, lr=3e-3, max_norm=1.0)
    params: Any = {name: value.detach() for name, value in model.named_parameters()}
    state = trainer.init(params)
    print(f"{ranks} stages, each divided over {mesh['tp'].size()} processes")
    print(f"head.weight here: {tuple(params['head.weight'].to_local().shape)} of ", end="")
    print(f"{tuple(params['head.weight'].shape)}\n")

    numbers = {character: i for i, character in enumerate(ALPHABET)}
    text = torch.tensor([numbers[character] for character in TEXT])
    generator = torch.Generator().manual_seed(0)  # every process draws the same rows
    first = loss = torch.tensor(0.0)
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - length, (rows, 1), generator=generator)
        windows = text[starts + torch.arange(length + 1)]
        batch = {"tokens": windows[:, :-1], "targets": windows[:, 1:]}
        with loss_parallel():  # logits stay divided
            loss, params, state, norm = trainer.step(params, state, batch)
        first = loss if step == 1 else first
        if step % max(1, steps // 5) == 0:
            print(f"step {step:4}/{steps}   loss {loss.item():.3f}   norm {norm.item():.2f}")
    assert loss < first, "it learns"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
