"""Whether all ranks were given the same batch, told by some of its numbers.

The rank that reads the inputs is seldom that which reads the labels. Where processes shuffle with
seeds of their own, labels are those of other inputs, and nothing but the loss would ever show it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fpipe import tree

Sample = dict[str, tuple[float, ...]]
"""Some numbers of each leaf of a batch, by its path; none of one without data."""

_COUNT = 64
_SPREAD = 2654435761  # a prime: what is at these places does not lie in one column


def sample(batch: object) -> Sample:
    """Numbers from the same places of every batch of these shapes."""
    leaves, spec = tree.flatten(batch)
    return dict(zip(tree.paths(spec), map(_numbers, leaves), strict=True))


def other_batches(samples: Sequence[Sample | None]) -> tuple[str, int, int] | None:
    """The path of the first leaf in which two ranks differ by more than rounding, and the two.

    Args:
        samples: of each rank, None of one that was given no batch.
    """
    given = [(rank, found) for rank, found in enumerate(samples) if found is not None]
    first, expected = given[0]
    for rank, found in given[1:]:
        for path, ours in expected.items():
            theirs = found.get(path)  # what one has split itself has another
            # One has no data where only its shapes are asked for.
            if ours and theirs and not _close(ours, theirs):
                return path, first, rank
    return None


def _numbers(leaf: Tensor) -> tuple[float, ...]:
    if leaf.is_meta or not leaf.numel():
        return ()
    with torch.no_grad():
        places = torch.arange(_COUNT, device=leaf.device) * _SPREAD % leaf.numel()
        found = leaf.detach().reshape(-1)[places]
        real = torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
        return tuple(real.double().flatten().tolist())


def _close(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    a, b = torch.tensor([ours, theirs], dtype=torch.float64, device="cpu")
    scale = float(torch.cat([a, b]).nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(a, b, rtol=0, atol=1e-2 * scale, equal_nan=True)
