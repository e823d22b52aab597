"""A module over processes: the same bits as in one, and all parameters back in one module."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fpipe
from fpipe import Schedule, schedules
from tests.distributed.actors import recorded_module
from tests.distributed.crew import Crew, Outcome, attempt, mesh_of, values
from tests.distributed.traps import DEEDS, Trap
from tests.models import assert_identical
from tests.modules.helpers import detached, unpipelined
from tests.modules.models import language_model, token_batch

RATE = 0.1


def train_module(
    group: dist.ProcessGroup | None, schedule: Schedule
) -> tuple[list[fpipe.Step], dict[str, Tensor]]:
    """Two steps; a rank changes only the parameters whose gradients it gets."""
    module, pipe = language_model(), recorded_module(group, schedule)
    # In an order of its own, which is not that in which a dict is flattened.
    params, steps = OrderedDict(reversed(detached(module).items())), []
    for _ in range(2):
        steps.append(pipe.step(params, token_batch()))
        for name, grad in steps[-1].grads.items():
            params[name] = params[name] if grad is None else params[name] - RATE * grad
    target = language_model()
    pipe.load_into(target, params)
    return steps, detached(target)


def test_module_over_ranks(crew: Crew) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    crew.start(train_module, schedule, ranks=range(2))
    steps, loaded = train_module(None, schedule)
    parts = values(crew.collect())
    for number, whole in enumerate(steps):
        merged: dict[str, Any] = {}
        for rank_steps, _ in parts:
            assert_identical(rank_steps[number].loss, whole.loss)
            grads = rank_steps[number].grads
            merged |= {name: grad for name, grad in grads.items() if grad is not None}
        assert_identical(merged, dict(whole.grads))
    for _, rank_loaded in parts:
        assert_identical(rank_loaded, loaded)


def choose(group: dist.ProcessGroup, schedule: Schedule) -> tuple[Any, fpipe.Step]:
    """Measure, and run a step."""
    module = language_model()
    pipe = fpipe.from_module(
        module,
        schedule=schedule,
        stages=4,
        example=token_batch(),
        measure=True,
        compile=False,
        group=group,
    )
    return pipe.balance, pipe.step(detached(module), token_batch())


def test_every_rank_takes_the_cuts_that_the_first_has_measured(crew: Crew) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    first, second = values(crew.run(choose, schedule, ranks=range(2)))
    assert first[0] == second[0] and first[0].unit == "s"
    expected = unpipelined(language_model(), detached(language_model()), token_batch())
    torch.testing.assert_close(second[1].loss, expected.loss)


def measure_in_rows(group: dist.ProcessGroup) -> Outcome:
    mesh = mesh_of((2, 2), ("dp", "pp"))
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    options: Any = {"example": token_batch(), "measure": True, "mesh": mesh}
    return attempt(lambda: fpipe.from_module(language_model(), schedule=schedule, **options))


def test_rows_of_a_mesh_do_not_measure_each_for_itself(crew: Crew) -> None:
    """Their cuts could differ, and the gradients that replicas add up lie on other ranks then."""
    for outcome in values(crew.run(measure_in_rows)):
        assert "measure=True with a mesh of 4 processes, in which a pip" in outcome.error.text


def measure_nothing(group: dist.ProcessGroup, schedule: Schedule) -> tuple[Outcome, Any]:
    """Rank 0 has no numbers at first; then both choose."""
    module = language_model()
    options: Any = {"example": token_batch(), "measure": True, "group": group, "compile": False}

    def choose(given: nn.Module) -> fpipe.ModulePipeline:
        buffers = {"mask": module.mask}
        return fpipe.from_module(given, schedule=schedule, buffers=buffers, **options)

    return attempt(choose, language_model().to("meta")), choose(module).cuts


def test_failure_to_measure_is_told_on_every_rank(crew: Crew) -> None:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    here, there = values(crew.run(measure_nothing, schedule, ranks=range(2)))
    said = "measure=True runs the module, but module['blocks.0.norm.bias']"
    assert here[0].error.kind == "StageError" and said in here[0].error.text
    assert there[0].error.kind == "PipelineError" and there[0].error.rank == 0
    assert "rank 0 cannot measure the parts of the module: StageError: " in there[0].error.text
    assert said in there[0].error.text
    assert here[1] == there[1]


def lose_a_rank(group: dist.ProcessGroup, victim: int, deed: str, what: str) -> list[Outcome]:
    """A rank is lost while cuts are measured, or while parameters are put together."""
    schedule, module = schedules.one_f_one_b(ranks=2, microbatches=2), language_model()
    trap = Trap()
    trap.arm(deed, 0)
    own = group.rank() == victim
    options: Any = {"schedule": schedule, "compile": trap if own else False, "group": group}
    if what == "measure":
        options |= {"example": token_batch(), "measure": True}
        return [attempt(lambda: fpipe.from_module(module, **options))]
    pipe = fpipe.from_module(module, cuts=["blocks.1"], **options | {"compile": False})
    pipe.programs(detached(module), token_batch())

    def load() -> None:
        if own:
            DEEDS[deed]()
        pipe.load_into(language_model(), detached(module))

    return [attempt(load), attempt(load)]


@pytest.mark.parametrize(("victim", "deed", "what"), [(0, "kill", "measure"), (1, "end", "load")])
def test_lost_rank_leaves_nobody_waiting(victim: int, deed: str, what: str) -> None:
    """What ranks told each other here went past the watch, and waited for half an hour."""
    with Crew(2) as crew:
        outcomes = crew.run(lose_a_rank, victim, deed, what, lost=[victim])
        for outcome in outcomes[1 - victim].value:
            assert outcome.error.kind == "PipelineError" and outcome.error.rank == victim
            assert f"rank {victim} has ended or cannot be reached" in outcome.error.text
            assert outcome.seconds < 20


def go_apart(group: dist.ProcessGroup) -> None:
    """One rank measures, the other takes a step."""
    module, schedule = language_model(), schedules.one_f_one_b(ranks=2, microbatches=2)
    options: Any = {"schedule": schedule, "compile": False, "group": group}
    if group.rank():
        pipe = fpipe.from_module(module, cuts=["blocks.1"], **options)
        pipe.step(detached(module), token_batch())
    else:
        fpipe.from_module(module, example=token_batch(), measure=True, **options)


def test_ranks_that_do_not_all_measure_are_named(crew: Crew) -> None:
    for outcome in crew.run(go_apart, ranks=range(2)):
        assert "rank 1 called pipe.step, but others called fpipe.balance" in outcome.error.text


def meet_with_less(group: dist.ProcessGroup, how: str, victim: int) -> tuple[Outcome, Any]:
    """One rank lacks a buffer or an example, or names a wrong buffer. Then both have them."""
    module, schedule = language_model(), schedules.one_f_one_b(ranks=2, microbatches=2)
    options: Any = {"schedule": schedule, "measure": True, "compile": False, "group": group}
    own = how if group.rank() == victim else ""
    shapes = language_model().to("meta") if own == "buffer" else module
    example = None if own == "example" else token_batch()
    buffers = {"nothing": module.mask} if own == "name" else None
    failed = attempt(lambda: fpipe.from_module(shapes, example=example, buffers=buffers, **options))
    return failed, fpipe.from_module(module, example=token_batch(), **options).cuts


@pytest.mark.parametrize(
    ("how", "victim", "said"),
    [
        ("buffer", 1, "the buffer 'mask' of LanguageModel"),
        ("example", 1, "cuts and example are both"),
        ("name", 1, "buffers names 'nothing', which is no buffer"),
        ("name", 0, "buffers names 'nothing', which is no buffer"),
    ],
)
def test_failure_of_a_rank_before_it_measures_is_told(
    crew: Crew, how: str, victim: int, said: str
) -> None:
    """It raised before it met the others, which waited for it for half an hour."""
    outcomes = values(crew.run(meet_with_less, how, victim, ranks=range(2)))
    here, there = outcomes[1 - victim], outcomes[victim]
    assert here[0].error.kind == "PipelineError" and here[0].error.rank == victim
    assert f"rank {victim} cannot make its pipeline: StageError: " in here[0].error.text
    assert said in here[0].error.text and said in there[0].error.text
    assert there[0].error.kind == "StageError" and here[0].seconds < 20
    assert here[1] == there[1]


def load_masters(group: dist.ProcessGroup, schedule: Schedule) -> tuple[Any, Any]:
    """Each rank has what it trains in another dtype, wider or narrower; then other shapes."""
    module, found = language_model(), []
    pipe = recorded_module(group, schedule, ["blocks.1"])
    params, batch = detached(module), token_batch()
    grads = pipe.step(params, batch).grads
    for dtype in (torch.float32, torch.float64):
        target = language_model().to(torch.float64 if dtype == torch.float32 else torch.float32)
        held = {n: p.to(target.get_parameter(n).dtype) for n, p in params.items()}
        own = {n: held[n] if grads[n] is None else (p + 1).to(dtype) for n, p in params.items()}
        pipe.load_into(target, own)
        found.append(detached(target))
    small = nn.Sequential(nn.Linear(2, 2))
    odd = small if group.rank() else module
    return found, attempt(pipe.load_into, odd, detached(odd))


def test_parameters_of_another_dtype_on_the_rank_that_has_them(crew: Crew) -> None:
    """Bytes of one dtype were received as another's, or ended the process."""
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    parts = values(crew.run(load_masters, schedule, ranks=range(2)))
    expected = {name: value + 1 for name, value in detached(language_model()).items()}
    for found, odd in parts:
        for own in found:
            assert own.keys() == expected.keys()
            for name, value in own.items():
                torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-6)
        assert "rank 1 got parameters of other names or shapes" in odd.error.text


class Other(nn.Linear):
    """Not what was trained."""


def load_wrong(group: dist.ProcessGroup, schedule: Schedule) -> None:
    """Rank 1 gives another module than rank 0."""
    module = language_model()
    pipe = fpipe.from_module(module, schedule=schedule, cuts=["blocks.1"], group=group)
    pipe.load_into(Other(2, 2) if group.rank() else module, detached(module))


def test_module_that_fits_on_one_rank_only_is_refused_on_both(crew: Crew) -> None:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    here, there = crew.run(load_wrong, schedule, ranks=range(2))
    said = "params and Other differ in 19 names"
    assert f"rank 1 cannot load its parameters: BatchError: {said}" in here.error.text
    assert said in there.error.text


def load_shapes(group: dist.ProcessGroup, schedule: Schedule) -> tuple[Outcome, dict[str, Tensor]]:
    """Rank 1 has no data of what rank 0 reads; at first it does not know that rank 0 does."""
    module, target = language_model(), language_model()
    pipe = recorded_module(group, schedule, ["blocks.1"])
    params = {name: value + 1 for name, value in detached(module).items()}
    if group.rank():
        params["blocks.0.norm.bias"] = params["blocks.0.norm.bias"].to("meta")
    early = attempt(lambda: pipe.load_into(target, params))
    pipe.programs(params, token_batch())
    pipe.load_into(target, params)
    return early, detached(target)


def test_parameters_without_data_are_refused_until_it_is_known_who_has_them(crew: Crew) -> None:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    (here, first), (there, second) = values(crew.run(load_shapes, schedule, ranks=range(2)))
    assert "rank 1 cannot load its parameters: BatchError: " in here.error.text
    assert there.error.kind == "BatchError"
    assert "params['blocks.0.norm.bias'] lies on the meta device" in there.error.text
    assert "call pipe.programs(params, batch) on all ranks first" in there.error.text
    expected = {name: value + 1 for name, value in detached(language_model()).items()}
    assert_identical(first, expected)
    assert_identical(second, expected)


def schedules_for(name: str) -> list[Schedule]:
    """Those of two stages on two ranks; for one model those of four.

    In one process every model has four stages (tests/modules/test_hugging_face.py).
    """
    every = [family(ranks=2, microbatches=4) for family in schedules.FAMILIES.values()]
    return [s for s in every if s.num_stages == (4 if name == "gpt2" else 2)]


def step_on_every_schedule(group: dist.ProcessGroup, name: str) -> list[fpipe.Step]:
    """One step of a Hugging Face model on each of its schedules."""
    # Not at the head of the file: only ranks that do this take the seconds of the import.
    from tests.modules.hugging_face import traced

    steps = []
    for schedule in schedules_for(name):
        params, batch, pipe = traced(name, schedule.num_stages, group)
        steps.append(pipe.with_schedule(schedule).step(params, batch))
    return steps


# One of each kind, by name, so that this file does not import them: between their stages Qwen2 and
# Mistral send what a Llama does.
HUGGING_FACE = ("gpt2", "llama", "bert", "vit", "t5", "mixtral")
ALIKE = {"qwen2", "mistral"}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_model_over_ranks(crew: Crew, name: str) -> None:
    crew.start(step_on_every_schedule, name, ranks=range(2))
    from tests.modules import hugging_face

    assert set(hugging_face.ARCHITECTURES) == {*HUGGING_FACE, *ALIKE}
    parts: list[list[fpipe.Step]] = values(crew.collect(timeout=200))
    for schedule, *steps in zip(schedules_for(name), *parts, strict=True):
        expected = hugging_face.expected_of(name, schedule.num_stages)
        merged: dict[str, Any] = {}
        for step in steps:
            torch.testing.assert_close(step.loss, expected.loss, rtol=1e-10, atol=0)
            merged |= {key: grad for key, grad in step.grads.items() if grad is not None}
        torch.testing.assert_close(merged, expected.grads, rtol=1e-10, atol=1e-10)
