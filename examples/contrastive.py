"""Which windows of a text overlap? A loss that compares all rows of the batch with each other.

    python examples/contrastive.py             # compiles first; two minutes on two cores
    python examples/contrastive.py --smoke     # two steps, uncompiled

An encoder of characters learns to find, for each window of Python's manual, the one that overlaps
it among those of the whole batch (InfoNCE: van den Oord et al., 2018). The more rows it has to
choose from the more it learns, but the loss of a pipeline is a mean over microbatches, none of
which sees another. So the loss stays outside: `pipe.forward` returns a vector for each row, with an
autograd history, and the backward of whatever is computed from them runs the pipeline once more,
forward and backward (GradCache: Gao et al., 2021). Stages hold what microbatches need, not a batch.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe

Params = list[dict[str, Tensor]]

# ── The data: pairs of windows, the second of which begins in the middle of the first ───────────

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;()[]{}=+-*/<>_\"'#@\n|`"
LENGTH, SHIFT = 64, 32  # characters


def texts() -> tuple[Tensor, Tensor]:
    """Characters as integers: the pages to learn from, and one page in ten to be tested on."""
    code = {c: i + 1 for i, c in enumerate(CHARACTERS)}  # 0 is any other
    pages = [
        torch.tensor([code.get(c, 0) for c in topics[name].lower()]) for name in sorted(topics)
    ]
    held_out = torch.cat(pages[::10])
    del pages[::10]
    return torch.cat(pages), held_out


def pairs_of(text: Tensor, starts: Tensor) -> Tensor:
    """The batch of an encoder, int64[2 * pairs, LENGTH]: first windows, then second ones."""
    firsts = starts[:, None] + torch.arange(LENGTH)
    return text[torch.cat([firsts, firsts + SHIFT])]


# ── The encoder: four stages of convolutions ────────────────────────────────────────────────────

WIDTH, STAGES = 64, 4


def encode(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """A residual block on [rows, width, characters]: a convolution over five, and a product."""
    h = F.conv1d(F.group_norm(x, 1), p["convolution"], p["bias"], padding=2)
    return x + torch.einsum("oi,bin->bon", p["product"], F.gelu(h))


def first(p: dict[str, Tensor], characters: Tensor) -> Tensor:
    """Look characters up, and encode."""
    return encode(p, F.embedding(characters, p["embedding"]).mT)


def last(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Encode, and go from [rows, width, n] to a direction for each row."""
    return F.normalize(encode(p, x).mean(-1) @ p["direction"], dim=1)


def init(generator: torch.Generator) -> Params:
    """Parameters of every stage, leaves that require a gradient."""

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    stages: Params = [
        {
            "convolution": normal(2 * WIDTH, WIDTH, 5, scale=(5 * WIDTH) ** -0.5),
            "bias": torch.zeros(2 * WIDTH),
            "product": normal(WIDTH, 2 * WIDTH, scale=(8 * WIDTH) ** -0.5),
        }
        for _ in range(STAGES)
    ]
    stages[0]["embedding"] = normal(len(CHARACTERS) + 1, WIDTH, scale=1.0)
    stages[-1]["direction"] = normal(WIDTH, WIDTH, scale=WIDTH**-0.5)
    return [{name: leaf.requires_grad_() for name, leaf in stage.items()} for stage in stages]


# ── The loss: of all rows together ──────────────────────────────────────────────────────────────


def similarity(z: Tensor) -> Tensor:
    """How well each second window fits each first one."""
    firsts, seconds = z.chunk(2)
    return firsts @ seconds.T


def contrastive(z: Tensor, log_scale: Tensor) -> Tensor:
    """Row i of the firsts belongs to row i of the seconds and to none of the others."""
    logits = similarity(z) * log_scale.exp()
    own = torch.arange(len(logits))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def unpipelined(params: Params, batch: Tensor, log_scale: Tensor) -> Tensor:
    """The loss by the same functions, called one after the other."""
    x = first(params[0], batch)
    for p in params[1:-1]:
        x = encode(p, x)
    return contrastive(last(params[-1], x), log_scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a few steps")
    smoke = parser.parse_args().smoke
    pairs, steps = (32, 2) if smoke else (256, 100)
    training, held_out = texts()
    generator = torch.Generator().manual_seed(0)

    params = init(generator)
    log_scale = torch.tensor(2.0, requires_grad=True)  # learnt too, beside the pipeline
    stages: list[Any] = [first, *[encode] * (STAGES - 2), last]
    schedule = fpipe.schedules.zbv(ranks=2, microbatches=8)
    pipe = fpipe.pipeline(  # a loss of its own is not asked for
        stages, lambda z, _: z.sum(), schedule, compile=not smoke
    )
    leaves = [leaf for stage in params for leaf in stage.values()]

    batch = pairs_of(training, torch.arange(pairs) * 2 * LENGTH)
    loss = contrastive(pipe.forward(params, batch), log_scale)
    found = torch.autograd.grad(loss, [*leaves, log_scale])
    whole = unpipelined(params, batch, log_scale)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(found, torch.autograd.grad(whole, [*leaves, log_scale]),
                               rtol=1e-3, atol=1e-5)  # fmt: skip
    print(f"loss and gradients of {pairs} pairs are those of the encoder in one piece\n")

    test = pairs_of(held_out, torch.arange(pairs) * (len(held_out) - 2 * LENGTH) // pairs)

    def accuracy() -> float:
        """How often the right window fits best, of all those from held-out pages."""
        with torch.no_grad():
            fit = similarity(pipe.forward(params, test))
        return (fit.argmax(1) == torch.arange(pairs)).double().mean().item()

    optimizer = torch.optim.AdamW([*leaves, log_scale], lr=2e-3, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps + 1)
    for step in range(steps + 1):
        if step % max(1, steps // 5) == 0:
            print(f"step {step:4}   loss {loss.item():.3f}   found among {pairs}: {accuracy():.1%}")
        starts = torch.randint(len(training) - 2 * LENGTH, (pairs,), generator=generator)
        batch = pairs_of(training, starts)
        loss = contrastive(pipe.forward(params, batch), log_scale)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
    print(f"\nguessing finds {1 / pairs:.1%}; the scale is now {log_scale.exp().item():.1f}")
    assert accuracy() >= (0 if smoke else 0.4), "the encoder did not learn"


if __name__ == "__main__":
    main()
