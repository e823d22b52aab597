"""Where torch.distributed.pipelining 2.13 is silently wrong or breaks, fpipe is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe import Action, BatchError, PipelineError, Schedule, ScheduleError, schedules
from tests.laid_out import laid_out
from tests.models import (
    Model,
    apply,
    assert_identical,
    assert_same,
    check,
    conv,
    gpt,
    mlp,
    mlp_first,
    mlp_layer,
    plain_pipeline,
    rand,
    unpipelined,
)


def rows_of(batch: Any, rows: int) -> Any:
    return {key: leaf[:rows] for key, leaf in batch.items()}


def test_two_steps_in_a_row() -> None:
    # There, gradients of the first step leak into the second, which is off by 37 %.
    model = mlp(2, 6)
    pipe = plain_pipeline(model.stages)
    first = pipe.step(model.params, model.batch)
    assert_identical(pipe.step(model.params, model.batch), first)
    moved = [{name: leaf + 0.1 for name, leaf in part.items()} for part in model.params]
    assert_same(
        pipe.step(moved, model.batch), unpipelined(model.stages, model.loss, moved, model.batch)
    )


@pytest.mark.parametrize("rows", [4, 5, 6, 7, 8])
def test_microbatches_of_uneven_size(rows: int) -> None:
    # There, each microbatch counts the same whatever its size: 28 % off the mean over the batch.
    model = mlp(2, rows)
    check(model.stages, model.params, model.batch, microbatches=4)


def check_sizes(model: Model, sizes: list[int], goals: list[str]) -> None:
    """One pipeline, batches of these sizes one after the other, what is asked for by turns."""
    pipe = plain_pipeline(model.stages, model.loss)
    for rows in sizes:
        batch = rows_of(model.batch, rows)
        output = apply(model.stages, model.params, batch)
        for goal in goals:
            if goal == "step":
                expected: Any = unpipelined(model.stages, model.loss, model.params, batch)
            else:
                expected = output if goal == "forward" else model.loss(output, batch)
            assert_same(getattr(pipe, goal)(model.params, batch), expected)


@pytest.mark.parametrize("goal", ["step", "forward", "value"])
@pytest.mark.parametrize("sizes", [[6, 4, 6], [4, 6, 4], [2, 7]])
def test_smaller_and_bigger_batches(sizes: list[int], goal: str) -> None:
    # There, buffers keep the size of the first batch; a bigger one aborts the process.
    check_sizes(mlp(2, max(sizes)), sizes, [goal])


def test_switching_between_training_and_evaluation() -> None:
    check_sizes(gpt(2, 4), [4, 2], ["step", "forward", "step", "value", "forward", "step"])


def row(text: str) -> list[Action]:
    return [Action.parse(word) for word in text.split()]


def test_last_stage_runs_its_second_microbatch_first() -> None:
    # There, losses are paired with microbatches by the order in which they come.
    edited = Schedule([0, 1], [row("0F0 0F1 0B1 0B0"), row("1F1 1F0 1B1 1B0")])
    model = mlp(2, 5)
    pipe = fpipe.pipeline(model.stages, model.loss, edited, compile=False)
    assert_same(pipe.step(model.params, model.batch), unpipelined(*model))
    assert_same(
        pipe.forward(model.params, model.batch), apply(model.stages, model.params, model.batch)
    )


def test_integer_leaves_travel_to_a_later_stage() -> None:
    def send(p: Any, batch: Any) -> Any:
        return {"h": mlp_first(p, batch), "row": (batch["x"] > 0).sum(1), "raw": batch["i"]}

    def carry(p: Any, x: Any) -> Any:
        return {**x, "h": mlp_layer(p, x["h"])}

    def use(p: Any, x: Any) -> Tensor:
        return mlp_layer(p, x["h"] * (x["row"] + x["raw"]).unsqueeze(1))

    model = mlp(3, 5)
    check([send, carry, use], model.params, model.batch | {"i": torch.arange(5)})


def viewed(x: Tensor) -> Tensor:
    return x.view(-1, 1, 3)


def transposed(x: Tensor) -> Tensor:
    return x.unsqueeze(1).transpose(1, 2)


def narrowed(x: Tensor) -> Tensor:
    return torch.cat([x, x], 1)[:, ::2]


def expanded(x: Tensor) -> Tensor:
    return x[:, :1].expand(-1, 3)


SHAPERS = [viewed, transposed, narrowed, expanded]


@pytest.mark.parametrize("shape", SHAPERS)
def test_stage_returns_a_view_or_strided_tensor(shape: Callable[[Tensor], Tensor]) -> None:
    check_shaper(shape)


def test_compiled_stage_returns_a_view_or_strided_tensor() -> None:
    # Compiled pieces do not check strides, neither of activations nor of their gradients.
    for shape in SHAPERS:
        check_shaper(shape, compile=laid_out, microbatches=1)


def check_shaper(shape: Callable[[Tensor], Tensor], **options: Any) -> None:
    """`shape` at the end of a stage, and, for its gradient, at the start of one."""

    def first(p: Any, batch: Any) -> Tensor:
        return shape(mlp_first(p, batch))

    def second(p: Any, x: Tensor) -> Tensor:
        return mlp_layer(p, shape(x.reshape(-1, 3)).reshape(-1, 3))

    model = mlp(2, 6)
    check([first, second], model.params, model.batch, **options)


@pytest.mark.parametrize("placement", [[0, 0, 1, 1], [0, 1, 1, 0], [1, 0, 0, 1]])
def test_adjacent_stages_on_one_rank(placement: list[int]) -> None:
    # There, evaluation waits for a message that a rank would have to send to itself.
    rows: list[list[Action]] = [[], []]
    for op, stages in (("F", range(4)), ("B", reversed(range(4)))):
        for stage in stages:
            rows[placement[stage]] += row(f"{stage}{op}0 {stage}{op}1")
    model = conv(4, 3)
    schedule = Schedule(placement, rows)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=False)
    output = apply(model.stages, model.params, model.batch)
    assert_same(pipe.forward(model.params, model.batch), output)
    assert_same(pipe.value(model.params, model.batch), model.loss(output, model.batch))
    assert_same(pipe.step(model.params, model.batch), unpipelined(*model))


def test_step_after_a_failed_step() -> None:
    # There, what the failed step had sent or summed is found by the next one.
    model = gpt(3, 6)
    schedule = schedules.interleaved_zero_bubble(ranks=3, microbatches=3, stages_per_rank=1)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=False)
    expected = pipe.step(model.params, model.batch)
    for broken_row in range(6):
        tokens = model.batch["tokens"].clone()
        tokens[broken_row, 0] = 99
        with pytest.raises(PipelineError):
            pipe.step(model.params, model.batch | {"tokens": tokens})
        assert_identical(pipe.step(model.params, model.batch), expected)


def test_step_after_a_refused_step() -> None:
    model = mlp(2, 4)
    pipe = plain_pipeline(model.stages)
    with pytest.raises(BatchError):
        pipe.step(model.params, rows_of(model.batch, 1))
    assert_same(pipe.step(model.params, model.batch), unpipelined(*model))


@pytest.mark.parametrize("text", ["0F0x", "0F0 1", "0F0,1B0", "F0", "0F", "0f0", "0F-1"])
def test_junk_in_the_text_of_an_action(text: str) -> None:
    # There, "0F0x" and the like are read as "0F0".
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(text)


def test_gradients_do_not_depend_on_who_asked_before() -> None:
    model = mlp(2, 4)
    pipe = plain_pipeline(model.stages)
    for part in model.params:
        part["w"].grad = rand(3, 3)  # what an optimizer of the caller's left there
    assert_same(pipe.step(model.params, model.batch), unpipelined(*model))
