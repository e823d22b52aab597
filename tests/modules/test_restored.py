"""A trace leaves a module as it was; changes that a forward makes are states, or warned about."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.nn import state_of
from tests.modules.helpers import (
    TWO,
    assert_equal_steps,
    by_microbatches,
    detached,
    linears,
    module_pipe,
    squares,
    unpipelined,
)


class Twice(nn.Module):
    """A submodule of two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 3)
        self.bridge = nn.Linear(3, 3)
        self.decoder = self.encoder

    def forward(self, x: Tensor) -> Tensor:
        """The first layer again at the end."""
        hidden: Tensor = self.decoder(torch.tanh(self.bridge(torch.tanh(self.encoder(x)))))
        return hidden


def test_submodule_of_two_names_stays_as_it_is() -> None:
    # torch.func.functional_call put what it was given into it for good: abstract tensors.
    module = Twice().double()
    params, batch = detached(module), {"x": torch.randn(4, 3, dtype=torch.float64)}
    held = dict(module.named_parameters())
    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
    step = module_pipe(module, "bridge", schedule=schedule).step(params, batch)
    assert all(held[name] is tensor for name, tensor in module.named_parameters())
    assert_equal_steps(step, by_microbatches(module, batch))


class Averaging(nn.Module):
    """Assigns to its buffer."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        """Less what has been the mean so far."""
        x = self.first(x)
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        y: Tensor = self.second(x - self.average)
        return y


def test_assignment_to_a_buffer_that_is_no_state_is_refused() -> None:
    module = Averaging()
    before = module.average
    pipe = module_pipe(module, "first")
    with pytest.raises(
        fpipe.StageError, match=r"Averaging assigns to its buffer 'average' .*has_state=True"
    ):
        pipe.step(detached(module), {"x": torch.ones(4, 3)})
    assert module.average is before


def test_assignment_to_a_buffer_is_a_new_state() -> None:
    # It was lost: the state of a step was the one before.
    module = Averaging()
    params, x = detached(module), torch.randn(4, 3)
    pipe = module_pipe(module, "first", has_state=True)
    state = pipe.step(params, state_of(module), {"x": x}).state
    for rows in x.chunk(TWO.num_microbatches):
        module(rows)
    torch.testing.assert_close(state["average"], module.average.detach())


class Caching(nn.Module):
    """Makes what it needs when it is called first, in all the ways that modules do."""

    shift: Tensor
    other: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.register_buffer("shift", None)
        self.scale: Tensor | None = None
        self.seen: list[Tensor] = []
        self.norms: dict[str, Tensor] = {}
        self.deep: dict[str, list[dict[int, Tensor]]] = {"positions": [{}]}
        self.last = 0

    def forward(self, input: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.arange(3.0, dtype=torch.float64)
            self.shift = self.scale.cos()
            self.register_buffer("other", self.scale.sin(), persistent=False)
            self.norms["first"] = next(self.layers.parameters()).norm()
            self.deep["positions"][0][3] = self.scale.sin()
        for layer in self.layers:
            input = layer(input * self.scale + self.shift + self.other) * self.norms["first"]
            input = input + self.deep["positions"][0][3]
            self.seen.append(input)
        self.last = len(input)
        return input


def test_caches_of_a_module_are_gone_after_the_trace() -> None:
    # The loss was an abstract tensor, as the module then was.
    module = Caching().double()
    params, batch = detached(module), {"input": torch.randn(6, 3, dtype=torch.float64)}
    pipe = module_pipe(module, None, stages=2, example=batch)
    for rows in (6, 4):  # the second is traced by itself
        part = {"input": batch["input"][:rows]}
        step = pipe.step(params, part)
        assert module.scale is None and module.shift is None and not hasattr(module, "other")
        assert module.seen == [] and module.norms == {} and module.last == 0
        assert module.deep == {"positions": [{}]}
        fresh = Caching().double()
        fresh.load_state_dict(module.state_dict())
        assert_equal_steps(step, unpipelined(fresh, params, part, squares))


class Converting(nn.Module):
    """Converts a part of itself in its forward, as routers of Hugging Face do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last, self.dtype = nn.Linear(4, 4), nn.Linear(4, 4), dtype

    def forward(self, x: Tensor) -> Any:
        self.last = self.last.to(self.dtype)
        return self.last(self.first(x).to(self.dtype))


def test_a_conversion_that_changes_nothing() -> None:
    """The conversion once failed, for torch replaces the data of parameters even by the same."""
    module, batch = Converting(torch.float64).double(), {"x": torch.randn(4, 4).double()}
    step = module_pipe(module, "first").step(detached(module), batch)
    assert_equal_steps(step, by_microbatches(module, batch))
    assert "_apply" not in vars(module.last)
    assert module.float().first.weight.dtype == torch.float32


def test_a_conversion_to_another_dtype_is_refused() -> None:
    module = Converting(torch.float32).double()
    rule = (
        r"converts a Linear of torch\.float64 on cpu to torch\.float32 on cpu in its forward at "
        r".*test_restored\.py:\d+: convert the module before"
    )
    with pytest.raises(fpipe.StageError, match=rule):
        module_pipe(module, "first").step(detached(module), {"x": torch.randn(4, 4).double()})


@pytest.mark.parametrize("part", ["", "1"])
def test_a_module_that_is_compiled_in_place(part: str) -> None:
    """Such a module was once refused, although `Module.compile` cannot be undone."""
    module = linears().double()
    plain = copy.deepcopy(module)
    compiled = module.get_submodule(part)
    compiled.compile(backend="eager")
    impl = compiled._compiled_call_impl
    batch = {"input": torch.randn(4, 3).double()}
    step = module_pipe(module, "0").step(detached(plain), batch)
    assert_equal_steps(step, by_microbatches(plain, batch))
    assert compiled._compiled_call_impl is impl


class Counting(nn.Module):
    """Counts its calls, and sets a number that is always the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.utils.weight_norm(nn.Linear(2, 2))  # sets its weight in each call
        self.steps, self.scale = 0, 0.5

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.scale = 1 / len(x[0])
        return self.layer(x) * self.scale


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_numbers_that_a_forward_changes_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    # A count of warm-up steps stayed 0 in every step, without a word.
    module = nn.Sequential(Counting(), nn.Linear(2, 2))
    batch = {"input": torch.ones(4, 2)}
    pipe = module_pipe(module, None, stages=2, example=batch)
    pipe.step(detached(module), batch)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        "the forward changes the attribute steps of a Counting, which stays what it was"
    )


# ── with a state ────────────────────────────────────────────────────────────────────────────────


class Normed(nn.Module):
    """Its norm has a state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


class Keeps(Normed):
    """Keeps a value of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.first(x)
        return self.last(self.norm(self.features))


class KeepsInAList(Normed):
    """Keeps views of its values, in a list."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.seen = [h[:, :2], {"norm": self.norm.running_mean}]
        return self.last(self.norm(h))


def with_hook() -> Normed:
    """A hook keeps what a layer returns on that layer."""
    net = Normed()
    net.first.register_forward_hook(lambda layer, _, output: setattr(layer, "output", output))
    return net


@pytest.mark.parametrize("make", [Keeps, KeepsInAList, with_hook])
def test_values_that_a_forward_or_a_hook_keeps_change_nothing(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    plain = Normed().double()
    net = make().double()
    net.load_state_dict(plain.state_dict())
    batch = {"x": torch.randn(8, 4, dtype=torch.float64)}
    steps = []
    for module in (plain, net):
        pipe = module_pipe(
            module, "norm", schedule=fpipe.schedules.zb_h1(ranks=2, microbatches=2), has_state=True
        )
        steps.append(pipe.step(detached(module), state_of(module), batch))
    torch.testing.assert_close(tuple(steps[1]), tuple(steps[0]))
