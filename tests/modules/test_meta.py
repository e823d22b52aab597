"""A module without weights is divided and traced as if it had them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import Tensor, nn

import fpipe
from tests import warm
from tests.modules.helpers import detached, module_pipe, on_meta, unpipelined
from tests.modules.hugging_face import ARCHITECTURES, batch_of, build, cross_entropy

ROOT: Final = Path(__file__).parents[2]
SCHEDULE = fpipe.schedules.zb_h1(ranks=2, microbatches=2)


def shapes_of(name: str, layers: int) -> nn.Module:
    """The model of `build`, of which only shapes are there."""
    with torch.device("meta"):
        return ARCHITECTURES[name].build(layers).double().eval()


# Rotary frequencies; position and token type ids; no buffer at all.
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_module_without_weights_steps_as_the_one_with(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    module, batch = build(name, 2), batch_of(name, rows=4)
    params = detached(module)
    shapes = shapes_of(name, 2)
    assert all(tensor.is_meta for tensor in (*shapes.parameters(), *shapes.buffers()))
    chosen = fpipe.balance(shapes, SCHEDULE, on_meta(batch), loss=cross_entropy)
    assert chosen == fpipe.balance(module, SCHEDULE, batch, loss=cross_entropy)
    pipe = fpipe.from_module(
        shapes,
        schedule=SCHEDULE,
        stages=2,
        example=on_meta(batch),
        loss=cross_entropy,
        compile=False,
    )
    assert pipe.cuts == chosen.cuts
    with caplog.at_level(logging.INFO, "fpipe"):
        programs = pipe.programs(on_meta(params), on_meta(batch))
        got = pipe.step(params, batch)
    assert sum(program.peak_bytes for program in programs) > 0
    # The plan for shapes is that for the tensors that have them.
    assert sum("tracing step" in record.message for record in caplog.records) == 1
    expected = unpipelined(module, params, batch, cross_entropy)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got.grads, expected.grads, rtol=1e-10, atol=1e-12)
    assert all(tensor.is_meta for tensor in (*shapes.parameters(), *shapes.buffers()))


def test_tensors_without_data_are_refused_by_a_step() -> None:
    module, batch = build("gpt2", 2), batch_of("gpt2", rows=4)
    pipe = module_pipe(module, "transformer.h.0", schedule=SCHEDULE, loss=cross_entropy)
    params = detached(module)
    with pytest.raises(
        fpipe.BatchError, match=r"params\['transformer.wpe.weight'\] lies on the meta.*prog"
    ):
        pipe.step(params | on_meta({k: params[k] for k in ["transformer.wpe.weight"]}), batch)
    with pytest.raises(fpipe.BatchError, match=r"batch\['input_ids'\] lies on the meta device"):
        pipe.step(params, batch | {"input_ids": batch["input_ids"].to("meta")})


class Scaled(nn.Module):
    """Two layers, and a buffer that is not in the state dict."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("scale", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.scale)


class Resets(Scaled):
    """Says how its buffer is made, and by what numbers its layer begins."""

    def reset_parameters(self) -> None:
        """As torch's own layers do."""
        self.scale.copy_(torch.arange(3.0))
        self.first.reset_parameters()


class AddsUp(Scaled):
    """Does something else to its buffer."""

    def reset_parameters(self) -> None:
        """Not a first value, for it depends on what was there."""
        self.scale.add_(1)


class Kept(Scaled):
    """Its buffer belongs to its state dict, so a checkpoint has it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(3.0))

    reset_parameters = Resets.reset_parameters


class Draws(Scaled):
    """Each process would draw numbers of its own."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.normal_()


def step_of(pipe: fpipe.ModulePipeline) -> Tensor:
    params = {name: torch.ones(value.shape) for name, value in pipe.module.named_parameters()}
    loss: Tensor = pipe.step(params, {"x": torch.ones(4, 3)}).loss
    return loss


def test_buffer_is_made_by_the_module_and_nothing_else_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    expected = step_of(module_pipe(Scaled(), "first"))
    module = Resets()
    weight = module.first.weight.detach().clone()
    module.scale = module.scale.to("meta")
    assert torch.equal(step_of(module_pipe(module, "first")), expected)
    assert module.scale.is_meta and torch.equal(module.first.weight, weight)
    draws, drawn = Draws().to("meta"), torch.get_rng_state()
    with pytest.raises(fpipe.StageError, match=r"'scale' of Draws lies on the meta"):
        module_pipe(draws, "first")
    assert torch.equal(torch.get_rng_state(), drawn) and not seeds
    buffers = {"scale": torch.arange(3.0)}
    assert torch.equal(
        step_of(module_pipe(Scaled().to("meta"), "first", buffers=buffers)), expected
    )
    # Those that are given take the place of those that have numbers too.
    assert step_of(module_pipe(Scaled(), "first", buffers={"scale": torch.zeros(3)})) != expected


@pytest.mark.parametrize("kind", [Scaled, AddsUp, Kept, Draws])
def test_buffer_that_nobody_makes_is_refused(kind: type[Scaled]) -> None:
    module = kind().to("meta")
    with pytest.raises(
        fpipe.StageError, match=rf"the buffer 'scale' of {kind.__name__} lies on the meta.*buffers="
    ):
        module_pipe(module, "first")


def test_state_has_the_numbers_that_buffers_lack() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    with torch.device("meta"):
        shapes = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    params, state = detached(module), fpipe.nn.state_of(module)
    batch = {"input": torch.randn(6, 3).double()}
    steps = [
        module_pipe(built, "1", schedule=SCHEDULE, has_state=True) for built in (module, shapes)
    ]
    expected, got = (pipe.step(params, state, batch) for pipe in steps)
    torch.testing.assert_close(got.grads, expected.grads, rtol=0, atol=0)
    assert torch.equal(got.state["1"].var, expected.state["1"].var)
    assert steps[1].programs(params, fpipe.nn.state_of(shapes), on_meta(batch))
    part = {"1.num_batches_tracked": state["1.num_batches_tracked"]}
    with pytest.raises(fpipe.StageError, match=r"'1.running_mean' of Seq.* meta.*has_state=True"):
        steps[1].step(params, part, batch)


def test_wrong_buffers_are_refused() -> None:
    with pytest.raises(fpipe.StageError, match=r"buffers names 'scales', which is no buffer of Sc"):
        module_pipe(Scaled(), "first", buffers={"scales": torch.ones(3)})
    for wrong in (torch.ones(2), torch.ones(3, device="meta"), 3.0):
        with pytest.raises(fpipe.StageError, match=r"buffers\['scale'\] must be a tensor of shape"):
            module_pipe(Scaled(), "first", buffers={"scale": wrong})


@pytest.mark.processes
def test_billions_of_parameters_are_divided_and_traced_without_weights(tmp_path: Path) -> None:
    """Six of the 32 layers of a Llama of seven billion parameters."""
    report = tmp_path / "report.json"
    arguments = ("--layers", "6", "--json", str(report))
    module = "benchmarks.trace.run"
    done = warm.run(module, *arguments, folder=ROOT, scratch=tmp_path, timeout=280)
    assert done.code == 0, done.output
    *_, (last, seconds, gibibytes) = json.loads(report.read_text("utf-8"))["rows"]
    assert last == "all of it" and seconds < 60 and gibibytes < 2
    assert "- parameters: 1.476 billion" in done.output
    assert "model.layers.4" in done.output and "evenness 82.5%" in done.output
