"""Functions of torch that look at data only to check it or to print it, made to do without.

Within `torch.func` they do not see that they are traced, where there is no data to look at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class WithoutPeeking(TorchFunctionMode):
    """Within it, `torch.nn.functional.one_hot` with a number of classes checks no index.

    An index that is no class then gives a row of zeros, as it does on CUDA under torch.compile. And
    a tensor in a message, which is formatted whether it is needed or not, is given as its shape.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or what stands for it."""
        if func is torch.nn.functional.one_hot:
            return _one_hot(*args, **(kwargs or {}))
        if func is Tensor.__format__ and args[0].dim() == 0:
            return f"a tensor of shape {tuple(args[0].shape)}"
        return func(*args, **(kwargs or {}))


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:  # the greatest index says how many: that needs data, and is refused
        return torch.nn.functional.one_hot(tensor, num_classes)
    classes = torch.arange(num_classes, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).to(torch.int64)
