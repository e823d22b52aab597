"""Differentially private training: clip every example's gradient across all stages, and add noise.

    python examples/dp_sgd.py             # seconds on two cores
    python examples/dp_sgd.py --smoke     # a few steps
    torchrun --standalone --nproc-per-node 2 examples/dp_sgd.py    # a process for each rank

The gradient of an example is spread over the ranks, but it has one norm, and that is what DP-SGD
clips (Abadi and others, 2016). `fpipe.per_example_norms(pipe)` gives it to every rank and keeps no
example's gradient. A second, ordinary step then weighs each example's loss by its clipping factor:
its gradient is the sum of the clipped gradients (Li and others, 2022). Each rank adds the noise to
its own stages.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pydoc_data.topics import topics
from typing import Any

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fpipe

Batch = dict[str, Tensor]

# ── The data: paragraphs of Python's manual, and whether they are code ──────────────────────────

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;()[]{}=+-*/<>_\"'#@\n|`"


def paragraphs() -> tuple[Tensor, Tensor]:
    """How often each character occurs in a paragraph, and 1 for code, which is indented."""
    found = dict.fromkeys(p for name in sorted(topics) for p in topics[name].split("\n\n"))
    chosen = [p for p in found if len(p) >= 40]
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [chosen[i] for i in order]
    rows = [[p.strip().lower().count(c) / len(p) for c in CHARACTERS] for p in chosen]
    code = [all(line.startswith("   ") for line in p.splitlines()) for p in chosen]
    return torch.tensor(rows) * 10, torch.tensor(code, dtype=torch.float32)


# ── The network, in two stages ──────────────────────────────────────────────────────────────────


def hidden(p: dict[str, Tensor], batch: Batch) -> Tensor:
    """A layer of tanh."""
    return torch.tanh(batch["x"] @ p["w"] + p["b"])


def output(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """A logit for each row."""
    return x @ p["w"] + p["b"]


def surprise(y: Tensor, batch: Batch) -> Tensor:
    """The weighted sum over the rows."""
    each = F.binary_cross_entropy_with_logits(y, batch["y"], reduction="none")
    return (batch["weight"] * each).sum()


# ── What the noise is worth ─────────────────────────────────────────────────────────────────────


def epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """The ε of (ε, δ)-differential privacy after so many steps on Poisson samples.

    Rényi divergence of the sampled Gaussian mechanism at integer orders (Mironov and others, 2019).
    """
    best = math.inf
    for order in range(2, 65):
        terms = [
            math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
            + k * math.log(rate) + (order - k) * math.log1p(-rate) + k * (k - 1) / (2 * noise**2)
            for k in range(order + 1)
        ]  # fmt: skip
        top = max(terms)
        divergence = (top + math.log(sum(math.exp(t - top) for t in terms))) / (order - 1)
        best = min(best, steps * divergence + math.log(1 / delta) / (order - 1))
    return best


# ── Training ────────────────────────────────────────────────────────────────────────────────────

CLIP, NOISE, SAMPLE, CAPACITY = 1.0, 2.0, 128, 224


def draw(x: Tensor, y: Tensor, generator: torch.Generator) -> Batch:
    """Each example with the same probability. Rows of weight 0 keep the shape, and so the plan."""
    chosen = torch.rand(len(x), generator=generator).mul(len(x)).lt(SAMPLE).nonzero()[:, 0]
    chosen = chosen[:CAPACITY]  # more than that is eight standard deviations away
    rows = torch.zeros(CAPACITY, dtype=torch.long)
    rows[: len(chosen)] = chosen
    weight = torch.zeros(CAPACITY)
    weight[: len(chosen)] = 1
    return {"x": x[rows], "y": y[rows], "weight": weight}


def clipped(norms: Any, pipe: fpipe.Pipeline, params: Any, batch: Batch) -> Any:
    """The sum of the clipped gradients of all examples, of the own stages."""
    length = norms.step(params, batch).norms
    factor = (CLIP / length.clamp(min=1e-12)).clamp(max=1)
    return pipe.step(params, {**batch, "weight": batch["weight"] * factor}).grads


def prove(norms: Any, pipe: fpipe.Pipeline, params: Any, batch: Batch) -> None:
    """Show once that this is what clipping every example by itself gives."""
    found = clipped(norms, pipe, params, batch)
    own = fpipe.per_example_grads(pipe).step(params, batch).grads
    leaves = optree.tree_leaves(own)
    squares = sum((g.reshape(CAPACITY, -1).square().sum(1) for g in leaves), torch.zeros(CAPACITY))
    if pipe.rank is not None:
        dist.all_reduce(squares)
    factor = (CLIP / squares.sqrt().clamp(min=1e-12)).clamp(max=1)
    for ours, each in zip(optree.tree_leaves(found), leaves, strict=True):
        torch.testing.assert_close(ours, torch.tensordot(factor, each, 1), rtol=1e-3, atol=1e-4)
    share = (factor[batch["weight"] > 0] < 1).float().mean()
    print(f"clipped as each example by itself would be; {share:.0%} of them are shortened\n")


def join() -> dist.ProcessGroup | None:
    """The processes that torchrun has started, of which the first one talks; None without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    dist.init_process_group("gloo")
    if dist.get_rank() != 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the end)
    return dist.group.WORLD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a few steps")
    steps = 10 if parser.parse_args().smoke else 400
    group = join()
    torch.set_num_threads(1)  # the operations are small: threads would wait for one another
    x, y = paragraphs()
    test = {"x": x[:448], "y": y[:448], "weight": torch.ones(448)}
    x, y = x[448:], y[448:]

    generator = torch.Generator().manual_seed(1)
    whole = [
        {"w": torch.randn(len(CHARACTERS), 16, generator=generator) / 8, "b": torch.zeros(16)},
        {"w": torch.randn(16, generator=generator) / 4, "b": torch.zeros(())},
    ]
    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(
        [hidden, output], surprise, schedule, reduction="sum", compile=False, group=group
    )
    norms = fpipe.per_example_norms(pipe)
    params = pipe.local(whole)
    prove(norms, pipe, params, draw(x, y, generator))

    # Noise must differ between ranks, and nobody else may know it: a seed of its own, from the
    # system, where privacy is meant in earnest.
    noise = torch.Generator().manual_seed(2 + (pipe.rank or 0))
    delta = 1 / (10 * len(x))
    for step in range(1, steps + 1):
        grads = clipped(norms, pipe, params, draw(x, y, generator))
        params = optree.tree_map(
            lambda p, g: (
                p - 1.0 * (g + NOISE * CLIP * torch.randn(g.shape, generator=noise)) / SAMPLE
            ),
            params,
            grads,
        )
        if step % (steps // 5) == 0:
            logits = pipe.forward(params, test)  # on the last rank
            right = 0.0 if logits is None else ((logits > 0) == (test["y"] > 0)).double().mean()
            # A rank without the logits has nothing to add.
            right = pipe.add_up(float(right))
            spent = epsilon(NOISE, SAMPLE / len(x), step, delta)
            print(f"step {step:3}   right {right:.1%}   ε {spent:.2f} at δ {delta:.0e}")
    often = max(test["y"].mean().item(), 1 - test["y"].mean().item())
    print(f"\nalways the more frequent answer: {often:.1%}")
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
