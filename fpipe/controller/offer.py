"""Offers: what ranks tell each other before a new plan, and what they refuse of it.

An offer says what a rank was given, or why it could not use it. A verdict says what plan a rank has
made of all offers, or why it could not make one.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fpipe import tree
from fpipe.arguments.shapes import Ambient, TreeShape, in_words
from fpipe.controller.refusal import check_problems, odd_one_out, refusal
from fpipe.controller.sample import Sample, other_batches
from fpipe.errors import BatchError

log = logging.getLogger("fpipe")


class Offer(NamedTuple):
    """What a rank brings to a new plan.

    Attributes:
        setup: digest of everything that must be the same on all ranks, by name.
        params: the parameters of its own stages.
        rows: rows of each microbatch, None without a batch.
        batch: shapes of its batch, None without a batch.
        sample: numbers of its batch, None without a batch.
        ambient: what else its traces depend on.
        problem: why it cannot take part, or None.
    """

    setup: Mapping[str, str]
    params: Mapping[int, TreeShape]
    rows: tuple[int, ...] | None
    batch: tuple[TreeShape, ...] | None
    sample: Sample | None
    ambient: Ambient
    problem: str | None


def check_offers(offers: Sequence[Offer], own: int, problem: Exception | None) -> None:
    """Refuse offers that do not fit together.

    Args:
        offers: of all ranks.
        own: this rank.
        problem: what is wrong with what this rank was given, if anything is.

    Raises:
        PipelineError: names the rank and what it brought; its cause is `problem`.
    """
    check_problems("run this step", [offer.problem for offer in offers], own, problem)
    for name in offers[0].setup:
        rank_or_none = odd_one_out([offer.setup.get(name, "") for offer in offers])
        if rank_or_none is not None:
            raise refusal(
                rank_or_none,
                f"rank {rank_or_none} has another {name} than the other ranks: "
                "fpipe.pipeline must get the same on every rank",
            )
    batches = {rank: (o.rows, o.batch) for rank, o in enumerate(offers) if o.batch is not None}
    if not batches:
        raise refusal(None, "no rank was given a batch: at least that of stage 0 needs it")
    ranks = list(batches)
    odd = odd_one_out([batches[rank] for rank in ranks])
    if odd is not None:
        rank = ranks[odd]
        other = next(r for r in ranks if batches[r] != batches[rank])
        raise refusal(
            rank,
            f"rank {rank} got a batch of another shape, {_rows(offers[rank])}, than rank {other}, "
            f"{_rows(offers[other])}",
        )
    for what, settings in (
        (
            "runs under another autocast, default dtype or choice of kernels",
            [(o.ambient.casts, o.ambient.dtype, o.ambient.kernels) for o in offers],
        ),
        (
            "has its module in another mode (train, eval; dropout, buffers)",
            [o.ambient.modes for o in offers],
        ),
    ):
        rank_or_none = odd_one_out(settings)
        if rank_or_none is not None:
            raise refusal(rank_or_none, f"rank {rank_or_none} {what} than other ranks")


def check_verdicts(
    verdicts: Sequence[tuple[bool, str]], own: int, problem: Exception | None
) -> None:
    """Refuse plans that differ between ranks, or that a rank could not make.

    Args:
        verdicts: of each rank whether it made a plan, and the plan's digest or what it raised.
        own: this rank.
        problem: what this rank raised, if it did.

    Raises:
        PipelineError: names the rank; its cause is `problem`.
    """
    texts = [None if made else text for made, text in verdicts]
    check_problems("make its programs", texts, own, problem)
    rank_or_none = odd_one_out(verdicts)
    if rank_or_none is not None:
        raise refusal(
            rank_or_none,
            f"rank {rank_or_none} has other stages or another loss than the other ranks: "
            "fpipe.pipeline must get the same functions on every rank",
        )


def warn_of_other_numbers(offers: Sequence[Offer]) -> None:
    """Say that ranks were given batches of one shape that are not the same batch."""
    found = other_batches([offer.sample for offer in offers])
    if found is None:
        return
    leaf, rank, other = found
    shapes = next(offer.batch for offer in offers if offer.batch is not None)
    log.warning(
        "rank %d has other numbers in batch%s than rank %d: all ranks of a pipeline must be given "
        "the same batch, so seed their loaders alike, and divide data by replicas alone",
        other,
        tree.paths(shapes[0].spec)[leaf],
        rank,
    )


def unsendable(offer: Offer) -> BatchError | None:
    """Why other processes could not read an offer, None if they can."""
    try:
        pickle.dumps(offer)
    except Exception as error:
        return BatchError(
            "params or batch have a container whose type other processes cannot import "
            f"({error}): define the type at the top level of a module"
        )
    return None


def _rows(offer: Offer) -> str:
    assert offer.rows is not None and offer.batch is not None
    spec, shapes = offer.batch[0]
    named_leaves = zip(tree.paths(spec), shapes, strict=True)
    leaves = ", ".join(f"batch{path}: {in_words(leaf)}" for path, leaf in named_leaves)
    return f"{sum(offer.rows)} rows in microbatches of [{leaves}]"
