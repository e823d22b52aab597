"""How sharp is the loss where gradient descent goes? The top eigenvalue of the Hessian, plotted.

    python examples/sharpness.py             # under a minute on two cores; writes sharpness.svg
    python examples/sharpness.py --smoke     # a few steps

Full-batch gradient descent with step size η is stable where the largest eigenvalue of the Hessian
stays below 2/η. Trained long enough, networks go right there and stay: the edge of stability (Cohen
and others, 2021). `fpipe.hvp(pipe)` multiplies with the Hessian of a pipeline, and a few steps of
power iteration from the last eigenvector find the eigenvalue, so it can be followed all along.
"""

from __future__ import annotations

import argparse
import math
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import optree
import torch
from torch import Tensor

import fpipe

Batch = dict[str, Tensor]
Params = list[dict[str, Tensor]]

# ── The data: which of twelve characters comes after four, in Python's manual ───────────────────

CHARACTERS = " etaoinsrlhd"
BEFORE = 4


def examples(count: int) -> Batch:
    """Characters as one-hot vectors, and the next one to be told."""
    text = "".join(c for c in topics["assignment"] + topics["class"] if c in CHARACTERS)
    codes = torch.tensor([CHARACTERS.index(c) for c in text[: count + BEFORE]])
    hot = torch.nn.functional.one_hot(codes, len(CHARACTERS)).float()
    rows = torch.cat([hot[i : i + count] for i in range(BEFORE)], 1)
    return {"x": rows, "y": hot[BEFORE:]}


# ── The network: tanh layers in four stages ─────────────────────────────────────────────────────


def first(p: dict[str, Tensor], batch: Batch) -> Tensor:
    """The layer that reads the characters."""
    return layer(p, batch["x"])


def layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """A layer of tanh."""
    return torch.tanh(x @ p["w"] + p["b"])


def last(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """The layer that tells."""
    return x @ p["w"] + p["b"]


def squared_error(y: Tensor, batch: Batch) -> Tensor:
    """Half the squared distance, mean over the rows."""
    return (y - batch["y"]).square().sum(1).mean() / 2


def init(width: int) -> Params:
    """Fresh parameters."""
    generator = torch.Generator().manual_seed(0)
    sizes = [len(CHARACTERS) * BEFORE, width, width, width, len(CHARACTERS)]
    return [
        {"w": torch.randn(n, m, generator=generator) / n**0.5, "b": torch.zeros(m)}
        for n, m in pairwise(sizes)
    ]


# ── The top eigenvalue ──────────────────────────────────────────────────────────────────────────


def dot(a: Any, b: Any) -> Tensor:
    """The inner product of two vectors, which are pytrees."""
    pairs = zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    return torch.stack([(x * y).sum() for x, y in pairs]).sum()


def scaled(vector: Any) -> Any:
    """To length 1."""
    length = dot(vector, vector).sqrt()
    return optree.tree_map(lambda leaf: leaf / length, vector)


def sharpness(
    hessian: fpipe.Directional, params: Params, batch: Batch, vector: Any, iterations: int
) -> tuple[float, Any]:
    """Rayleigh's quotient after some steps of power iteration, and the vector to go on from."""
    value = 0.0
    for _ in range(iterations):
        product = hessian.step(params, batch, vector).hvp
        value = dot(vector, product).item()
        vector = scaled(product)
    return value, vector


# ── The picture ─────────────────────────────────────────────────────────────────────────────────


def plot(steps: list[int], sharp: list[float], losses: list[float], edge: float) -> str:
    """Two panels over the steps, as SVG: sharpness with the edge, and the loss."""
    width, height, left, right = 640, 200, 62, 20
    across = (width - left - right) / steps[-1]

    def panel(top: int, title: str, values: list[float], line: float | None) -> list[str]:
        ceiling = 1.15 * max([*values, line or 0.0])
        bottom = top + height

        def y(value: float) -> float:
            return bottom - height * value / ceiling

        points = " ".join(
            f"{left + across * step:.1f},{y(v):.1f}" for step, v in zip(steps, values, strict=True)
        )
        parts = [f'<text x="{left}" y="{top - 8}" class="title">{title}</text>']
        ten = 10.0 ** math.floor(math.log10(ceiling / 2))
        apart = max(ten * nice for nice in (1, 2, 5) if ten * nice <= ceiling / 2)
        for number in range(int(ceiling / apart) + 1):
            tick = number * apart
            text = f"{tick:g}"
            parts.append(f'<path d="M{left} {y(tick):.1f}H{width - right}" class="grid"/>')
            parts.append(f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" class="end">{text}</text>')
        if line is not None:
            parts.append(f'<path d="M{left} {y(line):.1f}H{width - right}" class="edge"/>')
            parts.append(f'<text x="{left + 6}" y="{y(line) - 6:.1f}">2/η = {line:.1f}</text>')
        return [*parts, f'<polyline points="{points}"/>']

    ticks = [
        f'<text x="{left + across * steps[-1] * i / 4:.1f}" y="{2 * height + 118}" class="mid">'
        f"{steps[-1] * i // 4}</text>"
        for i in range(5)
    ]
    style = (
        "text{font:12px sans-serif;fill:#444}.title{font-weight:bold;fill:#222}"
        ".end{text-anchor:end}.mid{text-anchor:middle}.grid{stroke:#ddd}"
        ".edge{stroke:#c2410c;stroke-dasharray:5 4}"
        "polyline{fill:none;stroke:#1d4ed8;stroke-width:1.6}"
    )
    total = 2 * height + 150
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}">',
            f'<style>{style}</style><rect width="{width}" height="{total}" fill="#fff"/>',
            *panel(36, "Top eigenvalue of the Hessian", sharp, edge),
            *panel(height + 98, "Training loss", losses, None),
            *ticks,
            f'<text x="{width / 2}" y="{total - 12}" class="mid">step of gradient descent</text>',
            "</svg>\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a few steps")
    smoke = parser.parse_args().smoke
    total, every = (20, 5) if smoke else (2000, 10)
    rate = 0.12
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the operations are small: threads would wait for one another
    batch: Batch = examples(256)
    params: Any = init(32)

    schedule = fpipe.schedules.zbv(ranks=2, microbatches=2)
    pipe = fpipe.pipeline([first, layer, layer, last], squared_error, schedule, compile=False)
    hessian = fpipe.hvp(pipe)

    vector = scaled(optree.tree_map(torch.randn_like, params))
    _, vector = sharpness(hessian, params, batch, vector, 5 if smoke else 30)
    steps, sharp, losses = [], [], []
    for step in range(total + 1):
        loss, grads = pipe.step(params, batch)
        if step % every == 0:
            value, vector = sharpness(hessian, params, batch, vector, 4)
            steps.append(step)
            sharp.append(value)
            losses.append(loss.item())
            if step % (20 * every) == 0:
                print(f"step {step:4}   loss {losses[-1]:.4f}   sharpness {value:6.2f}   "
                      f"edge {2 / rate:.2f}")  # fmt: skip
        params = optree.tree_map(lambda p, g: p - rate * g, params, grads)
    path = Path("sharpness.svg")
    path.write_text(plot(steps, sharp, losses, 2 / rate), encoding="utf-8")
    print(f"\n{path} shows it")


if __name__ == "__main__":
    main()
