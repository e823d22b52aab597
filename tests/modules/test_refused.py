"""Modules, batches and parameters that a pipeline cannot follow are refused, with a way out."""

from __future__ import annotations

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
from tests.modules.helpers import (
    ONE,
    detached,
    linears,
    module_pipe,
    squares,
)
from tests.modules.models import language_model, token_batch


def mean(output: Tensor, batch: Any) -> Tensor:
    return output.mean()


def hooked(register: Callable[[Tensor], Any]) -> nn.Module:
    module = linears()
    register(module.get_parameter("1.weight"))
    return module


def spread(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """A wrapper in a group of one process, which is enough to construct it."""
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
            r"module is a DistributedDataParallel .* \.module; a step adds up gradients",
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
        (
            lambda: spread(composed),
            r"module has a hook of .*\.replicate: .*data= averages gradients",
        ),
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
def test_wrappers_and_hooks_that_a_step_would_ignore_are_refused(
    make: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(fpipe.StageError, match=message):
        module_pipe(make(), "0")


def test_changing_buffers_are_refused_by_name_and_fixed_ones_are_constants() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    pipe = module_pipe(module, "0")
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


class Branching(nn.Module):
    """Branches on the mask that it is given."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + 1 if mask.all() else x


def test_branch_on_data_is_refused_with_its_place() -> None:
    module = Branching()
    pipe = module_pipe(module, [], schedule=ONE)
    batch = {"x": torch.ones(4, 3), "mask": torch.ones(4, dtype=torch.bool)}
    with pytest.raises(
        fpipe.StageError,
        match=r"Branching branches on data .*test_refused\.py:\d+.*torch.where.*is_compiling",
    ):
        pipe.step(detached(module), batch)


def test_loss_that_does_not_take_the_batch_is_refused() -> None:
    """The error was torch's alone, as if the model were at fault."""
    module = linears()
    pipe = module_pipe(module, "0", loss=nn.CrossEntropyLoss())
    with pytest.raises(
        fpipe.StageError, match=r"not dict \(it is called as loss\(output, batch\), with what the"
    ):
        pipe.step(detached(module), {"input": torch.ones(4, 3)})


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
    pipe = module_pipe(module, [], schedule=ONE, loss=loss)
    with pytest.raises(fpipe.BatchError, match=message):
        pipe.step(detached(module), {name: torch.ones(4, 3), "y": torch.ones(4, 3)})


def test_type_error_within_the_forward_is_not_blamed_on_the_batch() -> None:
    module = nn.Linear(3, 3)
    module.register_forward_pre_hook(lambda *_: len(3))  # type: ignore[arg-type]
    pipe = module_pipe(module, [], schedule=ONE)
    with pytest.raises(fpipe.StageError, match=r"cannot be traced .* has no len"):
        pipe.step(detached(module), {"input": torch.ones(4, 3)})


def test_wrong_params_and_batches_are_refused() -> None:
    module = language_model()
    pipe = module_pipe(module, "blocks.1", loss=None)
    params, batch = detached(module), token_batch()
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


def test_parameters_of_other_shapes_are_refused_by_name() -> None:
    module = linears()
    pipe = module_pipe(module, "0", loss=mean)
    params = {**detached(module), "1.bias": torch.ones(2)}
    with pytest.raises(fpipe.StageError, match=r"'1.bias' has shape \(2,\) in place of \(3,\)"):
        pipe.step(params, {"input": torch.ones(2, 3)})


def test_parameters_that_were_tied_later_are_refused() -> None:
    module = linears()
    pipe = module_pipe(module, "0", loss=mean)
    module[1].weight = module[0].weight
    with pytest.raises(fpipe.BatchError, match=r"lacks '1.weight' .* make the pipeline anew"):
        pipe.step(detached(module), {"input": torch.ones(2, 3)})


def test_an_embedding_that_renormalises_is_refused() -> None:
    module = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 4))
    pipe = module_pipe(module, "0", loss=mean)
    with pytest.raises(fpipe.StageError, match=r"an embedding with max_norm, .* after a step"):
        pipe.step(detached(module), {"input": torch.zeros(2, dtype=torch.int64)})


def test_look_at_data_in_a_layer_of_torch_is_refused_with_its_place() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    batch = {"src": torch.ones(2, 3, 4), "mask": torch.zeros(3, 3)}
    pipe = module_pipe(
        module,
        "layers.0",
        schedule=fpipe.schedules.gpipe(ranks=2, microbatches=1),
        loss=mean,
        in_dims={"src": 0, "mask": None},
    )
    with pytest.raises(fpipe.StageError, match=r"a mask .* at .*/transformer\.py:\d+, .* is_ca"):
        pipe.step(detached(module), batch)
