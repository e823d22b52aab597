"""A training run that is stopped and goes on: under another schedule, on more processes or fewer.

    pip install .                             # in a checkout; once it is released, fpipe-torch
    python examples/resume.py                 # trains, stops, goes on, compares; about a minute
    python examples/resume.py --smoke         # seconds: a tiny model, a few steps, uncompiled

    torchrun --standalone --nproc-per-node 2 examples/resume.py --folder run --steps 200
    python examples/resume.py --folder run --steps 400

With a folder, a run goes on from what was saved there last, whoever saved it. All that a step
depends on beside parameters and moments is a function of its number: what it reads, what dropout
draws, the learning rate. Each process makes, trains, saves and loads what its stages read, and
nothing else; the module itself never has numbers.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fpipe

parser = argparse.ArgumentParser(description="train, save, and go on")
parser.add_argument("--folder", type=Path, help="saves of one model; without, a self-check")
parser.add_argument("--steps", type=int, help="go on up to this step")
parser.add_argument("--smoke", action="store_true")
options = parser.parse_args()
WIDTH, LAYERS, LENGTH, ROWS = (8, 2, 16, 8) if options.smoke else (64, 6, 64, 32)
STEPS = options.steps or (4 if options.smoke else 60)
EVERY = 2 if options.smoke else 20
# Each microbatch draws from its own key, so their number is part of the run; the ranks are not.
MICROBATCHES = 8

# Under torchrun a process for each rank; otherwise one process drives two ranks. On CUDA it is
# "cpu:gloo,cuda:nccl", after torch.cuda.set_device, and parameters and batches lie on the device.
GROUP = None
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    GROUP = dist.group.WORLD
    if options.folder is None:
        parser.error("processes need a --folder in which all of them save")
RANKS = 2 if GROUP is None else GROUP.size()
FIRST = GROUP is None or GROUP.rank() == 0

# Every Python carries its language reference, for `help("if")`. A token is a byte.
TEXT = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))


class Block(nn.Module):
    """A transformer block with dropout."""

    def __init__(self):
        super().__init__()
        self.norm, self.read = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.write, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        """From and to shape ``(rows, length, WIDTH)``."""
        q, k, v = (
            part.unflatten(2, (4, WIDTH // 4)).transpose(1, 2)
            for part in self.read(self.norm(x)).chunk(3, 2)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.write(heads.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(x))


class Model(nn.Module):
    """Tells each next byte."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        """From shape ``(rows, length)`` to ``(rows, length, 256)``."""
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def init_fn(key, name, like):
    """What a new run begins with, of the key and of the parameter's name alone."""
    if like.dim() == 1:
        return torch.zeros(like.shape) if name.endswith("bias") else torch.ones(like.shape)
    return 0.3 * like.shape[1] ** -0.5 * fpipe.random.normal(key, like.shape)


def draw(step):
    """The batch of a step."""
    chance = torch.Generator().manual_seed(step)
    starts = torch.randint(len(TEXT) - LENGTH - 1, (ROWS, 1), generator=chance)
    rows = TEXT[starts + torch.arange(LENGTH + 1)]
    return {"tokens": rows[:, :-1], "next": rows[:, 1:]}


def mean_loss(output, batch):
    """The mean over all bytes of a microbatch, which are as many in each."""
    return F.cross_entropy(output.flatten(0, 1), batch["next"].flatten())


def train(folder, pipe, steps):
    """Train from the last save on, and return the parameters of this process."""
    trainer = fpipe.train(
        pipe, torch.optim.AdamW, betas=(0.9, 0.98), weight_decay=0.01, max_norm=1.0
    )
    whole = sorted(folder.glob("step-" + 6 * "[0-9]"))  # one is renamed so when it is whole
    if whole:
        params, state, first, _ = trainer.load(whole[-1], draw(0))
    else:
        params = pipe.init(init_fn, fpipe.random.key(0), draw(0))
        state, first = trainer.init(params), 0
    if FIRST:
        begun = f"goes on after step {first}" if first else "begins"
        print(f"{pipe.schedule.name} on {RANKS} ranks " + (begun if first < steps else "is done"))
    start, pending = time.perf_counter(), None
    for step in range(first + 1, steps + 1):
        key = fpipe.random.fold_in(fpipe.random.key(1), step)
        rate = 3e-3 * min(1.0, step / 20)
        loss, params, state, norm = trainer.step(params, state, draw(step), key=key, lr=rate)
        if FIRST and (step % EVERY == 0 or step == steps):
            took = time.perf_counter() - start
            print(f"  step {step:4}   loss {loss:.3f}   norm {norm:.2f}   {took:5.1f} s")
        if step % EVERY == 0 or step == steps:  # it is written while the next steps run
            place = folder / f"step-{step:06}"
            pending = trainer.save_async(place, params, state, step=step, keep=3)
    if pending is not None:
        pending.wait()
    return pipe.own(params)


torch.set_num_threads(1)
with torch.device("meta"):
    module = Model()
pipe = fpipe.from_module(
    module,
    schedule=fpipe.schedules.zbv(ranks=RANKS, microbatches=MICROBATCHES),
    stages=2 * RANKS,
    example=draw(0),
    loss=mean_loss,
    has_key=True,
    compile=not options.smoke,
    group=GROUP,
)
if options.folder is not None:
    train(options.folder, pipe, STEPS)
else:
    looped = fpipe.schedules.interleaved_1f1b(
        ranks=RANKS, microbatches=MICROBATCHES, stages_per_rank=2
    )
    with tempfile.TemporaryDirectory() as place:
        train(Path(place) / "stopped", pipe, STEPS // 2)
        again = train(Path(place) / "stopped", pipe.with_schedule(looped), STEPS)
        whole = train(Path(place) / "whole", pipe, STEPS)
    torch.testing.assert_close(again, whole, rtol=1e-3, atol=1e-4)
    print("stopped and gone on or not, the parameters agree")

if GROUP is not None:
    dist.destroy_process_group()
