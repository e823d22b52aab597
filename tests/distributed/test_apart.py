"""Ranks that have come to be a call apart: no step is of two batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from fpipe import schedules
from tests.distributed import actors
from tests.distributed.crew import Crew, Outcome, attempt, values
from tests.models import unpipelined

SCHEDULE = schedules.gpipe(ranks=2, microbatches=2)


def batches(count: int) -> Iterator[dict[str, Tensor]]:
    """Of different numbers, but for the first rows of the first leaf."""
    batch = actors.model_of("mlp", 2, 6).batch
    for number in range(count):
        yield {name: leaf + number for name, leaf in batch.items()}


def mapped(pipe: fpipe.Pipeline, params: Any, batch: Any) -> None:
    stacked = {name: torch.stack([leaf, leaf]) for name, leaf in batch.items()}
    torch.func.vmap(lambda own: pipe.value(params, own))(stacked)


def moved(pipe: fpipe.Pipeline, params: Any, batch: Any) -> None:
    def value(x: Tensor) -> Tensor:
        return pipe.value(params, {**batch, "x": x})

    torch.func.jvp(value, (batch["x"],), (batch["x"],))


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under_a_mode(pipe: fpipe.Pipeline, params: Any, batch: Any) -> None:
    with Mode():
        pipe.value(params, batch)


REFUSED: dict[str, Callable[[fpipe.Pipeline, Any, Any], None]] = {
    "vmap": mapped, "jvp": moved, "a mode": under_a_mode
}  # fmt: skip


def refused_apart(group: dist.ProcessGroup, how: str, who: list[int]) -> list[Outcome]:
    """Values of five batches; some ranks make a call of the second that is refused, and go on."""
    model, pipe = actors.recorded(group, "mlp", SCHEDULE, 6)
    params = pipe.local(model.params)
    found = []
    for number, batch in enumerate(batches(5)):
        call: Any = pipe.value
        if number == 1 and group.rank() in who:
            call = lambda *given: REFUSED[how](pipe, *given)  # noqa: E731
        found.append(attempt(call, params, batch))
    return found


def check_rest(answers: list[list[Outcome]], but_for: int) -> None:
    model = actors.model_of("mlp", 2, 6)
    for number, batch in enumerate(batches(5)):
        expected = unpipelined(*model._replace(batch=batch)).loss
        for outcomes in answers:
            if number != but_for:
                torch.testing.assert_close(outcomes[number].value, expected)


@pytest.mark.parametrize("how", REFUSED)
def test_a_call_that_one_rank_refuses_is_heard_of(crew: Crew, how: str) -> None:
    """Its next call was taken for that which the others had begun: a step of two batches."""
    answers = values(crew.run(refused_apart, how, [1], ranks=range(2)))
    own, other = answers[1][1].error, answers[0][1].error
    # A mode is refused where the others hear of it at once.
    assert own.kind == ("PipelineError" if how == "a mode" else "FpipeError")
    assert "rank 1 cannot run this step: " in other.text
    assert other.text.endswith("The pipeline can be used again")
    assert own.text in other.text
    check_rest(answers, but_for=1)


@pytest.mark.parametrize("how", REFUSED)
def test_a_call_that_all_ranks_refuse(crew: Crew, how: str) -> None:
    answers = values(crew.run(refused_apart, how, [0, 1], ranks=range(2)))
    for outcomes in answers:
        assert outcomes[1].error.kind in ("FpipeError", "PipelineError")
    check_rest(answers, but_for=1)


def left_out(group: dist.ProcessGroup) -> list[Outcome]:
    """Steps; the loader of rank 1 leaves out the third batch, and that of rank 0 the fourth."""
    model, pipe = actors.recorded(group, "mlp", SCHEDULE, 6)
    params = pipe.local(model.params)
    given = list(batches(6))
    del given[2 if group.rank() else 4]
    found = [attempt(pipe.step, params, batch) for batch in given]
    return [Outcome(o.value and o.value.loss, o.failure) for o in found]


def test_a_batch_that_one_rank_leaves_out(crew: Crew) -> None:
    """The steps that followed were of two batches, without a word."""
    answers = values(crew.run(left_out, ranks=range(2)))
    model = actors.model_of("mlp", 2, 6)
    for number, batch in ((0, 0), (1, 1), (4, 5)):
        one = list(batches(6))[batch]
        expected = unpipelined(*model._replace(batch=one)).loss
        for outcomes in answers:
            torch.testing.assert_close(outcomes[number].value, expected)
    for outcomes in answers:
        for number in (2, 3):
            text = outcomes[number].error.text
            assert "rank 1 has other numbers in batch['" in text
            assert "is a step ahead" in text and text.endswith("The pipeline can be used again")


def rounded(group: dist.ProcessGroup) -> list[Tensor]:
    """Batches that ranks have computed to other last bits from the second on."""
    model, pipe = actors.recorded(group, "mlp", SCHEDULE, 6)
    params = pipe.local(model.params)
    found = []
    for number, batch in enumerate(batches(4)):
        if number and group.rank():
            batch = {name: leaf * (1 + 1e-12) for name, leaf in batch.items()}
        found.append(pipe.step(params, batch).loss)
    return found


def test_batches_that_are_rounded_otherwise_are_no_others(crew: Crew) -> None:
    answers = values(crew.run(rounded, ranks=range(2)))
    model = actors.model_of("mlp", 2, 6)
    for number, batch in enumerate(batches(4)):
        expected = unpipelined(*model._replace(batch=batch)).loss
        for losses in answers:
            torch.testing.assert_close(losses[number], expected)
