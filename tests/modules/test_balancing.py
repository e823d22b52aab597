"""Cuts that are chosen: what is counted, what is divided, and what is refused."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.modules.stage_shares import held_at_once
from tests.modules.helpers import detached, module_pipe, total, unpipelined
from tests.modules.models import LanguageModel, language_model, token_batch

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


def test_flops_and_boundaries_are_counted_and_balanced() -> None:
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
    batch = {"x": torch.ones(ROWS, 16, device="meta")}
    module = Uneven().to("meta")
    balance = fpipe.balance(module, schedule, batch, loss=total, intensity=0)
    # Loads are 1, 1, 4, 4, 1, 1: the wide boundary lies in the middle.
    assert balance.cuts == ("layers.2",)
    rows = ROWS // 2
    assert [stage.flops for stage in balance.stages] == [2 * rows * 16 * 16 * 6] * 2
    assert [stage.params for stage in balance.stages] == [16 * 16 * 6 * 4] * 2
    assert [stage.sends for stage in balance.stages] == [rows * 64 * 4, 0]
    assert balance.evenness == 1.0
    # Another boundary is narrower, and slower.
    narrow = fpipe.balance(module, schedule, batch, loss=total, intensity=0, slack=0.7)
    assert narrow.stages[0].sends == rows * 16 * 4
    lines = str(balance).splitlines()
    assert lines[0].split()[:2] == ["stage", "rank"] and lines[-1] == "evenness 100.0%"
    assert "layers.2  50.0%" in lines[1] and "the end  50.0%" in lines[2]


def test_a_slow_rank_is_given_less() -> None:
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10))).to("meta")
    batch = {"input": torch.ones(8, 8, device="meta")}
    linear = fpipe.schedules.one_f_one_b(ranks=3, microbatches=4)
    balance = fpipe.balance(module, linear, batch, loss=total, intensity=0, speed=[2, 2, 1])
    assert balance.cuts == ("3", "7")  # 4, 4 and 2 layers
    assert balance.evenness == pytest.approx(1.0)
    first, _, last = balance.stages
    assert first.flops == 2 * last.flops and first.load == pytest.approx(last.load)
    # Both stages of a rank have its speed.
    v = fpipe.schedules.zbv(ranks=2, microbatches=4)
    counts = [stage.flops for stage in fpipe.balance(
        module, v, batch, loss=total, intensity=0, speed=[4, 1]
    ).stages]  # fmt: skip
    assert counts[0] + counts[3] == 4 * (counts[1] + counts[2])
    alike = fpipe.balance(module, linear, batch, loss=total, intensity=0, speed=[3, 3, 3])
    assert alike.cuts == fpipe.balance(module, linear, batch, loss=total, intensity=0).cuts
    for speed in ([1, 1], [1, 1, 0], 2, {0: 1, 1: 1, 2: 1}, [1, 1, "fast"], [1, 1, inf]):
        with pytest.raises(fpipe.StageError, match=r"speed=.* above 0 for each of the 3 ranks"):
            fpipe.balance(module, linear, batch, loss=total, speed=speed)  # type: ignore[arg-type]


def test_chosen_cuts_train() -> None:
    module = language_model()
    params, batch = detached(module), token_batch(8)
    schedule = fpipe.schedules.zb_h1(ranks=3, microbatches=4)
    chosen = fpipe.balance(module, schedule, batch)
    assert all(cut.startswith("blocks.") for cut in chosen.cuts)
    pipe = module_pipe(module, chosen.cuts, schedule=schedule, loss=None)
    loss, grads = pipe.step(params, batch)
    expected = unpipelined(module, params, batch)
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close(grads, expected.grads)


class Misleading(nn.Module):
    """Four layers of equal FLOPs, of which the last also does what no counter counts as FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        wide = x[:, :, None].expand(-1, -1, 2048)
        for _ in range(8):
            wide = torch.sin(wide)
        return wide


def test_measured_times_are_divided_as_well_as_can_be() -> None:
    module, batch = Misleading(), {"x": torch.ones(ROWS, 16)}
    module.layers[0].requires_grad_(False)
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
    options: Any = {"loss": total, "slack": 0.0}
    counted = fpipe.balance(module, schedule, batch, intensity=0, **options)
    assert counted.cuts == ("layers.1",) and counted.unit == "FLOP"
    balance = fpipe.balance(module, schedule, batch, measure=True, compile=False, **options)
    assert [name for name, _ in balance.parts] == [f"layers.{n}" for n in range(4)] + [""]
    assert balance.cuts == ("layers.3",) and balance.unit == "s"
    loads = [load for _, load in balance.parts]
    slowest = min(max(sum(loads[:end]), sum(loads[end:])) for end in range(1, len(loads)))
    assert max(stage.load for stage in balance.stages) == slowest
    assert str(balance).splitlines()[0].split()[5:7] == ["ms", "GFLOP"]
    with pytest.raises(fpipe.StageError, match=r"runs the module, but batch\['x'\] is on the meta"):
        fpipe.balance(module, schedule, {"x": batch["x"].to("meta")}, measure=True, loss=total)


@pytest.mark.parametrize(
    "schedule",
    [
        fpipe.schedules.zbv(ranks=2, microbatches=4),
        fpipe.schedules.interleaved_1f1b(ranks=2, microbatches=4),
    ],
    ids=["vee", "looped"],
)
def test_from_module_chooses_its_cuts(
    schedule: fpipe.Schedule, caplog: pytest.LogCaptureFixture
) -> None:
    module = LanguageModel(blocks=7).double()
    params, batch = detached(module), token_batch(8)
    with caplog.at_level("INFO", logger="fpipe"):
        pipe = module_pipe(module, None, schedule=schedule, loss=None, stages=4, example=batch)
    assert pipe.balance is not None and pipe.cuts == pipe.balance.cuts
    assert str(pipe.balance) in caplog.text
    assert [stage.rank for stage in pipe.balance.stages] == list(schedule.placement)
    # No other choice of cuts makes a shorter step, but for the slack.
    loads = [load for _, load in pipe.balance.parts]

    def time(stages: list[float]) -> float:
        busiest = max(sum(stages[s] for s in schedule.stages_of(rank)) for rank in range(2))
        return 4 * busiest + max(stages)

    best = min(
        time([sum(loads[a:b]) for a, b in pairwise((0, *inner, len(loads)))])
        for inner in combinations(range(1, len(loads)), 3)
    )
    chosen = [stage.load for stage in pipe.balance.stages]
    assert best * (1 - 1e-9) <= time(chosen) <= 1.02 * best
    busiest = max(sum(chosen[s] for s in schedule.stages_of(rank)) for rank in range(2))
    assert pipe.balance.rank_evenness == pytest.approx(sum(chosen) / 2 / busiest)
    assert str(pipe.balance).endswith(
        f"evenness {pipe.balance.evenness:.1%}, of ranks {pipe.balance.rank_evenness:.1%}"
    )
    expected = unpipelined(module, params, batch)
    torch.testing.assert_close(tuple(pipe.step(params, batch)), tuple(expected))
    assert pipe.with_schedule(schedule).cuts == pipe.cuts
    assert pipe.with_schedule(schedule).balance is None


def test_memory_moves_the_cuts() -> None:
    """The even division holds too much on the first rank, which holds two microbatches at once."""
    module, batch = Uneven(), {"x": torch.ones(1024, 16)}
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
    even = fpipe.balance(module, schedule, batch, loss=total)
    limit = max(stage.memory for stage in even.stages) - 1
    pipe = module_pipe(module, None, schedule=schedule, loss=total, example=batch, memory=limit)
    assert pipe.balance is not None and pipe.cuts != even.cuts
    assert all(stage.memory <= limit for stage in pipe.balance.stages)
    named = module_pipe(module, even, schedule=schedule, loss=total)
    assert named.cuts == even.cuts and named.balance is even


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"cuts and example are both missing: name the submodules"),
        ({"stages": 2}, r"cuts and example are both missing"),
        # "stages='2', but the schedule has 2" did not say what is wrong with it.
        ({"stages": "2", "example": {}}, r"stages='2' is a str: it must be an integer, 2 for"),
        ({"stages": 3, "example": {}}, r"stages=3, but the schedule one_f_one_b has 2 on 2 ranks"),
        ({"stages": 2, "cuts": ["layers.1"]}, r"cuts=\['layers.1'\] is given beside stages, exa"),
    ],
)
def test_choice_without_what_it_takes_is_refused(options: dict[str, Any], message: str) -> None:
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
    with pytest.raises(fpipe.StageError, match=message):
        fpipe.from_module(Uneven(), schedule=schedule, loss=total, **options)


def test_layers_within_layers_where_the_outer_ones_are_too_few() -> None:
    def linear() -> nn.Module:
        return nn.Linear(16, 16, bias=False)

    module = nn.Sequential(*(nn.Sequential(linear(), linear()) for _ in range(2)))
    batch = {"input": torch.ones(ROWS, 16)}
    two, four, nine = (
        fpipe.schedules.one_f_one_b(ranks=ranks, microbatches=2) for ranks in (2, 4, 9)
    )
    assert fpipe.balance(module, two, batch, loss=total, intensity=0).cuts == ("0",)
    balance = fpipe.balance(module, four, batch, loss=total, intensity=0)
    assert [stage.flops for stage in balance.stages] == [2 * ROWS // 2 * 16 * 16] * 4
    with pytest.raises(fpipe.StageError, match="parts that can be told apart, fewer than the 9"):
        fpipe.balance(module, nine, batch, loss=total)
    with pytest.raises(fpipe.StageError, match="candidates='01' must be a list"):
        fpipe.balance(module, two, batch, loss=total, candidates="01")
    with pytest.raises(fpipe.StageError, match=r"candidates=\[<class .* must be a list of names"):
        fpipe.balance(module, two, batch, loss=total, candidates=[nn.Linear])  # type: ignore[list-item]
    ways: Any = ["0"], iter(["0"])
    for candidates in ways:
        assert fpipe.balance(module, two, batch, loss=total, candidates=candidates).cuts == ("0",)


def test_layers_that_are_in_no_list() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Linear(16, 16, bias=False) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.tanh(self.up(x)))

    class Attributes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.stem, self.body = Block(), Block(), nn.ModuleList([Block()])

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body[0](self.stem(x)))

    batch = {"x": torch.ones(ROWS, 16)}

    def balanced(ranks: int) -> fpipe.Balance:
        schedule = fpipe.schedules.one_f_one_b(ranks=ranks, microbatches=2)
        return fpipe.balance(Attributes(), schedule, batch, loss=total, intensity=0)

    assert balanced(2).cuts == ("body.0",)  # the list is enough
    assert balanced(3).cuts == ("stem", "body.0")
    assert len({stage.flops for stage in balanced(6).stages}) == 1


def test_loss_functions_that_return_more_are_weighed() -> None:
    def weighted(output: Tensor, batch: dict[str, Tensor]) -> Any:
        return (output.sum(), batch["x"].sum()), {"output": output}

    batch = {"x": torch.ones(ROWS, 16)}
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
    options: Any = {"loss": weighted, "reduction": "weighted", "has_aux": True}
    balance = fpipe.balance(Uneven(), schedule, batch, **options)
    assert balance.cuts == fpipe.balance(Uneven(), schedule, batch, loss=total).cuts


def test_modules_that_fit_nowhere_are_refused() -> None:
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
    batch = {"x": torch.ones(ROWS, 16)}
    with pytest.raises(fpipe.StageError, match=r"no division into 2 stages .* memory=100"):
        fpipe.balance(Uneven(), schedule, batch, loss=total, memory=100)
    with pytest.raises(fpipe.StageError, match=r"Linear has no submodule, of those .* calls once"):
        fpipe.balance(nn.Linear(16, 2), schedule, {"input": batch["x"]}, loss=total)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"intensity": -1}, "intensity=-1 must be a number, FLOPs for each byte, and not negative"),
        ({"slack": "0.1"}, "slack='0.1' must be a number, a fraction, and not negative"),
        ({"memory": float("nan")}, "memory=nan must be a number, bytes, and not negative"),
        ({"memory": [1]}, r"memory=\[1\] must be a number, bytes, and not negative"),
        ({"measure": 1}, "measure=1 must be True or False"),
        ({"is_compiling": "no"}, "is_compiling='no' must be True or False"),
    ],
)
def test_wrong_numbers(options: Any, rule: str) -> None:
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
    with pytest.raises(fpipe.StageError, match=rule):
        fpipe.balance(Uneven(), schedule, {"x": torch.ones(ROWS, 16)}, loss=total, **options)


def test_schedules_hold_what_their_papers_say() -> None:
    def most(schedule: fpipe.Schedule) -> list[int]:
        return [max(map(sum, held)) for held in held_at_once(schedule)]

    assert most(fpipe.schedules.one_f_one_b(ranks=4, microbatches=8)) == [4, 3, 2, 1]
    assert most(fpipe.schedules.gpipe(ranks=2, microbatches=5)) == [5, 5]
    # The last rank keeps as many for the gradients of parameters as the first for both.
    zero_bubble = held_at_once(fpipe.schedules.zb_h1(ranks=4, microbatches=8))
    assert max(held.open for held in zero_bubble[3]) == 1
    assert max(held.left for held in zero_bubble[3]) == 4


def test_half_a_backward_is_all_of_it_where_the_other_half_is_not_owed() -> None:
    """A frozen stage between others held what it had left for gradients that nobody makes."""
    rows = [
        "0F0 0F1 0F2 0W0 0W1 0W2",
        "1F0 1F1 1I0 1F2 1I1 1I2",
        "2F0 2B0 2F1 2B1 2F2 2B2",
    ]
    schedule = fpipe.Schedule((0, 1, 2), [map(fpipe.Action.parse, row.split()) for row in rows])
    fpipe.verify(schedule, requires=["FW", "FI", "FIW"])
    first, frozen, last = held_at_once(schedule)
    assert first == {(number, 0) for number in range(4)}
    assert frozen == {(number, 0) for number in range(3)}
    assert last == {(0, 0), (1, 0)}
    forward = fpipe.schedules.forward_only(ranks=2, microbatches=3)
    assert held_at_once(forward) == [{(0, 0), (1, 0)}] * 2
