"""The memory of a stage as it is estimated, against what programs hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe import schedules
from tests.modules.helpers import detached, module_pipe, squares

ROWS = 1024


class Skip(nn.Module):
    """Layers of which the last is added to the first."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.function = function

    def forward(self, input: Tensor) -> Tensor:
        first = x = self.layers[0](input)
        for layer in self.layers[1:]:
            x = self.function(layer(x))
        return x + first


def wide() -> nn.Module:
    """Some boundaries are sixty-four times as wide as others."""
    widths = [(16, 1024), (1024, 16), (16, 1024), (1024, 16), (16, 16)]
    return nn.Sequential(*(m for a, b in widths for m in (nn.Linear(a, b), nn.Tanh())))


def residual() -> nn.Module:
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(
                32, 2, 64, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
            )
            for _ in range(4)
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "wide": wide,
    "linear": lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(8))),
    "relu": lambda: nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(32, 32), nn.ReLU()))),
    "skip": lambda: Skip(torch.tanh),
    "linear skip": lambda: Skip(lambda x: x),
    "transformer": residual,
}


def estimated_and_held(
    module: nn.Module, schedule: fpipe.Schedule, batch: Any, **options: Any
) -> list[tuple[int, int]]:
    """For each rank: what its stages are said to need, and parameters and peak of its program."""
    balance = fpipe.balance(module, schedule, batch, loss=squares, **options)
    pipe = module_pipe(module, balance, schedule=schedule)
    pairs = []
    for rank, program in enumerate(pipe.programs(detached(module), batch)):
        shares = [stage for stage in balance.stages if stage.rank == rank]
        held = program.peak_bytes + sum(stage.params for stage in shares)
        pairs.append((sum(stage.memory for stage in shares), held))
    return pairs


BOUNDS = [
    (schedules.gpipe(ranks=2, microbatches=4), 1.5),
    (schedules.one_f_one_b(ranks=4, microbatches=8), 2.0),
    (schedules.zb_h1(ranks=4, microbatches=8), 2.0),
    # Where ranks have several stages, what each holds at most is added up.
    (schedules.zbv(ranks=2, microbatches=4), 2.5),
    (schedules.interleaved_1f1b(ranks=2, microbatches=4), 2.5),
    (schedules.interleaved_zero_bubble(ranks=2, microbatches=4), 2.8),
]
"""How much more than what is held an estimate may be."""


@pytest.mark.parametrize(
    ("name", "schedule", "most"),
    [
        pytest.param(name, schedule, most, id=f"{schedule.name}-{name}")
        for number, name in enumerate(MODELS)
        # Models take turns: each has every second schedule, and each schedule every second model.
        for schedule, most in BOUNDS[number % 2 :: 2]
    ],
)
def test_estimates_are_bounds(name: str, schedule: fpipe.Schedule, most: float) -> None:
    shape = (ROWS // 16, 16, 32) if name == "transformer" else (ROWS, 16 if name == "wide" else 32)
    torch.manual_seed(0)
    for estimated, held in estimated_and_held(
        MODELS[name](), schedule, {"input": torch.randn(shape)}
    ):
        assert held <= estimated <= most * held


def test_memory_counts_values_that_a_stage_receives() -> None:
    """The estimate once left out received values, and was a seventieth of what a rank holds."""
    module = nn.Sequential(nn.Linear(16, 4096), nn.Tanh(), nn.Linear(4096, 16), nn.Linear(16, 16))
    schedule = schedules.gpipe(ranks=2, microbatches=8)
    batch = {"input": torch.randn(8192, 16)}
    for estimated, held in estimated_and_held(module, schedule, batch, candidates=["1"]):
        assert held <= estimated <= 1.25 * held
    # The limit moves the cut, to where the last rank receives little.
    balance = fpipe.balance(
        module, schedule, batch, loss=squares, candidates=["1", "2"], memory=3e8
    )
    assert balance.cuts == ("1",)
    limit = max(stage.memory for stage in balance.stages) + 1
    again = fpipe.balance(
        module, schedule, batch, loss=squares, candidates=["1", "2"], memory=limit
    )
    assert all(stage.memory < limit for stage in again.stages)
    only: Any = {"candidates": ["1"], "memory": balance.stages[1].memory - 1}
    with pytest.raises(fpipe.StageError, match=r"no division into 2 stages keeps every rank"):
        fpipe.balance(module, schedule, batch, loss=squares, **only)


@pytest.mark.parametrize("half", [False, True])
def test_parameters_that_outweigh_values(half: bool) -> None:
    """Casts of parameters are held once; a gradient is there before it is added to the others."""

    class Heavy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

        def forward(self, input: Tensor) -> Tensor:
            x = input
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                for layer in self.layers:
                    x = layer(x)
            return x.float()

    schedule = schedules.one_f_one_b(ranks=2, microbatches=4)
    for estimated, held in estimated_and_held(Heavy(), schedule, {"input": torch.randn(64, 256)}):
        assert held <= estimated <= 1.5 * held
