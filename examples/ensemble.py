"""Eight small transformers learn English at once, through one pipeline.

    python examples/ensemble.py             # under two minutes on two cores
    python examples/ensemble.py --compile   # the same, compiled by Inductor first
    python examples/ensemble.py --smoke     # seconds: tiny, a few steps

Every stage computes all members at once: `fpipe.vmap(pipe)` is a pipeline of vmapped stages, under
the same schedule. The members differ in their first parameters and in their learning rate, so this
is a sweep too. At the end: how much faster it is than eight runs, and what the eight know together.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe

# ── The text: Python's own manual, each paragraph once ──────────────────────────────────────────

MANUAL = "\n\n".join(topics[name] for name in sorted(topics))
TEXT = "\n\n".join(dict.fromkeys(MANUAL.split("\n\n")))
ALPHABET = sorted(set(TEXT))

Batch = dict[str, Tensor]
Params = dict[str, Any]


def windows(text: Tensor, starts: Tensor, length: int) -> Batch:
    """Cut one row of `length` characters at each start; the targets are one character further."""
    rows = text[starts[:, None] + torch.arange(length + 1)]
    return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}


# ── One member: plain functions, which know of no ensemble ──────────────────────────────────────

HEADS = 2


def norm(scale: Tensor, x: Tensor) -> Tensor:
    """Layer norm without a shift."""
    return F.layer_norm(x, scale.shape, scale)


def block(p: Params, x: Tensor) -> Tensor:
    """A transformer block. In and out: (rows, length, width)."""
    q, k, v = (
        F.linear(norm(p["norm1"], x), p["qkv"]).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    )
    read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(read.transpose(1, 2).flatten(-2), p["out"])
    return x + F.linear(F.gelu(F.linear(norm(p["norm2"], x), p["up"])), p["down"])


def first(p: Params, batch: Batch) -> Tensor:
    """Embed characters and positions, then a block."""
    return block(p["block"], F.embedding(batch["inputs"], p["token"]) + p["position"])


def last(p: Params, x: Tensor) -> Tensor:
    """A block, then a logit for each character of the alphabet."""
    return F.linear(norm(p["norm"], block(p["block"], x)), p["head"])


def surprise(logits: Tensor, batch: Batch) -> Tensor:
    """The loss: mean surprise at the next character, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


STAGES: list[Callable[..., Tensor]] = [first, last]


class Size(NamedTuple):
    """How large a member is and how long all of them train."""

    members: int
    width: int
    length: int  # characters in a row
    rows: int  # in a batch
    microbatches: int
    steps: int
    timed: int  # rounds of the comparison


FULL = Size(members=8, width=32, length=32, rows=16, microbatches=4, steps=200, timed=9)
SMOKE = Size(members=8, width=8, length=8, rows=4, microbatches=2, steps=4, timed=1)


def init(size: Size, generator: torch.Generator) -> list[Params]:
    """Fresh parameters of one member: one dictionary per stage."""

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / math.sqrt(columns)

    width = size.width
    params: list[Params] = [
        {
            "block": {
                "norm1": torch.ones(width),
                "qkv": matrix(3 * width, width),
                "out": matrix(width, width, 0.3),
                "norm2": torch.ones(width),
                "up": matrix(4 * width, width),
                "down": matrix(width, 4 * width, 0.3),
            }
        }
        for _ in STAGES
    ]
    params[0]["token"] = torch.randn(len(ALPHABET), width, generator=generator) / 2
    params[0]["position"] = torch.randn(size.length, width, generator=generator) / 2
    params[-1]["norm"] = torch.ones(width)
    params[-1]["head"] = matrix(len(ALPHABET), width, 0.1)
    return params


# ── All of them ─────────────────────────────────────────────────────────────────────────────────


def stack(members: list[list[Params]]) -> Any:
    """The members' parameters along a new first dimension."""
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *members)  # type: ignore[arg-type]


def member(params: Any, number: int) -> Any:
    """One member's own."""
    return optree.tree_map(lambda leaf: leaf[number], params)


class Adam:
    """Adam (Kingma and Ba, 2015): elementwise, so it does not care that members are stacked."""

    def __init__(self, leaves: list[Tensor], rates: Tensor) -> None:
        self.leaves = leaves
        self.rates = [rates.view(-1, *[1] * (leaf.dim() - 1)) for leaf in leaves]
        self.mean = [torch.zeros_like(leaf) for leaf in leaves]
        self.square = [torch.zeros_like(leaf) for leaf in leaves]
        self.time = 0

    def step(self, grads: list[Tensor], share: float) -> None:
        """Change the leaves in place, with a share of each member's own learning rate."""
        self.time += 1
        for leaf, rate, mean, square, grad in zip(
            self.leaves, self.rates, self.mean, self.square, grads, strict=True
        ):
            mean.lerp_(grad, 0.1)
            square.lerp_(grad.square(), 0.02)
            unbiased = square / (1 - 0.98**self.time)
            leaf -= share * rate * (mean / (1 - 0.9**self.time)) / (unbiased.sqrt() + 1e-8)


def train(pipe: fpipe.Pipeline, params: Any, rates: Tensor, text: Tensor, size: Size) -> None:
    """All members read the same batches. The pipeline changes nothing; the optimizer does."""
    generator = torch.Generator().manual_seed(1)
    leaves = optree.tree_leaves(params)
    optimizer = Adam(leaves, rates)
    every = max(1, size.steps // 6)
    for step in range(1, size.steps + 1):
        starts = torch.randint(len(text) - size.length, (size.rows,), generator=generator)
        losses, grads = pipe.step(params, windows(text, starts, size.length))
        share = min(1.0, 20 * step / size.steps) * (1 - (step - 1) / size.steps)
        optimizer.step(optree.tree_leaves(grads), share)
        if step % every == 0:
            print(f"step {step:4}   loss of each", *(f"{loss:.2f}" for loss in losses.tolist()))


def compare(one: fpipe.Pipeline, all_of_them: fpipe.Pipeline, params: Any, batch: Batch,
            size: Size) -> None:  # fmt: skip
    """Show that each member gets what it gets alone, and measure what it takes."""
    alone = [member(params, number) for number in range(size.members)]
    losses, grads = all_of_them.step(params, batch)
    for number, own in enumerate(alone):
        expected = one.step(own, batch)
        torch.testing.assert_close(losses[number], expected.loss)
        own_grads = optree.tree_leaves(member(grads, number))
        for ours, theirs in zip(own_grads, optree.tree_leaves(expected.grads), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)

    ratios = []
    for _ in range(size.timed):
        begin = time.perf_counter()
        for own in alone:
            one.step(own, batch)
        middle_of_round = time.perf_counter()
        all_of_them.step(params, batch)
        end = time.perf_counter()
        ratios.append((middle_of_round - begin) / (end - middle_of_round))
    ratio = sorted(ratios)[len(ratios) // 2]
    print(f"{size.members} steps, one member each / one step of all: {ratio:.2f}\n")


def test(pipe: fpipe.Pipeline, params: Any, rates: Tensor, text: Tensor, size: Size) -> None:
    """Held-out loss of each, and of the mean of their predictions."""
    starts = torch.arange(0, len(text) - size.length, size.length)[: 40 * size.rows]
    starts = starts[: len(starts) // size.rows * size.rows]
    each, together = [], []
    for rows in starts.split(size.rows):
        batch = windows(text, rows, size.length)
        likely = pipe.forward(params, batch).log_softmax(-1)  # (members, rows, length, alphabet)
        target = batch["targets"].expand(size.members, -1, -1).unsqueeze(-1)
        own = likely.gather(-1, target)
        each.append(-own.mean((1, 2, 3)))
        together.append(-(own.logsumexp(0) - math.log(size.members)).mean())
    losses = torch.stack(each).mean(0)
    print("\nlearning rate   held-out loss, in nats a character")
    for rate, loss in zip(rates.tolist(), losses.tolist(), strict=True):
        print(f"{rate:13.4f}   {loss:.3f}")
    print(f"all together    {torch.stack(together).mean():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny: takes seconds")
    parser.add_argument("--compile", action="store_true", help="compile the stages")
    arguments = parser.parse_args()
    size = SMOKE if arguments.smoke else FULL
    torch.set_num_threads(1)  # the operations are small: threads would wait for one another
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("fpipe").setLevel(logging.INFO)  # says what the first calls are doing
    number = {character: i for i, character in enumerate(ALPHABET)}
    text = torch.tensor([number[character] for character in TEXT])
    training, held_out = text.split([split := len(text) * 9 // 10, len(text) - split])

    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=size.microbatches)
    one = fpipe.pipeline(STAGES, surprise, schedule, compile=arguments.compile)
    ensemble = fpipe.vmap(one)  # in_dims=(0, None): parameters stacked, the batch shared

    seeds = (torch.Generator().manual_seed(seed) for seed in range(size.members))
    params = stack([init(size, seed) for seed in seeds])
    rates = torch.logspace(math.log10(1e-3), math.log10(1e-2), size.members)
    compare(one, ensemble, params, windows(training, torch.arange(size.rows) * 99, size.length),
            size)  # fmt: skip
    train(ensemble, params, rates, training, size)
    test(ensemble, params, rates, held_out, size)


if __name__ == "__main__":
    main()
