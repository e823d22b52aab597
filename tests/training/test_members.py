"""An ensemble is trained at once: each member as if it were alone."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe import FpipeError, pytree, schedules
from tests.models import Model, assert_same, mlp, pipe_of

RATES: Final = torch.tensor([0.1, 0.01, 0.003], dtype=torch.float64)
OPTIMIZERS: Final[dict[str, Any]] = {
    "AdamW": torch.optim.AdamW,
    "Adafactor": torch.optim.Adafactor,
    "NAdam": torch.optim.NAdam,
    "SGD": torch.optim.SGD,
}


def members_of(model: Model) -> Any:
    return pytree.tree_map(lambda p: torch.stack([p, 2 * p, p - 0.5]), model.params)


def steps_of(trainer: fpipe.Trainer, params: Any, batch: Any, **hyper: Any) -> Any:
    state = trainer.init(params)
    for _ in range(3):
        loss, params, state, norm = trainer.step(params, state, batch, **hyper)
    return loss, params, state.moments, norm


def member(tree: Any, number: int) -> Any:
    return pytree.tree_map(lambda leaf: leaf[number], tree)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_each_member_is_trained_as_if_it_were_alone(name: str, max_norm: float | None) -> None:
    model = mlp(2, 8)
    trainer = fpipe.train(pipe_of(model), OPTIMIZERS[name], lr=0.1, max_norm=max_norm)
    members = members_of(model)
    together = steps_of(fpipe.vmap(trainer), members, model.batch, lr=RATES)
    for number, rate in enumerate(RATES):
        alone = steps_of(trainer, member(members, number), model.batch, lr=rate)
        assert_same(member(together, number), alone)


def test_members_may_have_batches_of_their_own_and_share_a_rate() -> None:
    model = mlp(2, 8)
    trainer = fpipe.train(pipe_of(model), torch.optim.AdamW, lr=0.1)
    members = members_of(model)
    batches = pytree.tree_map(lambda leaf: torch.stack([leaf, leaf + 1, leaf - 1]), model.batch)
    together = steps_of(fpipe.vmap(trainer, in_dims=(0, 0)), members, batches)
    for number in range(3):
        alone = steps_of(trainer, member(members, number), member(batches, number))
        assert_same(member(together, number), alone)


def test_what_cannot_be_mapped_is_refused() -> None:
    model = mlp(2, 8)
    trainer = fpipe.train(pipe_of(model), torch.optim.SGD, lr=0.1)
    with pytest.raises(FpipeError, match="must stack all parameters along dimension 0"):
        fpipe.vmap(trainer, in_dims=(1, None))
    with pytest.raises(FpipeError, match="has members already"):
        fpipe.vmap(fpipe.vmap(trainer))
    pair: Any = (lambda params: params, lambda grads, state, params: (grads, state))
    with pytest.raises(FpipeError, match="pair of functions: make one of"):
        fpipe.vmap(fpipe.train(pipe_of(model), pair))
    ensemble, members = fpipe.vmap(trainer), members_of(model)
    rates: Tensor = RATES[:2]
    with pytest.raises(FpipeError, match="lr has 2 numbers for 3 members"):
        ensemble.step(members, ensemble.init(members), model.batch, lr=rates)


class DecaysMatrices(torch.optim.SGD):
    """An optimizer that goes by the number of dimensions."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.dim() > 1:
                    param.mul_(0.5)
                param.sub_(param.grad, alpha=group["lr"])


@pytest.mark.parametrize("optimizer", [DecaysMatrices, torch.optim.AdamW, torch.optim.Adafactor])
def test_members_move_as_each_does_alone(optimizer: Any) -> None:
    model = mlp(2, 8)
    pipe = fpipe.pipeline(
        model.stages, model.loss, schedules.gpipe(ranks=2, microbatches=2), compile=False
    )
    trainer = fpipe.train(pipe, optimizer, lr=0.1)
    members = [pytree.tree_map(lambda leaf, n=n: leaf * n, model.params) for n in (1, 2)]
    stacked = pytree.tree_map(lambda *leaves: torch.stack(leaves), *members)
    ensemble = fpipe.vmap(trainer, in_dims=(0, None))
    state, states = ensemble.init(stacked), [trainer.init(own) for own in members]
    for _ in range(3):
        _, stacked, state, _ = ensemble.step(stacked, state, model.batch)
        for at, own in enumerate(members):
            _, members[at], states[at], _ = trainer.step(own, states[at], model.batch)
    expected = pytree.tree_map(lambda *leaves: torch.stack(leaves), *members)
    assert_same(stacked, expected)


def test_a_number_for_each_member_without_members_is_refused() -> None:
    # It was broadcast over the elements of a parameter where it happened to fit.
    pipe = fpipe.pipeline(
        [lambda w, x: x @ w] * 2,
        lambda y, _: y.square().mean(),
        fpipe.schedules.gpipe(ranks=2, microbatches=2),
        compile=False,
    )
    trainer = fpipe.train(pipe, torch.optim.Adam)
    params = [torch.eye(8), torch.eye(8)]
    with pytest.raises(fpipe.FpipeError, match=r"lr has 8 numbers.*fpipe\.vmap\(trainer\)"):
        trainer.step(params, trainer.init(params), torch.ones(4, 8), lr=torch.full((8,), 0.1))
