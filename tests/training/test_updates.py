"""Optimizers as pure functions: the bits of torch's own, whatever the numbers are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from fpipe import FpipeError
from fpipe.training.recorded_step import one_by_one
from fpipe.training.updates import Updates

OPTIMIZERS: Final[list[tuple[type[torch.optim.Optimizer], dict[str, Any]]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"betas": (0.8, 0.95)}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),  # takes another way from its sixth step on
    (torch.optim.Adamax, {}),
    (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (torch.optim.Adadelta, {}),
    (torch.optim.ASGD, {"t0": 20.0}),  # averages from its 20th step on
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.Muon, {}),
    (torch.optim.Adafactor, {"weight_decay": 0.1}),
]

STEPS: Final = 50


def names(case: Any) -> str | None:
    return case.__name__ if isinstance(case, type) else None


def rates(step: int) -> float:
    """A learning rate that changes."""
    return 0.01 * (1 + step % 3)


def train_both(
    optimizer: type[torch.optim.Optimizer],
    hyper: dict[str, Any],
    param: Tensor,
    rate: Callable[[int], Any],
) -> tuple[Tensor, Tensor]:
    """The parameter after many steps of torch's own, and of the pure update."""
    generator = torch.Generator().manual_seed(0)
    theirs, ours = param.clone(), param.clone()
    plain = optimizer([theirs], **one_by_one(optimizer, hyper))
    updates = Updates(optimizer, hyper)
    moments = updates.init(ours, updates.defaults)
    for step in range(STEPS):
        grad = torch.randn(param.shape, dtype=param.dtype, generator=generator)
        theirs.grad = grad.clone()
        plain.param_groups[0]["lr"] = rates(step)
        plain.step()
        before = ours.clone(), {name: value.clone() for name, value in moments.items()}
        held = ours, moments
        ours, moments = updates(ours, grad, moments, updates.defaults | {"lr": rate(step)}, step)
        assert torch.equal(held[0], before[0])  # nothing that is passed in is changed
        assert all(torch.equal(held[1][name], value) for name, value in before[1].items())
    return theirs, ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("optimizer", "hyper"), OPTIMIZERS, ids=names)
def test_update_has_the_bits_of_torch(
    optimizer: type[torch.optim.Optimizer], hyper: dict[str, Any], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    param = torch.randn(4, 5, dtype=dtype, generator=generator)
    theirs, ours = train_both(optimizer, hyper, param, rates)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("optimizer", "hyper"), OPTIMIZERS, ids=names)
def test_a_rate_may_be_a_tensor(
    optimizer: type[torch.optim.Optimizer], hyper: dict[str, Any]
) -> None:
    param = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    theirs, ours = train_both(
        optimizer, hyper, param, lambda step: torch.tensor(rates(step), dtype=torch.float64)
    )
    # NAdam keeps a product in float32, and Muon computes in bfloat16.
    loose = {torch.optim.NAdam: 1e-8, torch.optim.Muon: 1e-2}
    torch.testing.assert_close(ours, theirs, rtol=0, atol=loose.get(optimizer, 1e-12))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_parameters_may_have_any_shape(shape: tuple[int, ...]) -> None:
    param = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for optimizer in (torch.optim.AdamW, torch.optim.Adafactor):
        theirs, ours = train_both(optimizer, {}, param, rates)
        assert torch.equal(ours, theirs)


def records(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Classes of which a step is recorded from now on."""
    from fpipe.training import updates as module

    recorded: list[Any] = []
    record = module.record_update

    def counted(*arguments: Any) -> Any:
        recorded.append(arguments[0])
        return record(*arguments)

    monkeypatch.setattr(module, "record_update", counted)
    module._recordings.cache_clear()
    return recorded


def test_a_new_rate_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = records(monkeypatch)
    train_both(torch.optim.AdamW, {}, torch.randn(3, 3), rates)
    assert len(recorded) == 2  # the first step, and all others


def test_a_new_trainer_records_nothing_of_an_optimizer_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But of another kind, under another branch, or where a user's class may have changed."""
    recorded = records(monkeypatch)
    betas: Any
    for betas, dtype in product(((0.9, 0.999), (0.8, 0.9)), (torch.float32, torch.float64)):
        hyper = {"betas": betas, "weight_decay": 0.0}
        for _ in range(2):
            theirs, ours = train_both(torch.optim.Adam, hyper, torch.randn(3, 3).to(dtype), rates)
            assert torch.equal(ours, theirs)
    assert len(recorded) == 4
    theirs, ours = train_both(torch.optim.Adam, {"weight_decay": 0.1}, torch.randn(3, 3), rates)
    assert torch.equal(ours, theirs)
    assert len(recorded) == 6
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        train_both(torch.optim.Adam, hyper, torch.randn(3, 3, dtype=torch.float32), rates)
    finally:
        torch.set_default_dtype(before)
    assert len(recorded) == 8
    for _ in range(2):
        train_both(SignDescent, {}, torch.randn(3, 3), rates)
    assert len(recorded) == 12


class SignDescent(torch.optim.Optimizer):
    """A user's own optimizer, with a number that the graph has to read, and a branch on a rate."""

    def __init__(self, params: Any, lr: float = 0.1, cautious: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "cautious": cautious})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                rate = group["lr"] / (1.0 + p.grad.norm().item())
                if group["cautious"] > 0.5:
                    rate = rate / 2
                p.add_(state["mean"].sign(), alpha=-rate)


@pytest.mark.parametrize("cautious", [0.0, 1.0])
def test_users_own_optimizer(cautious: float) -> None:
    theirs, ours = train_both(SignDescent, {"cautious": cautious}, torch.randn(3, 3), rates)
    assert torch.equal(ours, theirs)


def test_a_branch_on_a_hyperparameter_is_taken_anew() -> None:
    updates = Updates(SignDescent, {})
    param, grad = torch.zeros(2), torch.ones(2)
    moments = updates.init(param, updates.defaults)
    full, _ = updates(param, grad, moments, updates.defaults, 0)
    half, _ = updates(param, grad, moments, updates.defaults | {"cautious": 1.0}, 0)
    assert torch.equal(half, full / 2)


class ByValue(SignDescent):
    """Branches on the value of a gradient."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad.norm() > 1:
                p.data.mul_(0.5)


class Counting(SignDescent):
    """Keeps what is no tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["history"] = [1]


def remade(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr)


@pytest.mark.parametrize(
    ("optimizer", "hyper", "message"),
    [
        (torch.optim.LBFGS, {}, "LBFGS cannot be a pure update: it calls the loss several times"),
        (torch.optim.SparseAdam, {}, "it takes sparse gradients alone"),
        (torch.optim.SGD, {"lr": -1.0}, r"SGD does not take lr=-1\.0: .*Invalid learning rate"),
        (torch.optim.SGD, {"speed": 1.0}, "does not take speed=1.0"),
        (remade, {"lr": 0.1}, "is no class of torch.optim or derived from"),
        (torch.optim.SGD([torch.ones(1)]), {}, "pass the class, torch.optim.AdamW, and not an"),
    ],
)
def test_refused_when_it_is_made(optimizer: Any, hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(FpipeError, match=message):
        Updates(optimizer, hyper)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (ByValue, r"ByValue cannot be recorded .*pass a pair of functions \(init, update\)"),
        (Counting, r"Counting cannot be recorded .*its state has \{'history': \[1\]\}"),
    ],
)
def test_refused_when_it_is_recorded(optimizer: type[torch.optim.Optimizer], message: str) -> None:
    updates = Updates(optimizer, {})
    with pytest.raises(FpipeError, match=message):
        updates.init(torch.ones(2), updates.defaults)


def test_members_of_an_ensemble_have_rates_of_their_own() -> None:
    updates = Updates(torch.optim.AdamW, {})
    params, grads = torch.randn(2, 3, 3), torch.randn(2, 3, 3)
    moments = {"exp_avg": torch.rand(2, 3, 3), "exp_avg_sq": torch.rand(2, 3, 3)}
    rates = torch.tensor([0.1, 0.01], dtype=torch.float64)

    def one(param: Tensor, grad: Tensor, moments: Any, lr: Tensor | float) -> Any:
        return updates(param, grad, moments, updates.defaults | {"lr": lr}, 3)

    together = torch.func.vmap(one)(params, grads, moments, rates)
    for member in range(2):
        own = {name: value[member] for name, value in moments.items()}
        alone = one(params[member], grads[member], own, rates[member].item())
        torch.testing.assert_close(together[0][member], alone[0])
        torch.testing.assert_close(together[1]["exp_avg"][member], alone[1]["exp_avg"])


def test_a_rate_may_be_learned() -> None:
    updates = Updates(torch.optim.Adam, {})
    param, grad = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    moments = updates.init(param, updates.defaults)

    def loss(lr: Tensor) -> Tensor:
        return updates(param, grad, moments, updates.defaults | {"lr": lr}, 0)[0].square().sum()

    rate = torch.tensor(0.1, dtype=torch.float64)
    slope = torch.func.grad(loss)(rate)
    change = (loss(rate + 1e-6) - loss(rate - 1e-6)) / 2e-6
    torch.testing.assert_close(slope, change, rtol=1e-6, atol=1e-6)
