"""Writes that autograd does not see leave the gradient of a value as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe
from tests.models import assert_same, rand

PARAMS = {"a": rand(3, 3), "b": rand(3, 3) / 2}
BATCH = rand(4, 3)


def within_no_grad(write: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def layer(x: Tensor) -> Tensor:
        with torch.no_grad():
            write(x)
        return x * x

    return layer


def assigned(x: Tensor) -> None:
    x[0] = x[1].clamp(-0.1, 0.1)


def added(x: Tensor) -> None:
    x += 2


def to_a_view(x: Tensor) -> Tensor:
    row = x[1:]
    with torch.no_grad():
        row.mul_(2)
    return x * x


def to_data(x: Tensor) -> Tensor:
    x.data.masked_fill_(x > 0, 0.5)
    return x * x


def to_data_of_a_view(x: Tensor) -> Tensor:
    x[0].data.mul_(2)
    return x * x


def to_detached(x: Tensor) -> Tensor:
    other = x.detach()
    other.detach().clamp_(max=0.3)
    return x * x * other


def bounded_norm(x: Tensor) -> Tensor:
    norm = x.norm(dim=1, keepdim=True).clone()
    with torch.no_grad():
        norm.clamp_min_(1.5)
    return x / norm


def to_infinity(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.masked_fill_(torch.eye(4, 3, dtype=torch.bool), float("-inf"))
    return x.softmax(1)


def seen(x: Tensor) -> Tensor:
    x.mul_(2)
    x[0] = 1.0
    return x * x.detach()


def detached_in_place(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
        y.mul_(3)
    z = x.exp()
    z.detach_()
    return x * y * z


def detached_after_a_view_was_read(x: Tensor) -> Tensor:
    z = x.exp()
    row = z[0].sin()
    z.detach_()
    return x * z * row


def to_a_row_of(x: Tensor) -> None:
    x[0].clamp_(-1, 1)


def to_itself_by_out(x: Tensor) -> None:
    torch.clamp(x, -1, 1, out=x)


def view_of_what_is_detached_in_place(x: Tensor) -> Tensor:
    """It keeps its gradient in torch."""
    z = x.exp()
    row = z[0]
    z.detach_()
    return z * row.sin() * x


def row_of_what_is_detached(x: Tensor) -> Tensor:
    other = torch.ones(4, 3, dtype=torch.float64).detach()
    other[1].copy_(x[0])
    return x.exp() * other


def part_of_what_is_detached(x: Tensor) -> Tensor:
    row = torch.ones(4, 3, dtype=torch.float64).detach()[2]
    row[1:] = x[0, :2]
    return x.exp() * row


def into_what_is_detached(x: Tensor) -> Tensor:
    """No gradient comes back by way of `base`, which changes too."""
    base = torch.ones(4, 3, dtype=torch.float64) * 2
    seen = base.detach()
    seen[0] = x[1]
    return x * base * base[:1]


def into_a_view_of_what_is_detached(x: Tensor) -> Tensor:
    base = torch.ones(4, 3, dtype=torch.float64) * 2
    base.detach()[1].copy_(x[0])
    return x * base.unfold(1, 1, 1)[..., 0]


def into_data(x: Tensor) -> Tensor:
    base = torch.ones(4, 3, dtype=torch.float64) * 2
    base.data.add_(x)
    base.mul_(x[2])
    return x * base


def into_data_of_what_carries_a_gradient(x: Tensor) -> Tensor:
    x.data.add_(x[0] * 2)
    return x + 1


def view_without_of_what_was_updated(x: Tensor) -> Tensor:
    x[:, :1] = x[1, 1]
    with torch.no_grad():
        seen = x[:, :2]
        every = x.expand(2, 4, 3)
    return x * seen.unfold(1, 1, 1).sum() * every.chunk(2)[1][0]


def view_without_that_is_updated(x: Tensor) -> Tensor:
    with torch.no_grad():
        seen = x.exp()
        other = x * 2
    seen[0] = x[1]
    other += x
    return x * seen * other


def left_as_it_was(x: Tensor) -> Tensor:
    """What is looked at without gradients keeps its own."""
    x[0] = x[1] * 2
    with torch.no_grad():
        row = x.reshape(-1) * 2
    return x * row.sum()


LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "method": within_no_grad(lambda x: x.clamp_(-0.1, 0.1)),
    "chain": within_no_grad(lambda x: x.mul_(2).add_(1)),
    "copy": within_no_grad(lambda x: x.copy_(x.clamp(-0.1, 0.1))),
    "function": within_no_grad(torch.relu_),
    "item": within_no_grad(assigned),
    "operator": within_no_grad(added),
    "view": to_a_view,
    "data": to_data,
    "data of a view": to_data_of_a_view,
    "detached": to_detached,
    "norm": bounded_norm,
    "infinity": to_infinity,
    "seen": seen,
    "into what is detached": into_what_is_detached,
    "into a view of what is detached": into_a_view_of_what_is_detached,
    "into data": into_data,
    "into data of what carries a gradient": into_data_of_what_carries_a_gradient,
    "view without of what was updated": view_without_of_what_was_updated,
    "view without that is updated": view_without_that_is_updated,
    "left as it was": left_as_it_was,
    "detach_": detached_in_place,
    "detach_ after a view was read": detached_after_a_view_was_read,
    "row": within_no_grad(to_a_row_of),
    "out=": within_no_grad(to_itself_by_out),
    "row of detached": lambda x: x * x.detach()[0].mul_(2),
    "view of what is detached in place": view_of_what_is_detached_in_place,
    "row of what is detached": row_of_what_is_detached,
    "part of what is detached": part_of_what_is_detached,
    "embedding of a bounded table": lambda x: F.embedding(torch.tensor([0, 2, 0]), x, max_norm=0.5),
    "bags of a bounded table": lambda x: F.embedding_bag(
        torch.tensor([[0, 2], [2, 2]]), x, None, 0.5, mode="sum"
    ),
    "embedding of a detached bounded table": lambda x: (
        F.embedding(torch.tensor([0, 2, 0]), x.detach() * 2, max_norm=0.5) * x[:1]
    ),
    "cosine": lambda x: x * F.cosine_similarity(x, x.roll(1, 0))[:, None],
    "cosine within its bound": lambda x: x * F.cosine_similarity(x, x.exp(), 0, 2.0),
    "cosine of all pairs": lambda x: x @ F.cosine_similarity(x[None, :3], x[:3, None], -1),
    "cosine of each row": lambda x: (
        x * torch.vmap(lambda row: F.cosine_similarity(row, x[0], 0, 2.0))(x)[:, None]
    ),
    "cosine of other dtypes": lambda x: (
        x * F.cosine_similarity(x, torch.ones(3).int(), -1)[:, None]
    ),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("cut", [True, False])
def test_gradient_is_what_it_is_without_a_pipeline(layer: Any, cut: bool) -> None:
    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        x = fpipe.cut(batch @ params["a"])
        return (fpipe.cut(layer(x * 1.0)) @ params["b"]).square().sum()

    own = {name: leaf.clone().requires_grad_() for name, leaf in PARAMS.items()}
    loss = loss_fn(own, BATCH)
    loss.backward()
    if cut:
        schedule = fpipe.schedules.zb_h1(ranks=3, microbatches=1)
        pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
        found, grads = pipe.step(PARAMS, BATCH)
    else:
        pipe = fpipe.pipeline(
            [lambda p, x: x @ p, lambda p, x: layer(x * 1.0) @ p],
            lambda y, _: y.square().sum(),
            fpipe.schedules.gpipe(ranks=2, microbatches=1),
            compile=False,
        )
        found, (a, b) = pipe.step(list(PARAMS.values()), BATCH)
        grads = {"a": a, "b": b}
    torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(grads, {name: leaf.grad for name, leaf in own.items()})


def detached_and_written_to(x: Tensor) -> Tensor:
    z = x.exp()
    row = z[0]
    z.detach_()
    z.mul_(2)
    return x * z * row


def written_to_itself(x: Tensor) -> Tensor:
    """Autograd refuses it: the row is read while it is written to."""
    seen = x.detach()
    seen.add_(x[0])
    return x * seen


def written_to_what_is_kept(x: Tensor) -> Tensor:
    """Autograd refuses it: what exp keeps for its backward has changed."""
    y = x.exp()
    y.detach().mul_(2)
    return x * y


@pytest.mark.parametrize(
    ("layer", "rule"),
    [
        (
            detached_and_written_to,
            r"writes to a tensor after it has called detach_\(\) on it at .*test_unseen\.py:\d+: "
            r".*y\.detach\(\)\.clone\(\)",
        ),
        (written_to_itself, r"a part of what it reads .* at .*test_unseen\.py:\d+: .*clone\(\)"),
        (written_to_what_is_kept, r"needed for gradient computation has been modified by an inpl"),
    ],
)
@pytest.mark.parametrize("cut", [True, False])
def test_what_autograd_cannot_follow_is_refused(layer: Any, rule: str, cut: bool) -> None:
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=1)
    if cut:
        pipe = fpipe.pipeline(
            lambda p, x: (layer(fpipe.cut(x @ p[0])) @ p[1]).square().sum(),
            schedule=schedule,
            compile=False,
        )
    else:
        stages = [lambda p, x: x @ p, lambda p, x: layer(x * 1.0) @ p]
        pipe = fpipe.pipeline(stages, lambda y, _: y.square().sum(), schedule, compile=False)
    with pytest.raises(fpipe.StageError, match=rule):
        pipe.step(list(PARAMS.values()), BATCH)


@pytest.mark.parametrize("cut", [True, False])
def test_view_without_gradients_is_handed_on(cut: bool) -> None:
    """torch says that such a view requires a gradient."""

    def first(p: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ p
        with torch.no_grad():
            return y, y[:1]

    def second(p: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
        return ((pair[0] * pair[1]) @ p).square().sum()

    a, b = (leaf.clone().requires_grad_() for leaf in PARAMS.values())
    loss = second(b, first(a, BATCH))
    loss.backward()
    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=1)
    if cut:
        pipe = fpipe.pipeline(
            lambda p, x: second(p[1], fpipe.cut(first(p[0], x))), schedule=schedule, compile=False
        )
    else:
        pipe = fpipe.pipeline([first, second], lambda y, _: y, schedule, compile=False)
    found, grads = pipe.step(list(PARAMS.values()), BATCH)
    torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(grads, [a.grad, b.grad])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("cuts", [False, True])
def test_a_view_that_is_told_to_require_a_gradient(cuts: bool) -> None:
    """The trace never ended: torch held what the guard waited for, and asked for the device."""

    def first(w: Tensor, x: Tensor) -> Tensor:
        own = x[:]
        own.requires_grad = True
        return own @ w

    def whole(params: Any, batch: Tensor) -> Tensor:
        return (fpipe.cut(first(params[0], batch)) @ params[1]).square().mean()

    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
    if cuts:
        pipe = fpipe.pipeline(whole, schedule=schedule, compile=False)
    else:
        stages = [first, lambda w, x: x @ w]
        pipe = fpipe.pipeline(stages, lambda y, _: y.square().mean(), schedule, compile=False)
    params, batch = [rand(3, 3), rand(3, 3)], rand(4, 3)
    grads, loss = torch.func.grad_and_value(lambda p: (batch @ p[0] @ p[1]).square().mean())(params)
    assert_same(tuple(pipe.step(params, batch)), (loss, grads))
