"""A module that nobody edited gives the loss and the gradients that it gives without a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.nn import state_of
from fpipe.schedule import Schedule
from tests.modules.helpers import (
    TWO,
    assert_equal_steps,
    by_microbatches,
    detached,
    module_pipe,
    squares,
    unpipelined,
)
from tests.modules.models import CUTS, language_model, token_batch, token_loss


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [
        (fpipe.schedules.one_f_one_b(ranks=4, microbatches=4), "none"),
        (fpipe.schedules.zbv(ranks=2, microbatches=4), "full"),
    ],
    ids=["one_f_one_b", "zbv"],
)
def test_module_equals_itself_unpipelined(schedule: Schedule, remat: Any) -> None:
    module = language_model()
    params, batch = detached(module), token_batch(9)
    pipe = module_pipe(module, CUTS, schedule=schedule, loss=None, remat=remat)
    assert_equal_steps(pipe.step(params, batch), unpipelined(module, params, batch))
    # Other numbers than the module's own: what is passed counts, and what it holds stays.
    held = detached(module)
    other = {name: value * 1.5 for name, value in params.items()}
    assert_equal_steps(pipe.step(other, batch), unpipelined(module, other, batch))
    for name, value in module.named_parameters():
        assert torch.equal(value, held[name])
    assert not any(submodule._forward_hooks for submodule in module.modules())


def test_loss_of_output_and_batch() -> None:
    module = language_model()
    params, batch = detached(module), token_batch(9)

    def loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return 2 * token_loss(output, batch)

    pipe = module_pipe(module, "blocks.1", loss=loss)
    assert pipe.cuts == ("blocks.1",) and pipe.module is module
    got, expected = pipe.step(params, batch), unpipelined(module, params, batch)
    torch.testing.assert_close(got.loss, 2 * expected.loss)
    # The table is at both ends, and one leaf; the mask is a buffer, and none.
    assert "embedding.weight" in got.grads and "head.weight" not in got.grads
    assert "mask" not in got.grads
    torch.testing.assert_close(pipe.value(params, batch), 2 * expected.loss)


def test_another_schedule_keeps_the_cuts() -> None:
    module = language_model()
    pipe = module_pipe(module, "blocks.1", loss=None)
    other = pipe.with_schedule(fpipe.schedules.zb_h1(ranks=2, microbatches=3))
    assert isinstance(other, fpipe.ModulePipeline) and other.cuts == pipe.cuts
    with pytest.raises(fpipe.StageError, match=r"cuts has 1 names, which make 2 stages.* has 4"):
        pipe.with_schedule(fpipe.schedules.zbv(ranks=2, microbatches=4))


class Lagging(nn.Module):
    """Calls one submodule twice and another never."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.never = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.twice(x))


@pytest.mark.parametrize(("name", "times"), [("twice", 2), ("never", 0)])
def test_submodule_that_is_not_called_once_is_refused(name: str, times: int) -> None:
    module = Lagging()
    pipe = module_pipe(module, name)
    with pytest.raises(
        fpipe.StageError,
        match=rf"'{name}', which the forward of .* {times} times: .*fpipe\.cut in a forward hook",
    ):
        pipe.step(detached(module), {"x": torch.ones(4, 3)})


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"module": squares}, r"module=<function.* is a function: .*fpipe.pipeline takes"),
        ({"cuts": "blocks.1"}, r"cuts='blocks.1' is a str: it must be a list of names"),
        ({"cuts": ["block.1"]}, r"'block.1', which is no submodule of LanguageModel.*'blocks.1'"),
        ({"cuts": [""]}, r"names '', which is no submodule .* lists them$"),
        ({"cuts": ["blocks.1", "blocks.1"]}, r"names a submodule twice"),
        ({"cuts": ["blocks.1", "blocks.2"]}, r"cuts has 2 names, which make 3 stages"),
        ({"schedule": "zbv"}, r"schedule='zbv' is a str"),
        ({"loss": 3}, r"loss=3 is not callable: it is a function \(output, batch\)"),
        ({"loss": nn.PReLU()}, r"loss is a PReLU with parameters to be trained, .* of the module"),
        ({"buffers": 3}, "buffers=3 is an int: it must be a dict of tensors by the names"),
        ({"measure": "yes"}, "measure='yes' must be True or False"),
        ({"is_compiling": 1}, "is_compiling=1 must be True or False"),
        ({"has_key": ()}, r"has_key=\(\) must be True or False"),
        ({"cuts": None, "stages": "2", "example": {}}, "stages='2' is a str: it must"),
        ({"has_state": 1}, "has_state=1 must be True or False"),
    ],
)
def test_wrong_argument_is_refused(options: dict[str, Any], rule: str) -> None:
    arguments: dict[str, Any] = {"module": language_model(), "schedule": TWO, "cuts": ["blocks.1"]}
    with pytest.raises(fpipe.StageError, match=rule):
        fpipe.from_module(**arguments | options, compile=False)


class Whole(nn.Module):
    """A module with a state, which draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(torch.tanh(self.first(x)))))


class Splitting(Whole):
    """Its forward marks where stages end, as with torch's `pipe_split`."""

    def forward(self, x: Tensor) -> Tensor:
        x = fpipe.cut(torch.tanh(self.first(x)))
        return self.last(self.drop(self.norm(x)))


def test_cuts_of_the_forward_itself() -> None:
    module = Splitting().double().eval()
    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
    pipe = module_pipe(module, fpipe.cut, schedule=schedule)
    assert pipe.cuts is None
    params, batch = detached(module), {"x": torch.randn(6, 4, dtype=torch.float64)}
    assert_equal_steps(pipe.step(params, batch), by_microbatches(module, batch))
    pipe.load_into(module, {name: leaf + 1 for name, leaf in params.items()})
    torch.testing.assert_close(detached(module), {n: leaf + 1 for n, leaf in params.items()})


def test_cuts_of_the_forward_of_a_module_with_state_and_keys() -> None:
    module, whole = Splitting().double(), Whole().double()
    options: Any = {"has_state": True, "has_key": True}
    batch, key = {"x": torch.randn(6, 4, dtype=torch.float64)}, fpipe.random.key(0)
    arguments = detached(module), state_of(module), batch, key
    step = module_pipe(module, fpipe.cut, **options).step(*arguments)
    named = module_pipe(whole, "first", **options)  # a little earlier
    torch.testing.assert_close(step, named.step(*arguments))


def test_cuts_that_the_forward_does_not_make_are_refused() -> None:
    pipe = module_pipe(nn.Linear(4, 4), fpipe.cut)
    with pytest.raises(fpipe.StageError, match=r"Linear executes 0 cuts, .* place fpipe.cut\(x\)"):
        pipe.step(detached(nn.Linear(4, 4)), {"input": torch.ones(4, 4)})
