"""Updates are compiled where the stages are: one kernel for parameters of any shape."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

import fpipe
from fpipe import schedules
from fpipe.training import compiled
from fpipe.training.compiled import Kernels
from fpipe.training.updates import Updates
from tests.models import assert_identical, assert_same, mlp

SHAPES: Final = ((3,), (4, 5), (2, 3, 7))


def stepped(updates: Updates, hyper: Any, shape: tuple[int, ...]) -> list[Any]:
    """A parameter and its state after some steps."""
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(shape, generator=generator, dtype=torch.float64)
    state = updates.init(param, hyper)
    for count in range(4):
        grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        param, state = updates(param, grad, state, hyper | {"lr": 0.1 / (1 + count)}, count)
    return [param, state]


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "RMSprop", "NAdam", "Adagrad", "RAdam"])
def test_one_kernel_serves_all_shapes(name: str) -> None:
    made: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph

    options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)
    fast = Updates(optimizer, {"lr": 0.1, **options}, Kernels({"backend": backend}))
    plain = Updates(optimizer, {"lr": 0.1, **options})
    for shape in SHAPES:
        hyper = plain.checked({"lr": 0.1, **options})
        assert_same(stepped(fast, hyper, shape), stepped(plain, hyper, shape))
    assert len(made) <= 2  # RAdam has two branches


def test_what_is_not_elementwise_stays_uncompiled() -> None:
    kernels = Kernels({"backend": "eager"})
    updates = Updates(torch.optim.Muon, {"lr": 0.1}, kernels)
    param = torch.randn(4, 4)
    hyper = updates.checked({"lr": 0.1})
    state = updates.init(param, hyper)
    for count in range(2):
        param, state = updates(param, torch.randn(4, 4), state, hyper, count)
    assert all(entry is None for entry in kernels._split.values())


@pytest.mark.inductor
def test_a_kernel_of_inductor_serves_all_shapes_and_writes_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels: list[Any] = []
    made = compiled.row_kernel

    def noted(*arguments: Any) -> Any:
        kernels.append(made(*arguments))
        return kernels[-1]

    monkeypatch.setattr(compiled, "row_kernel", noted)
    options = {"options": {"fpipe.wgrad_kernel": False}}  # one of fpipe's own, which others pass by
    fast = Updates(torch.optim.AdamW, {"lr": 0.1}, Kernels(options))
    plain = Updates(torch.optim.AdamW, {"lr": 0.1})
    hyper = plain.checked({"lr": 0.1})
    for shape in SHAPES:
        assert_same(stepped(fast, hyper, shape), stepped(plain, hyper, shape))
    assert len(kernels) == 1
    ours, theirs = (stepped(updates, hyper, (4, 5)) for updates in (fast, plain))
    before, grad = ours[0].data_ptr(), torch.ones(4, 5, dtype=torch.float64)
    param, state = fast(ours[0], grad, ours[1], hyper, 4, in_place=True)
    assert param.data_ptr() == before
    assert_same([param, state], list(plain(theirs[0], grad, theirs[1], hyper, 4)))
    assert len(kernels) == 2


@pytest.mark.inductor
def test_a_compiled_step_is_that_of_an_uncompiled_one() -> None:
    model = mlp(2, 8)
    schedule = schedules.zb_h1(ranks=2, microbatches=4)
    ends = []
    for compile in (True, False):
        pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=compile)
        trainer = fpipe.train(pipe, torch.optim.AdamW, lr=0.1, max_norm=0.05)
        params, state = model.params, trainer.init(model.params)
        for _ in range(3):
            loss, params, state, norm = trainer.step(params, state, model.batch)
        ends.append([loss, params, state.moments, norm])
    assert_same(ends[0], ends[1])
    assert_identical(int(state.steps), 3)
