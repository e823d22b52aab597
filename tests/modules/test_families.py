"""Models of other kinds, unmodified, one step each: what they do that decoders alone do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from tests.modules.helpers import assert_equal_steps, by_microbatches, detached, module_pipe
from tests.modules.hugging_face import DECODER, ENCODER, LIBRARY, VOCABULARY, cross_entropy

ROWS, LENGTH = 4, 8


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        model: name of the class, whose configuration has the `options`.
        cuts: as for `fpipe.from_module`.
        batch: makes one.
        loss: None for the model's own.
        tracing: further options of `fpipe.from_module`.
    """

    model: str
    options: dict[str, Any]
    cuts: list[str]
    batch: Callable[[], dict[str, Tensor]]
    loss: Callable[[Any, Any], Tensor] | None = cross_entropy
    tracing: dict[str, Any] = field(default_factory=dict)


def text() -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (2, ROWS, LENGTH))
    return {"input_ids": tokens[0], "labels": tokens[1]}


def speech() -> dict[str, Tensor]:
    batch = text()
    features = torch.randn(ROWS, 8, 20, dtype=torch.float64)
    return {
        "input_features": features,
        "decoder_input_ids": batch["input_ids"],
        "labels": batch["labels"],
    }


def images() -> dict[str, Tensor]:
    pixels = torch.randn(ROWS, 3, 16, 16, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(3, (ROWS,))}


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    # The last stage reads what each router has left, for a loss of their balance.
    "experts": Family(
        "MixtralForCausalLM",
        DECODER
        | {"num_hidden_layers": 3, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"experts_implementation": "batched_mm", "output_router_logits": True},
        ["model.layers.0", "model.layers.1"],
        text,
        loss=None,
    ),
    # Windows in turns, scores that are capped.
    "gemma2": Family(
        "Gemma2ForCausalLM",
        DECODER | {"num_hidden_layers": 2, "head_dim": 4, "sliding_window": 4},
        ["model.layers.0"],
        text,
    ),
    # A scan instead of attention.
    "mamba": Family(
        "MambaForCausalLM",
        {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2}
        | {"vocab_size": VOCABULARY},
        ["backbone.layers.0"],
        text,
    ),
    # Positions that each layer reads, and looks at data that it spares where it is compiled.
    "deberta": Family(
        "DebertaV2ForMaskedLM",
        ENCODER
        | SPECIAL
        | {"num_hidden_layers": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 16}
        | {"relative_attention": True, "pos_att_type": "c2p|p2c", "position_buckets": 4},
        ["deberta.encoder.layer.0"],
        text,
        tracing={"is_compiling": True},
    ),
    # Convolutions, an encoder of something else, positions that are frozen.
    "whisper": Family(
        "WhisperForConditionalGeneration",
        SPECIAL
        | {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
        | {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}
        | {"d_model": 16, "vocab_size": VOCABULARY, "num_mel_bins": 8, "decoder_start_token_id": 1}
        | {"max_source_positions": 10, "max_target_positions": 16},
        ["model.encoder.layers.0"],
        speech,
    ),
    # Windows that are shifted, and rows of windows.
    "swin": Family(
        "SwinForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2]}
        | {"window_size": 4, "num_labels": 3},
        ["swin.encoder.layers.0.blocks.0"],
        images,
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_model_of_another_kind_equals_itself_unpipelined(name: str) -> None:
    family = FAMILIES[name]
    torch.manual_seed(0)
    kind = getattr(LIBRARY, family.model)
    module = kind(kind.config_class(**family.options)).double().eval()
    batch = family.batch()
    schedule = fpipe.schedules.zb_h1(ranks=len(family.cuts) + 1, microbatches=2)
    pipe = module_pipe(module, family.cuts, schedule=schedule, loss=family.loss, **family.tracing)
    loss = family.loss or (lambda output, _: output.loss)
    # Some compute in float32, whatever they are given.
    assert_equal_steps(
        pipe.step(detached(module), batch),
        by_microbatches(module, batch, loss=loss),  # the balance of experts is one of a microbatch
        rounding=1e-6,
        of_grads=1e-6,
    )
