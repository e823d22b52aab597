"""Training with an optimizer, and a run that goes on from a checkpoint to the same numbers."""

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
x = torch.rand(64, 1) * 4 - 2
batch = {"x": x, "y": torch.sin(2 * x)}
pipe = fpipe.pipeline(
    [encode, decode], loss, fpipe.schedules.zb_h1(ranks=2, microbatches=8), compile=False
)
trainer = fpipe.train(pipe, torch.optim.AdamW, lr=1e-2, max_norm=1.0)


def steps(params, state, count):
    for _ in range(count):
        value, params, state, _ = trainer.step(params, state, batch)
    return value, params, state


first, params, state = steps(params, trainer.init(params), 1)
middle, params, state = steps(params, state, 100)
trainer.save("checkpoint", params, state)
last, *_ = steps(params, state, 10)
saved = trainer.load("checkpoint")
again, *_ = steps(saved.params, saved.state, 10)
print(f"loss {first:.4f}, after 100 steps {middle:.4f}, after 110 {last:.4f}, resumed {again:.4f}")
assert middle < first and torch.equal(last, again)
