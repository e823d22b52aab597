"""State, key, aux and frozen parameters in one function, and in one module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad_and_value

import fpipe
from fpipe import random, schedules
from fpipe.nn import batch_norm, call, keyed, state_of
from tests.models import assert_same

KEY = random.key(2)


def everything_by_microbatch(one: Any, trained: Any, state: Any, batch: Tensor) -> Any:
    """The loss, gradients, state and aux of three microbatches, one after the other."""

    def whole(own: Any) -> Any:
        now, total, kept = state, torch.zeros((), dtype=torch.float64), []
        for number, part in enumerate(batch.tensor_split(3)):
            loss, now, aux = one(own, now, part, random.fold_in(KEY, number))
            now = fpipe.pytree.tree_map(Tensor.detach, now)
            total = total + loss * len(part) / len(batch)
            kept.append(aux)
        return total, (now, torch.cat(kept))

    grads, (loss, (new, aux)) = grad_and_value(whole, has_aux=True)(trained)
    return loss, grads, new, aux


def loss_with_everything(params: Any, state: Any, batch: Tensor, key: Tensor) -> Any:
    """Draws in two stages, normalises in one, counts in another; the first layer is frozen."""
    first, second = random.split(key)
    x = fpipe.cut(torch.tanh(batch @ params["frozen"]))
    x, stats = batch_norm(random.dropout(first, x, 0.3), state["stats"], params["scale"])
    x = fpipe.cut(x)
    hidden = torch.tanh(x @ params["middle"])
    count = state["count"] + 1
    x = fpipe.cut(hidden)
    loss = random.dropout(second, x @ params["frozen"] * params["scale"], 0.2).square().mean()
    return loss, {"stats": stats, "count": count}, hidden


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [
        (schedules.zb_h1(ranks=4, microbatches=3), "none"),
        (schedules.zbv(ranks=2, microbatches=3), "full"),
    ],
    ids=["zb_h1", "zbv"],
)
def test_function_with_everything(schedule: fpipe.Schedule, remat: Any) -> None:
    torch.manual_seed(0)
    params = {name: torch.randn(4, 4).double() for name in ("frozen", "middle")}
    params["scale"] = torch.rand(4).double() + 0.5
    state = {
        "stats": fpipe.nn.BatchStats(torch.zeros(4).double(), torch.ones(4).double()),
        "count": torch.tensor(0),
    }
    batch = torch.randn(8, 4).double()
    pipe = fpipe.pipeline(
        loss_with_everything,
        schedule=schedule,
        has_state=True,
        has_key=True,
        has_aux=True,
        trainable={"frozen": False, "middle": True, "scale": True},
        remat=remat,
        compile=False,
    )
    found = pipe.step(params, state, batch, KEY)
    trained = {name: params[name] for name in ("middle", "scale")}
    loss, grads, new, aux = everything_by_microbatch(
        lambda own, *others: loss_with_everything({**params, **own}, *others), trained, state, batch
    )
    assert_same(tuple(found), (loss, grads | {"frozen": None}, new, aux))
    assert "0B0" not in str(pipe.programs(params, state, batch)[0])


class Everything(nn.Module):
    """The same as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(4))
        self.third = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.last = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.third(self.norm(torch.tanh(self.first(x))))
        return self.last(hidden), hidden


def test_module_with_everything() -> None:
    torch.manual_seed(0)
    module = Everything().double()
    module.first.requires_grad_(False)
    params = {name: p.detach() for name, p in module.named_parameters()}
    batch = torch.randn(8, 4).double()

    def loss(output: tuple[Tensor, Tensor], batch: Any) -> Any:
        return output[0].square().mean(), output[1]

    def one(own: Any, state: Any, x: Tensor, key: Tensor) -> Any:
        with keyed(key):
            output, state = call(module, {**params, **own}, state, x)
        return loss(output, None)[0], state, output[1]

    pipe = fpipe.from_module(
        module,
        schedule=schedules.zbv(ranks=2, microbatches=3),
        cuts=["first", "norm", "third"],
        loss=loss,
        has_state=True,
        has_key=True,
        has_aux=True,
        remat="full",
        compile=False,
    )
    found = pipe.step(params, state_of(module), {"x": batch}, KEY)
    trained = {name: value for name, value in params.items() if not name.startswith("first")}
    expected = everything_by_microbatch(one, trained, state_of(module), batch)
    frozen = {name: None for name in params if name.startswith("first")}
    assert_same(tuple(found), (expected[0], expected[1] | frozen, *expected[2:]))
