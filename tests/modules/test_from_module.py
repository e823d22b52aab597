"""A module that nobody edited gives the loss and the gradients that it gives without a pipeline."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import fpipe
from fpipe.nn import state_of
from fpipe.schedule import Schedule
from tests.modules.models import (
    CUTS,
    cross_entropy,
    detached,
    language_model,
    make_batch,
    unpipelined,
)

ONE = fpipe.schedules.gpipe(ranks=1, microbatches=2)
TWO = fpipe.schedules.gpipe(ranks=2, microbatches=2)


def assert_equal_steps(got: fpipe.Step, expected: fpipe.Step) -> None:
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-10, atol=1e-12)
    assert got.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        torch.testing.assert_close(got.grads[name], grad, rtol=1e-10, atol=1e-12)


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
    params, batch = detached(module), make_batch()
    pipe = fpipe.from_module(module, schedule=schedule, cuts=CUTS, remat=remat, compile=False)
    assert_equal_steps(pipe.step(params, batch), unpipelined(module, params, batch))
    # Other numbers than the module's own: what is passed counts, and what it holds stays.
    held = detached(module)
    other = {name: value * 1.5 for name, value in params.items()}
    assert_equal_steps(pipe.step(other, batch), unpipelined(module, other, batch))
    for name, value in module.named_parameters():
        assert torch.equal(value, held[name])
    assert not any(submodule._forward_hooks for submodule in module.modules())


class Louder(nn.Module):
    """Three times as loud in training."""

    def forward(self, input: Tensor) -> Tensor:
        return input * (3.0 if self.training else 1.0)


def test_the_mode_of_the_module_is_that_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    """It was that of the first call for each set of shapes, so that a batch of another size, first
    met in evaluation, was trained without dropout ever after."""
    module = nn.Sequential(nn.Linear(2, 2), Louder()).double()
    params, batch = detached(module), {"input": torch.ones(4, 2, dtype=torch.float64)}
    pipe = fpipe.from_module(
        module, schedule=TWO, cuts=["0"], loss=lambda y, _: y.sum(), compile=False
    )
    ensemble = fpipe.vmap(pipe)
    both = {name: torch.stack([value, value]) for name, value in params.items()}
    with caplog.at_level(logging.INFO, logger="fpipe"):
        for change in (module.train, module.eval, module[1].train, module.eval):
            change()
            expected = module(**batch).sum().detach() / 2  # the mean of two sums
            torch.testing.assert_close(pipe.step(params, batch).loss, expected)
            torch.testing.assert_close(pipe.value(params, batch), expected)
            torch.testing.assert_close(ensemble.step(both, batch).loss, expected.expand(2))
    steps = [r.message for r in caplog.records if r.message.startswith("tracing step")]
    assert len(steps) == 2 * 3  # all in training, all in evaluation, some in training
    assert steps[-1].endswith(
        "the module has another mode (train, eval), other parts, attributes of layers, buffers or "
        "hooks"
    )


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def test_submodules_are_those_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    """One that was put in the place of another, and has no parameters, was not seen."""
    tanh, leaky = nn.Tanh(), nn.LeakyReLU(0.1)
    inner = nn.Sequential(nn.Linear(2, 2), leaky)
    module = nn.Sequential(nn.Linear(2, 2), tanh, inner, tanh).double()
    params, batch = detached(module), {"input": torch.ones(4, 2, dtype=torch.float64)}
    pipe = fpipe.from_module(
        module, schedule=TWO, cuts=["0"], loss=lambda y, _: y.sum(), compile=False
    )

    def slope(value: float) -> None:
        leaky.negative_slope = value

    changes: list[tuple[Callable[[], object], bool]] = [
        (lambda: None, True),
        (lambda: module.__setitem__(1, nn.Sigmoid()), True),
        (lambda: module.__setitem__(1, nn.Tanh()), True),  # not shared any more
        (lambda: module.__setitem__(1, nn.Tanh()), False),
        (lambda: module.__setitem__(3, leaky), True),  # another that is there already
        (lambda: slope(-3.0), True),
        (lambda: slope(0.1), False),
        (lambda: module.__setitem__(1, Scaled(2.0)), True),
        (lambda: module.__setitem__(1, Scaled(3.0)), True),
        (lambda: setattr(module[1], "forward", torch.exp), True),
    ]
    with caplog.at_level(logging.INFO, logger="fpipe"):
        for change, is_new in changes:
            change()
            caplog.clear()
            expected = module(**batch).sum().detach() / 2
            torch.testing.assert_close(pipe.step(params, batch).loss, expected)
            traced = [r for r in caplog.records if r.message.startswith("tracing step")]
            assert len(traced) == is_new


class Renewing(nn.Module):
    """Makes a part of itself anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(2, 2), nn.Tanh()

    def forward(self, input: Tensor) -> Tensor:
        self.act = nn.Tanh()
        return self.act(self.linear(input))


def test_parts_that_a_forward_makes(caplog: pytest.LogCaptureFixture) -> None:
    module = Renewing().double()
    batch = {"input": torch.ones(4, 2, dtype=torch.float64)}
    pipe = fpipe.from_module(
        module, schedule=TWO, cuts=["linear"], loss=lambda y, _: y.sum(), compile=False
    )
    with caplog.at_level(logging.INFO, logger="fpipe"):
        for _ in range(3):
            module(**batch)
            pipe.step(detached(module), batch)
    assert sum(r.message.startswith("tracing step") for r in caplog.records) == 1


class Scaling(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x) * self.scale


def test_buffers_and_dropout_are_those_of_the_call() -> None:
    """Buffers that were replaced, as load_state_dict(assign=True) does, were those of the trace."""
    module = nn.Sequential(nn.Linear(2, 2), Scaling()).double()
    linear, scaling = module
    assert isinstance(scaling, Scaling) and isinstance(scaling.dropout, nn.Dropout)
    params, batch = detached(module), {"input": torch.ones(4, 2, dtype=torch.float64)}
    pipe = fpipe.from_module(
        module, schedule=TWO, cuts=["0"], loss=lambda y, _: y.sum(), compile=False
    )

    def check(factor: float) -> None:
        expected = factor * linear(batch["input"]).sum().detach() / 2
        torch.testing.assert_close(pipe.step(params, batch).loss, expected)

    check(1)
    scaling.scale.fill_(2)
    check(2)
    module.load_state_dict(
        module.state_dict() | {"1.scale": torch.tensor(3.0, dtype=torch.float64)}, assign=True
    )
    check(3)
    scaling.dropout.p = 1.0
    check(0)
    scaling.dropout.p = 0.0
    check(3)


def test_buffers_that_are_replaced_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Linear(2, 2), Scaling()).double()
    scaling = module[1]
    assert isinstance(scaling, Scaling)
    params, batch = detached(module), {"input": torch.ones(4, 2, dtype=torch.float64)}
    pipe = fpipe.from_module(
        module, schedule=TWO, cuts=["0"], loss=lambda y, _: y.sum(), compile=False
    )
    with caplog.at_level(logging.WARNING, "fpipe"):
        for _ in range(10):
            pipe.value(params, batch)
            scaling.scale = scaling.scale * 2
    (record,) = caplog.records
    assert "the buffers of Sequential have been replaced 8 times" in record.message
    with caplog.at_level(logging.WARNING, "fpipe"):
        for _ in range(10):
            handle = module[0].register_forward_hook(lambda *_: None)
            pipe.value(params, batch)
            handle.remove()
    assert "the hooks of Sequential have been replaced 8 times" in caplog.records[-1].message
    assert len(caplog.records) == 2


def test_hooks_are_those_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    """A hook that was put on after the trace was never run, and one that was gone was."""
    module = nn.Sequential(nn.Linear(2, 2), Louder()).double()
    params, batch = detached(module), {"input": torch.ones(4, 2, dtype=torch.float64)}
    pipe = fpipe.from_module(
        module, schedule=TWO, cuts=["0"], loss=lambda y, _: y.sum(), compile=False
    )

    def double(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output * 2

    def check() -> None:
        expected = module(**batch).sum().detach() / 2
        torch.testing.assert_close(pipe.step(params, batch).loss, expected)

    with caplog.at_level(logging.INFO, logger="fpipe"):
        check()
        for _ in range(2):
            handle = module[1].register_forward_hook(double)
            check()
            handle.remove()
            check()
            handle = module[1].register_forward_pre_hook(lambda _, x: (x[0] + 1,))
            check()
            handle.remove()
    steps = [r.message for r in caplog.records if r.message.startswith("tracing step")]
    assert len(steps) == 1 + 1 + 2  # a function that is put on again is known, a new one is not


def test_equal_buffers_are_written_to_apart() -> None:
    """Those of one number that were equal when they were traced were taken for one."""
    module = nn.Sequential(Scaling(), Scaling()).double()
    batch = {"input": torch.ones(4, 2, dtype=torch.float64)}
    pipe = fpipe.from_module(
        module, schedule=TWO, cuts=["0"], loss=lambda y, _: y.mean(), compile=False
    )
    for index, factor in ((0, 2.0), (1, 6.0)):
        scaling = module[index]
        assert isinstance(scaling, Scaling)
        scaling.scale.fill_(factor / (1 + index))
        assert pipe.value({}, batch) == factor


def test_parameters_are_loaded_in_each_other_s_places() -> None:
    """The first was copied over the second before that was read."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    pipe = fpipe.from_module(module, schedule=TWO, cuts=["0"], loss=squares, compile=False)
    own, before = dict(module.named_parameters()), detached(language := copy.deepcopy(module))
    swapped = {"0.weight": "1.weight", "1.weight": "0.weight"}
    pipe.load_into(module, {name: own[swapped.get(name, name)] for name in own})
    for name, value in own.items():
        assert torch.equal(value, before[swapped.get(name, name)])
    wide = before | {"0.bias": before["0.bias"].to(torch.complex64)}
    with pytest.raises(fpipe.BatchError, match=r"complex64, but that of Sequential is .*float32"):
        pipe.load_into(language, wide)


def test_loss_that_does_not_take_the_batch() -> None:
    """It was told of in torch's words alone, as a fault of the model's."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = fpipe.from_module(
        module, schedule=TWO, cuts=["0"], loss=nn.CrossEntropyLoss(), compile=False
    )
    with pytest.raises(
        fpipe.StageError, match=r"not dict \(it is called as loss\(output, batch\), with what the"
    ):
        pipe.step(detached(module), {"input": torch.ones(4, 2)})


def test_loss_of_output_and_batch() -> None:
    module = language_model()
    params, batch = detached(module), make_batch()

    def loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return 2 * cross_entropy(output, batch)

    pipe = fpipe.from_module(module, schedule=TWO, cuts=["blocks.1"], loss=loss, compile=False)
    assert pipe.cuts == ("blocks.1",) and pipe.module is module
    got, expected = pipe.step(params, batch), unpipelined(module, params, batch)
    torch.testing.assert_close(got.loss, 2 * expected.loss)
    # The table is at both ends, and one leaf; the mask is a buffer, and none.
    assert "embedding.weight" in got.grads and "head.weight" not in got.grads
    assert "mask" not in got.grads
    torch.testing.assert_close(pipe.value(params, batch), 2 * expected.loss)


def test_trained_parameters_go_back_into_a_module() -> None:
    module, target = language_model(), language_model()
    params, batch = detached(module), make_batch(8)
    pipe = fpipe.from_module(module, schedule=TWO, cuts=["blocks.1"], compile=False)
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


def test_another_schedule_keeps_the_cuts() -> None:
    module = language_model()
    pipe = fpipe.from_module(module, schedule=TWO, cuts=["blocks.1"], compile=False)
    other = pipe.with_schedule(fpipe.schedules.zb_h1(ranks=2, microbatches=3))
    assert isinstance(other, fpipe.ModulePipeline) and other.cuts == pipe.cuts
    with pytest.raises(fpipe.StageError, match=r"cuts has 1 names, which make 2 stages.* has 4"):
        pipe.with_schedule(fpipe.schedules.zbv(ranks=2, microbatches=4))


class Normed(nn.Sequential):
    """Batch norm in the middle."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def squares(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return output.square().mean()


def test_changing_buffers_are_refused_by_name_and_fixed_ones_are_constants() -> None:
    module = Normed().double()
    pipe = fpipe.from_module(module, schedule=TWO, cuts=["0"], loss=squares, compile=False)
    params = detached(module)
    batch = {"input": torch.randn(6, 3, dtype=torch.float64)}
    with pytest.raises(fpipe.StageError, match=r"module\.1\.num_batches_tracked.*module\.eval\(\)"):
        pipe.step(params, batch)
    buffers = dict(module.named_buffers())
    assert buffers["1.num_batches_tracked"] == 0
    module.eval()
    buffers["1.running_mean"].fill_(0.5)
    loss, _ = pipe.step(params, batch)
    torch.testing.assert_close(loss, squares(module(batch["input"]), batch))


class Lagging(nn.Module):
    """Calls one submodule twice and another never, and branches on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.never = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.twice(self.twice(x))
        if mask is not None and mask.all():
            y = y + 1
        return y


@pytest.mark.parametrize(("name", "times"), [("twice", 2), ("never", 0)])
def test_submodule_that_is_not_called_once_is_refused(name: str, times: int) -> None:
    module = Lagging()
    pipe = fpipe.from_module(module, schedule=TWO, cuts=[name], loss=squares, compile=False)
    with pytest.raises(
        fpipe.StageError,
        match=rf"'{name}', which the forward of .* {times} times: .*fpipe\.cut in a forward hook",
    ):
        pipe.step(detached(module), {"x": torch.ones(4, 3)})


def test_branch_on_data_is_refused_with_its_place() -> None:
    module = Lagging()
    pipe = fpipe.from_module(module, schedule=ONE, cuts=[], loss=squares, compile=False)
    batch = {"x": torch.ones(4, 3), "mask": torch.ones(4, dtype=torch.bool)}
    with pytest.raises(
        fpipe.StageError,
        match=r"Lagging branches on data .*test_from_module\.py:\d+.*torch.where.*is_compiling",
    ):
        pipe.step(detached(module), batch)


@pytest.mark.parametrize(
    ("options", "message"),
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
    ],
)
def test_wrong_argument_is_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "module": language_model(),
        "schedule": TWO,
        "cuts": ["blocks.1"],
    } | options
    with pytest.raises(fpipe.StageError, match=message):
        fpipe.from_module(given.pop("module"), compile=False, **given)


class ByPosition(nn.Linear):
    def forward(self, *xs: Tensor) -> Tensor:
        return super().forward(xs[0])


@pytest.mark.parametrize(
    ("module", "name", "loss", "message"),
    [
        (
            nn.Linear(3, 3),
            "input",
            None,
            r"'y', .*\(input: .* unexpected .*'y'\): .*without a loss=",
        ),
        (nn.Linear(3, 3), "x", squares, r"'x', 'y', .*\(input: .*missing .* 'input'\): .* keyword"),
        (ByPosition(3, 3), "xs", squares, r"\(\*xs: .*: .*wrap the module in one whose arguments"),
    ],
)
def test_batch_that_does_not_suit_the_forward_is_refused(
    module: nn.Module, name: str, loss: Any, message: str
) -> None:
    pipe = fpipe.from_module(module, schedule=ONE, cuts=[], loss=loss, compile=False)
    with pytest.raises(fpipe.BatchError, match=message):
        pipe.step(detached(module), {name: torch.ones(4, 3), "y": torch.ones(4, 3)})


def test_type_error_within_the_forward_is_no_matter_of_the_batch() -> None:
    module = nn.Linear(3, 3)
    module.register_forward_pre_hook(lambda *_: len(3))  # type: ignore[arg-type]
    pipe = fpipe.from_module(module, schedule=ONE, cuts=[], loss=squares, compile=False)
    with pytest.raises(fpipe.StageError, match=r"cannot be traced .* has no len"):
        pipe.step(detached(module), {"input": torch.ones(4, 3)})


def test_nothing_is_copied_where_a_part_has_no_data() -> None:
    """What lies on the meta device was found after the half was copied, once a step had run."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    pipe = fpipe.from_module(module, schedule=TWO, cuts=["0"], loss=squares, compile=False)
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
    pipe = fpipe.from_module(
        module, schedule=TWO, cuts=["0"], loss=squares, has_state=True, compile=False
    )
    params = detached(module)
    state = fpipe.pytree.tree_map(lambda value: value.to(**wrong), fpipe.nn.state_of(module))
    with pytest.raises(fpipe.BatchError, match=message):
        pipe.load_into(module, {name: p + 1 for name, p in params.items()}, state)
    assert all(torch.equal(p, params[name]) for name, p in module.named_parameters())


def test_load_into_takes_the_module_first() -> None:
    module = nn.Linear(3, 3)
    pipe = fpipe.from_module(module, schedule=ONE, cuts=[], loss=squares, compile=False)
    with pytest.raises(fpipe.BatchError, match=r"module is a dict: pass the torch.nn.Module"):
        pipe.load_into(detached(module), module)  # type: ignore[arg-type]


def test_wrong_params_and_batches_are_refused() -> None:
    module = language_model()
    pipe = fpipe.from_module(module, schedule=TWO, cuts=["blocks.1"], compile=False)
    params, batch = detached(module), make_batch()
    with pytest.raises(fpipe.BatchError, match=r"params is a list: .*named_parameters"):
        pipe.step(list(params.values()), batch)
    with pytest.raises(fpipe.BatchError, match=r"batch is a Tensor: .* keyword arguments"):
        pipe.step(params, batch["tokens"])
    with pytest.raises(fpipe.BatchError, match=r"params is .*list\(...\) of it.* dict\(module"):
        pipe.step(module.named_parameters(), batch)
    with pytest.raises(fpipe.BatchError, match=r"params has 'more', which LanguageModel has not: "):
        pipe.step(params | {"more": params["embedding.weight"]}, batch)
    with pytest.raises(fpipe.BatchError, match=r"params\['embedding.weight'\] is a list: it must"):
        pipe.step({name: [value] for name, value in params.items()}, batch)
    rule = r"lacks 'embedding.weight' of LanguageModel and has 'head.weight', which"
    with pytest.raises(fpipe.BatchError, match=rule):
        wrong = dict(params)
        wrong["head.weight"] = wrong.pop("embedding.weight")
        pipe.step(wrong, batch)
    with pytest.raises(fpipe.StageError, match=r"returns a dict without a loss.*labels"):
        pipe.step(params, {"tokens": batch["tokens"]})
    with pytest.raises(fpipe.BatchError, match=r"differ in 21 names, such as"):
        pipe.load_into(Lagging(), params)
    odd: Any = params | {"embedding.weight": [1.0]}
    with pytest.raises(fpipe.BatchError, match=r"params\['embedding.weight'\]=\[1.0\] is a list"):
        pipe.load_into(module, odd)
    with pytest.raises(fpipe.BatchError, match=r"params is a list: it must be a dict"):
        pipe.load_into(module, list(odd))  # type: ignore[arg-type]
    with pytest.raises(fpipe.BatchError, match=r"params\['embedding.weight'\] has shape \(3,\)"):
        pipe.load_into(module, params | {"embedding.weight": torch.ones(3)})
    with pytest.raises(fpipe.BatchError, match=r"\['embedding.weight'\] lies on the meta device"):
        shape = params["embedding.weight"].to("meta")
        pipe.load_into(module, params | {"embedding.weight": shape})


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"buffers": 3}, "buffers=3 is an int: it must be a dict of tensors by the names"),
        ({"measure": "yes"}, "measure='yes' must be True or False"),
        ({"is_compiling": 1}, "is_compiling=1 must be True or False"),
        ({"has_key": ()}, r"has_key=\(\) must be True or False"),
        (
            {"cuts": None, "stages": "2", "example": {}},
            "stages='2' is a str: it must",
        ),
        ({"has_state": 1}, "has_state=1 must be True or False"),
    ],
)
def test_wrong_arguments(options: Any, rule: str) -> None:
    given = {"schedule": TWO, "cuts": ["blocks.1"], "compile": False} | options
    with pytest.raises(fpipe.StageError, match=rule):
        fpipe.from_module(language_model(), **given)


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

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.square().mean()

    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
    pipe = fpipe.from_module(module, schedule=schedule, cuts=["bridge"], loss=loss, compile=False)
    step = pipe.step(params, batch)
    assert all(held[name] is tensor for name, tensor in module.named_parameters())
    loss(module(batch["x"]), batch).backward()
    for name, tensor in held.items():
        torch.testing.assert_close(step.grads[name], tensor.grad)


def test_assignment_to_a_buffer_that_is_no_state_is_refused() -> None:
    module = Averaging()
    before = module.average
    pipe = fpipe.from_module(module, schedule=TWO, cuts=["first"], loss=squares, compile=False)
    with pytest.raises(
        fpipe.StageError, match=r"Averaging assigns to its buffer 'average' .*has_state=True"
    ):
        pipe.step(detached(module), {"x": torch.ones(4, 3)})
    assert module.average is before


def test_assignment_to_a_buffer_is_a_new_state() -> None:
    # It was lost: the state of a step was the one before.
    module = Averaging()
    params, x = detached(module), torch.randn(4, 3)
    pipe = fpipe.from_module(
        module, schedule=TWO, cuts=["first"], loss=squares, has_state=True, compile=False
    )
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


def test_what_a_module_caches_while_it_is_traced_is_gone_afterwards() -> None:
    # The loss was an abstract tensor, as the module then was.
    module = Caching().double()
    params, batch = detached(module), {"input": torch.randn(6, 3, dtype=torch.float64)}
    pipe = fpipe.from_module(
        module, schedule=TWO, stages=2, example=batch, loss=squares, compile=False
    )
    for rows in (6, 4):  # the second is traced by itself
        part = {"input": batch["input"][:rows]}
        step = pipe.step(params, part)
        assert module.scale is None and module.shift is None and not hasattr(module, "other")
        assert module.seen == [] and module.norms == {} and module.last == 0
        assert module.deep == {"positions": [{}]}
        fresh = Caching().double()
        fresh.load_state_dict(module.state_dict())
        assert_equal_steps(step, unpipelined(fresh, params, part, squares))


def test_parameters_of_other_shapes_are_named() -> None:
    module = linears()
    pipe = fpipe.from_module(
        module, schedule=TWO, cuts=["0"], loss=lambda output, _: output.mean(), compile=False
    )
    params = {**detached(module), "1.bias": torch.ones(2)}
    with pytest.raises(fpipe.StageError, match=r"'1.bias' has shape \(2,\) in place of \(3,\)"):
        pipe.step(params, {"input": torch.ones(2, 3)})


def test_parameters_that_were_tied_later_are_told() -> None:
    module = linears()
    pipe = fpipe.from_module(
        module, schedule=TWO, cuts=["0"], loss=lambda output, _: output.mean(), compile=False
    )
    module[1].weight = module[0].weight
    with pytest.raises(fpipe.BatchError, match=r"lacks '1.weight' .* make the pipeline anew"):
        pipe.step(detached(module), {"input": torch.ones(2, 3)})


def test_an_embedding_that_renormalises_is_told() -> None:
    module = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 4))
    pipe = fpipe.from_module(
        module, schedule=TWO, cuts=["0"], loss=lambda output, _: output.mean(), compile=False
    )
    with pytest.raises(fpipe.StageError, match=r"an embedding with max_norm, .* after a step"):
        pipe.step(detached(module), {"input": torch.zeros(2, dtype=torch.int64)})


def test_place_in_a_layer_of_torch_is_named() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    batch = {"src": torch.ones(2, 3, 4), "mask": torch.zeros(3, 3)}
    pipe = fpipe.from_module(
        module,
        schedule=fpipe.schedules.gpipe(ranks=2, microbatches=1),
        cuts=["layers.0"],
        loss=lambda output, _: output.mean(),
        in_dims={"src": 0, "mask": None},
        compile=False,
    )
    with pytest.raises(fpipe.StageError, match=r"a mask .* at .*/transformer\.py:\d+, .* is_ca"):
        pipe.step(detached(module), batch)


def test_hooks_on_gradients_that_come_later_are_refused() -> None:
    module = linears()
    pipe = fpipe.from_module(
        module, schedule=TWO, cuts=["0"], loss=lambda output, _: output.mean(), compile=False
    )
    batch = {"input": torch.ones(2, 3)}
    expected = pipe.step(detached(module), batch)
    weight = module.get_parameter("1.weight")
    for register, where in (
        (lambda: weight.register_hook(lambda g: g * 0), r"parameter\('1.weight'\)"),
        (lambda: weight.register_post_accumulate_grad_hook(lambda _: None), "parameter"),
    ):
        handle = register()
        with pytest.raises(fpipe.StageError, match=rf"{where}.* hooks on its gradient.*remove"):
            pipe.step(detached(module), batch)
        handle.remove()
    assert_equal_steps(pipe.step(detached(module), batch), expected)


def test_backward_hooks_of_modules_count_at_each_call() -> None:
    """They were refused."""
    module = linears().double()
    pipe = fpipe.from_module(
        module, schedule=TWO, cuts=["0"], loss=lambda output, _: output.mean(), compile=False
    )
    batch = {"input": torch.ones(2, 3).double()}
    expected = pipe.step(detached(module), batch)
    for register in (
        lambda: module[1].register_full_backward_pre_hook(lambda _, grads: doubled(grads)),
        lambda: module[1].register_full_backward_hook(lambda _, grads, __: doubled(grads)),
    ):
        handle = register()
        step = pipe.step(detached(module), batch)
        module(batch["input"]).mean().backward()
        own = {name: leaf.grad for name, leaf in module.named_parameters()}
        assert_equal_steps(step, fpipe.Step(expected.loss, own))
        module.zero_grad()
        handle.remove()
    assert_equal_steps(pipe.step(detached(module), batch), expected)


def doubled(grads: Any) -> Any:
    return (grads[0] * 2,)


def linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def hooked(register: Callable[[Tensor], Any]) -> nn.Module:
    module = linears()
    register(module.get_parameter("1.weight"))
    return module


def spread(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """One of a group of one, which is all that constructors want."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return wrap(linears())
    finally:
        dist.destroy_process_group()


def sharded(module: nn.Module) -> nn.Module:
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    return module


def composed(module: nn.Module) -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(module)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.compile(linears()), r"is an OptimizedModule .* take .* \._orig_mod; "),
        (
            lambda: nn.DataParallel(linears()),
            r"module is a DataParallel around a Sequential: .*dev",
        ),
        (
            lambda: spread(nn.parallel.DistributedDataParallel),
            r"module is a DistributedDataParallel .* \.module; it cannot average the gra",
        ),
        (lambda: spread(sharded), r"module is a FSDPSequential, a FSDPModule: .* before it is sh"),
        (
            lambda: spread(
                partial(
                    FullyShardedDataParallel,
                    device_id=torch.device("cpu"),
                    sharding_strategy=ShardingStrategy.NO_SHARD,
                )
            ),
            r"module is a FullyShardedDataParallel: pass the module as it is before it is sharded",
        ),
        (lambda: spread(composed), r"module has a hook of .*\.replicate: .*\(do so yourself"),
        (lambda: nn.Sequential(nn.DataParallel(linears())), r"module\.get_submodule\('0'\) is a D"),
        (
            lambda: hooked(lambda w: w.register_hook(lambda grad: grad * 0)),
            r"module\.get_parameter\('1\.weight'\) has hooks on its gradient, .* what step returns",
        ),
        (
            lambda: hooked(lambda w: w.register_post_accumulate_grad_hook(lambda _: None)),
            "has hooks on its gradient",
        ),
    ],
)
def test_what_a_step_would_leave_out_is_refused(
    make: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(fpipe.StageError, match=message):
        fpipe.from_module(make(), schedule=TWO, cuts=["0"], loss=lambda output, _: output.mean())


class Whole(nn.Module):
    """A module with a state, which draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(torch.tanh(self.first(x)))))


class Splitting(Whole):
    """It says itself where stages end, as one does for torch's `pipe_split`."""

    def forward(self, x: Tensor) -> Tensor:
        x = fpipe.cut(torch.tanh(self.first(x)))
        return self.last(self.drop(self.norm(x)))


def test_cuts_of_the_forward_itself() -> None:
    module = Splitting().double().eval()
    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=2)
    pipe = fpipe.from_module(
        module,
        schedule=schedule,
        cuts=fpipe.cut,
        loss=lambda y, _: y.square().mean(),
        compile=False,
    )
    assert pipe.cuts is None
    params, batch = detached(module), {"x": torch.randn(6, 4, dtype=torch.float64)}

    def plain(own: Any) -> Tensor:
        output: Tensor = torch.func.functional_call(module, own, (batch["x"],))
        return output.square().mean()

    grads, loss = torch.func.grad_and_value(plain)(params)
    step = pipe.step(params, batch)
    torch.testing.assert_close((step.loss, step.grads), (loss, grads))
    pipe.load_into(module, {name: leaf + 1 for name, leaf in params.items()})
    torch.testing.assert_close(detached(module), {n: leaf + 1 for n, leaf in params.items()})


def test_cuts_of_the_forward_of_a_module_with_state_and_keys() -> None:
    module, whole = Splitting().double(), Whole().double()
    options: Any = {
        "schedule": fpipe.schedules.zb_h1(ranks=2, microbatches=2),
        "loss": lambda y, _: y.square().mean(),
        "has_state": True,
        "has_key": True,
        "compile": False,
    }
    batch, key = {"x": torch.randn(6, 4, dtype=torch.float64)}, fpipe.random.key(0)
    arguments = detached(module), state_of(module), batch, key
    step = fpipe.from_module(module, cuts=fpipe.cut, **options).step(*arguments)
    named = fpipe.from_module(whole, cuts=["first"], **options)  # a little earlier
    torch.testing.assert_close(step, named.step(*arguments))


def test_cuts_that_the_forward_does_not_make_are_refused() -> None:
    pipe = fpipe.from_module(
        nn.Linear(4, 4),
        schedule=fpipe.schedules.zb_h1(ranks=2, microbatches=2),
        cuts=fpipe.cut,
        loss=lambda y, _: y.square().mean(),
        compile=False,
    )
    with pytest.raises(fpipe.StageError, match=r"Linear executes 0 cuts, .* place fpipe.cut\(x\)"):
        pipe.step(detached(nn.Linear(4, 4)), {"input": torch.ones(4, 4)})


class Converting(nn.Module):
    """Converts a part of itself in its forward, as routers of Hugging Face do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last, self.dtype = nn.Linear(4, 4), nn.Linear(4, 4), dtype

    def forward(self, x: Tensor) -> Any:
        self.last = self.last.to(self.dtype)
        return self.last(self.first(x).to(self.dtype))


def of_converting(dtype: torch.dtype) -> tuple[Converting, fpipe.ModulePipeline]:
    module = Converting(dtype).double()
    pipe = fpipe.from_module(
        module, schedule=TWO, cuts=["first"], compile=False,
        loss=lambda output, batch: output.square().mean(),
    )  # fmt: skip
    return module, pipe


def test_a_conversion_that_changes_nothing() -> None:
    """It failed, for torch puts other data into the parameters, be it the same."""
    module, pipe = of_converting(torch.float64)
    params, batch = dict(module.named_parameters()), {"x": torch.randn(4, 4).double()}
    expected = module(**batch).square().mean()
    grads = torch.autograd.grad(expected, list(params.values()))
    step = pipe.step(params, batch)
    assert_equal_steps(step, fpipe.Step(expected.detach(), dict(zip(params, grads, strict=True))))
    assert "_apply" not in vars(module.last)
    assert module.float().first.weight.dtype == torch.float32


def test_a_conversion_to_another_dtype_is_refused() -> None:
    module, pipe = of_converting(torch.float32)
    told = (
        r"converts a Linear of torch\.float64 on cpu to torch\.float32 on cpu in its forward at "
        r".*test_from_module\.py:\d+: convert the module before"
    )
    with pytest.raises(fpipe.StageError, match=told):
        pipe.step(dict(module.named_parameters()), {"x": torch.randn(4, 4).double()})


@pytest.mark.parametrize("part", ["", "1"])
def test_a_module_that_is_compiled_in_place(part: str) -> None:
    """It was refused, by a name that was not its own; `Module.compile` cannot be taken back."""
    module = linears().double()
    plain = copy.deepcopy(module)
    compiled = module.get_submodule(part)
    compiled.compile(backend="eager")
    impl = compiled._compiled_call_impl
    pipe = fpipe.from_module(
        module, schedule=TWO, cuts=["0"], compile=False,
        loss=lambda output, batch: output.square().mean(),
    )  # fmt: skip
    params, batch = dict(plain.named_parameters()), {"input": torch.randn(4, 3).double()}
    expected = plain(**batch).square().mean()
    grads = torch.autograd.grad(expected, list(params.values()))
    step = pipe.step(params, batch)
    assert_equal_steps(step, fpipe.Step(expected.detach(), dict(zip(params, grads, strict=True))))
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
def test_numbers_that_a_forward_changes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    # A count of warm-up steps stayed 0 in every step, without a word.
    module = nn.Sequential(Counting(), nn.Linear(2, 2))
    pipe = fpipe.from_module(
        module,
        schedule=fpipe.schedules.gpipe(ranks=2, microbatches=2),
        stages=2,
        example={"input": torch.ones(4, 2)},
        loss=lambda y, _: y.square().mean(),
        compile=False,
    )
    pipe.step({n: p.detach() for n, p in module.named_parameters()}, {"input": torch.ones(4, 2)})
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(
        "the forward changes the attribute steps of a Counting, which stays what it was"
    )
