"""Mixed precision over replicas: FSDP2's numbers, and half the bytes of a gather."""

from __future__ import annotations

from typing import Any, Final, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fpipe
from fpipe import pytree, schedules
from fpipe.program.replica_collectives import collectives_of
from tests.distributed.actors import Group
from tests.distributed.crew import Crew, mesh_of, values
from tests.models import assert_same

HALF: Final = torch.bfloat16
WIDE: Final = torch.float32
MICROBATCHES: Final = 4
POLICIES: Final = {
    "float32 sums": MixedPrecisionPolicy(HALF, WIDE, WIDE),
    "bfloat16 sums": MixedPrecisionPolicy(HALF, output_dtype=WIDE),
}


class Layer(nn.Module):
    """A linear layer, as a module for FSDP2."""

    def __init__(self, params: dict[str, Tensor]) -> None:
        super().__init__()
        self.w, self.b = (nn.Parameter(params[name].clone()) for name in ("w", "b"))

    def forward(self, x: Tensor) -> Tensor:
        return layer({"w": self.w, "b": self.b}, x)


def layer(params: Any, x: Any) -> Tensor:
    x = x["x"] if isinstance(x, dict) else x
    return F.gelu(x @ params["w"]) + params["b"]


def mean_square(y: Tensor, batch: Any) -> Tensor:
    return (y - batch["y"]).square().mean()


def problem(replica: int) -> tuple[list[Any], dict[str, Tensor]]:
    """The parameters of two stages, and the rows of a replica."""
    generator = torch.Generator().manual_seed(0)
    params = [
        {
            "w": torch.randn(8, 8, generator=generator) / 3,
            "b": torch.randn(8, generator=generator),
        }
        for _ in range(2)
    ]
    generator.manual_seed(1 + replica)
    batch = {name: torch.randn(16, 8, generator=generator) for name in ("x", "y")}
    return params, batch


def sharded_by_torch(params: Any, batch: Any, mesh: Any, policy: Any) -> tuple[Tensor, list[Any]]:
    """Loss of this replica, and gradients, of FSDP2 that adds up over microbatches."""
    model = nn.Sequential(*map(Layer, params))
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    total = torch.zeros(())
    for m in range(MICROBATCHES):
        model.set_requires_gradient_sync(m == MICROBATCHES - 1)  # type: ignore[operator]
        part = {name: leaf.chunk(MICROBATCHES)[m] for name, leaf in batch.items()}
        loss = mean_square(model(part["x"]), part) / MICROBATCHES
        loss.backward()
        total = total + loss.detach()
    return total, [
        {name: cast(Any, own.grad).full_tensor() for name, own in part.named_parameters()}
        for part in model
    ]


def steps_in_precision(group: Group, kind: str, divided: bool) -> list[Any]:
    """A step of fpipe and one of FSDP2: losses, gradients of this rank's stage, what moves."""
    policy = POLICIES[kind]
    mesh = mesh_of((2, 2), ("dp", "pp"))
    params, batch = problem(mesh.get_local_rank("dp"))
    pipe = fpipe.pipeline(
        [layer] * 2,
        mean_square,
        schedules.zb_h1(ranks=2, microbatches=MICROBATCHES),
        mesh=mesh,
        data="dp",
        compile=False,
        mp_policy=policy,
    )
    own = pipe.shard(pipe.local(params)) if divided else pipe.replicate(pipe.local(params))
    loss, grads = pipe.step(own, batch)
    rank = mesh.get_local_rank("pp")
    dtypes = {leaf.dtype for leaf in pytree.flatten(grads[rank])[0]}
    whole = {n: g.full_tensor() if divided else g for n, g in grads[rank].items()}
    total, theirs = sharded_by_torch(params, batch, mesh["dp"], policy)
    moved = collectives_of(pipe.programs(own, batch)[rank])
    return [float(loss), whole, dtypes, float(total), theirs[rank], moved]


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize("kind", POLICIES)
def test_the_numbers_are_those_of_fsdp(crew: Crew, kind: str, divided: bool) -> None:
    parts = values(crew.run(steps_in_precision, kind, divided))
    mean = sum(part[3] for part in parts) / len(parts)
    for loss, grads, dtypes, _, theirs, moved in parts:
        assert abs(loss - mean) < 1e-6 * abs(mean)
        assert dtypes == {WIDE}
        assert_same(grads, theirs, 1e-6 if kind == "float32 sums" else 2e-2)
        sums = "float32" if kind == "float32 sums" else "bfloat16"
        gathers = [text for text in moved if "UNSHARD" in text]
        reductions = [text for text in moved if "REDUCE_GRAD" in text]
        assert bool(gathers) == divided
        assert all("bfloat16" in text for text in gathers)
        assert reductions
        assert all(sums in text for text in reductions)
