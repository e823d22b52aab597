"""What ranks with a CUDA device each do: ``torchrun --nproc-per-node 2 -m tests.device.ranks``.

One rank alone does what it can. With ``EMULATED=1`` in the environment the devices are made of the
CPU.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

if os.environ.get("EMULATED"):
    import tests.device.emulated  # noqa: F401

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fpipe
from fpipe import pytree, schedules
from fpipe.transport.group import HINDRANCES, StagedTransport
from tests.models import assert_same, gpt, mlp, unpipelined

FEW = ("gpipe", "zb_h1", "zbv")
FAMILIES = (
    *("gpipe", "one_f_one_b", "eager_1f1b", "interleaved_1f1b", "looped_bfs", "group_1f1b"),
    *("interleaved_zero_bubble", "zb_h1", "zb_h2", "zbv", "v_half", "v_min", "dualpipev"),
)


def main() -> None:
    """Steps against the function without a pipeline, and a fault, after which ranks go on."""
    torch.set_num_threads(1)
    rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() < 2:
        # NCCL refuses two ranks with one device, unless they are on hosts of their own.
        os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"}
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    world = dist.get_world_size()
    families, make = (FEW, mlp) if os.environ.get("EMULATED") else (FAMILIES, gpt)
    pipes: dict[int, fpipe.Pipeline] = {}  # those of as many stages share what is traced
    for family in families:
        schedule = schedules.get(family, ranks=world, microbatches=4)
        model = make(schedule.num_stages, 8)
        if schedule.num_stages not in pipes:
            pipes[schedule.num_stages] = fpipe.pipeline(
                model.stages,
                model.loss,
                schedule,
                compile=False,
                group=dist.group.WORLD,
                timeout=30,
            )
        pipe = pipes[schedule.num_stages].with_schedule(schedule)
        expected = unpipelined(*model)
        whole = pytree.tree_map(lambda leaf: leaf.to(device), (model.params, model.batch))
        params, batch = pipe.local(whole[0]), whole[1]
        for _ in range(2):
            step = pipe.step(params, batch)
        assert step.loss.device == device
        assert_same(step.loss.cpu(), expected.loss)
        for stage in schedule.stages_of(rank):
            grads = pytree.tree_map(lambda leaf: leaf.cpu(), step.grads[stage])
            assert_same(grads, expected.grads[stage])
        assert_same(pipe.value(params, batch).cpu(), expected.loss)
        norm = torch.stack([leaf.norm() for leaf in pytree.flatten(expected.grads)[0]]).norm()
        assert_same(torch.as_tensor(fpipe.global_norm(step.grads, pipe=pipe)).cpu().double(), norm)
    if not os.environ.get("EMULATED"):  # which has no collectives of DTensors
        divides_layers(device)
    keeps_shards_on_the_cpu(device)
    if world > 1:
        goes_by_way_of_the_cpu_once(device)
        runs_out_of_memory_for_what_arrives(device)
        goes_by_way_of_the_cpu_where_nccl_hinders(device)
        moves_every_dtype(device)
        steps_in_a_thread_with_another_device(device)
        refuses_parameters_that_lie_elsewhere(device)
        fails_on_one_microbatch(device)
        sends_no_value_of_the_cpu(device)
        hears_of_a_rank_that_ends(device)
    dist.destroy_process_group()


def run_as(environment: Mapping[str, str], written: Path) -> None:
    """`main` in a process that has imported this; what it tells goes to a file."""
    os.environ.update(environment)
    file = os.open(written, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    main()


def divides_layers(device: torch.device) -> None:
    """Every rank has a part of each stage: parameters are DTensors, divided over NCCL."""
    torch.manual_seed(0)
    schedule = schedules.zb_h1(ranks=1, microbatches=4)
    whole = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(2)]).to(device).double()
    x = torch.randn(8, 8, dtype=torch.float64, device=device)

    def loss(y: torch.Tensor, _: Any) -> torch.Tensor:
        return y.square().mean()

    expected = loss(whole(x), x)
    grads = torch.autograd.grad(expected, list(whole.parameters()))
    mesh = init_device_mesh("cuda", (1, dist.get_world_size()), mesh_dim_names=("pp", "tp"))
    parallelize_module(whole, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for compiled in (False, True):
        pipe = fpipe.from_module(
            whole, schedule=schedule, loss=loss, cuts=[], mesh=mesh, compile=compiled
        )
        params = pipe.local(dict(whole.named_parameters()))
        for _ in range(2):
            step = pipe.step(params, {"input": x})
        assert_same(step.loss, expected.detach())
        found = {name: grad.full_tensor() for name, grad in step.grads.items()}
        assert_same([found[name] for name, _ in whole.named_parameters()], list(grads))
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        assert_same(torch.as_tensor(fpipe.global_norm(step.grads, pipe=pipe)).to(norm), norm)


def keeps_shards_on_the_cpu(device: torch.device) -> None:
    """Replicas whose parts of parameters, gradients and states live on the CPU."""
    schedule = schedules.one_f_one_b(ranks=1, microbatches=2).sharded(1, 1)
    model, world = mlp(1, 4 * dist.get_world_size()), dist.get_world_size()
    mesh = init_device_mesh("cuda", (world, 1), mesh_dim_names=("dp", "pp"))
    expected = unpipelined(*model)
    rows = pytree.tree_map(
        lambda leaf: leaf.chunk(world)[mesh.get_local_rank("dp")].to(device), model.batch
    )
    for bucket in (None, 64):
        pipe = fpipe.pipeline(
            model.stages,
            model.loss,
            schedule,
            compile=False,
            mesh=mesh,
            data="dp",
            bucket_bytes=bucket,
            offload_policy=CPUOffloadPolicy(),
        )
        params = pipe.shard(model.params)
        for _ in range(2):
            step = pipe.step(params, rows)
        assert_same(step.loss.cpu(), expected.loss)
        for part, grad, whole in zip(
            *(pytree.flatten(tree)[0] for tree in (params, step.grads, expected.grads)),
            strict=True,
        ):
            assert part.is_pinned() and grad.is_pinned(), (part, grad)
            assert part.shape == grad.shape, (part, grad)
            assert_same(grad, whole.chunk(world)[mesh.get_local_rank("dp")])
        trainer = fpipe.train(pipe, torch.optim.AdamW, lr=0.1, max_norm=0.1)
        _, params, state, _ = trainer.step(params, trainer.init(params), rows)
        assert all(leaf.device.type == "cpu" for leaf in pytree.flatten((params, state))[0])


def goes_by_way_of_the_cpu_once(device: torch.device) -> None:
    """Until a step has come to its end: its kernels are loaded then, while none of NCCL waits.

    There are others for what begins elsewhere in its memory.
    """
    pipe, params, batch = one_that_fails_when_told(device)
    with counted() as sent:
        for number in range(6):
            sent.append(0)
            Fails.now = number == 0
            if Fails.now:
                refused(lambda: pipe.step(params, batch))
            else:
                elsewhere = number > 3 and dist.get_rank() == 0
                pipe.step(params, pytree.tree_map(moved, batch) if elsewhere else batch)
    assert all(sent[:2]) and sent[2:4] == [0, 0] and sent[4] and sent[5] == 0, sent


def one_that_fails_when_told(device: torch.device) -> tuple[fpipe.Pipeline, Any, Any]:
    """A pipeline, and parameters and a batch for it."""
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    model = mlp(2, 8)
    pipe = fpipe.pipeline(
        model.stages, model.loss, schedule, compile=fails_when_told, group=dist.group.WORLD
    )
    params, batch = pytree.tree_map(lambda leaf: leaf.to(device), (model.params, model.batch))
    return pipe, pipe.local(params), batch


@contextmanager
def counted() -> Iterator[list[int]]:
    """The last number of the list counts the messages that leave by way of the CPU."""
    sent: list[int] = []
    plain = StagedTransport._leaving

    def leaving(self: StagedTransport, values: Any) -> Any:
        sent[-1] += 1
        return plain(self, values)

    StagedTransport._leaving = leaving  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        StagedTransport._leaving = plain  # type: ignore[method-assign]


def goes_by_way_of_the_cpu_where_nccl_hinders(device: torch.device) -> None:
    """A message that waits would keep everything else waiting; all ranks must be told so."""
    for name in HINDRANCES:
        os.environ[name] = "1"
        try:
            pipe, params, batch = one_that_fails_when_told(device)
            with counted() as sent:
                for _ in range(3):
                    sent.append(0)
                    pipe.step(params, batch)
            assert all(sent), (name, sent)
            if dist.get_rank() == 0:
                del os.environ[name]
            pipe, params, batch = one_that_fails_when_told(device)
            text = refused(lambda: pipe.step(params, batch))  # noqa: B023
            assert f"another {name} than" in text, text
        finally:
            os.environ.pop(name, None)


def moved(leaf: torch.Tensor) -> torch.Tensor:
    """A copy that begins one element into its memory."""
    memory = leaf.new_empty(leaf.numel() + 1)
    return memory[1:].view(leaf.shape).copy_(leaf)


def runs_out_of_memory_for_what_arrives(device: torch.device) -> None:
    """In a first step, which copies it to the device; the pipeline can be used again."""
    schedule = schedules.gpipe(ranks=2, microbatches=3)
    model = mlp(2, 6)
    pipe = fpipe.pipeline(
        model.stages, model.loss, schedule, compile=False, group=dist.group.WORLD, timeout=30
    )
    params, batch = pytree.tree_map(lambda leaf: leaf.to(device), (model.params, model.batch))
    plain, count = StagedTransport._delivered, 0

    def short(self: StagedTransport, values: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("on purpose")
        return plain(self, values)

    StagedTransport._delivered = short  # type: ignore[method-assign]
    try:
        refused(lambda: pipe.step(pipe.local(params), batch))
    finally:
        StagedTransport._delivered = plain  # type: ignore[method-assign]
    assert_same(pipe.step(pipe.local(params), batch).loss.cpu(), unpipelined(*model).loss)


def refused(deed: Callable[[], object]) -> str:
    """What the error says that a deed raises."""
    try:
        deed()
    except fpipe.PipelineError as error:
        return str(error)
    raise AssertionError("was not refused")


def moves_every_dtype(device: torch.device) -> None:
    """NCCL has no name for complex numbers, nor for some integers."""
    dtypes = (torch.complex64, torch.complex128, torch.int16, torch.float64, torch.bool)

    def first(w: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        values = [(x * w).to(dtype) for dtype in dtypes]
        return [*values, values[0].mH, values[1].conj().imag]

    def second(w: torch.Tensor, xs: list[torch.Tensor]) -> torch.Tensor:
        return sum(((x + 1j) * w).abs().sum() for x in xs)  # type: ignore[return-value]

    def loss(y: torch.Tensor, _: object) -> torch.Tensor:
        return y

    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    stages: list[Any] = [first, second]
    x = torch.arange(1.0, 9.0).view(4, 2)
    weights = [torch.tensor(3.0), torch.tensor(2.0)]
    expected = fpipe.pipeline(stages, loss, schedule, compile=False).step(weights, x)
    pipe = fpipe.pipeline(stages, loss, schedule, compile=False, group=dist.group.WORLD)
    for _ in range(2):  # the first step goes by way of the CPU
        step = pipe.step(pipe.local([w.to(device) for w in weights]), x.to(device))
        assert_same(step.loss.cpu(), expected.loss, 1e-6)  # float32 sums, in another order
        assert_same(step.grads[dist.get_rank()].cpu(), expected.grads[dist.get_rank()], 1e-6)


def steps_in_a_thread_with_another_device(device: torch.device) -> None:
    """A thread begins with the first device, whichever the rank has."""
    schedule = schedules.gpipe(ranks=2, microbatches=2)
    model = mlp(2, 8)
    pipe = fpipe.pipeline(
        model.stages, model.loss, schedule, compile=False, group=dist.group.WORLD, timeout=30
    )
    params, batch = pytree.tree_map(lambda leaf: leaf.to(device), (model.params, model.batch))
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(pipe.step, pipe.local(params), batch).result()
    assert_same(step.loss.cpu(), unpipelined(*model).loss)


def refuses_parameters_that_lie_elsewhere(device: torch.device) -> None:
    """Both ranks are told, and by name."""
    schedule = schedules.zb_h1(ranks=2, microbatches=4)
    model = mlp(2, 8)
    pipe = fpipe.pipeline(
        model.stages, model.loss, schedule, compile=False, group=dist.group.WORLD, timeout=30
    )
    says = refused(lambda: pipe.step(pipe.local(model.params), model.batch))
    assert f"lies on cpu while the rank computes on {device}" in says, says


def fails_on_one_microbatch(device: torch.device) -> None:
    """Every rank hears of it, and the pipeline can be used again."""

    def stage(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ w

    def loss(y: torch.Tensor, _: object) -> torch.Tensor:
        return y.square().mean()

    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(
        [stage, stage], loss, schedule, compile=fails_when_told, group=dist.group.WORLD, timeout=30
    )
    params = pipe.local([torch.eye(3, device=device)] * 2)
    x = torch.ones(4, 3, device=device)
    for number in range(3):
        Fails.now = number == 1 and dist.get_rank() == 1
        try:
            found = pipe.step(params, x).loss.item()
            assert number != 1 and found == 1.0, found
        except fpipe.PipelineError as error:
            assert number == 1 and error.rank == 1 and "on purpose" in str(error), error


def sends_no_value_of_the_cpu(device: torch.device) -> None:
    """NCCL does not; the first step says so, and the pipeline can be used again."""

    def stage(w: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        return [x * w, torch.tensor(3.0)]

    def last(w: torch.Tensor, xs: list[torch.Tensor]) -> torch.Tensor:
        return xs[0] * w * xs[1]

    def loss(y: torch.Tensor, _: object) -> torch.Tensor:
        return y.mean()

    schedule = schedules.gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline([stage, last], loss, schedule, compile=False, group=dist.group.WORLD)
    params = pipe.local([torch.ones((), device=device)] * 2)
    for _ in range(2):
        text = refused(lambda: pipe.step(params, torch.ones(4, device=device)))
        assert "float32[], lies on cpu while the rank computes on cuda" in text, text
        assert "The pipeline can be used again" in text, text


def hears_of_a_rank_that_ends(device: torch.device) -> None:
    """In the midst of a step, with messages under way both ways; it ends the process."""
    pipe, params, batch = one_that_fails_when_told(device)
    for _ in range(2):
        pipe.step(params, batch)
    start = time.monotonic()
    Fails.deed = partial(os._exit, 0)
    Fails.now = dist.get_rank() == 1
    text = refused(lambda: pipe.step(params, batch))
    assert "rank 1" in text, text
    assert time.monotonic() - start < 10, time.monotonic() - start
    os._exit(0)


def fail() -> None:
    """What code does that is to fail."""
    raise RuntimeError("fails on purpose")


class Fails:
    """Whether the code of `fails_when_told` does so, and how."""

    now = False
    deed: Callable[[], object] = staticmethod(fail)


def fails_when_told(graph: torch.fx.GraphModule, _: object) -> Any:
    """A compiler."""

    def run(arguments: list[torch.Tensor]) -> Any:
        if Fails.now:
            Fails.deed()
        given = list(arguments)
        arguments.clear()
        return graph(*given)

    return run


if __name__ == "__main__":
    main()
