"""What the ranks do in the tests; every function is called as ``function(group, *arguments)``.

With None for the group the same function does all of it in one process: what a test compares with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh

import fpipe
from fpipe import Schedule, pytree
from fpipe.pieces.boxed import Boxed
from fpipe.program.program import Program, Send, WaitSend
from tests.cut_model import IN_DIMS, language_model
from tests.distributed.crew import Outcome, attempt, mesh_of
from tests.models import MODELS, Model, adapted, mlp, piped
from tests.modules.models import CUTS
from tests.modules.models import language_model as language_module

Group = dist.ProcessGroup | None
P = TypeVar("P", bound=fpipe.Pipeline)


class Output(NamedTuple):
    """What `Pipeline.forward` returned."""

    value: Any


def model_of(name: str, stages: int, rows: int, dtype: torch.dtype = torch.float64) -> Model:
    """One of the tests' models; the same in every process."""
    return MAKERS[name](stages, rows, dtype)


def pipeline(group: Group, model: Model, schedule: Schedule, **options: Any) -> fpipe.Pipeline:
    """The pipeline of a model."""
    options = {"compile": False, "group": group} | options
    return fpipe.pipeline(model.stages, model.loss, schedule, **options)


def recorded(
    group: Group,
    name: str,
    schedule: Schedule,
    rows: int,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[Model, fpipe.Pipeline]:
    """A model and its pipeline; all of a process that have equal options share their recordings."""
    _, pipe = piped(MAKERS[name], schedule, 1, group=group, **options)
    return model_of(name, schedule.num_stages, rows, dtype), pipe


@cache
def _recorded_function(**options: Any) -> fpipe.Pipeline:
    schedule = fpipe.schedules.gpipe(ranks=4, microbatches=1)
    return fpipe.pipeline(
        language_model, schedule=schedule, in_dims=IN_DIMS, compile=False, **options
    )


def recorded_function(group: Group, schedule: Schedule, **options: Any) -> fpipe.Pipeline:
    """The pipeline of the function with cuts; those of a process share their recordings too."""
    return over(_recorded_function(**options), schedule, group)


@cache
def _recorded_module(cuts: tuple[str, ...]) -> fpipe.ModulePipeline:
    schedule = fpipe.schedules.gpipe(ranks=len(cuts) + 1, microbatches=1)
    return fpipe.from_module(language_module(), schedule=schedule, cuts=cuts, compile=False)


def recorded_module(
    group: Group, schedule: Schedule, cuts: Sequence[str] = CUTS
) -> fpipe.ModulePipeline:
    """The pipeline of the tests' own module, cut there; those of a process share as well."""
    return over(_recorded_module(tuple(cuts)), schedule, group)


def over(pipe: P, schedule: Schedule, group: Group) -> P:
    """Of the same kind, over a group, with the recordings of `pipe`."""
    definition = replace(pipe._engine.definition, schedule=schedule, group=group)
    return type(pipe)(definition, like=pipe._engine)


def scaled(params: Any, factor: float) -> Any:
    """Every leaf times a number."""
    return pytree.tree_map(lambda leaf: leaf * factor, params)


# ── what a test compares ────────────────────────────────────────────────────────────────────────


def one_step(
    group: Group, name: str, schedule: Schedule, rows: int, dtype: torch.dtype, options: Any
) -> list[Any]:
    """A single step."""
    model, pipe = recorded(group, name, schedule, rows, dtype, **options)
    return [pipe.step(pipe.local(model.params), model.batch)]


def one_uncompiled(group: Group, schedule: Schedule) -> list[Any]:
    """A single step, of which rank 0 runs the graphs as they are and the others by a backend."""
    model = mlp(schedule.num_stages, 8)
    plain = group is None or group.rank() == 0
    pipe = pipeline(group, model, schedule, compile=False if plain else {"backend": "eager"})
    return [pipe.step(pipe.local(model.params), model.batch)]


def every_call(group: Group, name: str, schedule: Schedule, sizes: Sequence[int]) -> list[Any]:
    """Training and evaluation in turn, on batches of changing shapes, all results kept."""
    results: list[Any] = []
    _, pipe = recorded(group, name, schedule, 2)
    for number, rows in enumerate(sizes):
        model = model_of(name, schedule.num_stages, rows)
        params = pipe.local([scaled(part, 1 + number / 9) for part in model.params])
        results.append(pipe.step(params, model.batch))
        results.append(pipe.value(params, model.batch))
        results.append(Output(pipe.forward(params, model.batch)))
    return results


def step_without_batch(
    group: Group, schedule: Schedule, rows: int, given: Collection[int]
) -> list[Any]:
    """Only the ranks in `given` pass the batch."""
    model, pipe = recorded(group, "gpt", schedule, rows)
    batch = model.batch if group is None or group.rank() in given else None
    params = pipe.local(model.params)
    return [pipe.step(params, batch), pipe.step(params, batch), pipe.value(params, batch)]


def two_pipelines(group: Group, first: Schedule, second: Schedule) -> list[Any]:
    """Two pipelines of other models over one group, in turn."""
    both = [recorded(group, "mlp", first, 6), recorded(group, "gpt", second, 4)]
    return [
        pipe.step(pipe.local(model.params), model.batch) for _ in range(2) for model, pipe in both
    ]


def changing_parameters(group: Group, schedule: Schedule) -> list[Any]:
    """The parameters of the last stage, and so of one rank alone, take another shape and back."""
    model, pipe = recorded(group, "mlp", schedule, 6)
    wide = {"w": model.params[-1]["w"], "b": model.params[-1]["b"].expand(2, 1, 3)}
    results = []
    for last in (model.params[-1], wide, model.params[-1], wide):
        results.append(pipe.step(pipe.local([*model.params[:-1], last]), model.batch))
    return results


def on_a_mesh(group: Group, schedule: Schedule, name: str) -> tuple[int, list[Any]]:
    """Two pipelines side by side, each on its own rows: which of them this is, and its step."""
    mesh: DeviceMesh = mesh_of((2, 2), ("dp", "pp"))
    model = model_of(name, schedule.num_stages, 6)
    pipe = pipeline(None, model, schedule, mesh=mesh)
    replica = mesh.get_local_rank("dp")
    params = [scaled(part, 1 + replica) for part in model.params]
    return replica, [pipe.step(pipe.local(params), model.batch)]


def hold_outputs(group: dist.ProcessGroup) -> tuple[Tensor, Tensor] | None:
    """An output that lives on in the caller's autograd graph alone, while further steps run.

    Returns:
        The gradient of its weighted sum, and what it must be; on the rank of the last stage.
    """
    model = Model([double, identity], lambda y, _: y.sum(), [None, None], torch.ones(4, 3))
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=1)
    pipe = pipeline(group, model, schedule)
    out = pipe.forward(model.params, model.batch, out_dims=None)
    if out is not None:
        weight = torch.ones_like(out, requires_grad=True)
        kept, expected = (weight * out).sum(), out.clone()
        del out
    for factor in (2, 3):
        pipe.forward(model.params, model.batch * factor, out_dims=None)
    if group.rank() == 0:
        return None
    kept.backward()
    assert weight.grad is not None
    return weight.grad, expected


# ── what a test looks at from within ────────────────────────────────────────────────────────────


def sent_before_waiting(group: dist.ProcessGroup, schedule: Schedule, rows: int) -> int:
    """How many messages a rank has on their way to another at one time, at most."""
    model, pipe = recorded(group, "mlp", schedule, rows)
    program = pipe.programs(pipe.local(model.params), model.batch)[group.rank()]
    on_their_way, most = 0, 0
    for instruction in program.instructions:
        on_their_way += isinstance(instruction, Send) - isinstance(instruction, WaitSend)
        most = max(most, on_their_way)
    return most


def proved_first(group: dist.ProcessGroup, schedule: Schedule) -> list[str]:
    """Whether the proof comes before the first kernel."""
    seen = []
    model = model_of("mlp", schedule.num_stages, 2 * schedule.num_microbatches)

    def compile(module: fx.GraphModule, examples: Sequence[Tensor]) -> Boxed:
        def call(inputs: list[Tensor]) -> Sequence[Tensor]:
            seen.append("ran")
            outputs: Sequence[Tensor] = module(*inputs)
            return outputs

        return call

    def prove(programs: Sequence[Program]) -> None:
        assert len(programs) == group.size()
        seen.append("proved")

    pipe = pipeline(group, model, schedule, compile=compile)
    with patch("fpipe.program.order.prove", prove):
        for _ in range(2):
            pipe.step(pipe.local(model.params), model.batch)
    return seen


class Entry(NamedTuple):
    """When a rank called a step, when its first kernel ran, by the machine's clock, and what came.

    Attributes:
        called: seconds.
        computed: seconds.
        kernels: how many ran in the first step, and in this one.
        right: whether the result is that of the first step.
    """

    called: float
    computed: float
    kernels: tuple[int, int]
    right: bool


def one_comes_late(
    group: dist.ProcessGroup, schedule: Schedule, late: Mapping[int, float]
) -> Entry:
    """The second step, which the ranks in `late` call so many seconds after the others."""
    times: list[float] = []

    def compile(module: fx.GraphModule, examples: Sequence[Tensor]) -> Boxed:
        def call(inputs: list[Tensor]) -> Sequence[Tensor]:
            times.append(time.monotonic())
            outputs: Sequence[Tensor] = module(*inputs)
            return outputs

        return call

    model = model_of("mlp", schedule.num_stages, 2 * schedule.num_microbatches)
    pipe = pipeline(group, model, schedule, compile=compile)
    params = pipe.local(model.params)
    before = pipe.step(params, model.batch)
    kernels = len(times)
    times.clear()
    time.sleep(late.get(group.rank(), 0.0))
    called = time.monotonic()
    step = pipe.step(params, model.batch)
    right = all(map(torch.equal, pytree.flatten(step)[0], pytree.flatten(before)[0]))
    return Entry(called, times[0], (kernels, len(times)), right)


def generators(group: dist.ProcessGroup, schedule: Schedule, recorder: int) -> list[Tensor]:
    """The losses of two steps of one seed; during the second rank `recorder` records."""
    model = model_of("mlp", schedule.num_stages, 2 * schedule.num_microbatches)
    first, *others = model.stages

    def drop(p: Any, x: Any) -> Tensor:
        return torch.dropout(first(p, x), 0.5, train=True)

    model = model._replace(stages=[drop, *others])
    pipe = pipeline(group, model, schedule)
    params = pipe.local(model.params)
    pipe.step(params, model.batch)
    losses = []
    for records in (False, group.rank() == recorder):
        torch.manual_seed(group.rank())
        with fpipe.record() if records else nullcontext():
            losses.append(pipe.step(params, model.batch).loss)
    return losses


def programs_and_step(group: dist.ProcessGroup) -> list[Outcome]:
    """Rank 1 asks for programs where the other steps; then both step."""
    model, pipe = recorded(group, "mlp", fpipe.schedules.gpipe(ranks=2, microbatches=2), 6)
    params = pipe.local(model.params)
    call = pipe.programs if group.rank() == 1 else pipe.step
    return [
        attempt(call, params, model.batch),
        attempt(lambda: pipe.step(params, model.batch).loss),
    ]


def without_data(group: dist.ProcessGroup) -> list[Outcome]:
    """Rank 1 passes shapes in place of its parameters, then of the batch; then numbers."""
    model, pipe = recorded(group, "mlp", fpipe.schedules.gpipe(ranks=2, microbatches=2), 6)
    params = pipe.local(model.params)
    empty, bare = params, model.batch
    if group.rank() == 1:
        empty, bare = pytree.tree_map(lambda leaf: leaf.to("meta"), (params, model.batch))
    given = [(empty, model.batch), (params, bare), (params, model.batch)]
    return [attempt(lambda p, batch: pipe.step(p, batch).loss, *each) for each in given]


def one_records(group: dist.ProcessGroup, schedule: Schedule, recorder: int) -> list[list[str]]:
    """The actions of each rank in a timeline that one rank alone records, of a second step."""
    model, pipe = recorded(group, "mlp", schedule, 2 * schedule.num_microbatches)
    params = pipe.local(model.params)
    pipe.step(params, model.batch)
    if group.rank() != recorder:
        pipe.step(params, model.batch)
        return []
    with fpipe.record() as recording:
        pipe.step(params, model.batch)
    events = recording.timeline.events
    return [[str(event.action) for event in row if event.end > event.start] for row in events]


def profiled(group: Group, schedule: Schedule) -> list[str]:
    """The labels that a profiler shows of a step, in order."""
    model, pipe = recorded(group, "mlp", schedule, 2 * schedule.num_microbatches)
    params = pipe.local(model.params)
    pipe.step(params, model.batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        pipe.step(params, model.batch)
    events = sorted(profiler.events() or [], key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("PP:")]


def with_default_device(group: Group, name: str, schedule: Schedule, rows: int) -> list[Any]:
    """Where new tensors go to a device that is not that of the stages."""
    model = model_of(name, schedule.num_stages, rows)
    with torch.device("meta"):
        pipe = pipeline(group, model, schedule)
        return [pipe.step(pipe.local(model.params), model.batch) for _ in range(2)]


def norms(group: Group, schedule: Schedule, dtype: torch.dtype) -> list[Any]:
    """A step's gradients, their norm, and what clipping to half of it makes of them."""
    model, pipe = recorded(group, "mlp", schedule, 6, dtype)
    loss, grads = pipe.step(pipe.local(model.params), model.batch)
    with fpipe.use(pipe):
        norm = fpipe.global_norm(grads)
        clipped = fpipe.clip_by_global_norm(grads, norm.item() / 2)
        again = fpipe.global_norm(clipped.grads)
    kept = fpipe.clip_by_global_norm(grads, norm.item() * 2, pipe=pipe)
    return [
        norm,
        clipped.norm,
        again,
        fpipe.Step(loss, clipped.grads),
        fpipe.Step(loss, kept.grads),
    ]


def norm_and_step(group: dist.ProcessGroup) -> list[Outcome]:
    """Rank 1 asks for a norm where the others step; then all of them step."""
    model, pipe = recorded(group, "mlp", fpipe.schedules.gpipe(ranks=3, microbatches=2), 6)
    params = pipe.local(model.params)

    def step() -> Tensor:
        return pipe.step(params, model.batch).loss

    def norm() -> Tensor:
        return fpipe.global_norm(params, pipe=pipe)

    return [attempt(norm if group.rank() == 1 else step), attempt(step)]


def infinite(group: dist.ProcessGroup) -> list[Any]:
    """One rank has an infinite gradient, the others none and zeros."""
    _, pipe = recorded(group, "mlp", fpipe.schedules.gpipe(ranks=3, microbatches=2), 6)
    own = [None, torch.zeros(2), torch.tensor([1.0, torch.inf])][group.rank()]
    grads, norm = fpipe.clip_by_global_norm([own], 1.0, pipe=pipe)
    part = attempt(fpipe.global_norm, pipe.local([own] * 3))
    return [norm, grads, part]


# ── a model of values that are awkward to send ──────────────────────────────────────────────────


def fill(p: Any, batch: Any) -> Any:
    """A value that is read, one that only the loss reads, a mask, integers, nothing, a scalar."""
    x = batch["x"] @ p
    return {
        "x": x,
        "late": batch["x"] * 2,
        "mask": x > 0,
        "rank": x.argsort(1),
        "nothing": x[:, :0],
        "scalar": x.sum(),
    }


def view(p: Any, v: Any) -> Any:
    """Only views of what was received: transposed, expanded, a slice."""
    return {**v, "x": v["x"].t(), "late": v["late"].expand(2, -1, -1), "rank": v["rank"][:, ::2]}


def identity(p: Any, v: Any) -> Any:
    return v


def double(p: Any, v: Tensor) -> Tensor:
    return v * 2


def unview(p: Any, v: Any) -> Any:
    """Read the views; a pending conjugation goes out."""
    x = (v["x"].t() @ p).masked_fill(v["mask"], 0.5) + v["scalar"]
    return {**v, "x": torch.complex(x, 2 * x).conj(), "late": v["late"][1]}


def close(p: Any, v: Any) -> Any:
    x = (v["x"].imag + v["x"].real) @ p + v["rank"][:, :1]
    return {"x": x, "late": v["late"], "nothing": v["nothing"]}


def plumbing_loss(y: Any, batch: Any) -> Tensor:
    return (y["x"] - y["late"]).square().mean() + y["nothing"].sum()


def plumbing(num_stages: int, rows: int, dtype: torch.dtype = torch.float64) -> Model:
    """Five stages or more; those beyond are the identity."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    extra = num_stages - 5
    stages = [fill, view, identity, *[identity] * extra, unview, close]
    params = [make(3, 3), None, None, *[None] * extra, make(3, 3), make(3, 3)]
    return Model(stages, plumbing_loss, params, {"x": make(rows, 3)})


MAKERS: dict[str, Callable[..., Model]] = {
    **MODELS,
    "mlp": mlp,
    "adapted": adapted,
    "plumbing": plumbing,
}
