"""Modules whose buffers change: they come in and go out as a state."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe import Schedule, schedules
from fpipe.nn import buffers_of, state_of
from tests.models import assert_same
from tests.modules.helpers import by_microbatches, detached, module_pipe, squares, total

SCHEDULE = schedules.one_f_one_b(ranks=2, microbatches=4)
ROWS = 8
WITH_AUX: dict[str, Any] = {"has_aux": True, "has_state": True}


class Convolutional(nn.Module):
    """Two normalisations, a count, and a buffer that never changes and every stage reads."""

    scale: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh())
        self.second = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3, momentum=0.3), nn.Tanh())
        self.third = nn.Linear(12, 4)
        self.fourth = nn.Linear(4, 2)
        self.register_buffer("scale", torch.full((), 1.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.second(self.first(x) * self.scale) * self.scale
        x = torch.tanh(self.third(x.flatten(1))) * self.scale
        return self.fourth(x) * self.scale


CUTS = ["first", "second", "third"]


def convolutional() -> Convolutional:
    torch.manual_seed(0)
    module = Convolutional().double()
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(torch.randn_like(buffer))
    return module


def image_batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(ROWS, 1, 5, 5).double() + 1}


def with_logits(output: Tensor, batch: dict[str, Tensor]) -> Any:
    return squares(output, batch), {"logits": output}


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [
        (schedules.one_f_one_b(ranks=4, microbatches=4), "full"),
        (schedules.zb_h1(ranks=4, microbatches=4), "none"),
        (schedules.zbv(ranks=2, microbatches=4), "full"),
    ],
    ids=["one_f_one_b", "zb_h1", "zbv"],
)
def test_buffers_are_what_the_module_would_hold(schedule: Schedule, remat: Any) -> None:
    module, twin, batch = convolutional(), convolutional(), image_batch()
    pipe = module_pipe(module, CUTS, schedule=schedule, loss=with_logits, remat=remat, **WITH_AUX)
    params, state = detached(module), state_of(module)
    result = pipe.step(params, state, batch)
    outputs: list[Tensor] = []

    def noting(output: Tensor, batch: Any) -> Tensor:
        outputs.append(output.detach())
        return squares(output, batch)

    loss, grads = by_microbatches(twin, batch, 4, loss=noting)
    logits = torch.cat(outputs)
    assert isinstance(result, fpipe.StepStateAux)
    assert_same((result.loss, result.grads), (loss, grads))
    assert_same(result.aux["logits"], logits)
    assert_same(buffers_of(result.state), dict(twin.named_buffers()))
    assert result.state["calls"] == 4 and result.state["first.1.num_batches_tracked"] == 4
    assert_same(dict(module.named_buffers()), dict(convolutional().named_buffers()))
    # The state of one step begins the next, and goes back into a module.
    second = pipe.step(params, result.state, batch)
    by_microbatches(twin, batch, 4)
    assert_same(buffers_of(second.state), dict(twin.named_buffers()))
    pipe.load_into(module, params, second.state)
    assert_same(dict(module.named_buffers()), dict(twin.named_buffers()))
    assert_same(tuple(pipe.forward(params, state, batch)), (loss, {"logits": logits}))


def test_deferred_statistics_are_those_of_the_whole_batch() -> None:
    module, twin, batch = convolutional(), convolutional(), image_batch()
    pipe = module_pipe(module, "first", schedule=SCHEDULE, has_state=True, batch_norm="deferred")
    result = pipe.step(detached(module), state_of(module), batch)
    assert isinstance(result, fpipe.StepState)
    twin.first(batch["x"])  # what the second one normalises depends on how the batch is split
    assert_same(result.state["first.1"], state_of(twin)["first.1"])
    assert result.state["first.1.num_batches_tracked"] == 1
    assert_same(result.loss, by_microbatches(convolutional(), batch, 4).loss)


def test_buffers_left_out_of_the_state_are_constants() -> None:
    module, batch = convolutional().eval(), image_batch()
    pipe = module_pipe(module, "first", schedule=SCHEDULE, has_state=True)
    result = pipe.step(detached(module), {"calls": module.calls}, batch)
    assert_same(result.state, {"calls": torch.tensor(4)})
    assert_same(result.loss, module(batch["x"]).square().mean())
    module.train()
    rule = r"writes in place to a tensor that it closes over \('.*num_batches_tracked'\)"
    with pytest.raises(fpipe.StageError, match=rule):
        module_pipe(module, "first", schedule=SCHEDULE, has_state=True).step(
            detached(module), {"calls": module.calls}, batch
        )


def test_cuts_of_a_module_with_a_state_are_chosen() -> None:
    module, batch = convolutional(), image_batch()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for measure in (False, True):
        balance = fpipe.balance(
            module,
            SCHEDULE,
            batch,
            loss=with_logits,
            candidates=CUTS,
            measure=measure,
            compile=False,
            **WITH_AUX,
        )
        assert [name for name, _ in balance.parts] == [*CUTS, ""]
    pipe = module_pipe(module, balance, schedule=SCHEDULE, loss=with_logits, **WITH_AUX)
    loss, *_ = pipe.step(detached(module), state_of(module), batch)
    assert_same(loss, by_microbatches(convolutional(), batch, 4).loss)
    with pytest.raises(fpipe.StageError, match="writes in place to a tensor that it closes over"):
        fpipe.balance(module, SCHEDULE, batch, loss=with_logits, has_aux=True, candidates=CUTS)
    assert_same(dict(module.named_buffers()), before)


def test_wrong_states_are_refused() -> None:
    module, batch = convolutional(), image_batch()
    pipe = module_pipe(module, "first", loss=with_logits, **WITH_AUX)
    params = detached(module)
    for state, message in (
        ([module.calls], r"state is a list: .* fpipe.nn.state_of\(module\)"),
        ({"counts": module.calls}, r"state has the buffer 'counts' of shape \(\), which in Convol"),
        ({"calls": torch.zeros(2)}, r"'calls' of shape \(2,\), which in Convolutional has shape"),
    ):
        with pytest.raises(fpipe.BatchError, match=message):
            pipe.step(params, state, batch)
        with pytest.raises(fpipe.BatchError, match=message):
            pipe.load_into(module, params, state)  # type: ignore[arg-type]
    with pytest.raises(fpipe.StageError, match=r"has_aux=True is about .* -> \(loss, aux\)"):
        module_pipe(module, "first", loss=None, has_aux=True)
    with pytest.raises(fpipe.StageError, match=r'batch_norm="deferred" is about running statist'):
        module_pipe(module, "first", batch_norm="deferred")
    plain = module_pipe(module, "first", loss=total, **WITH_AUX)
    with pytest.raises(fpipe.StageError, match=r"must return \(loss, state, aux\)"):
        plain.step(params, state_of(module), batch)


def step_with_state(module: nn.Module) -> Any:
    pipe = module_pipe(module, "0", has_state=True)
    return pipe.step(detached(module), state_of(module), {"input": torch.randn(4, 3)})


def test_layers_that_share_a_buffer_are_refused_by_its_names() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    first, second = module
    assert isinstance(first, nn.BatchNorm1d) and isinstance(second, nn.BatchNorm1d)
    second.running_mean = first.running_mean
    rule = "buffers '0.running_mean' and '1.running_mean' of Sequential are one tensor"
    with pytest.raises(fpipe.BatchError, match=rule):
        step_with_state(module)


def test_averages_over_all_steps_are_refused() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None))
    with pytest.raises(fpipe.StageError, match="'1' is a BatchNorm1d with momentum=None"):
        step_with_state(module)


class Aliased(nn.Module):
    """Reads what it writes to a buffer, by another name."""

    mean: Tensor
    head: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        if kind == "buffer":
            self.register_buffer("head", self.mean[:2])
        elif kind == "attribute":
            self.head = self.mean[:2]
        elif kind == "list":
            self.parts = [self.mean]
        else:
            self.register_buffer("head", torch.zeros(4)[:2])
            self.still = self.head  # nobody writes to it
        self.norm = nn.BatchNorm1d(4)
        if kind == "statistics":
            self.seen = self.norm.running_mean
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.mean.add_(h.detach().mean(0))
        seen = self.parts[0][:2] if self.kind == "list" else self.head
        out: Tensor = self.last(self.norm(h)) + seen.repeat(2)
        return out


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("buffer", "'mean', and has 'head'"),
        ("attribute", "'mean', and has 'head'"),
        ("list", r"'mean', and has 'parts\[0\]'"),
        ("statistics", "'norm.running_mean', and has 'seen'"),
        ("apart", None),
    ],
)
def test_tensors_in_the_memory_of_a_buffer_that_changes_are_refused(
    kind: str, names: str | None
) -> None:
    """The forward would read the other tensor as it was before the step."""
    torch.manual_seed(0)
    module = Aliased(kind)
    pipe = module_pipe(module, "first", has_state=True)
    call = partial(pipe.step, detached(module), state_of(module), {"x": torch.randn(8, 4)})
    if names is None:
        assert call().state["mean"].any()
    else:
        with pytest.raises(fpipe.StageError, match=f"Aliased writes to its buffer {names} in the"):
            call()
