"""Microbatches that the caller has made, which may be of different shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Microbatches(tuple[T, ...], Generic[T]):
    """One value for each microbatch, in place of a batch that is to be split.

    Parts may differ in the size of any dimension: sentences of about one length make a microbatch,
    and each is padded to its own longest. Stages are traced once for each different shape, and a
    plan is made for each order of shapes; so pad to a few lengths. The loss is as for a batch that
    is split: with ``reduction="mean"`` a microbatch counts by its rows, and with ``"weighted"``,
    which is what a mean over tokens wants, by its weight.

    It stands for the whole batch or for any part of it: as the entry of a dict, say, beside others
    that are split. ``in_dims`` speaks of one microbatch: it says which dimension of a part holds
    its rows, and None of one that has none. Where ``out_dims`` is this class, what comes out is
    left apart as well. It is a tuple, and a node of optree in the namespace ``"fpipe"``; gradients
    by the batch have it where the batch has.

    Args:
        parts: as many pytrees as the schedule has microbatches, of one structure, whose leaves have
            the same dtypes and numbers of dimensions in all of them.

    Example:
        >>> import torch, fpipe
        >>> def loss_fn(w, batch):
        ...     x = fpipe.cut(batch["x"] * w) * batch["mask"]
        ...     return x.sum(), batch["mask"].sum()
        >>> schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)
        >>> pipe = fpipe.pipeline(loss_fn, schedule=schedule, reduction="weighted", compile=False)
        >>> short = {"x": torch.ones(8, 3), "mask": torch.ones(8, 3)}
        >>> long = {"x": torch.full((2, 9), 4.0), "mask": torch.ones(2, 9)}
        >>> loss, grad = pipe.step(torch.tensor(2.0), fpipe.Microbatches([short, long]))
        >>> loss.item(), grad.item()  # (24 * 1 + 18 * 4) / (24 + 18) is the gradient
        (4.5714..., 2.2857...)
    """

    __slots__ = ()

    def __new__(cls, parts: Iterable[T]) -> Microbatches[T]:
        """Take the parts in order."""
        return super().__new__(cls, parts)

    def __repr__(self) -> str:
        return f"fpipe.Microbatches({list(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Microbatches, (list(self),)
