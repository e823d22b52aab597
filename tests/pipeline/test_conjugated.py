"""Values that torch has yet to conjugate or negate: what crosses a border is memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe import schedules
from fpipe.schedule import Schedule
from tests.laid_out import laid_out

SCHEDULES = [
    schedules.gpipe(ranks=2, microbatches=2),
    schedules.zbv(ranks=1, microbatches=2),  # a border within one rank
]


def made(w: Tensor, x: Tensor) -> Tensor:
    return torch.complex(x * w, x)


STAGES: dict[str, list[Callable[[Tensor, Tensor], Tensor]]] = {
    "a cotangent": [made, lambda w, h: h.conj() * w],
    "a cotangent of a view": [made, lambda w, h: h[:, 1:].conj() * w],
    "a negated cotangent": [
        lambda w, x: torch.view_as_real(made(w, x))[..., 1].sin() * w,
        lambda w, h: torch.complex(h, h).conj().imag * w,
    ],
    "an output": [
        lambda w, x: made(w, x).conj(),
        lambda w, h: torch.view_as_real(h.resolve_conj()).sin() * w,
    ],
    "a negated output": [lambda w, x: made(w, x).conj().imag, lambda w, h: h.sin() * w],
    "both": [
        lambda w, x: made(w, x).conj() * w,
        lambda w, h: torch.complex(h.imag, h.conj().imag) * w,
    ],
    "a gradient that is returned": [lambda w, x: made(w, x).exp(), lambda w, h: (h * w).conj()],
}


def loss_of(y: Tensor, _: Any = None) -> Tensor:
    if y.is_complex():
        y = y.imag - 2 * y.real
    return y.square().sum()


def check_chain(stages: list[Any], schedule: Schedule, w: Tensor, **options: Any) -> None:
    x = torch.linspace(-1, 2, 12, dtype=torch.float64).view(4, 3)
    pipe = fpipe.pipeline(stages, loss_of, schedule, reduction="sum", **options)
    leaves = [w.clone().requires_grad_() for _ in stages]
    y = x
    for stage, leaf in zip(stages, leaves, strict=True):
        y = stage(leaf, y)
    loss = loss_of(y)
    grads = torch.autograd.grad(loss, leaves)
    found = pipe.step([w] * len(stages), x)
    torch.testing.assert_close((found.loss, list(found.grads)), (loss.detach(), list(grads)))
    assert not any(leaf.is_conj() or leaf.is_neg() for leaf in found.grads)
    forward = pipe.forward([w] * len(stages), x)
    torch.testing.assert_close(forward, y.detach())


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
@pytest.mark.parametrize("name", STAGES)
def test_what_crosses_a_border(name: str, schedule: Schedule) -> None:
    """In one process a cotangent crossed as a lazy conjugate, of which kernels knew nothing."""
    check_chain(STAGES[name], schedule, torch.tensor(1.5, dtype=torch.float64), compile=False)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_parameters_that_are_complex(remat: Any) -> None:
    stages = [lambda w, x: x * w.conj(), lambda w, h: (h.conj() * w).exp()]
    w = torch.tensor(0.3 + 0.4j, dtype=torch.complex128)
    check_chain(stages, SCHEDULES[0], w, compile=False, remat=remat)


@pytest.mark.parametrize("name", STAGES)
def test_kernels_read_the_memory(name: str) -> None:
    check_chain(
        STAGES[name], SCHEDULES[0], torch.tensor(1.5, dtype=torch.float64), compile=laid_out
    )


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_compiled() -> None:
    one = schedules.gpipe(ranks=2, microbatches=1)
    check_chain(STAGES["both"], one, torch.tensor(1.5, dtype=torch.float64))
