"""What no microbatch goes into is computed once a step, and kept once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fpipe
from fpipe import Action, Schedule, schedules
from fpipe.program.program import Compute
from tests.models import adapted, assert_same, piped, rand, unpipelined

WIDTH = 32


class Counter:
    """A compiler whose callables count how often each of some ops runs."""

    def __init__(self, *names: str) -> None:
        self.counts = dict.fromkeys(names, 0)

    def __call__(self, module: fx.GraphModule, examples: Any) -> Callable[[list[Tensor]], Any]:
        here = [
            str(node.target).split(".")[1] for node in module.graph.nodes if "." in str(node.target)
        ]

        def call(inputs: list[Tensor]) -> Any:
            for name in self.counts:
                self.counts[name] += here.count(name)
            taken = list(inputs)
            inputs.clear()
            return module(*taken)

        return call


def layer(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def test_a_recorded_rank_never_goes_back_in_time() -> None:
    # Each UNSHARD was shown where the first had computed.
    row = "0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0F1 0B1 0RESHARD"
    schedule = fpipe.Schedule.from_text(row)
    model, pipe = piped(adapted, schedule, 4)
    with fpipe.record() as recording:
        pipe.step(model.params, model.batch)
    (events,) = recording.timeline.events
    assert " ".join(str(event.action) for event in events) == row
    assert events[0].end > events[0].start
    assert all(before.end <= after.start for before, after in pairwise(events))


def peak_of(microbatches: int, **options: Any) -> int:
    """Bytes that a step under autocast holds, whose microbatches have a row each."""
    schedule = schedules.gpipe(ranks=1, microbatches=microbatches)
    pipe = fpipe.pipeline([layer], lambda y, _: y.float().sum(), schedule, **options)
    with torch.autocast("cpu", torch.bfloat16):
        (program,) = pipe.programs([torch.ones(WIDTH, WIDTH)], torch.ones(microbatches, WIDTH))
    return program.peak_bytes


def test_the_casts_of_autocast_are_kept_once() -> None:
    more = peak_of(8, compile=False) - peak_of(4, compile=False)
    assert more < 4 * WIDTH * WIDTH * torch.bfloat16.itemsize / 2


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("rows", [8, 7])
def test_once_a_step(remat: Any, rows: int) -> None:
    """For microbatches of two sizes too."""
    counter = Counter("exp", "linalg_vector_norm")
    schedule = schedules.zb_h1(ranks=2, microbatches=4)
    model, pipe = piped(adapted, schedule, rows, remat=remat, compile=counter)
    expected = unpipelined(*model)
    for step in (1, 2):
        assert_same(pipe.step(model.params, model.batch), expected)
        assert counter.counts == {"exp": 2 * step, "linalg_vector_norm": 2 * step}


def test_of_the_parameters_of_each_step() -> None:
    schedule = schedules.zbv(ranks=2, microbatches=2)
    model, pipe = piped(adapted, schedule, 4)
    pipe.step(model.params, model.batch)
    other = [{name: 2 * leaf for name, leaf in own.items()} for own in model.params]
    assert_same(pipe.step(other, model.batch), unpipelined(*model._replace(params=other)))


def test_before_the_first_that_reads_it() -> None:
    schedule = schedules.gpipe(ranks=1, microbatches=2)
    pipe = fpipe.pipeline([lambda w, x: x @ w.exp()], lambda y, _: y.sum(), schedule, compile=False)
    (program,) = pipe.programs([rand(3, 3)], rand(4, 3))
    names = [str(i.action) for i in program.instructions if isinstance(i, Compute)]
    assert names == ["0UNSHARD", "0F0", "0F1", "0B0", "0B1"]
    assert "0UNSHARD %" in str(program)


def test_in_evaluation_too() -> None:
    schedule = schedules.gpipe(ranks=2, microbatches=4)
    counter = Counter("exp")
    model, pipe = piped(adapted, schedule, 8, compile=counter)
    assert_same(pipe.value(model.params, model.batch), unpipelined(*model).loss)
    assert counter.counts == {"exp": 2}


def test_of_a_module() -> None:
    torch.manual_seed(0)
    first = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3, dtype=torch.float64))
    module = nn.Sequential(first, nn.Tanh(), nn.Linear(3, 3, dtype=torch.float64))
    counter = Counter("_weight_norm_interface")
    pipe = fpipe.from_module(
        module,
        schedule=schedules.zb_h1(ranks=2, microbatches=3),
        cuts=["0"],
        loss=lambda output, _: output.square().mean(),
        compile=counter,
    )
    batch = rand(6, 3)
    loss, grads = pipe.step(dict(module.named_parameters()), {"input": batch})
    assert counter.counts == {"_weight_norm_interface": 1}
    module(batch).square().mean().backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    assert_same((loss, grads), (module(batch).square().mean(), expected))


def test_of_an_ensemble_and_by_example() -> None:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    model, pipe = piped(adapted, schedule, 4)
    members = [{n: torch.stack([leaf, 2 * leaf]) for n, leaf in p.items()} for p in model.params]
    losses, grads = fpipe.vmap(pipe).step(members, model.batch)
    for member in (0, 1):
        params = [{name: leaf[member] for name, leaf in own.items()} for own in members]
        expected = unpipelined(*model._replace(params=params))
        own = [{name: leaf[member] for name, leaf in part.items()} for part in grads]
        assert_same((losses[member], own), tuple(expected))
    each = fpipe.per_example_grads(pipe).step(model.params, model.batch)
    for row in range(4):
        batch = {name: leaf[row : row + 1] for name, leaf in model.batch.items()}
        expected = unpipelined(*model._replace(batch=batch))
        own = [{name: leaf[row] for name, leaf in part.items()} for part in each.grads]
        assert_same(own, expected.grads)


def test_one_that_fails_is_named() -> None:
    def breaking(module: fx.GraphModule, examples: Any) -> Callable[[list[Tensor]], Any]:
        def call(inputs: list[Tensor]) -> Any:
            raise ValueError("no exponent")

        return call if "exp" in module.code else Counter()(module, examples)

    model, pipe = piped(adapted, schedules.gpipe(ranks=2, microbatches=2), 4, compile=breaking)
    rule = r"^0UNSHARD failed on rank 0 \(stage 0\): ValueError: no exponent$"
    with pytest.raises(fpipe.PipelineError, match=rule) as failed:
        pipe.step(model.params, model.batch)
    assert (failed.value.stage, failed.value.microbatch) == (0, None)


def test_the_first_preparation_is_the_one_that_is_recorded() -> None:
    """Microbatches of another shape prepare other values, later than the UNSHARD."""

    def sized(p: Tensor, x: Tensor) -> Tensor:
        w = p.float().double()
        return x @ (w * 2.0 * p.float().double() if len(x) == 3 else w)

    base = schedules.one_f_one_b(ranks=2, microbatches=3)
    rows = [[Action.parse(f"{rank}UNSHARD"), *row] for rank, row in enumerate(base.actions)]
    schedule = Schedule(base.placement, rows)
    pipe = fpipe.pipeline([sized] * 2, lambda y, _: y.square().mean(), schedule, compile=False)
    with fpipe.record() as recording:
        pipe.step([rand(3, 3)] * 2, rand(7, 3))
    for events in recording.timeline.events:
        assert [event.start for event in events] == sorted(event.start for event in events)
