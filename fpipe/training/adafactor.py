"""Adafactor without a branch on the values of tensors, so that it can be recorded.

Torch's own compares two norms with numbers in Python. Here they are compared as tensors, to the
same bits.

Source: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost (2018).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Adafactor(torch.optim.Adafactor):
    """`torch.optim.Adafactor`, whose step reads no tensor to decide what to do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        assert param.grad is not None
        grad = -param.grad if group["maximize"] else param.grad
        state = self.state[param]
        if not state:
            self._init_group({"params": [param]}, [], [], [], [], [], [])
        state["step"] += 1
        steps = state["step"].item()
        lr, decay = group["lr"], group["weight_decay"]
        eps1, eps2 = group["eps"]
        if eps1 is None:
            eps1 = torch.finfo(param.dtype).eps
        rate = min(lr, 1 / steps**0.5)
        scale = _root_mean_square(param).clamp(min=eps2).item() * rate
        if decay != 0:
            param.mul_(1 - lr * decay)
        variance = _second_moment(grad, state, steps ** group["beta2_decay"], eps1)
        update = variance.clamp(min=eps1 * eps1).rsqrt() * grad
        excess = (_root_mean_square(update) / group["d"]).clamp(min=1.0).item()
        param.add_(update, alpha=-scale / excess)


def _root_mean_square(value: Tensor) -> Tensor:
    return value.norm(2).double() / value.numel() ** 0.5


def _second_moment(grad: Tensor, state: dict[str, Any], weight: float, eps: float) -> Tensor:
    """The running mean of the squares; of a matrix the product of those of rows and columns."""
    if grad.dim() < 2:
        variance: Tensor = state["variance"].lerp_(grad * grad, weight)
        return variance
    rows, columns = state["row_var"], state["col_var"]
    for moment, dim in ((rows, -1), (columns, -2)):
        moment.lerp_(grad.norm(dim=dim, keepdim=True).square() / grad.size(dim), weight)
    return (rows @ columns) / rows.mean(dim=-2, keepdim=True).clamp(min=eps)
