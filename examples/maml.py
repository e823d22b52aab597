"""Parameters from which one step of gradient descent suffices: MAML, through a pipeline.

    python examples/maml.py             # a minute on two cores
    python examples/maml.py --smoke     # a few steps

A task is a sine wave of its own height and phase, of which ten points are shown (Finn, Abbeel and
Levine, 2017). A network takes one step on those, and is judged on ten others. What is learnt are
the parameters before the step, so the loss is differentiated through a gradient: `pipe.value`
stands in `torch.func.grad` of `torch.func.vmap` of a function that calls `torch.func.grad`, as any
loss function would, and each of them is a call of a pipeline. A network that was trained on all
waves at once is there to compare: it knows their mean, and one step does not take it far.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

import fpipe

Batch = dict[str, Tensor]
Params = Any  # a list with the parameters of each stage
Value = Callable[[Params, Batch], Tensor]

RATE = 0.02  # of the step within a task

# ── Tasks, and a network of four stages ────────────────────────────────────────────────────────


def tasks(number: int, generator: torch.Generator) -> tuple[Batch, Batch]:
    """Points to learn from and points to be judged on, 10 of each, in float32; tasks in front."""
    height = torch.rand(number, 1, 1, generator=generator) * 4.9 + 0.1
    phase = torch.rand(number, 1, 1, generator=generator) * math.pi
    x = torch.rand(number, 20, 1, generator=generator) * 10 - 5
    points = {"x": x, "y": height * torch.sin(x - phase)}
    shown = {name: leaf[:, :10] for name, leaf in points.items()}
    return shown, {name: leaf[:, 10:] for name, leaf in points.items()}


def first(p: dict[str, Tensor], batch: Batch) -> Tensor:
    """From a point to 40 features."""
    return torch.tanh(batch["x"] @ p["w"] + p["b"])


def layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """A layer of tanh."""
    return torch.tanh(x @ p["w"] + p["b"])


def last(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """The height at the point."""
    return x @ p["w"] + p["b"]


def error(y: Tensor, batch: Batch) -> Tensor:
    """The mean squared error of the rows."""
    return (y - batch["y"]).square().mean()


def init(generator: torch.Generator, width: int = 40) -> Params:
    """Parameters of the stages."""
    sizes = [(1, width), (width, width), (width, width), (width, 1)]
    return [
        {"w": torch.randn(n, m, generator=generator) / math.sqrt(n), "b": torch.zeros(m)}
        for n, m in sizes
    ]


# ── Learning to learn ───────────────────────────────────────────────────────────────────────────


def adapted(value: Value, params: Params, shown: Batch) -> Params:
    """The parameters after one step on the points that are shown."""
    grads = torch.func.grad(value)(params, shown)
    return optree.tree_map(lambda p, g: p - RATE * g, params, grads)


def after_a_step(value: Value, params: Params, shown: Batch, judged: Batch) -> Tensor:
    """The mean over tasks of the loss after one step on each."""

    def one(own: Batch, other: Batch) -> Tensor:
        return value(adapted(value, params, own), other)

    losses: Tensor = torch.func.vmap(one)(shown, judged)
    return losses.mean()


def train(
    loss: Callable[[Params, Batch, Batch], Tensor], params: Params, steps: int, number: int
) -> Params:
    """Adam on `number` new tasks in each step."""
    generator = torch.Generator().manual_seed(1)
    leaves, spec = optree.tree_flatten(params)
    leaves = [leaf.clone() for leaf in leaves]
    optimizer = torch.optim.Adam(leaves, 2e-3)
    for _ in range(steps):
        grads = torch.func.grad(loss)(
            optree.tree_unflatten(spec, leaves), *tasks(number, generator)
        )
        for leaf, own in zip(leaves, optree.tree_leaves(grads), strict=True):
            leaf.grad = own
        optimizer.step()
    return optree.tree_unflatten(spec, leaves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a few steps")
    smoke = parser.parse_args().smoke
    steps, number = (3, 4) if smoke else (1000, 16)
    torch.set_num_threads(1)  # the operations are small: threads would wait for one another

    schedule = fpipe.schedules.zb_h1(ranks=4, microbatches=2)
    pipe = fpipe.pipeline([first, layer, layer, last], error, schedule, compile=False)
    start = init(torch.Generator().manual_seed(0))

    def whole(params: Params, batch: Batch) -> Tensor:
        x = first(params[0], batch)
        for p in params[1:3]:
            x = layer(p, x)
        return error(last(params[3], x), batch)

    # The same function without a pipeline has the same derivative, through the step and all tasks.
    some = tasks(number, torch.Generator().manual_seed(2))
    ours, theirs = (
        torch.func.grad(lambda p, v=value: after_a_step(v, p, *some))(start)
        for value in (pipe.value, whole)
    )
    pairs = zip(optree.tree_leaves(ours), optree.tree_leaves(theirs), strict=True)
    far = max((a - b).abs().max() / b.abs().max() for a, b in pairs)
    print(f"the derivative through a step is that without a pipeline, to {far:.0e}\n")
    assert far < 1e-4

    def at_once(params: Params, shown: Batch, judged: Batch) -> Tensor:
        flat = {name: torch.cat([shown[name], judged[name]], 1).flatten(0, 1) for name in shown}
        return pipe.value(params, flat)

    began = time.perf_counter()
    learnt = {
        "trained on all waves at once": train(at_once, start, steps, number),
        "trained to take one step": train(
            lambda params, *points: after_a_step(pipe.value, params, *points), start, steps, number
        ),
    }
    print(f"trained twice, {steps} steps each, in {time.perf_counter() - began:.0f} s\n")

    shown, judged = tasks(200, torch.Generator().manual_seed(3))
    each = torch.func.vmap(pipe.value, (None, 0))
    print("squared error on new waves      before a step   after it")
    after = {}
    for name, params in learnt.items():
        after[name] = after_a_step(pipe.value, params, shown, judged).item()
        print(f"{name:30}  {each(params, judged).mean():13.3f}   {after[name]:8.3f}")
    at_first, to_step = after.values()
    assert smoke or to_step < at_first / 2


if __name__ == "__main__":
    main()
