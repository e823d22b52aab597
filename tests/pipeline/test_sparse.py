"""Sparse tensors that a stage makes for itself: graph networks have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from tests.models import rand

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

NODES = 5
EDGES = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])
BATCH = {"x": rand(NODES, 3), "edges": EDGES, "weights": rand(6)}
PARAMS = [rand(3, 4), rand(4, 4), rand(4, 2)]


def adjacency(batch: Any, weights: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(batch["edges"], weights, (NODES, NODES))


def spread(batch: Any, h: Tensor) -> Tensor:
    return torch.sparse.mm(adjacency(batch, batch["weights"]), h).tanh()


def loss_fn(params: list[Tensor], batch: Any) -> Tensor:
    h = fpipe.cut(spread(batch, batch["x"] @ params[0]))
    return (fpipe.cut(spread(batch, h @ params[1])) @ params[2]).square().mean()


def last(p: Tensor, h: Tensor) -> Tensor:
    return h @ p


def sparse_pipe(*, cut: bool, **options: Any) -> fpipe.Pipeline:
    schedule = fpipe.schedules.zb_h1(ranks=3, microbatches=1)
    if cut:
        return fpipe.pipeline(loss_fn, schedule=schedule, in_dims=None, **options)
    stages: list[Any] = [
        lambda p, batch: spread(batch, batch["x"] @ p),
        fpipe.Stage(lambda p, h, batch: spread(batch, h @ p), reads_batch=True),
        last,
    ]
    return fpipe.pipeline(stages, lambda y, _: y.square().mean(), schedule, in_dims=None, **options)


def check_sparse(
    pipe: fpipe.Pipeline, loss_fn: Any = loss_fn, params: list[Tensor] = PARAMS
) -> None:
    own = [leaf.clone().requires_grad_() for leaf in params]
    expected = loss_fn(own, BATCH)
    expected.backward()
    step = pipe.step(params, BATCH)
    torch.testing.assert_close(step.loss, expected.detach())
    torch.testing.assert_close(list(step.grads), [leaf.grad for leaf in own])


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("cut", [True, False])
def test_equal_to_autograd(cut: bool, remat: str) -> None:
    check_sparse(sparse_pipe(cut=cut, remat=remat, compile=False))


@pytest.mark.inductor
def test_compiled() -> None:
    """What a forward keeps for its backward is dense, for compiled code takes nothing else."""

    def loss_fn(params: list[Tensor], batch: Any) -> Tensor:
        return last(params[1], fpipe.cut(spread(batch, batch["x"] @ params[0]))).square().mean()

    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=1)
    check_sparse(fpipe.pipeline(loss_fn, schedule=schedule, in_dims=None), loss_fn, PARAMS[::2])


def test_none_crosses_a_cut() -> None:
    def loss_fn(params: list[Tensor], batch: Any) -> Tensor:
        edges = adjacency(batch, batch["weights"] * params[1].sum())
        h = fpipe.cut(batch["x"] @ params[0])
        return torch.sparse.mm(edges, h).square().mean()

    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=1)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, in_dims=None, compile=False)
    with pytest.raises(fpipe.StageError, match=r"layout torch.sparse_coo.* dense"):
        pipe.step(PARAMS, BATCH)
