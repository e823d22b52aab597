"""What the ranks do in the tests; every function is called as ``function(group, *arguments)``.

With None for the group the same function does all of it in one process: what a test compares with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fpipe
from fpipe import Schedule, tree
from tests.models import MODELS, Model, mlp

Group = dist.ProcessGroup | None


class Output(NamedTuple):
    """What `Pipeline.forward` returned."""

    value: Any


def model_of(name: str, stages: int, rows: int, dtype: torch.dtype = torch.float64) -> Model:
    """One of the tests' models; the same in every process."""
    makers: dict[str, Callable[..., Model]] = {**MODELS, "mlp": mlp, "plumbing": plumbing}
    return makers[name](stages, rows, dtype)


def pipeline(group: Group, model: Model, schedule: Schedule, **options: Any) -> fpipe.Pipeline:
    """The pipeline of a model."""
    options = {"compile": False, "group": group} | options
    return fpipe.pipeline(model.stages, model.loss, schedule, **options)


def scaled(params: Any, factor: float) -> Any:
    """Every leaf times a number."""
    return tree.tree_map(lambda leaf: leaf * factor, params)


# ── what a test compares ────────────────────────────────────────────────────────────────────────


def one_step(
    group: Group, name: str, schedule: Schedule, rows: int, dtype: torch.dtype, options: Any
) -> list[Any]:
    """A single step."""
    model = model_of(name, schedule.num_stages, rows, dtype)
    pipe = pipeline(group, model, schedule, **options)
    return [pipe.step(pipe.local(model.params), model.batch)]


def every_call(group: Group, name: str, schedule: Schedule, sizes: Sequence[int]) -> list[Any]:
    """Training and evaluation in turn, on batches of changing shapes, all results kept."""
    results: list[Any] = []
    pipe = pipeline(group, model_of(name, schedule.num_stages, 2), schedule)
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
    model = model_of("gpt", schedule.num_stages, rows)
    pipe = pipeline(group, model, schedule)
    batch = model.batch if group is None or group.rank() in given else None
    params = pipe.local(model.params)
    return [pipe.step(params, batch), pipe.step(params, batch), pipe.value(params, batch)]


def two_pipelines(group: Group, first: Schedule, second: Schedule) -> list[Any]:
    """Two pipelines of other models over one group, in turn."""
    models = [model_of("mlp", first.num_stages, 6), model_of("gpt", second.num_stages, 4)]
    pipes = [pipeline(group, m, s) for m, s in zip(models, (first, second), strict=True)]
    return [
        pipe.step(pipe.local(model.params), model.batch)
        for _ in range(2)
        for pipe, model in zip(pipes, models, strict=True)
    ]


def changing_parameters(group: Group, schedule: Schedule) -> list[Any]:
    """The parameters of the last stage, and so of one rank alone, take another shape and back."""
    model = model_of("mlp", schedule.num_stages, 6)
    pipe = pipeline(group, model, schedule)
    wide = {"w": model.params[-1]["w"], "b": model.params[-1]["b"].expand(2, 1, 3)}
    results = []
    for last in (model.params[-1], wide, model.params[-1], wide):
        results.append(pipe.step(pipe.local([*model.params[:-1], last]), model.batch))
    return results


def on_a_mesh(group: Group, schedule: Schedule, name: str) -> tuple[int, list[Any]]:
    """Two pipelines side by side, each on its own rows: which of them this is, and its step."""
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
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
