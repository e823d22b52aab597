"""A small GPT learns English from Python's own manual, through a zero-bubble pipeline.

    python examples/gpt.py             # under three minutes on two cores
    python examples/gpt.py --smoke     # seconds: a tiny model, a few steps, nothing compiled
    torchrun --standalone --nproc-per-node 2 examples/gpt.py    # a process for each rank

Four stages lie on two ranks in the shape of a V, and Inductor compiles each of them. Without
torchrun all of it runs in this one process: no launcher, no process group. Read it from the top; a
pipeline needs nothing but functions.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fpipe

# ── The text ────────────────────────────────────────────────────────────────────────────────────
# Every Python carries its language reference, for `help("if")`. Topics quote one another, so each
# paragraph is kept once: what is held out for the test must not be read in training.

MANUAL = "\n\n".join(topics[name] for name in sorted(topics))
TEXT = "\n\n".join(dict.fromkeys(MANUAL.split("\n\n")))
ALPHABET = sorted(set(TEXT))

Batch = dict[str, Tensor]


def encode(text: str) -> Tensor:
    """Turn characters into numbers."""
    number = {character: i for i, character in enumerate(ALPHABET)}
    return torch.tensor([number[character] for character in text])


def windows(text: Tensor, starts: Tensor, length: int) -> Batch:
    """Cut one row of `length` characters at each start; the targets are one character further."""
    rows = text[starts[:, None] + torch.arange(length + 1)]
    return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}


def unigram_entropy(text: Tensor) -> float:
    """Nats per character, for someone who knows how frequent each character is and no more."""
    frequency = text.bincount() / len(text)
    return -torch.special.xlogy(frequency, frequency).sum().item()


# ── The model ───────────────────────────────────────────────────────────────────────────────────
# Parameters are dictionaries of tensors; the model is functions of them.

HEADS = 4

Params = dict[str, Any]


def rotate(x: Tensor) -> Tensor:
    """Turn each pair of numbers by an angle that grows with the position (rotary embedding)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    frequency = 1000 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(length, device=x.device)[:, None] * frequency
    a, b = x.split(half, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def attention(params: Params, x: Tensor) -> Tensor:
    """Each position reads the ones before it. In and out: (rows, length, width)."""
    q, k, v = F.linear(x, params["qkv"]).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    return F.linear(y.transpose(1, 2).flatten(-2), params["out"])


def mlp(params: Params, x: Tensor) -> Tensor:
    """Each position thinks on its own."""
    return F.linear(F.gelu(F.linear(x, params["up"])), params["down"])


def norm(scale: Tensor, x: Tensor) -> Tensor:
    """Layer norm without a shift."""
    return F.layer_norm(x, scale.shape, scale)


def blocks(params: Sequence[Params], x: Tensor) -> Tensor:
    """A stack of transformer blocks."""
    for block in params:
        x = x + attention(block["attention"], norm(block["norm1"], x))
        x = x + mlp(block["mlp"], norm(block["norm2"], x))
    return x


# A stage takes its own parameters and what the stage before it returned. The first one takes the
# microbatch itself, and the loss sees the microbatch again.


def first(params: Params, batch: Batch) -> Tensor:
    """Embed the characters, then the first blocks."""
    return blocks(params["blocks"], F.embedding(batch["inputs"], params["embedding"]))


def middle(params: Params, x: Tensor) -> Tensor:
    """Blocks alone. Two stages are this function, so it is compiled once."""
    return blocks(params["blocks"], x)


def last(params: Params, x: Tensor) -> Tensor:
    """The last blocks, then a logit for each character of the alphabet."""
    return F.linear(norm(params["norm"], blocks(params["blocks"], x)), params["head"])


def surprise(logits: Tensor, batch: Batch) -> Tensor:
    """The loss: mean surprise at the next character, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


STAGES: list[Callable[[Params, Any], Tensor]] = [first, middle, middle, last]


def model(params: Sequence[Params], batch: Batch) -> Tensor:
    """The whole model without a pipeline, stage after stage: logits."""
    x: Any = batch
    for stage, stage_params in zip(STAGES, params, strict=True):
        x = stage(stage_params, x)
    return x


def plain(params: Sequence[Params], batch: Batch) -> Tensor:
    """The loss without a pipeline."""
    return surprise(model(params, batch), batch)


class Size(NamedTuple):
    """How large the model is and how long it trains."""

    width: int
    blocks: int  # in each stage
    length: int  # characters in a row
    rows: int  # in a batch
    microbatches: int
    steps: int
    tested: int | None  # batches of the text that is held out, None for all of it
    written: int  # characters of the sample


FULL = Size(
    width=128, blocks=1, length=128, rows=16, microbatches=8, steps=500, tested=None, written=500
)
SMOKE = Size(width=16, blocks=1, length=16, rows=8, microbatches=4, steps=20, tested=10, written=50)


def init(size: Size, generator: torch.Generator) -> list[Params]:
    """Fresh parameters: one dictionary per stage."""

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / math.sqrt(columns)

    def block() -> Params:
        width = size.width
        # What flows past the blocks is a sum over them; this keeps it from growing with depth.
        quiet = 1 / math.sqrt(2 * size.blocks * len(STAGES))
        return {
            "norm1": torch.ones(width),
            "attention": {"qkv": matrix(3 * width, width), "out": matrix(width, width, quiet)},
            "norm2": torch.ones(width),
            "mlp": {"up": matrix(4 * width, width), "down": matrix(width, 4 * width, quiet)},
        }

    params: list[Params] = [{"blocks": [block() for _ in range(size.blocks)]} for _ in STAGES]
    params[0]["embedding"] = torch.randn(len(ALPHABET), size.width, generator=generator) / 2
    params[-1]["norm"] = torch.ones(size.width)
    params[-1]["head"] = matrix(len(ALPHABET), size.width, 0.1)
    return params


# ── The pipeline ────────────────────────────────────────────────────────────────────────────────
# In one process it has all parameters. With a process for each rank, a process has those of its own
# stages, `pipe.local` puts None in place of the others, and None has neither leaves nor gradients.


def join() -> dist.ProcessGroup | None:
    """The processes that torchrun has started, of which the first one talks; None without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    dist.init_process_group("gloo")
    if dist.get_rank() != 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the end)
    return dist.group.WORLD


def gather(pipe: fpipe.Pipeline, params: list[Params]) -> list[Params]:
    """The parameters of all stages, wherever they are."""
    if pipe.rank is None:
        return params
    parts: list[Any] = [None] * pipe.schedule.num_ranks
    dist.all_gather_object(parts, pipe.local(params))
    return [parts[rank][stage] for stage, rank in enumerate(pipe.schedule.placement)]


def prove(pipe: fpipe.Pipeline, params: list[Params], batch: Batch) -> None:
    """Show once that the pipeline computes the loss and the gradients of the plain function."""
    loss, grads = pipe.step(params, batch)
    expected_grads, expected_loss = torch.func.grad_and_value(plain)(params, batch)
    pairs = list(zip(leaves_of(grads), leaves_of(pipe.local(expected_grads)), strict=True))
    worst = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    print(f"loss: {loss.item():.6f} in the pipeline, {expected_loss.item():.6f} without it")
    print(f"gradients: relative difference at most {worst:.1e}, over {len(pairs)} tensors\n")
    torch.testing.assert_close(loss, expected_loss)
    assert worst < 1e-4, "the pipeline and the plain function disagree"


def rate_of(step: int, steps: int) -> float:
    """The learning rate: up to 4e-3 within a tenth of the steps, then down along a cosine."""
    rise = max(1.0, steps / 10)
    return 4e-3 * min(step / rise, (1 + math.cos(math.pi * max(0.0, step - rise) / steps)) / 2)


def train(
    pipe: fpipe.Pipeline,
    params: list[Params],
    text: Tensor,
    size: Size,
    generator: torch.Generator,
) -> list[Params]:
    """Train with AdamW, whose step is a part of the pipeline's: each stage has it when it is done.

    Nothing is changed in place: what comes back are other parameters.
    """
    trainer = fpipe.train(pipe, torch.optim.AdamW, betas=(0.9, 0.98), weight_decay=0.05)
    params = pipe.local(params)
    state = trainer.init(params)
    every = max(1, size.steps // 10)
    since = time.perf_counter()
    for step in range(1, size.steps + 1):
        starts = torch.randint(len(text) - size.length, (size.rows,), generator=generator)
        batch = windows(text, starts, size.length)
        rate = rate_of(step, size.steps)
        loss, params, state, _ = trainer.step(params, state, batch, lr=rate)
        if step % every == 0:
            now = time.perf_counter()
            speed = every * size.rows * size.length / (now - since)
            print(f"step {step:4}/{size.steps}   loss {loss.item():.3f}   {speed:,.0f} tokens/s")
            since = now
    return params


def held_out_loss(pipe: fpipe.Pipeline, params: list[Params], text: Tensor, size: Size) -> float:
    """Mean loss over `text`, cut into batches of the shape that the pipeline is compiled for."""
    starts = torch.arange(0, len(text) - size.length, size.length)
    batches = starts[: len(starts) // size.rows * size.rows].split(size.rows)
    chosen = batches[: size.tested]
    losses = [pipe.value(params, windows(text, batch, size.length)) for batch in chosen]
    return torch.stack(losses).mean().item()


@torch.no_grad()
def write(params: list[Params], prompt: str, size: Size, generator: torch.Generator) -> str:
    """Continue the prompt, one character after another. This needs no pipeline."""
    text = encode(prompt)
    for _ in range(size.written):
        logits = model(params, {"inputs": text[None, -size.length :]})[0, -1]
        likely = torch.softmax(logits / 0.7, -1)  # below 1: prefer what is likely
        text = torch.cat([text, torch.multinomial(likely, 1, generator=generator)])
    return "".join(ALPHABET[number] for number in text.tolist())


def leaves_of(tree: Sequence[Params]) -> list[Tensor]:
    """The tensors of a pytree, in an order that depends on its structure alone."""
    return optree.tree_leaves(tree)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny and uncompiled: takes seconds")
    smoke = parser.parse_args().smoke
    size = SMOKE if smoke else FULL
    group = join()
    torch.set_num_threads(1)  # as torchrun does, whose processes then take the very same sums
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("fpipe").setLevel(logging.INFO)  # says what the first call is doing

    generator = torch.Generator().manual_seed(0)
    text = encode(TEXT)
    training, held_out = text.split([split := len(text) * 9 // 10, len(text) - split])
    params = init(size, generator)

    schedule = fpipe.schedules.zbv(ranks=2, microbatches=size.microbatches)
    print(schedule, end="\n\n")
    pipe = fpipe.pipeline(STAGES, surprise, schedule, compile=not smoke, group=group)

    starts = torch.arange(size.rows) * size.length
    prove(pipe, params, windows(training, starts, size.length))
    params = train(pipe, params, training, size, generator)

    print(f"\nheld-out loss     {held_out_loss(pipe, params, held_out, size):.3f} nats a character")
    print(f"unigram entropy   {unigram_entropy(text):.3f} nats a character\n")
    print(write(gather(pipe, params), "When a class", size, generator))
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
