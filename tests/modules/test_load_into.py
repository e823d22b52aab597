"""Parameters and a state are copied into a module, all of them or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fpipe
from tests.modules.helpers import (
    assert_equal_steps,
    detached,
    linears,
    module_pipe,
)
from tests.modules.models import language_model, token_batch


def test_trained_parameters_go_back_into_a_module() -> None:
    module, target = language_model(), language_model()
    params, batch = detached(module), token_batch(8)
    pipe = module_pipe(module, "blocks.1", loss=None)
    losses = []
    for _ in range(3):
        loss, grads = pipe.step(params, batch)
        params = {name: value - 0.1 * grads[name] for name, value in params.items()}
        losses.append(loss)
    assert losses[0] > losses[1] > losses[2]
    pipe.load_into(target, params)
    assert target.head.weight is target.embedding.weight
    torch.testing.assert_close(target(**batch)["loss"], pipe.value(params, batch))
    assert_equal_steps(pipe.step(detached(target), batch), pipe.step(params, batch))


def test_parameters_are_loaded_in_each_other_s_places() -> None:
    """load_into once overwrote the second parameter before it read it."""
    module = linears()
    pipe = module_pipe(module, "0")
    held, before = dict(module.named_parameters()), detached(module)
    swapped = {"0.weight": "1.weight", "1.weight": "0.weight"}
    pipe.load_into(module, {name: held[swapped.get(name, name)] for name in held})
    for name, value in held.items():
        assert torch.equal(value, before[swapped.get(name, name)])


def test_nothing_is_copied_where_a_part_has_no_data() -> None:
    """After a step, load_into once found a tensor without data when half was copied."""
    module = linears()
    pipe = module_pipe(module, "0")
    params = detached(module)
    pipe.step(params, {"input": torch.ones(4, 3)})
    part = {name: p + 1 if name[0] == "0" else p.to("meta") for name, p in params.items()}
    with pytest.raises(fpipe.BatchError, match=r"params\['1.\w+'\] lies on the meta device"):
        pipe.load_into(module, part)
    assert all(torch.equal(p, params[name]) for name, p in module.named_parameters())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device": "meta"}, "'1.running_mean' of state lies on the meta device and has no data"),
        ({"dtype": torch.complex64}, "'1.running_mean' of state is torch.complex64, but that of"),
    ],
)
def test_nothing_is_copied_where_the_state_cannot_be(wrong: Any, message: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    pipe = module_pipe(module, "0", has_state=True)
    params = detached(module)
    state = fpipe.pytree.tree_map(lambda value: value.to(**wrong), fpipe.nn.state_of(module))
    with pytest.raises(fpipe.BatchError, match=message):
        pipe.load_into(module, {name: p + 1 for name, p in params.items()}, state)
    assert all(torch.equal(p, params[name]) for name, p in module.named_parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda params: list(params), r"params is a list: it must be a dict"),
        (lambda params: {"more": torch.ones(1)} | params, r"differ in 1 names, such as 'more'"),
        (lambda params: params | {"1.bias": [1.0]}, r"params\['1.bias'\]=\[1.0\] is a list"),
        (lambda params: params | {"1.bias": torch.ones(2)}, r"\['1.bias'\] has shape \(2,\)"),
        (
            lambda params: params | {"1.bias": params["1.bias"].to("meta")},
            r"params\['1.bias'\] lies on the meta device",
        ),
        (
            lambda params: params | {"1.bias": params["1.bias"].to(torch.complex64)},
            r"complex64, but that of Sequential is .*float32",
        ),
    ],
)
def test_params_that_do_not_fit_are_refused(change: Any, message: str) -> None:
    module = linears()
    with pytest.raises(fpipe.BatchError, match=message):
        module_pipe(module, "0").load_into(module, change(detached(module)))


def test_modules_that_do_not_fit_are_refused() -> None:
    module = linears()
    pipe, params = module_pipe(module, "0"), detached(module)
    with pytest.raises(fpipe.BatchError, match=r"module is a dict: pass the torch.nn.Module"):
        pipe.load_into(params, module)  # type: ignore[arg-type]
    with pytest.raises(fpipe.BatchError, match=r"'0.weight' of Seq.* meta device.*anew"):
        pipe.load_into(linears().to("meta"), params)
