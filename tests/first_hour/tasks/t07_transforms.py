"""Gradients of single examples, and an ensemble of three models in one pipeline."""

import torch

import fpipe


def encode(params, batch):
    return torch.tanh(batch["x"] @ params["w"])


def decode(params, hidden):
    return hidden @ params["w"]


def loss(y, batch):
    return (y - batch["y"]).square().mean()


torch.manual_seed(0)
params = [{"w": torch.randn(1, 32)}, {"w": torch.randn(32, 1)}]
batch = {"x": torch.randn(16, 1), "y": torch.randn(16, 1)}
pipe = fpipe.pipeline(
    [encode, decode], loss, fpipe.schedules.zb_h1(ranks=2, microbatches=4), compile=False
)
_, grads = pipe.step(params, batch)
_, singles = fpipe.per_example_grads(pipe).step(params, batch)
torch.testing.assert_close(singles[1]["w"].mean(0), grads[1]["w"])
print("gradients of 16 examples:", list(singles[1]["w"].shape))

members = [{"w": torch.randn(3, 1, 32)}, {"w": torch.randn(3, 32, 1)}]
values, stacked = fpipe.vmap(pipe, in_dims=(0, None)).step(members, batch)
for member in range(3):
    own = [{"w": stage["w"][member]} for stage in members]
    value, _ = pipe.step(own, batch)
    torch.testing.assert_close(values[member], value)
print("losses of 3 members:", [round(value, 4) for value in values.tolist()])
