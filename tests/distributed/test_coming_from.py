"""The programs of the how-to pages "Coming from …": fpipe's halves, and torch's own.

A page's text runs on each rank, uncompiled on CPUs, with a small model in place of the reader's.
Steps have the losses of plain torch in one process on all rows.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.crew import Crew, mesh_of, values
from tests.documents import HOW_TO
from tests.modules.helpers import detached

ROWS, WIDTH = 16, 4


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return mean_square(output, batch["target"])


def programs(page: str) -> list[str]:
    """The two programs of a page, the other library's and fpipe's."""
    text = (HOW_TO / page).read_text("utf-8")
    return re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[:2]


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(count)]


def data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return {"input": draw[0], "target": draw[1]}


def rows_of(replica: int, replicas: int) -> dict[str, Tensor]:
    """Those of one replica."""
    return {name: leaf.chunk(replicas)[replica] for name, leaf in data().items()}


def by_one_process(
    count: int, steps: int, rate: float = 0.0, max_norm: float | None = None
) -> list[Tensor]:
    """The losses of plain torch on all rows."""
    module, batch, losses = nn.Sequential(*layers(count)), data(), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(loss(module(batch["input"]), batch))
        losses[-1].backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
    return [value.detach() for value in losses]


# ── fpipe's halves ──────────────────────────────────────────────────────────────────────────────


def run_ours(group: dist.ProcessGroup, text: str, count: int, replicas: int) -> list[Tensor]:
    """Run fpipe's half of a page; the losses of its step and, if it has a trainer, of another."""
    ranks = group.size() // replicas
    rows = rows_of(group.rank() // ranks, replicas)
    module = nn.Sequential(*layers(count))
    names: dict[str, Any] = {
        "fpipe": __import__("fpipe"),
        "torch": torch,
        "init_device_mesh": lambda _, shape, mesh_dim_names: mesh_of(shape, mesh_dim_names),
        "layers": list(module),
        "model": module,
        "module": module,
        "params": detached(module),
        "loss": loss,
        "batch": rows,
        "rows_of_this_replica": rows,
        "replicas": replicas,
        "ranks": ranks,
        "world_size": group.size(),
    }
    exec(text.replace("loss=loss", "loss=loss, compile=False"), names)
    if "trainer" not in names:
        return [names["value"]]
    step = names["trainer"].step(names["params"], names["state"], rows)
    return [names["value"], step.loss]


@pytest.mark.parametrize(
    ("page", "count", "replicas"),
    [
        ("from-ddp.md", 2, 2),
        ("from-horovod.md", 2, 2),
        ("from-deepspeed.md", 4, 1),
        ("from-megatron.md", 8, 1),
        ("from-torch-pipelining.md", 8, 1),
    ],
)
def test_our_half_takes_the_steps_of_one_process(
    crew: Crew, page: str, count: int, replicas: int
) -> None:
    text = programs(page)[1]
    rate, norm = re.search(r"lr=([\d.e-]+)", text), re.search(r"max_norm=([\d.]+)", text)
    expected = by_one_process(
        count, 2 if rate else 1, float(rate[1]) if rate else 0.0, float(norm[1]) if norm else None
    )
    for losses in values(crew.run(run_ours, text, count, replicas)):
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0.0)


# ── torch's halves ──────────────────────────────────────────────────────────────────────────────


def run_ddp(group: dist.ProcessGroup, text: str) -> Tensor:
    """A step of `DistributedDataParallel`, as the page has it, and the loss of a second."""
    module, rows = nn.Sequential(*layers(2)), rows_of(group.rank(), group.size())
    names: dict[str, Any] = {
        "DistributedDataParallel": nn.parallel.DistributedDataParallel,
        "module": module,
        "loss_fn": mean_square,
        "optimizer": torch.optim.AdamW(module.parameters(), lr=1e-3),
        "x": rows["input"],
        "y": rows["target"],
    }
    exec(text, names)
    return mean_square(module(rows["input"]), rows["target"]).detach()


def test_the_half_of_ddp_takes_the_step_of_one_process(crew: Crew) -> None:
    losses = values(crew.run(run_ddp, programs("from-ddp.md")[0]))
    torch.testing.assert_close(torch.stack(losses).mean(), by_one_process(2, 2, 1e-3)[1])


def run_torch_pipelining(group: dist.ProcessGroup, text: str) -> list[Tensor]:
    """A step of torch's own pipeline, as the page has it."""
    from torch.distributed import pipelining

    parts, batch, rank = layers(8), data(), group.rank()
    names: dict[str, Any] = {
        "PipelineStage": pipelining.PipelineStage,
        "ScheduleZBVZeroBubble": pipelining.ScheduleZBVZeroBubble,
        "down": parts[rank],
        "up": parts[7 - rank],
        "rank": rank,
        "world_size": group.size(),
        "device": torch.device("cpu"),
        "loss_fn": mean_square,
        "optimizer": torch.optim.SGD([*parts[rank].parameters(), *parts[7 - rank].parameters()]),
        "x": batch["input"],
        "y": batch["target"],
    }
    exec(text, names)
    return [value.detach() for value in names["losses"]]


def test_the_half_of_torch_pipelining_runs(crew: Crew) -> None:
    losses = values(crew.run(run_torch_pipelining, programs("from-torch-pipelining.md")[0]))
    torch.testing.assert_close(torch.stack(losses[0]).mean(), by_one_process(8, 1)[0])
