"""Which training examples make a model believe what it does? Influence functions.

    python examples/influence.py             # seconds on two cores
    python examples/influence.py --smoke     # fewer examples

A small network learns to tell code from prose in Python's manual. If a training example had not
been there, the loss on a held-out paragraph would differ by about gᵀ H⁻¹ gᵢ / n: g the held-out
gradient, H the Hessian, gᵢ the gradient of example i (Koh and Liang, 2017). Here H is never formed:
conjugate gradient needs products only, which `fpipe.hvp(pipe)` computes. And no gᵢ is formed
either: gᵢᵀs of all examples is one forward of `fpipe.jvp` of `fpipe.per_example_grads`. At the end
some examples are left out indeed, and the network is trained again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe

Batch = dict[str, Tensor]
Params = list[dict[str, Tensor]]

# ── The data: paragraphs, and whether they are indented, which the manual does with code ────────

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;()[]{}=+-*/<>_\"'#@\n|`"


def paragraphs(count: int) -> tuple[list[str], Batch]:
    """Half code, half prose, in an order of their own; features are how often characters occur."""
    found = dict.fromkeys(
        p for name in sorted(topics) for p in topics[name].split("\n\n") if 60 <= len(p) <= 400
    )
    code = [p for p in found if all(line.startswith("   ") for line in p.splitlines())]
    prose = [p for p in found if not any(line.startswith(" ") for line in p.splitlines())]
    mixed = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [(prose[: count // 2] + code[: count // 2])[i] for i in mixed]
    rows = [[p.lower().count(c) / len(p) for c in CHARACTERS] for p in chosen]
    batch = {
        "x": torch.tensor(rows, dtype=torch.float64) * 10,
        "y": torch.tensor([float(p.startswith(" ")) for p in chosen], dtype=torch.float64),
        "weight": torch.ones(count, dtype=torch.float64),
    }
    return chosen, batch


def part(batch: Batch, rows: slice) -> Batch:
    """Some rows."""
    return {name: leaf[rows] for name, leaf in batch.items()}


# ── The network, in two stages; a penalty keeps its Hessian positive ────────────────────────────

DECAY = 0.02


def hidden(p: dict[str, Tensor], batch: Batch) -> Tensor:
    """A layer of tanh. Its penalty travels along, one for each row."""
    y = torch.tanh(batch["x"] @ p["w"] + p["b"])
    return torch.cat([y, penalty(p).expand(len(y), 1)], 1)


def output(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """A logit and the penalty of both layers, for each row."""
    logit = x[:, :-1] @ p["w"] + p["b"]
    return torch.stack([logit, x[:, -1] + penalty(p)], 1)


def penalty(p: dict[str, Tensor]) -> Tensor:
    """Weight decay."""
    return DECAY / 2 * (p["w"].square().sum() + p["b"].square().sum())


def loss(y: Tensor, batch: Batch) -> Tensor:
    """Mean over the rows; a row of weight 0 is left out of the data, and not of the penalty."""
    surprise = F.binary_cross_entropy_with_logits(y[:, 0], batch["y"], reduction="none")
    return (batch["weight"] * surprise + y[:, 1]).mean()


# ── Vectors are pytrees ─────────────────────────────────────────────────────────────────────────


def dot(a: Any, b: Any) -> Tensor:
    """The inner product of two vectors."""
    pairs = zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    return torch.stack([(x * y).sum() for x, y in pairs]).sum()


def add(a: Any, scale: Tensor | float, b: Any) -> Any:
    """``a + scale * b``."""
    return optree.tree_map(lambda x, y: x + scale * y, a, b)


def conjugate_gradient(product: Callable[[Any], Any], target: Any) -> Any:
    """Solve ``H s = target`` by products with H alone; stop where H is not positive."""
    solution = optree.tree_map(torch.zeros_like, target)
    residual = direction = target
    size = start = dot(residual, residual)
    for _ in range(80):
        along = product(direction)
        bend = dot(direction, along)
        if bend <= 0:
            return solution if dot(solution, solution) > 0 else target
        step = size / bend
        solution = add(solution, step, direction)
        residual = add(residual, -step, along)
        before, size = size, dot(residual, residual)
        if size <= 1e-12 * start:
            break
        direction = add(residual, size / before, direction)
    return solution


def train(pipe: fpipe.Pipeline, hessian: Any, params: Params, batch: Batch) -> Params:
    """Newton's method: steps by conjugate gradient, halved until they help."""
    for _ in range(60):
        value, grads = pipe.step(params, batch)
        if dot(grads, grads) < 1e-16:
            break

        def product(vector: Any, here: Params = params) -> Any:
            return hessian.step(here, batch, vector).hvp

        step = conjugate_gradient(product, grads)
        scale = 1.0
        while pipe.value(add(params, -scale, step), batch) >= value and scale > 1e-6:
            scale /= 2
        params = add(params, -scale, step)
    return params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="fewer examples")
    smoke = parser.parse_args().smoke
    count = 64 if smoke else 320
    torch.set_num_threads(1)  # the operations are small: threads would wait for one another
    texts, everything = paragraphs(count)
    training, held_out = (
        part(everything, slice(count // 2)),
        part(everything, slice(count // 2, count)),
    )
    rows = len(training["y"])

    generator = torch.Generator().manual_seed(1)
    width = 4
    params: Params = [
        {"w": torch.randn(len(CHARACTERS), width, generator=generator).double() / 4,
         "b": torch.zeros(width).double()},
        {"w": torch.randn(width, generator=generator).double(), "b": torch.zeros(()).double()},
    ]  # fmt: skip
    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
    pipe = fpipe.pipeline([hidden, output], loss, schedule, compile=False)
    hessian = fpipe.hvp(pipe)  # made once, so traced once
    params = train(pipe, hessian, params, training)
    logits = pipe.forward(params, held_out)[:, 0]
    right = ((logits > 0) == (held_out["y"] > 0)).double().mean()
    print(f"{rows} paragraphs learnt; code and prose told apart in {right:.0%} of the others\n")

    # The held-out paragraph of which the network is least sure.
    chosen = int(logits.abs().argmin())
    question = part(held_out, slice(chosen, chosen + 1))
    alone = pipe.with_schedule(fpipe.schedules.zb_h1(ranks=2, microbatches=1))
    before, gradient = alone.step(params, question)

    solution = conjugate_gradient(lambda v: hessian.step(params, training, v).hvp, gradient)
    each = fpipe.jvp(fpipe.per_example_grads(pipe)).value(params, training, solution).jvp
    # The penalty is in every row and stays when the row's surprise goes.
    decay = DECAY * dot(params, solution)
    predicted = (each - decay) / rows

    order = predicted.argsort(descending=True).tolist()
    show("Held out: is this code?", texts[count // 2 + chosen])
    show("It would be harder without", texts[order[0]])
    show("It would be easier without", texts[order[-1]])

    print("change of its loss    predicted    trained again")
    pairs = []
    tried = 1 if smoke else 3
    for index in [*order[:tried], order[rows // 2], *order[-tried:]]:
        without = {**training, "weight": training["weight"].clone()}
        without["weight"][index] = 0
        after = alone.value(train(pipe, hessian, params, without), question)
        pairs.append((predicted[index].item(), (after - before).item()))
        print(f"without example {index:3}   {pairs[-1][0]:+.5f}     {pairs[-1][1]:+.5f}")
    correlation = torch.corrcoef(torch.tensor(pairs).T)[0, 1]
    print(f"correlation {correlation:.3f}")
    assert correlation > 0.9, "influence does not predict what leaving an example out does"


def show(title: str, text: str) -> None:
    """A paragraph under its title."""
    print(
        f"{title}\n" + "\n".join(f"    | {line.strip()}" for line in text.splitlines()[:4]) + "\n"
    )


if __name__ == "__main__":
    main()
