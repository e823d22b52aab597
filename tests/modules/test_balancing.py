"""Cuts that are chosen: what is counted, what is divided, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.modules.balancing import held_at_once
from tests.modules.models import detached, language_model, make_batch, unpipelined

ROWS = 8


class Uneven(nn.Module):
    """Six layers of which the third is as heavy as four others."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16, 16, 16, 64, 16, 16, 16]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def total(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return output.sum()


def test_flops_and_boundaries_are_counted_and_balanced() -> None:
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
    batch = {"x": torch.ones(ROWS, 16, device="meta")}
    module = Uneven().to("meta")
    found = fpipe.balance(module, schedule, batch, loss=total, intensity=0)
    # Loads are 1, 1, 4, 4, 1, 1: the wide boundary lies in the middle.
    assert found.cuts == ("layers.2",)
    rows = ROWS // 2
    assert [stage.flops for stage in found.stages] == [2 * rows * 16 * 16 * 6] * 2
    assert [stage.params for stage in found.stages] == [16 * 16 * 6 * 4] * 2
    assert [stage.sends for stage in found.stages] == [rows * 64 * 4, 0]
    assert found.evenness == 1.0
    # Another boundary is narrower, and slower.
    narrow = fpipe.balance(module, schedule, batch, loss=total, intensity=0, slack=0.7)
    assert narrow.stages[0].sends == rows * 16 * 4
    lines = str(found).splitlines()
    assert lines[0].split()[:2] == ["stage", "rank"] and lines[-1] == "evenness 100.0%"
    assert "layers.2  50.0%" in lines[1] and "the end  50.0%" in lines[2]


def test_chosen_cuts_train() -> None:
    module = language_model()
    params, batch = detached(module), make_batch(8)
    schedule = fpipe.schedules.zb_h1(ranks=3, microbatches=4)
    chosen = fpipe.balance(module, schedule, batch)
    assert all(cut.startswith("blocks.") for cut in chosen.cuts)
    pipe = fpipe.from_module(module, schedule=schedule, cuts=chosen.cuts, compile=False)
    loss, grads = pipe.step(params, batch)
    expected = unpipelined(module, params, batch)
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close(grads, expected.grads)


def test_what_does_not_fit_is_refused() -> None:
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
    batch = {"x": torch.ones(ROWS, 16)}
    with pytest.raises(fpipe.StageError, match=r"no division into 2 stages .* memory=100"):
        fpipe.balance(Uneven(), schedule, batch, loss=total, memory=100)
    with pytest.raises(fpipe.StageError, match=r"has no submodules in a ModuleList"):
        fpipe.balance(nn.Linear(16, 2), schedule, {"input": batch["x"]}, loss=total)
    with pytest.raises(fpipe.StageError, match=r"intensity=-1 and slack=0.02 must not be negative"):
        fpipe.balance(Uneven(), schedule, batch, loss=total, intensity=-1)


def test_schedules_hold_what_their_papers_say() -> None:
    assert held_at_once(fpipe.schedules.one_f_one_b(ranks=4, microbatches=8)) == [4, 3, 2, 1]
    assert held_at_once(fpipe.schedules.gpipe(ranks=2, microbatches=5)) == [5, 5]
