"""Hugging Face models as they are, tiny, with random weights; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import fpipe
from fpipe.schedule.families.evaluation import all_forwards_first
from tests.modules.helpers import detached, module_pipe, unpipelined

LIBRARY: Any = transformers  # its configurations are typed by what they happen to need

VOCABULARY, LENGTH, ROWS = 31, 7, 8
DECODER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}


@dataclass(frozen=True)
class Architecture:
    """A kind of model.

    Attributes:
        build: makes it with so many layers (an even number: T5 has half of them on each side).
        layer: the name of a layer, by its number and the number of layers.
    """

    build: Callable[[int], nn.Module]
    layer: Callable[[int, int], str]

    def cuts(self, layers: int) -> list[str]:
        """Each layer ends a stage, but for the last."""
        return [self.layer(number, layers) for number in range(layers - 1)]


def _decoder(family: str, **options: Any) -> Architecture:
    config = getattr(LIBRARY, f"{family}Config")
    model = getattr(LIBRARY, f"{family}ForCausalLM")
    return Architecture(
        lambda layers: model(config(num_hidden_layers=layers, **DECODER | options)),
        lambda number, layers: f"model.layers.{number}",
    )


def _gpt2(layers: int) -> nn.Module:
    config = LIBRARY.GPT2Config(
        n_embd=16, n_layer=layers, n_head=2, n_positions=16, vocab_size=VOCABULARY,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LIBRARY.GPT2LMHeadModel(config)


def _bert(layers: int) -> nn.Module:
    config = LIBRARY.BertConfig(
        num_hidden_layers=layers, vocab_size=VOCABULARY, max_position_embeddings=16, **ENCODER
    )
    return LIBRARY.BertForMaskedLM(config)


def _vit(layers: int) -> nn.Module:
    config = LIBRARY.ViTConfig(
        num_hidden_layers=layers, image_size=8, patch_size=4, num_labels=VOCABULARY, **ENCODER
    )
    return LIBRARY.ViTForImageClassification(config)


def _t5(layers: int) -> nn.Module:
    config = LIBRARY.T5Config(
        d_model=16, d_kv=8, d_ff=24, num_heads=2, vocab_size=VOCABULARY, decoder_start_token_id=0,
        num_layers=layers // 2, num_decoder_layers=layers // 2,
    )  # fmt: skip
    return LIBRARY.T5ForConditionalGeneration(config)


def _t5_layer(number: int, layers: int) -> str:
    half = layers // 2
    side = "encoder" if number < half else "decoder"
    return f"{side}.block.{number % half}"


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(_gpt2, lambda number, layers: f"transformer.h.{number}"),
    "llama": _decoder("Llama"),
    "qwen2": _decoder("Qwen2"),
    "mistral": _decoder("Mistral", sliding_window=4),
    "bert": Architecture(_bert, lambda number, layers: f"bert.encoder.layer.{number}"),
    "vit": Architecture(_vit, lambda number, layers: f"vit.layers.{number}"),
    "t5": Architecture(_t5, _t5_layer),
    # The other implementations of the experts choose rows by data or have no float64.
    "mixtral": _decoder(
        "Mixtral",
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="batched_mm",
    ),
}


def build(name: str, layers: int) -> nn.Module:
    """A model in float64 without dropout, the same each time."""
    torch.manual_seed(0)
    return ARCHITECTURES[name].build(layers).double().eval()


def batch_of(name: str, rows: int = 5) -> dict[str, Tensor]:
    """Token ids or images, and labels."""
    torch.manual_seed(1)
    if name == "vit":
        images = torch.randn(rows, 3, 8, 8, dtype=torch.float64)
        return {"pixel_values": images, "labels": torch.randint(VOCABULARY, (rows,))}
    return {
        "input_ids": torch.randint(VOCABULARY, (rows, LENGTH)),
        "labels": torch.randint(VOCABULARY, (rows, LENGTH)),
    }


def cross_entropy(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Of the logits in float64; the models' own loss turns them to float32."""
    logits, labels = output["logits"].flatten(0, -2), batch["labels"].flatten()
    return nn.functional.cross_entropy(logits, labels)


@cache
def traced(
    name: str, stages: int, group: dist.ProcessGroup | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], fpipe.ModulePipeline]:
    """Parameters, batch and pipeline of a model; all schedules of so many stages share its traces.

    Each of its layers is a stage.
    """
    module = build(name, stages)
    schedule = all_forwards_first([stage % 2 for stage in range(stages)], 1, split=False)
    cuts = ARCHITECTURES[name].cuts(stages)
    pipe = module_pipe(module, cuts, schedule=schedule, loss=cross_entropy, group=group)
    return detached(module), batch_of(name, ROWS), pipe


@cache
def expected_of(name: str, layers: int) -> fpipe.Step:
    """Loss and gradients of the module as it is."""
    module = build(name, layers)
    return unpipelined(module, detached(module), batch_of(name, ROWS), cross_entropy)
