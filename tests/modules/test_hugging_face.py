"""Hugging Face models, unmodified, pipelined and not: the same loss and the same gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from tests.modules.helpers import assert_equal_steps, detached, module_pipe, unpipelined
from tests.modules.hugging_face import (
    ARCHITECTURES,
    LENGTH,
    batch_of,
    build,
    cross_entropy,
    expected_of,
    traced,
)


def stages_of(name: str) -> int:
    """Stages in the middle have two models: what passes through a stage of others is the same."""
    return 4 if name in ("llama", "t5") else 2


# Each model with several families: all have one trace, and `test_conformance` has each placement of
# its stages with models of other shapes.
@pytest.mark.parametrize(
    ("family", "name"), list(zip(fpipe.schedules.FAMILIES, itertools.cycle(ARCHITECTURES)))
)
def test_model_equals_itself_unpipelined(name: str, family: str) -> None:
    make = fpipe.schedules.FAMILIES[family]
    stages = stages_of(name)
    # As many stages in each family, on as many ranks or on half of them, share one trace.
    ranks = 2 * stages // make(ranks=2, microbatches=4).num_stages
    params, batch, pipe = traced(name, stages)
    step = pipe.with_schedule(make(ranks=ranks, microbatches=4)).step(params, batch)
    assert_equal_steps(step, expected_of(name, stages))


def test_the_loss_of_the_model_itself() -> None:
    module = build("bert", 2)
    params, batch = detached(module), batch_of("bert")
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=3)
    pipe = module_pipe(module, "bert.encoder.layer.0", schedule=schedule, loss=None)
    expected = unpipelined(module, params, batch, lambda output, _: output.loss)
    assert_equal_steps(pipe.step(params, batch), expected)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_model_that_checkpoints_its_layers() -> None:
    module: Any = build("llama", 2).train()
    params = detached(module)
    batch = {name: leaf[:4] for name, leaf in batch_of("llama").items()}  # two equal microbatches
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=2)
    expected = unpipelined(module, params, batch, cross_entropy)
    held = []
    for use_reentrant in (None, True, False):
        if use_reentrant is not None:
            module.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        pipe = module_pipe(module, "model.layers.0", schedule=schedule, loss=cross_entropy)
        assert_equal_steps(pipe.step(params, batch), expected)
        held.append([program.peak_bytes for program in pipe.programs(params, batch)])
    before, *others = held
    assert all(peak < plain for after in others for plain, peak in zip(before, after, strict=True))


def test_model_may_look_at_the_positions_that_it_makes() -> None:
    module: Any = build("llama", 2)
    module.config.use_cache = False  # it then looks whether several texts are packed into a row
    params, batch = detached(module), batch_of("llama")
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=1)
    pipe = module_pipe(module, None, schedule=schedule, loss=cross_entropy, stages=2, example=batch)
    assert_equal_steps(pipe.step(params, batch), unpipelined(module, params, batch, cross_entropy))


def padded_batch() -> tuple[dict[str, Tensor], Tensor]:
    """A batch whose rows end early, and which of its tokens are there."""
    batch = batch_of("llama")
    present = torch.arange(LENGTH) < torch.tensor([7, 5, 3, 6, 7])[:, None]
    return batch | {"labels": batch["labels"].where(present, -100)}, present


def test_padding_mask_is_refused_with_the_place_and_the_way_round() -> None:
    module = build("llama", 2)
    batch, present = padded_batch()
    pipe = module_pipe(
        module,
        "model.layers.0",
        schedule=fpipe.schedules.zb_h1(ranks=2, microbatches=5),
        loss=cross_entropy,
        is_compiling=False,
    )
    with pytest.raises(
        fpipe.StageError,
        match=r"LlamaForCausalLM branches on data .* at .*masking_utils\.py:\d+.*"
        r'four dimensions.*attn_implementation="eager".*is_compiling=True',
    ):
        pipe.step(detached(module), batch | {"attention_mask": present.long()})


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("llama", "four dimensions"),
        ("llama", "eager"),
        ("llama", "is_compiling"),
        ("bert", "is_compiling"),  # which looks at its mask under "eager" too
        ("llama", "by itself"),
        ("bert", "by itself"),
        ("t5", "by itself"),
    ],
)
def test_ways_round_the_padding_mask(name: str, way: str) -> None:
    module: Any = build(name, 2)
    batch, present = padded_batch()
    params, mask = detached(module), present.long()
    if way == "eager":
        module.set_attn_implementation("eager")
    expected = unpipelined(module, params, batch | {"attention_mask": mask}, summed)
    if way == "four dimensions":
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        mask = causal & present[:, None, None, :]
    pipe = module_pipe(
        module,
        ARCHITECTURES[name].cuts(2),
        schedule=fpipe.schedules.zb_h1(ranks=2, microbatches=5),
        loss=summed,
        reduction="sum",
        is_compiling=None if way == "by itself" else way == "is_compiling",
    )
    assert_equal_steps(pipe.step(params, batch | {"attention_mask": mask}), expected)


@pytest.mark.parametrize("is_compiling", [None, True])
def test_cuts_are_chosen_beside_a_padding_mask(is_compiling: bool | None) -> None:
    batch, present = padded_batch()
    balance = fpipe.balance(
        build("bert", 2),
        fpipe.schedules.gpipe(ranks=2, microbatches=1),
        batch | {"attention_mask": present.long()},
        loss=summed,
        reduction="sum",
        is_compiling=is_compiling,
    )
    assert balance.cuts == ("bert.encoder.layer.0",)


def test_experts_that_cannot_be_traced_are_refused_with_the_way_round() -> None:
    module: Any = build("mixtral", 2)
    module.set_experts_implementation("grouped_mm")
    pipe = module_pipe(
        module,
        "model.layers.0",
        schedule=fpipe.schedules.gpipe(ranks=2, microbatches=1),
        loss=cross_entropy,
    )
    with pytest.raises(
        fpipe.StageError,
        match=r"MixtralForCausalLM chose an implementation of its experts .* at .*moe\.py:\d+ .*"
        r'experts_implementation="batched_mm"',
    ):
        pipe.step(detached(module), batch_of("mixtral"))


def summed(output: Any, batch: Any) -> Tensor:
    """Over the tokens that are there: rows have different numbers of them."""
    logits, labels = output["logits"].flatten(0, -2), batch["labels"].flatten()
    return nn.functional.cross_entropy(logits, labels, reduction="sum")
