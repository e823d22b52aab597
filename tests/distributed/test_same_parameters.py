"""Ranks that are given other parameters of one function, or other arguments, all know of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from fpipe import schedules
from tests.distributed.actors import Group
from tests.distributed.crew import Crew, Outcome, attempt, values
from tests.laid_out import laid_out
from tests.models import assert_same, rand

SCHEDULE = schedules.one_f_one_b(ranks=2, microbatches=2)
Params = dict[str, Tensor]


def loss_fn(params: Params, batch: Tensor) -> Tensor:
    hidden = fpipe.cut(torch.tanh(batch @ params["a"]))
    return (torch.tanh(hidden * params["b"].sum(0)) @ params["b"] + params["c"]).square().mean()


def tied_pipe(group: Group, **options: Any) -> fpipe.Pipeline:
    return fpipe.pipeline(loss_fn, schedule=SCHEDULE, group=group, **({"compile": False} | options))


def problem() -> tuple[Params, Tensor]:
    return {"a": rand(3, 3), "b": rand(3, 3), "c": rand(3)}, rand(4, 3)


ODD: dict[str, tuple[Any, str]] = {
    "renamed": (lambda p: {"z": p["a"], "b": p["b"], "c": p["c"]}, "in another structure"),
    "missing": (lambda p: {"b": p["b"], "c": p["c"]}, "in another structure"),
    "a list": (lambda p: list(p.values()), "in another structure"),
    "broadcast": (lambda p: p | {"c": p["c"][:1]}, r"float64[1] and float64[3] at ['c']"),
    "single": (lambda p: p | {"b": p["b"].float()}, "float32[3, 3] and float64[3, 3] at ['b']"),
    "turned": (lambda p: p | {"b": p["b"].T}, "of strides (1, 3) and (3, 1) at ['b']"),
}


def steps_with_odd(group: dist.ProcessGroup) -> list[Outcome]:
    """Rank 1 is given something odd in each step but the last."""
    pipe, (params, batch) = tied_pipe(group), problem()
    changes = [change for change, _ in ODD.values()]
    given = [change(params) if group.rank() else params for change in changes]
    return [attempt(pipe.step, own, batch) for own in (*given, params)]


def test_parameters_that_are_others_on_one_rank(crew: Crew) -> None:
    """Leaves were taken by their number: a broadcast gave another loss without a word."""
    for answers in values(crew.run(steps_with_odd, ranks=range(2))):
        for (_, said), answer in zip(ODD.values(), answers, strict=False):
            assert answer.error.kind == "PipelineError"
            assert f"got other parameters than rank {1 - answer.error.rank}, {said}" in (
                answer.error.text
            )
            assert answer.error.text.endswith("The pipeline can be used again")
        assert_same(answers[-1].value.loss, tied_pipe(None).step(*problem()).loss)


def step_of_own(group: Group, compile: Any) -> fpipe.Step:
    """Each rank holds what it reads alone, made in other strides or dtypes than the shapes say."""
    params, batch = problem()
    params["b"] = params["b"].T.contiguous().T.float()
    params["c"], params["a"], batch = params["c"].float(), params["a"].float(), batch.float()
    if group is not None:
        own = ("b", "c") if group.rank() else ("a",)
        bare = {name: p.to("meta", torch.float64).contiguous() for name, p in params.items()}
        params = {name: p if name in own else bare[name] for name, p in params.items()}
    return tied_pipe(group, compile=compile).step(params, batch)


@pytest.mark.parametrize("compile", [False, laid_out], ids=["plain", "compiled"])
def test_parameters_without_data_do_not_count(crew: Crew, compile: Any) -> None:
    """Kernels were compiled for strides that the first rank had been told of."""
    expected = step_of_own(None, False)
    for rank, step in enumerate(values(crew.run(step_of_own, compile, ranks=range(2)))):
        assert_same(step.loss, expected.loss, 1e-6)
        for name, grad in step.grads.items():
            assert (grad is None) is ((name == "a") is bool(rank))
            if grad is not None:
                assert_same(grad, expected.grads[name], 1e-6)
                assert grad.stride() == expected.grads[name].stride()


def steps_by_name(group: dist.ProcessGroup) -> list[Outcome]:
    """Rank 1 names an argument wrongly, and lives on."""
    pipe, (params, batch) = tied_pipe(group), problem()
    name = "btach" if group.rank() else "batch"
    calls = (pipe.step, pipe.value, pipe.forward)
    wrong = [attempt(lambda call=call: call(params, **{name: batch})) for call in calls]
    return [*wrong, attempt(lambda: pipe.step(params, batch=batch).loss)]


def test_argument_that_one_rank_names_wrongly(crew: Crew) -> None:
    """The other rank took its next batch for this one."""
    for answers in values(crew.run(steps_by_name, ranks=range(2))):
        for answer in answers[:3]:
            assert answer.error.rank == 1
            assert "rank 1 cannot run this step: BatchError: " in answer.error.text
            assert "by name btach" in answer.error.text
        assert_same(answers[3].value, tied_pipe(None).step(*problem()).loss)


def over_new_group(group: dist.ProcessGroup) -> list[Outcome]:
    """A pipeline that rank 0 could not make; others over the same group, and over a new one."""
    params, batch = problem()
    if group.rank():
        tied_pipe(group)
    same = attempt(tied_pipe(group).step, params, batch)
    fresh = dist.new_group(range(2))
    return [same, attempt(lambda: tied_pipe(fresh).step(params, batch).loss)]


def test_pipelines_are_counted_anew_over_a_new_group() -> None:
    with Crew(2) as crew:  # others would count in its group
        for same, fresh in values(crew.run(over_new_group)):
            assert "called the pipeline that is number" in same.error.text
            assert "Over a new group" in same.error.text
            assert_same(fresh.value, tied_pipe(None).step(*problem()).loss)
