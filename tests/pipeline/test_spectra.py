"""Real transforms whose cotangents torch writes to in their backwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.eager import check_stages
from tests.models import rand

BATCH = rand(4, 8)
PARAMS = [rand(8), rand(8)]
WINDOW = torch.hann_window(4, dtype=torch.float64)


def low_pass(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x)
    spectrum[..., 2:] = 0
    return torch.fft.irfft(spectrum, n=8)


def short_time(x: Tensor) -> Tensor:
    spectrum = torch.stft(x, 4, 2, window=WINDOW, return_complex=True)
    return torch.istft(spectrum, 4, 2, window=WINDOW, length=8)


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "round trip": lambda x: torch.fft.irfft(torch.fft.rfft(x), n=8),
    "odd": lambda x: torch.fft.irfft(torch.fft.rfft(x), n=7).sum(-1, keepdim=True) * x,
    "half complex": lambda x: torch.fft.hfft(torch.fft.ihfft(x), n=8),
    "in two dimensions": lambda x: torch.fft.irfft2(
        torch.fft.rfft2(x.view(-1, 2, 4)), s=(2, 4)
    ).flatten(1),
    "in all": lambda x: torch.fft.irfftn(torch.fft.rfftn(x, dim=(1,)), s=(8,), dim=(1,)),
    "low pass": low_pass,
    "of short times": short_time,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_equal_to_autograd(name: str) -> None:
    """Some were refused, where a transform took a cotangent that was written to."""
    transform = TRANSFORMS[name]
    check_stages([lambda w, x: x * w, lambda w, h: transform(h) * w], PARAMS, BATCH)
