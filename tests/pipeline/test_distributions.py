"""Distributions in losses: what they are given is not checked, for that would look at data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as D

import fpipe
from tests.models import rand

PARAMS = [rand(3, 3), rand(3, 3) / 2]
BATCH = rand(4, 3)
SCHEDULE = fpipe.schedules.gpipe(ranks=2, microbatches=2)


def normal(y: Tensor) -> Tensor:
    return D.Normal(y[:, 0], y[:, 1].exp()).log_prob(y[:, 2])


def independent(y: Tensor) -> Tensor:
    return D.Independent(D.Normal(y, 1.0), 1).log_prob(y.detach() + 1)


def categorical(y: Tensor) -> Tensor:
    return D.Categorical(probs=y.softmax(-1)).log_prob(y.argmin(-1))


def bernoulli(y: Tensor) -> Tensor:
    return D.Bernoulli(logits=y).log_prob((y.detach() > 0).to(y.dtype))


def divergence(y: Tensor) -> Tensor:
    prior = D.Normal(torch.zeros_like(y[:, 0]), 2.0)
    return D.kl_divergence(D.Normal(y[:, 0], y[:, 1].exp()), prior)


def multivariate(y: Tensor) -> Tensor:
    prior = D.MultivariateNormal(torch.zeros(3, dtype=y.dtype), scale_tril=y.exp().diag_embed())
    return prior.log_prob(y)


def with_covariance(y: Tensor) -> Tensor:
    covariance = y[:, :, None] * y[:, None] + torch.eye(3, dtype=y.dtype)
    free = torch.tensor(4.0, dtype=y.dtype)
    wishart = D.Wishart(free, precision_matrix=covariance, validate_args=True)
    likelihood = wishart.log_prob(covariance)
    return likelihood + D.MultivariateNormal(y, covariance, validate_args=True).log_prob(y.exp())


def mixture(y: Tensor) -> Tensor:
    mixed = D.MixtureSameFamily(D.Categorical(logits=y), D.Normal(y, y.exp()))
    return mixed.log_prob(y.detach()[:, 0])


def squashed(y: Tensor) -> Tensor:
    transform = D.TanhTransform(cache_size=1)
    base = D.Normal(y, torch.ones_like(y), validate_args=True)
    return D.TransformedDistribution(base, [transform]).log_prob(y.detach().tanh() * 0.9)


@pytest.mark.parametrize(
    ("likelihood", "cut"),
    [
        (normal, True),
        (independent, False),
        (categorical, True),
        (bernoulli, False),
        (divergence, True),
        (multivariate, False),
        (with_covariance, True),
        (with_covariance, False),
        (mixture, True),
        (squashed, False),
    ],
)
def test_loss_and_gradients(likelihood: Callable[[Tensor], Tensor], cut: bool) -> None:
    def loss_fn(params: list[Tensor], batch: Tensor) -> Tensor:
        return likelihood(fpipe.cut((batch @ params[0]).tanh()) @ params[1]).mean()

    own = [leaf.clone().requires_grad_() for leaf in PARAMS]
    expected = loss_fn(own, BATCH)
    grads = torch.autograd.grad(expected, own)
    if cut:
        pipe = fpipe.pipeline(loss_fn, schedule=SCHEDULE, compile=False)
    else:
        pipe = fpipe.pipeline(
            [lambda p, x: (x @ p).tanh(), lambda p, x: x @ p],
            lambda y, _: likelihood(y).mean(),
            SCHEDULE,
            compile=False,
        )
    step = pipe.step(PARAMS, BATCH)
    torch.testing.assert_close(step.loss, expected.detach())
    torch.testing.assert_close(tuple(step.grads), grads)
    torch.testing.assert_close(pipe.value(PARAMS, BATCH), expected.detach())


def test_they_are_checked_again_afterwards() -> None:
    test_loss_and_gradients(normal, cut=False)
    with pytest.raises(ValueError, match=r"GreaterThan"):
        D.Normal(torch.zeros(2), -torch.ones(2), validate_args=True)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("family", [D.Dirichlet, lambda y: D.Beta(y, y.flip(-1))])
def test_samples_of_a_function_of_torchs_own(family: Callable[[Tensor], Any], remat: Any) -> None:
    """Its gradient comes from a function of torch.autograd whose forward takes ctx."""

    def stage(p: Tensor, x: Tensor) -> Tensor:
        sample: Tensor = family((x @ p).exp() + 1).rsample()
        return sample

    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=1)
    stages = [stage, lambda p, x: x @ p]
    pipe = fpipe.pipeline(
        stages, lambda y, _: y.square().mean(), schedule, compile=False, remat=remat
    )
    own = [leaf.clone().requires_grad_() for leaf in PARAMS]
    torch.manual_seed(0)
    expected = (stage(own[0], BATCH) @ own[1]).square().mean()
    expected.backward()
    torch.manual_seed(0)
    loss, grads = pipe.step(PARAMS, BATCH)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grads, [leaf.grad for leaf in own])
