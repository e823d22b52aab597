"""What the tests of modules share: pipelines, losses, references, comparisons, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

import fpipe
from fpipe import Schedule, random
from fpipe.nn import keyed

ONE = fpipe.schedules.gpipe(ranks=1, microbatches=2)
TWO = fpipe.schedules.gpipe(ranks=2, microbatches=2)


# ── pipelines ───────────────────────────────────────────────────────────────────────────────────


def squares(output: Tensor, batch: Any) -> Tensor:
    """The mean of the squares of the output."""
    return output.square().mean()


def total(output: Tensor, batch: Any) -> Tensor:
    """The sum of the output."""
    return output.sum()


def module_pipe(
    module: nn.Module,
    cuts: Any,
    *,
    schedule: Schedule = TWO,
    loss: Any = squares,
    compile: Any = False,
    **options: Any,
) -> fpipe.ModulePipeline:
    """A pipeline of a module, uncompiled; one name of a submodule is one cut."""
    named = [cuts] if isinstance(cuts, str) else cuts
    return fpipe.from_module(
        module, schedule=schedule, cuts=named, loss=loss, compile=compile, **options
    )


def linears() -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def detached(module: nn.Module) -> dict[str, Tensor]:
    """The parameters as `Pipeline.step` takes them."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def on_meta(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The shapes of tensors."""
    return {name: value.to("meta") for name, value in tensors.items()}


def steps_traced(caplog: pytest.LogCaptureFixture, goal: str = "step") -> list[str]:
    """The messages that say that a step was traced, or what else was."""
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if message.startswith(f"tracing {goal}")]


# ── references ──────────────────────────────────────────────────────────────────────────────────


def unpipelined(
    module: nn.Module,
    params: dict[str, Tensor],
    batch: dict[str, Tensor],
    loss: Callable[[Any, Any], Tensor] = lambda output, batch: output["loss"],
) -> fpipe.Step:
    """Loss and gradients of the module itself, for the whole batch."""

    def whole(params: dict[str, Tensor]) -> Tensor:
        return loss(functional_call(module, params, (), batch), batch)

    grads, value = grad_and_value(whole)(params)
    return fpipe.Step(value, grads)


def by_microbatches(
    module: nn.Module,
    batch: Mapping[str, Tensor],
    microbatches: int = 2,
    *,
    loss: Callable[[Any, Any], Tensor] = squares,
    key: Tensor | None = None,
) -> fpipe.Step:
    """Loss and gradients of the module itself, microbatch by microbatch, each with its key.

    The buffers of the module change. Frozen parameters have no gradient.
    """
    columns = [leaf.chunk(microbatches) for leaf in batch.values()]
    losses = []
    for number, values in enumerate(zip(*columns, strict=True)):
        part = dict(zip(batch, values, strict=True))
        with nullcontext() if key is None else keyed(random.fold_in(key, number)):
            losses.append(loss(module(**part), part))
    value = torch.stack(losses).mean()
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    grads: tuple[Tensor, ...] = torch.autograd.grad(
        value, list(trained.values()), allow_unused=True, materialize_grads=True
    )
    frozen: dict[str, Any] = dict.fromkeys(detached(module))
    return fpipe.Step(value.detach(), frozen | dict(zip(trained, grads, strict=True)))


def assert_equal_steps(
    got: fpipe.Step, expected: fpipe.Step, rounding: float = 1e-10, of_grads: float | None = None
) -> None:
    """Compare loss and gradients.

    Args:
        got: of the pipeline.
        expected: of the module itself.
        rounding: relative tolerance; that of numbers near 0 is a hundredth of it.
        of_grads: tolerance of gradients near 0; None for that of the loss.
    """
    near_zero = rounding / 100 if of_grads is None else of_grads
    torch.testing.assert_close(got.loss, expected.loss, rtol=rounding, atol=rounding / 100)
    assert got.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        torch.testing.assert_close(got.grads[name], grad, rtol=rounding, atol=near_zero)


# ── checkpoints ─────────────────────────────────────────────────────────────────────────────────


def write_distributed(module: nn.Module, folder: Path) -> Path:
    """The state dict in a directory of torch.distributed.checkpoint."""
    with pytest.warns(UserWarning, match="to save in a single process"):
        dcp.save(module.state_dict(), checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"
