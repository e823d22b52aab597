"""Random numbers within stages: drawn once, whatever is computed again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe
from fpipe import schedules
from tests.models import assert_identical, assert_same, mean_square, mlp, mlp_first, mlp_layer


def dropped(p: Any, batch: Any) -> Tensor:
    return F.dropout(mlp_first(p, batch), 0.4) + 0.1 * torch.randn(3, dtype=batch["x"].dtype)


def noisy(p: Any, x: Tensor) -> Tensor:
    h = x * torch.bernoulli(torch.full_like(x, 0.7))
    return F.dropout(mlp_layer(p, h), 0.3) * torch.rand_like(x)


def steps(schedule: fpipe.Schedule, stages: int, rows: int = 7, **options: Any) -> list[fpipe.Step]:
    model = mlp(stages, rows)
    chain = options.pop("chain", [dropped, *[noisy] * (stages - 1)])
    pipe = fpipe.pipeline(chain, mean_square, schedule, **({"compile": False} | options))
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(pipe.step(model.params, model.batch))
    return found


@pytest.mark.parametrize("family", ["gpipe", "one_f_one_b", "zb_h1", "zbv"])
def test_result_does_not_depend_on_remat(family: str) -> None:
    schedule = schedules.get(family, ranks=2, microbatches=3)
    kept, other = steps(schedule, schedule.num_stages)
    assert not kept.loss.equal(other.loss)
    for remat in ("full", "except_last", lambda node: "mm" in str(node.target)):
        again, _ = steps(schedule, schedule.num_stages, remat=remat)
        assert_identical(again, kept)


@pytest.mark.inductor
def test_compiled_result_does_not_depend_on_remat() -> None:
    """In one stage with all draws, which has the fewest kernels."""
    schedule = schedules.one_f_one_b(ranks=1, microbatches=1)
    options: Any = {"chain": [lambda p, batch: noisy(p, dropped(p, batch))], "compile": True}
    kept, other = steps(schedule, 1, 6, **options)
    assert not kept.loss.equal(other.loss)
    # Inductor drew in another order where a graph returned more: a mask here, its draws there.
    again, _ = steps(schedule, 1, 6, **options, remat="full")
    assert_same(again, kept)


def test_one_microbatch_draws_what_the_plain_function_draws() -> None:
    schedule = schedules.zb_h1(ranks=2, microbatches=1)
    step, _ = steps(schedule, 2, remat="full")
    model = mlp(2, 7)
    params = [{k: v.clone().requires_grad_() for k, v in part.items()} for part in model.params]
    torch.manual_seed(0)
    loss = mean_square(noisy(params[1], dropped(params[0], model.batch)), model.batch)
    loss.backward()
    expected = fpipe.Step(loss.detach(), [{k: v.grad for k, v in part.items()} for part in params])
    assert_same(step, expected)


DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    # The derivative that torch has of it, once recorded, reads memory that nobody has written to.
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_": lambda x: F.rrelu_(x * 1, training=True),
    "rrelu in evaluation": lambda x: F.rrelu(x, training=False),
    # Of what overwrites a value there is none.
    "normal_": lambda x: x * x.clone().normal_(),
    "uniform_": lambda x: x * x.clone().uniform_(),
    "bernoulli_": lambda x: x * x.clone().bernoulli_(0.5),
    "bernoulli_ of a tensor": lambda x: x * x.clone().bernoulli_(torch.full_like(x, 0.5)),
    "exponential_ of a part": lambda x: (x.clone()[0].exponential_() * x).tanh(),
    "geometric_": lambda x: x * x.clone().geometric_(0.5),
    "log_normal_": lambda x: x * x.clone().log_normal_(),
    "cauchy_": lambda x: x * x.clone().cauchy_(),
    # Nor of this one, which torch takes for differentiable where it is recorded.
    "randint_like": lambda x: x * torch.randint_like(x, 5),
    "randint_like from 1": lambda x: x * torch.randint_like(x, 1, 5),
}


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("layer", DRAWN.values(), ids=DRAWN)
def test_gradient_of_a_cut_function_that_draws(layer: Any, remat: Any) -> None:
    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        y = layer(fpipe.cut(x * w).sin())
        return fpipe.cut(y * y).sum()

    torch.manual_seed(0)
    w, x = torch.randn(3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    own = w.clone().requires_grad_()
    torch.manual_seed(1)
    loss = loss_fn(own, x)
    loss.backward()
    schedule = schedules.zb_h1(ranks=3, microbatches=1)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, remat=remat, compile=False)
    torch.manual_seed(1)
    assert_same(pipe.step(w, x), fpipe.Step(loss.detach(), own.grad))


def test_microbatches_draw_apart() -> None:
    def first(p: Tensor, x: Tensor) -> Tensor:
        return x * p + torch.rand(1)

    schedule = schedules.gpipe(ranks=1, microbatches=2)
    pipe = fpipe.pipeline([first], lambda y, _: y.mean(), schedule, compile=False)
    output = pipe.forward([torch.ones(1)], torch.zeros(2, 1))
    assert not output[0].equal(output[1])


def test_what_another_thread_draws_meanwhile_is_its_own() -> None:
    """It was taken for a seed while a stage was traced, and for draws of the stage afterwards."""
    end = threading.Event()

    def elsewhere(drawn: threading.Event) -> None:
        torch.rand(3)
        drawn.set()
        end.wait()

    def stage(p: Tensor, x: Tensor) -> Tensor:
        drawn = threading.Event()
        threading.Thread(target=elsewhere, args=(drawn,), daemon=True).start()
        drawn.wait()
        return torch.tanh(x * p)

    def seeded(p: Tensor, x: Tensor) -> Tensor:
        y = stage(p, x)
        torch.manual_seed(torch.initial_seed())
        return y

    def plain(p: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x * p).square().mean()

    def slope(value: Any) -> Any:
        return torch.func.grad(lambda p: torch.func.grad(value)(p, x).square().sum())

    def piped(of: Callable[[Tensor, Tensor], Tensor]) -> Any:
        schedule = fpipe.schedules.gpipe(ranks=1, microbatches=1)
        pipe = fpipe.pipeline([of], lambda y, _: y.square().mean(), schedule, compile=False)
        return lambda p, x: pipe.value([p], x)

    p, x = torch.tensor(0.5, dtype=torch.float64), torch.linspace(1, 2, 4, dtype=torch.float64)
    try:
        torch.testing.assert_close(slope(piped(stage))(p), slope(plain)(p))
        with pytest.raises(fpipe.StageError, match="seeds torch's generator"):
            piped(seeded)(p, x)
    finally:
        end.set()


def test_what_another_thread_seeds_meanwhile_is_its_own() -> None:
    """A stage was said to have seeded torch's generator, and the seed was undone."""
    state = torch.get_rng_state()

    def stage(p: Tensor, x: Tensor) -> Tensor:
        thread = threading.Thread(target=torch.manual_seed, args=(1234,), daemon=True)
        thread.start()
        thread.join()
        return torch.tanh(x * p)

    end = threading.Event()
    waiting = threading.Thread(target=end.wait, daemon=True)
    waiting.start()
    try:
        schedule = fpipe.schedules.gpipe(ranks=1, microbatches=1)
        pipe = fpipe.pipeline([stage], lambda y, _: y.square().mean(), schedule, compile=False)
        pipe.step([torch.ones(())], torch.ones(2))
        assert torch.initial_seed() == 1234
        assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(1234).get_state())
    finally:
        end.set()
        waiting.join()
        torch.set_rng_state(state)


def test_seeding_that_is_undone_is_refused() -> None:
    """A step would draw other numbers each time."""

    def stage(p: Tensor, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return x * p + torch.randn(2)

    schedule = fpipe.schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline([stage], lambda y, _: y.square().mean(), schedule, compile=False)
    with pytest.raises(fpipe.StageError, match=r"seeds torch's generator at .*draw from a key"):
        pipe.step([torch.ones(())], torch.ones(2))


def test_draw_whose_name_no_graph_can_write() -> None:
    def stage(p: Any, x: Tensor) -> Tensor:
        return x * p * torch.empty_like(x).random_(1, 4)

    pipe = fpipe.pipeline(
        [stage], lambda y, _: y.mean(), schedules.gpipe(ranks=1, microbatches=1), compile=False
    )
    with pytest.raises(fpipe.StageError, match=r"draw with torch\.randint\(low, high, x\.shape\)"):
        pipe.step([torch.ones(2)], torch.ones(2, 2))


@pytest.mark.inductor
def test_compiled_draws_have_the_default_dtype() -> None:
    """Inductor drew float32, which the backward read as the float64 of the trace."""
    torch.set_default_dtype(torch.float64)
    try:
        pipe = fpipe.pipeline(
            [lambda w, x: torch.tanh(x @ w) * torch.rand(4)],
            lambda y, _: y.sum(),
            schedules.gpipe(ranks=1, microbatches=1),
        )
        w, x = torch.eye(4), torch.ones(2, 4)
        found = []
        for moved in (w, w + 1e-6, w - 1e-6):
            torch.manual_seed(1)
            found.append(pipe.step([moved], x))
    finally:
        torch.set_default_dtype(torch.float32)
    slope = (found[1].loss - found[2].loss) / 2e-6
    torch.testing.assert_close(found[0].grads[0].sum(), slope, rtol=1e-6, atol=1e-6)
