"""A module of your own becomes a pipeline of two stages, compiled; it agrees with autograd."""

import torch
from torch import nn
from torch.func import functional_call, grad_and_value

import fpipe


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 64), nn.GELU())
        self.second = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def loss_of(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch["y"])


torch.manual_seed(0)
module = Net()
pipe = fpipe.from_module(
    module,
    schedule=fpipe.schedules.zb_h1(ranks=2, microbatches=4),
    cuts=["first"],
    loss=loss_of,
)
params = {name: parameter.detach() for name, parameter in module.named_parameters()}
batch = {"x": torch.randn(32, 16), "y": torch.randint(4, (32,))}
value, grads = pipe.step(params, batch)
expected_grads, expected = grad_and_value(
    lambda own: loss_of(functional_call(module, own, (batch["x"],)), batch)
)(params)
torch.testing.assert_close(value, expected)
torch.testing.assert_close(grads, expected_grads)
print(f"loss {value:.4f}, without a pipeline {expected:.4f}; {len(grads)} gradients agree")
