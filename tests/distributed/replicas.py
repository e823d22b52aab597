"""Pipelines over replicas, as processes of a mesh run them, beside one process on all rows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

import fpipe
from fpipe import Schedule, dtensors, pytree
from fpipe.program import async_collectives
from fpipe.program.program import Compute
from fpipe.program.replica_collectives import Begin, Wait
from tests.distributed.crew import Outcome, attempt, mesh_of
from tests.distributed.traps import Trap
from tests.meter import Meter
from tests.models import assert_same

ROWS = 16


def stage(p: Any, x: Tensor) -> Tensor:
    """Five rows do not divide evenly over two replicas, a scalar does not divide at all."""
    return x + p["scale"] * torch.tanh(x @ p["into"] + p["bias"]) @ p["out"]


def mean_square(y: Tensor, _: Any) -> Tensor:
    return y.square().mean()


def sum_square(y: Tensor, _: Any) -> Tensor:
    return y.square().sum()


def weighted_square(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    weight = (x[:, 0] > 0).to(y.dtype)
    return (weight * y.square().sum(1)).sum(), weight.sum()


LOSSES: dict[str, Callable[..., Any]] = {
    "mean": mean_square,
    "sum": sum_square,
    "weighted": weighted_square,
}


def parameters(stages: int, hidden: int = 5, width: int = 3) -> list[Any]:
    """The same on every process."""
    generator = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [
        {
            "into": rand(width, hidden),
            "bias": rand(hidden),
            "out": rand(hidden, width),
            "scale": rand(),
        }
        for _ in range(stages)
    ]


def data(width: int = 3) -> Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def alone(schedule: Schedule, reduction: str, batch: Tensor) -> fpipe.Step:
    """One process on all rows, in plain autograd."""
    params = parameters(schedule.num_stages)
    leaves, spec = pytree.flatten(params)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = batch
    for own in pytree.unflatten(spec, leaves):
        y = stage(own, y)
    found = LOSSES[reduction](y, batch)
    loss = found[0] / found[1] if reduction == "weighted" else found
    grads = torch.autograd.grad(loss, leaves)
    return fpipe.Step(loss.detach(), pytree.unflatten(spec, grads))


def rows_of(
    mesh: DeviceMesh, dims: Sequence[str], batch: Tensor, sizes: Sequence[int] | None = None
) -> Tensor:
    """The rows of this process's replica, so many for each; None for the same number."""
    replica, replicas = 0, 1
    for dim in dims:
        replica = replica * mesh[dim].size() + mesh.get_local_rank(dim)
        replicas *= mesh[dim].size()
    return batch.split(list(sizes or [len(batch) // replicas] * replicas))[replica]


def whole(tree: Any) -> Any:
    """All of every leaf."""
    return pytree.map_wholes(lambda leaf, path: dtensors.whole(leaf), tree)


def check_step(
    pipe: fpipe.Pipeline, params: Any, batch: Tensor, expected: fpipe.Step, stages: Sequence[int]
) -> None:
    """A step gives the loss of all rows, and gradients that are placed as the parameters are."""
    loss, grads = pipe.step(params, batch)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-10, atol=0)
    for number in stages:
        for name, leaf in params[number].items():
            grad = grads[number][name]
            assert type(grad) is type(leaf)
            if dtensors.is_dtensor(leaf):
                assert grad.placements == leaf.placements
                assert grad.shape == leaf.shape
        assert_same(whole(grads[number]), expected.grads[number])


@cache
def recorded(
    mesh: DeviceMesh,
    dims: tuple[str, ...],
    stages: int,
    reduction: str = "mean",
    **options: Any,
) -> fpipe.Pipeline:
    """A pipeline whose recordings all schedules of so many stages share, from call to call."""
    ranks = mesh["pp"].size()
    schedule = fpipe.schedules.looped_bfs(
        ranks=ranks, microbatches=4, stages_per_rank=stages // ranks
    )
    return fpipe.pipeline(
        [stage] * stages,
        LOSSES[reduction],
        schedule,
        mesh=mesh,
        data=list(dims) if len(dims) > 1 else dims[0],
        reduction=reduction,
        compile=False,
        **options,
    )


def steps(
    group: Any,
    schedule: Schedule,
    shape: Sequence[int],
    names: Sequence[str],
    dims: Sequence[str],
    policies: Sequence[tuple[Any, Any]],
    reduction: str = "mean",
    sizes: Sequence[int] | None = None,
    options: Any = None,
) -> int:
    """Steps under each policy, with plain and with divided parameters; returns how many."""
    mesh = mesh_of(tuple(shape), tuple(names))
    batch = data()
    expected = alone(schedule, reduction, batch)
    own = rows_of(mesh, dims, batch, sizes)
    first = recorded(mesh, tuple(dims), schedule.num_stages, reduction, **options or {})
    plain = first.with_schedule(schedule)
    given = plain.local(parameters(schedule.num_stages))
    stages = schedule.stages_of(plain.rank or 0)
    done = 0
    for policy in policies:
        pipe = plain if policy is None else plain.with_schedule(schedule.sharded(*policy))
        for params in (pipe.shard(given), pipe.replicate(given)):
            check_step(pipe, params, own, expected, stages)
            torch.testing.assert_close(pipe.value(params, own), expected.loss, rtol=1e-10, atol=0)
            done += 1
    return done


# ── modules: tied, frozen, scalar and uneven parameters ─────────────────────────────────────────


class Tied(nn.Module):
    """An embedding that is the head too, a frozen base with an adapter, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.base = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.down = nn.ParameterList(torch.randn(6, 2) for _ in range(4))
        self.up = nn.ParameterList(torch.randn(2, 6) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.base.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = base(x + self.scale * torch.tanh(x @ down @ up))
        return x @ self.embed.weight.T


def token_loss(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten())


def token_sum(logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    weights = (batch["tokens"] > 2).double()
    losses = F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten(), reduction="none")
    return (losses * weights.flatten()).sum(), weights.sum()


TOKEN_LOSSES: dict[str, Callable[..., Any]] = {"mean": token_loss, "weighted": token_sum}


def tied_module() -> Tied:
    torch.manual_seed(3)
    return Tied().double()


def tokens(rows: int = ROWS) -> dict[str, Tensor]:
    return {"tokens": torch.randint(7, (rows, 5), generator=torch.Generator().manual_seed(4))}


@cache
def recorded_module(mesh: DeviceMesh, schedule: Schedule, reduction: str) -> fpipe.ModulePipeline:
    """The pipeline of `Tied`, which keeps its recordings from call to call."""
    return fpipe.from_module(
        tied_module(),
        schedule=schedule,
        cuts=["base.0", "base.1", "base.2"],
        loss=TOKEN_LOSSES[reduction],
        mesh=mesh,
        data="dp",
        reduction=reduction,
        compile=False,
    )


def module_steps(
    group: Any, schedule: Schedule, policies: Sequence[Any], reduction: str, sizes: Sequence[int]
) -> None:
    """Steps of a module under each policy, beside plain autograd on all rows."""
    mesh = mesh_of((2, 2), ("dp", "pp"))
    module, batch = tied_module(), tokens()
    loss = TOKEN_LOSSES[reduction]
    found: Any = loss(module(**batch), batch)
    value = found[0] / found[1] if reduction == "weighted" else found
    value.backward()
    own = {"tokens": rows_of(mesh, ["dp"], batch["tokens"], sizes)}
    plain = recorded_module(mesh, schedule, reduction)
    for policy in policies:
        pipe = plain if policy is None else plain.with_schedule(schedule.sharded(*policy))
        held = pipe.place(dict(module.named_parameters()), own)
        for params in (pipe.shard(held), pipe.replicate(held)):
            loss_of_all, grads = pipe.step(params, own)
            torch.testing.assert_close(loss_of_all, value.detach(), rtol=1e-10, atol=0)
            seen = 0
            for name, parameter in module.named_parameters():
                if parameter.grad is None:
                    assert grads[name] is None
                elif grads[name] is not None:
                    assert_same(whole(grads[name]), parameter.grad)
                    seen += 1
            assert seen > 3
            norm = fpipe.global_norm(grads, pipe=pipe)
            squares = [p.grad.square().sum() for p in module.parameters() if p.grad is not None]
            torch.testing.assert_close(norm, torch.stack(squares).sum().sqrt())


# ── keys, states, optimizers ────────────────────────────────────────────────────────────────────


def dropped(w: Tensor, x: Tensor, key: Tensor) -> Tensor:
    """Which elements dropout keeps."""
    kept: Tensor = fpipe.random.bernoulli(key, 0.5, x.shape).to(x.dtype)
    return x * kept * w


def key_masks(group: Any) -> list[Any]:
    """What each process gets of rows of ones under one key, plain and with replicas."""
    mesh = mesh_of((2, 2), ("dp", "pp"))
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(
        [fpipe.Stage(dropped, reads_key=True)] * 2,
        mean_square,
        schedule,
        mesh=mesh,
        data="dp",
        compile=False,
    )
    params = pipe.replicate(pipe.local([torch.ones(3, dtype=torch.float64)] * 2))
    ones = torch.ones(8, 3, dtype=torch.float64)
    key = fpipe.random.key(0)
    outputs = [pipe.forward(params, ones, key) for _ in range(2)]
    return [mesh.get_local_rank("dp"), *outputs]


def counted(params: Any, state: Any, x: Tensor) -> Any:
    """A loss, a running mean of the rows, and a count."""
    y = x * params["w"]
    fpipe.cut(y)
    new = {"mean": 0.5 * state["mean"] + 0.5 * x.mean(0), "count": state["count"] + 1}
    return y.square().mean(), new


def states(group: Any, kind: str, sizes: Sequence[int], microbatches: int) -> Any:
    """The state after a step, on every process."""
    mesh = mesh_of((2, 2), ("dp", "pp"))
    pipe = fpipe.pipeline(
        counted,
        schedule=fpipe.schedules.gpipe(ranks=2, microbatches=microbatches),
        has_state=True,
        mesh=mesh,
        data="dp",
        replica_state=kind,
        compile=False,
    )
    params = pipe.shard({"w": torch.ones(3, dtype=torch.float64)})
    state = {"mean": torch.zeros(3, dtype=torch.float64), "count": torch.tensor(0)}
    return pipe.step(params, state, rows_of(mesh, ["dp"], data(), sizes)).state


def trained(group: Any, cases: Sequence[bool], max_norm: float) -> list[list[Any]]:
    """Loss, norm and whole parameters after clipped steps of an optimizer over replicas.

    One for each of `cases`: whether parameters are divided.
    """
    mesh = mesh_of((2, 2), ("dp", "pp"))
    pipe = recorded(mesh, ("dp",), 4).with_schedule(fpipe.schedules.zbv(ranks=2, microbatches=4))
    held, batch = pipe.local(parameters(4)), rows_of(mesh, ["dp"], data())
    return [
        train(pipe, pipe.shard(held) if divided else pipe.replicate(held), batch, max_norm)
        for divided in cases
    ]


def train(pipe: fpipe.Pipeline, params: Any, batch: Any, max_norm: float) -> list[Any]:
    """Three steps of AdamW."""
    trainer = fpipe.train(pipe, torch.optim.AdamW, lr=0.1, max_norm=max_norm)
    state = trainer.init(params)
    for _ in range(3):
        loss, params, state, norm = trainer.step(params, state, batch)
    moments = [m for m in pytree.flatten(state.moments)[0] if m.dim()]
    return [loss, norm, whole(params), sum(m.numel() for m in moments)]


def profiled(group: Any) -> tuple[fpipe.Cost, fpipe.Cost, list[str]]:
    """Costs of divided and of plain stages, and what a recorded step shows of rank 0."""
    mesh = mesh_of((2, 2), ("dp", "pp"))
    schedule = fpipe.schedules.interleaved_1f1b(ranks=2, microbatches=4, stages_per_rank=2)
    pipe = recorded(mesh, ("dp",), 4).with_schedule(schedule)
    given = pipe.local(parameters(4))
    batch = rows_of(mesh, ["dp"], data())
    divided = pipe.shard(given)
    with fpipe.record() as recording:
        pipe.step(divided, batch)
    shown = [str(event.action) for event in recording.timeline.events[0]]
    return (
        fpipe.profile(pipe, divided, batch, steps=2),
        fpipe.profile(pipe, pipe.replicate(given), batch, steps=2),
        shown,
    )


class Unseen(async_collectives.UnderWay):
    """Collectives that hold nothing of their own, as those of other backends than gloo.

    It fills one more tensor, and its thread lets go of the others a moment after the end.
    """

    def wait(self) -> Tensor:
        flat: Any = self._flat
        with _disable_current_modes():
            result = super().wait()
        until = time.monotonic() + 1
        while flat is not None and flat is not result and flat._use_count() > 1:
            assert time.monotonic() < until
            time.sleep(0)
        return result


def memory(
    group: Any, policies: Sequence[tuple[Any, Any]], hidden: int, width: int
) -> list[tuple[int, int]]:
    """The planned peak of a step of stages that are so wide, and the measured one, in bytes.

    One pair for each policy.
    """
    mesh = mesh_of((2, 2), ("dp", "pp"))
    schedule = fpipe.schedules.interleaved_1f1b(ranks=2, microbatches=4, stages_per_rank=2)
    first = recorded(mesh, ("dp",), schedule.num_stages)
    params = first.shard(first.with_schedule(schedule).local(parameters(4, hidden, width)))
    batch = rows_of(mesh, ["dp"], data(width))
    held = [*pytree.flatten(params)[0], batch]
    peaks = []
    for policy in policies:
        pipe = first.with_schedule(schedule.sharded(*policy))
        pipe.step(params, batch)
        program = pipe.programs(params, batch)[pipe.rank or 0]
        measured = []
        for _ in range(3):  # a thread of gloo's may hold a tensor for a moment after its collective
            with patch("fpipe.program.async_collectives.UnderWay", Unseen), Meter(held) as meter:
                result = pipe.step(params, batch)
            del result
            measured.append(meter.peak)
        peaks.append((program.peak_bytes, min(measured)))
    return peaks


def stages_under_reduction(group: Any, schedule: Schedule) -> int:
    """How many stages of this rank have reductions under way at once, at most."""
    mesh = mesh_of((2, 2), ("dp", "pp"))
    count = schedule.num_stages
    pipe = fpipe.pipeline(
        [stage] * count, mean_square, schedule, mesh=mesh, data="dp", compile=False
    )
    params = pipe.shard(pipe.local(parameters(count)))
    program = pipe.programs(params, rows_of(mesh, ["dp"], data()))[pipe.rank or 0]
    under_way: Counter[int] = Counter()
    most = 0
    for one in program.instructions:
        if isinstance(one, Compute) and one.action.op == fpipe.Op.REDUCE_GRAD:
            under_way[one.action.stage] += isinstance(one.call, Begin) - isinstance(one.call, Wait)
            most = max(most, sum(number > 0 for number in under_way.values()))
    assert not under_way.total()
    return most


# ── three dimensions ────────────────────────────────────────────────────────────────────────────


class Perceptron(nn.Module):
    """A layer whose two matrices may be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


def three_dimensional(group: Any, policies: Sequence[Any]) -> int:
    """Replicas of a pipeline whose layers are divided too; returns how many gradients it saw."""
    mesh = mesh_of((2, 2, 2), ("dp", "pp", "tp"))
    torch.manual_seed(0)
    whole, module = (nn.Sequential(Perceptron(), Perceptron()).double() for _ in range(2))
    module.load_state_dict(whole.state_dict())
    by_position, undivided = Shard(1), Replicate()
    plan: dict[str, ParallelStyle] = {
        "0": PrepareModuleInput(
            input_layouts=undivided, desired_input_layouts=by_position, use_local_output=True
        ),
        "*.up": ColwiseParallel(input_layouts=by_position),
        "*.down": RowwiseParallel(output_layouts=by_position),
        "1": PrepareModuleOutput(
            output_layouts=by_position, desired_output_layouts=undivided, use_local_output=True
        ),
    }
    parallelize_module(module, mesh["tp"], plan)
    x = torch.randn(8, 4, 4, dtype=torch.float64)
    expected = mean_square(whole(x), None)
    expected.backward()
    own = x.split([2, 6])[mesh.get_local_rank("dp")]
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
    plain = fpipe.from_module(
        module,
        schedule=schedule,
        cuts=["0"],
        loss=mean_square,
        mesh=mesh,
        data="dp",
        compile=False,
    )
    seen = 0
    for policy in policies:
        pipe = plain if policy is None else plain.with_schedule(schedule.sharded(*policy))
        params = pipe.shard(dict(module.named_parameters()))
        loss, grads = pipe.step(params, {"input": own})
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=0)
        for name, parameter in whole.named_parameters():
            if grads[name] is not None:
                assert grads[name].placements == params[name].placements
                torch.testing.assert_close(
                    grads[name].full_tensor(), parameter.grad, rtol=1e-10, atol=1e-14
                )
                seen += 1
    return seen


# ── what fails, and what is refused ─────────────────────────────────────────────────────────────


def failing(group: Any, process: int, deed: str, at: int) -> list[Outcome]:
    """A good step, one in which a kernel of a process does a deed, and what comes after."""
    mesh, trap = mesh_of((2, 2), ("dp", "pp")), Trap()
    pipe = fpipe.pipeline(
        [stage] * 2,
        mean_square,
        fpipe.schedules.one_f_one_b(ranks=2, microbatches=2),
        mesh=mesh,
        data="dp",
        compile=trap,
        timeout=2.0,
    )
    params = pipe.shard(pipe.local(parameters(2)))
    batch = rows_of(mesh, ["dp"], data())
    good = attempt(pipe.step, params, batch)
    if dist.get_rank() == process:
        trap.arm(deed, at)
    bad = attempt(pipe.step, params, batch)
    return [good, bad, attempt(pipe.step, params, batch)]


def refused(group: Any) -> list[Outcome]:
    """Steps that replicas cannot take together, and a good one again."""
    mesh = mesh_of((2, 2), ("dp", "pp"))
    second = mesh.get_local_rank("dp") == 1
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)

    def make(chosen: Schedule, **options: Any) -> fpipe.Pipeline:
        return fpipe.pipeline(
            [stage] * 2, mean_square, chosen, mesh=mesh, data="dp", compile=False, **options
        )

    pipe = make(schedule)
    batch = rows_of(mesh, ["dp"], data())
    given = pipe.local(parameters(2))
    divided = pipe.shard(given)
    other = pytree.tree_map(lambda leaf: leaf + 1.0, given) if second else given
    wider = pipe.local(parameters(2, hidden=6))
    policy = make(schedule.sharded(reduce=1) if second else schedule)
    remat = make(schedule, remat="full" if second else "none")
    return [
        attempt(pipe.step, other, batch),
        attempt(pipe.step, wider if second else given, batch),
        attempt(policy.step, given, batch),
        attempt(remat.step, given, batch),
        attempt(pipe.step, given, [batch] if second else batch),
        attempt(pipe.step, divided if second else given, batch),
        attempt(pipe.step, given, batch),
    ]


def misused(group: Any) -> list[Outcome]:
    """What no process accepts."""
    mesh = mesh_of((2, 2), ("dp", "pp"))
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)

    def make(**options: Any) -> fpipe.Pipeline:
        return fpipe.pipeline([stage] * 2, mean_square, schedule, compile=False, **options)

    pipe = make(mesh=mesh, data="dp")
    params = pipe.shard(pipe.local(parameters(2)))
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    cut: dict[str, Any] = {"schedule": schedule, "cuts": ["0"], "loss": mean_square}
    return [
        attempt(partial(make, mesh=mesh, data="tp")),
        attempt(partial(make, mesh=mesh, data="pp")),
        attempt(partial(make, data="dp")),
        attempt(partial(make, mesh=mesh, data="dp", bucket_bytes=0)),
        attempt(partial(make, mesh=mesh, data="dp", replica_state="last")),
        attempt(pipe.shard, params),
        attempt(make(mesh=mesh).shard, params),
        attempt(fpipe.per_example_norms, pipe),
        attempt(
            partial(
                fpipe.from_module, cast("nn.Module", fully_shard(module, mesh=mesh["dp"])), **cut
            )
        ),
    ]
