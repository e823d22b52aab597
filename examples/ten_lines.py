"""The ten lines of the README: two stages on two ranks, trained to fit a sine.

    python examples/ten_lines.py             # compiles first, then a second
    python examples/ten_lines.py --smoke     # the same, uncompiled

The optimizer is one line: the step is a pure function, so new parameters are a new list.
"""

import sys

import torch

import fpipe


def encode(params, batch):
    return torch.tanh(batch["x"] @ params["w"] + params["b"])


def decode(params, hidden):
    return hidden @ params["w"]


def squared_error(y, batch):
    return (y - batch["y"]).square().mean()


torch.manual_seed(0)
params = [{"w": torch.randn(1, 32) * 2, "b": torch.randn(32)}, {"w": torch.zeros(32, 1)}]
batch = {"x": torch.linspace(-2, 2, 64)[:, None], "y": torch.linspace(-2, 2, 64)[:, None].sin()}

schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=4)
pipe = fpipe.pipeline([encode, decode], squared_error, schedule, compile="--smoke" not in sys.argv)
for step in range(201):
    loss, grads = pipe.step(params, batch)
    params = [{k: p[k] - 0.05 * g[k] for k in p} for p, g in zip(params, grads, strict=True)]
    if step % 50 == 0:
        print(f"step {step:3}   loss {loss.item():.5f}")
