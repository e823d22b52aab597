"""Two processes, each with the parameters of its own stage: torchrun starts it."""

import torch
import torch.distributed as dist
from torch.func import grad_and_value

import fpipe


def encode(params, batch):
    return torch.tanh(batch["x"] @ params["w"])


def decode(params, hidden):
    return hidden @ params["w"]


def loss(y, batch):
    return (y - batch["y"]).square().mean()


dist.init_process_group("gloo")
torch.manual_seed(0)
params = [{"w": torch.randn(1, 32)}, {"w": torch.randn(32, 1)}]
batch = {"x": torch.randn(64, 1), "y": torch.randn(64, 1)}
schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=8)
pipe = fpipe.pipeline([encode, decode], loss, schedule, group=dist.group.WORLD, compile=False)
value, grads = pipe.step(pipe.local(params), batch)
expected_grads, expected = grad_and_value(
    lambda own: loss(decode(own[1], encode(own[0], batch)), batch)
)(params)
torch.testing.assert_close(value, expected)
torch.testing.assert_close(grads, pipe.local(expected_grads))
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: loss {value:.4f}", flush=True)
dist.destroy_process_group()
