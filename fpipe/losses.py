"""Losses of language models that are exact however labels are spread, for ``reduction="weighted"``.

A mean over tokens of which some do not count (labels of -100) is not the mean of the means of
microbatches. These return the sum and how many tokens count, of which a pipeline makes the mean
over the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["causal_lm", "masked_lm"]

IGNORED: Final = -100
"""The label of a token that does not count."""


def causal_lm(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The cross entropy of each next token, in float32 at least, as Hugging Face has it.

    Args:
        output: logits of shape [rows, tokens, classes], or what has them as ``.logits``.
        batch: with ``"labels"``, int64 of shape [rows, tokens]: the label at a place is what the
            logits at the place before predict. -100 does not count.

    Returns:
        The sum over the labels that count, and their number.

    Example:
        >>> import torch, fpipe
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embedding, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)
        ...     def forward(self, tokens):
        ...         return self.head(self.embedding(tokens))
        >>> pipe = fpipe.from_module(
        ...     Model(),
        ...     schedule=fpipe.schedules.one_f_one_b(ranks=2, microbatches=2),
        ...     cuts=["embedding"],
        ...     loss=fpipe.losses.causal_lm,
        ...     reduction="weighted",
        ...     compile=False,
        ... )
        >>> params = {name: p.detach() for name, p in Model().named_parameters()}
        >>> tokens = torch.arange(8).view(2, 4)
        >>> labels = torch.tensor([[0, 1, 2, 3], [4, 5, -100, -100]])
        >>> loss, grads = pipe.step(params, {"tokens": tokens, "labels": labels})
        >>> bool(loss > 0)
        True
    """
    logits = _logits(output)
    return _summed(logits[:, :-1], batch["labels"][:, 1:])


def masked_lm(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The cross entropy of each token itself, as the loss of Hugging Face's encoders and of T5.

    Args and returns are those of `causal_lm`, but for the label at a place, which is what the
    logits at that place predict.

    Example:
        >>> logits, labels = torch.zeros(2, 3, 5), torch.tensor([[0, -100, 1], [-100, -100, 4]])
        >>> total, count = masked_lm(logits, {"labels": labels})
        >>> round(total.item() / count.item(), 4), count.item()  # the logarithm of 5
        (1.6094, 3)
    """
    return _summed(_logits(output), batch["labels"])


def _logits(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    logits: Tensor = output["logits"] if isinstance(output, Mapping) else output.logits
    return logits


def _summed(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = torch.nn.functional.cross_entropy(
        wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (labels != IGNORED).sum()
