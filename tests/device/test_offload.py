"""Parameters and gradients that live on the CPU, while stages compute on CUDA."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy

import fpipe
from fpipe import pytree, schedules
from tests.device.test_one_process import moved
from tests.models import assert_same, gpt, mlp, unpipelined

pytestmark = pytest.mark.cuda

CUDA: Final = torch.device("cuda", 0)
LIVES_ON_THE_CPU: Final[Any] = {
    "devices": [CUDA] * 2,
    "offload_policy": CPUOffloadPolicy(),
    "compile": False,
}


def places(tree: Any) -> set[torch.device]:
    return {leaf.device for leaf in pytree.flatten(tree)[0]}


@pytest.mark.parametrize("family", ["gpipe", "zb_h1", "zbv"])
def test_gradients_come_to_the_cpu(family: str) -> None:
    schedule = schedules.get(family, ranks=2, microbatches=4)
    model = gpt(schedule.num_stages, 8)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, **LIVES_ON_THE_CPU)
    params, batch = pipe.place(moved(model.params, "cuda")), moved(model.batch, "cuda")
    assert places(params) == {torch.device("cpu")}
    assert all(leaf.is_pinned() for leaf in pytree.flatten(params)[0])
    for _ in range(2):
        step = pipe.step(params, batch)
    assert places(step.grads) == {torch.device("cpu")} and step.loss.device == CUDA
    assert all(leaf.is_pinned() for leaf in pytree.flatten(step.grads)[0])
    assert_same(moved(step, "cpu"), unpipelined(*model))
    assert_same(pipe.value(params, batch).cpu(), step.loss.cpu())


def whole(params: Any, batch: Any) -> Tensor:
    """Both stages read the embedding."""
    x = fpipe.cut(torch.tanh(params["embedding"][batch["tokens"]] @ params["weight"]))
    logits = x @ params["embedding"].T
    return torch.nn.functional.cross_entropy(logits, batch["tokens"])


def test_one_function_whose_stages_share_a_parameter() -> None:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=4)
    torch.manual_seed(0)
    params = {"embedding": torch.randn(16, 8).double(), "weight": torch.randn(8, 8).double()}
    batch = {"tokens": torch.randint(16, (8,))}
    expected = fpipe.pipeline(whole, schedule=schedule, compile=False).step(params, batch)
    pipe = fpipe.pipeline(whole, schedule=schedule, **LIVES_ON_THE_CPU)
    step = pipe.step(params, moved(batch, "cuda"))
    assert places(step.grads) == {torch.device("cpu")}
    assert_same(moved(step, "cpu"), expected)


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.05}, {"donate": True}])
def test_an_optimizer_updates_on_the_cpu(options: dict[str, Any]) -> None:
    schedule = schedules.zb_h1(ranks=2, microbatches=4)
    model = mlp(2, 8)
    ends = []
    for offloads in (False, True):
        more: Any = LIVES_ON_THE_CPU if offloads else {"compile": False}
        pipe = fpipe.pipeline(model.stages, model.loss, schedule, **more)
        trainer = fpipe.train(pipe, torch.optim.AdamW, lr=0.1, **options)
        params = pytree.tree_map(torch.clone, model.params)
        batch = moved(model.batch, "cuda") if offloads else model.batch
        params, state = pipe.place(params), trainer.init(params)
        for _ in range(3):
            loss, params, state, norm = trainer.step(params, state, batch)
        assert places((params, state)) == {torch.device("cpu")}
        ends.append(moved((loss, params, state, norm), "cpu"))
    assert_same(ends[1], ends[0])


def test_the_plan_counts_copies_of_parameters() -> None:
    schedule = schedules.gpipe(ranks=2, microbatches=2)
    model = mlp(2, 8)
    plain = fpipe.pipeline(model.stages, model.loss, schedule, compile=False)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, **LIVES_ON_THE_CPU)
    pairs = zip(
        plain.programs(model.params, model.batch),
        pipe.programs(model.params, moved(model.batch, "cuda")),
        strict=True,
    )
    more = [after.peak_bytes - before.peak_bytes for before, after in pairs]
    sizes = [sum(leaf.nbytes for leaf in pytree.flatten(part)[0]) for part in model.params]
    assert more[0] == 0  # its backward reads no parameter
    assert 0 < more[1] <= sizes[1]


def test_parameters_that_do_not_live_on_the_cpu() -> None:
    schedule = schedules.gpipe(ranks=2, microbatches=2)
    model = mlp(2, 8)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, **LIVES_ON_THE_CPU)
    with pytest.raises(fpipe.BatchError, match=r"params\[0\].* lies on cuda:0, and offload_policy"):
        pipe.step(moved(model.params, "cuda"), moved(model.batch, "cuda"))


def test_files_are_no_memory_of_a_device(tmp_path: Any) -> None:
    schedule = schedules.gpipe(ranks=2, microbatches=2)
    model = mlp(2, 8)

    def ones(key: Tensor, name: str, like: Tensor) -> Tensor:
        return torch.ones(like.shape, dtype=like.dtype)

    plain = fpipe.pipeline(model.stages, model.loss, schedule, compile=False, devices=[CUDA] * 2)
    with pytest.raises(fpipe.StageError, match="compute on cuda:0: pass offload_policy"):
        plain.init(ones, fpipe.random.key(0), shapes=model.params, storage=tmp_path)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, **LIVES_ON_THE_CPU)
    params = pipe.init(ones, fpipe.random.key(0), shapes=model.params, storage=tmp_path)
    batch = moved(model.batch, "cuda")
    alike = pytree.tree_map(torch.ones_like, model.params)
    expected = unpipelined(model.stages, model.loss, alike, model.batch)
    assert_same(moved(pipe.step(params, batch), "cpu"), expected)
