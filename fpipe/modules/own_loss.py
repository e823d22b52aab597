"""The loss that a module computes itself, for the whole batch: a mean over tokens that count.

    batch        labels of -100 do not count, and rows differ in how many they have
    module       its loss is a mean over the targets of a microbatch that count
    pipeline     adds up the sums, and divides by how many counted in all

While the forward is traced, torch's functions of means note their sum and their weight. If what the
module returns is such a mean, the pipeline takes the two in its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn._reduction import legacy_get_string

from fpipe import pytree
from fpipe.errors import StageError, a_type
from fpipe.trace.overrides.standin import Instead

ITEMS: Final = "num_items_in_batch"
"""The argument of Hugging Face models that says by what a sum is divided."""


class Mean(NamedTuple):
    """A mean over targets.

    Attributes:
        value: the sum over the weight.
        returned: the same, as the module got it: it may write to that.
        version: of `returned`, before anything was written to it.
        total: the sum.
        weight: how many targets count, or their class weights together.
    """

    value: Tensor
    returned: Tensor
    version: int
    total: Tensor
    weight: Tensor


class OwnLoss:
    """Notes the means that a forward takes over targets, of which some may not count.

    Args:
        name: of the module's class.
        in_dims: how the batch is split: rows weigh a loss that is no such mean.
    """

    def __init__(self, name: str, in_dims: Any) -> None:
        self._name, self._in_dims = name, in_dims
        self._means: list[Mean] = []
        self._sums: list[Tensor] = []

    def noting(self) -> Instead:
        """A context within which means are noted."""
        self._means.clear()
        self._sums.clear()
        sums = {function: self._noting_sums(function) for function in _ADDING}
        means = {function: self._noting_means(function) for function in _AVERAGING}
        return Instead(sums | means)

    def weighted(self, loss: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor | float]:
        """The loss of a microbatch as a sum and its weight.

        Args:
            loss: what the module has returned, within `noting`.
            batch: the microbatch.

        Raises:
            StageError: the loss of the batch does not follow from those of its microbatches.
        """
        if ITEMS in batch:
            raise StageError(
                f"batch has {ITEMS!r}, by which {self._name} divides its loss: leave it out, for "
                "the pipeline itself divides the sum over all microbatches by the number of labels "
                'that count; or give from_module reduction="sum"'
            )
        if any(loss is total for total in self._sums):
            raise StageError(
                f"the own loss of {self._name} is a sum, of which a pipeline takes the mean over "
                'the microbatches: give from_module reduction="sum", for the loss of the whole '
                "batch"
            )
        if len(self._means) > 1:
            raise StageError(
                f"the own loss of {self._name} is made of {len(self._means)} means over labels, "
                "each of which may ignore some (-100): the loss of the whole batch does not follow "
                "from those of its microbatches. If no label is ignored, give from_module "
                "loss=lambda output, batch: output.loss, a mean over rows; otherwise a loss= that "
                'returns (sum, weight), with reduction="weighted", as fpipe.losses.causal_lm does'
            )
        if not self._means:
            rows = _rows(batch, self._in_dims)
            return loss * rows, float(rows)
        mean = self._means[0]
        if loss is mean.returned and loss._version == mean.version:
            return mean.total, mean.weight
        # There is more to it, such as the balance of experts, which the same weight weighs.
        return mean.total + (loss - mean.value) * mean.weight, mean.weight

    def _noting_means(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`cross_entropy` or `nll_loss`, whose means over numbers of classes are noted."""
        signature = inspect.signature(function)

        def called(*arguments: Any, **options: Any) -> Tensor:
            bound = signature.bind(*arguments, **options)
            bound.apply_defaults()
            rest = bound.arguments
            input, target = rest.pop("input"), rest["target"]
            reduction, old = rest.pop("reduction"), (rest.pop("size_average"), rest.pop("reduce"))
            if old != (None, None):  # the names that torch has given up
                reduction = legacy_get_string(*old, emit_warning=False)
            if reduction == "sum":
                self._sums.append(total := function(input, reduction="sum", **rest))
                return total
            if reduction != "mean" or target.is_floating_point():
                return function(input, reduction=reduction, **rest)
            # In half precision a sum over many tokens is rounded, or infinite.
            wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
            total = function(wide, reduction="sum", **rest)
            weight = _weight(target, rest["weight"], rest["ignore_index"])
            value = (total / torch.where(weight == 0, 1, weight)).to(input.dtype)
            returned = value.clone()
            self._means.append(Mean(value, returned, returned._version, total, weight))
            return returned

        return called

    def _noting_sums(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def called(*arguments: Any, **options: Any) -> Tensor:
            value = function(*arguments, **options)
            if options.get("reduction") == "sum":
                self._sums.append(value)
            return value

        return called


_AVERAGING: Final[tuple[Callable[..., Tensor], ...]] = (F.cross_entropy, F.nll_loss)
"""Functions that take a mean over targets, of which some may not count."""

_ADDING: Final = (
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.ctc_loss,
    F.huber_loss,
    F.kl_div,
    F.l1_loss,
    F.mse_loss,
    F.smooth_l1_loss,
)
"""Functions that take a `reduction`, and have no targets that do not count."""


def loss_of(output: Any, name: str) -> Tensor:
    """The loss that the output of a module holds, whose class has this name."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None:
        raise StageError(
            f"{name} returns {a_type(output)} without a loss: give "
            "from_module a loss=(output, batch) -> scalar, or the batch what the module makes "
            "its loss of (labels, for Hugging Face models)"
        )
    return loss


def _weight(target: Tensor, class_weights: Tensor | None, ignore_index: int) -> Tensor:
    """The number by which torch divides the sum for a mean."""
    counts = target != ignore_index
    if class_weights is None:
        return counts.sum()
    classes = torch.where(counts, target, 0)
    return torch.where(counts, class_weights[classes], 0).sum()


def _rows(batch: Mapping[str, Any], in_dims: Any) -> int:
    """The number of rows of a microbatch."""
    dims = pytree.broadcast_prefix("in_dims", in_dims, batch, "batch")
    leaves, _ = pytree.flatten(batch)
    sizes = (leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None)
    return next(sizes, 1)
