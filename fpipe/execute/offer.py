"""Offers: what ranks tell each other before a new plan, and what they refuse of it.

An offer says what a rank was given, or why it could not use it. A verdict says what plan a rank has
made of all offers, or why it could not make one.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from fpipe import pytree
from fpipe.errors import BatchError
from fpipe.execute.fault import check_problems, odd_one_out, refusal
from fpipe.execute.sample import COPIED, ROUNDING, Sample, unlike
from fpipe.graph.nodes import Layout
from fpipe.inputs.ambient import Ambient
from fpipe.inputs.signature import TreeShape, in_words, unlike_keys

log = logging.getLogger("fpipe")


class BatchShape(NamedTuple):
    """A batch without its data.

    Attributes:
        rows: of each microbatch.
        kinds: of each microbatch, as in `SplitBatch`.
        shapes: of a microbatch of each kind.
    """

    rows: tuple[int, ...]
    kinds: tuple[int, ...]
    shapes: tuple[TreeShape, ...]

    def microbatch(self, number: int) -> tuple[int, TreeShape]:
        """The rows and the shape of a microbatch."""
        return self.rows[number], self.shapes[self.kinds[number]]


class Offer(NamedTuple):
    """A rank's proposal for a new plan.

    Attributes:
        setup: digest of everything that must be the same on all ranks, by name.
        params: the parameters of its own stages; of one function all of them, for each.
        held: of one function, which leaves of its parameters have data there; else None.
        batch: that it was given, None without one.
        sample: numbers of its batch, None without a batch.
        ambient: what else its traces depend on.
        schedule: in words.
        problem: why it cannot take part, or None.
    """

    setup: Mapping[str, str]
    params: Mapping[int, TreeShape]
    held: tuple[bool, ...] | None
    batch: BatchShape | None
    sample: Sample | None
    ambient: Ambient
    schedule: str
    problem: str | None


def check_offers(offers: Sequence[Offer], this_rank: int, problem: Exception | None) -> None:
    """Refuse offers that do not fit together.

    Args:
        offers: of all ranks.
        this_rank: the number of this rank.
        problem: what is wrong with what this rank was given, if anything is.

    Raises:
        PipelineError: names the rank and what it brought; its cause is `problem`.
    """
    check_problems("run this step", [offer.problem for offer in offers], this_rank, problem)
    for name in offers[0].setup:
        rank_or_none = odd_one_out([offer.setup.get(name, "") for offer in offers])
        if rank_or_none is not None:
            more = _both(offers, rank_or_none) if name == "schedule" else ""
            raise refusal(
                rank_or_none,
                f"rank {rank_or_none} has another {name} than the other ranks{more}: the pipelines "
                "of all ranks must have the same",
            )
    batches = {rank: o.batch for rank, o in enumerate(offers) if o.batch is not None}
    if not batches:
        raise refusal(None, "no rank was given a batch: at least that of stage 0 needs it")
    ranks = list(batches)
    odd = odd_one_out([batches[rank] for rank in ranks])
    if odd is not None:
        rank = ranks[odd]
        other = next(r for r in ranks if batches[r] != batches[rank])
        batch, other_batch = batches[rank], batches[other]
        at = _first_unlike(batch, other_batch)
        raise refusal(
            rank,
            f"rank {rank} got a batch {_unlike(batch, other_batch, at)}, {_rows(batch, at)}, than "
            f"rank {other}, {_rows(other_batch, at)}: pass the "
            "same on all ranks, of which leaves that a rank does not read may lie on the meta "
            "device",
        )
    for what, settings in (
        ("runs under another autocast", [o.ambient.casts for o in offers]),
        ("has another default dtype", [o.ambient.dtype for o in offers]),
        (
            "has torch take other kernels (float32 precision, deterministic ones, attention)",
            [o.ambient.kernels for o in offers],
        ),
        (
            "has its module in another mode (train, eval; parts, attributes of layers, buffers)",
            [o.ambient.modes for o in offers],
        ),
    ):
        rank_or_none = odd_one_out(settings)
        if rank_or_none is not None:
            raise refusal(rank_or_none, f"rank {rank_or_none} {what} than other ranks")


def _both(offers: Sequence[Offer], odd: int) -> str:
    """The schedules of this rank and of one with another, for a message."""
    odd_digest = offers[odd].setup["schedule"]
    other = next(o.schedule for o in offers if o.setup.get("schedule") != odd_digest)
    if other != offers[odd].schedule:
        return f" ({offers[odd].schedule}, not {other})"
    return " (a search that ends by the clock finds another on each: give fpipe.search iterations=)"


def shared_parameters(offers: Sequence[Offer]) -> TreeShape | None:
    """The parameters of one function, of which ranks hold parts; None if each stage has its own.

    Those without data on a rank count only where no rank has any: it does not read them, and may
    not know what has become of them since.

    Raises:
        PipelineError: a rank has others than the other ranks; names it, and the leaf.
    """
    by_rank = {
        rank: (next(iter(offer.params.values())), offer.held)
        for rank, offer in enumerate(offers)
        if offer.held is not None
    }
    if not by_rank:
        return None
    ranks = list(by_rank)
    trees = [by_rank[rank][0] for rank in ranks]

    def refuse(values: Sequence[Hashable], among: Sequence[int], where: str) -> None:
        odd = odd_one_out(values)
        if odd is not None:
            other = next(at for at, value in enumerate(values) if value != values[odd])
            raise refusal(
                ranks[among[odd]],
                f"rank {ranks[among[odd]]} got other parameters than rank {ranks[among[other]]}, "
                f"{where}: pass the same on all ranks, of which those that a rank does not read "
                "may lie on the meta device, and then do not count",
            )

    refuse([t.spec for t in trees], range(len(ranks)), "in another structure")
    orders = [t.orders for t in trees]
    odd = odd_one_out(orders)
    if odd is not None:
        other = next(t for t in trees if t.orders != orders[odd])
        refuse(orders, range(len(ranks)), f"with keys {unlike_keys(trees[odd], other)}")
    leaves = []
    for index, path in enumerate(pytree.paths(trees[0].spec)):
        leaf_shapes = [t.leaves[index] for t in trees]
        holders = [at for at, rank in enumerate(ranks) if (by_rank[rank][1] or ())[index]]
        if not holders:
            holders = list(range(len(ranks)))
        shapes = [in_words(leaf_shapes[at]) for at in holders]
        refuse(shapes, holders, f"{' and '.join(sorted({*shapes}))} at {path}")
        lie = [Layout(leaf_shapes[at].shape, leaf_shapes[at].stride).steps for at in holders]
        refuse(lie, holders, f"of strides {' and '.join(map(str, sorted({*lie})))} at {path}")
        leaves.append(leaf_shapes[holders[0]])
    return trees[0]._replace(leaves=tuple(leaves))


def check_verdicts(
    verdicts: Sequence[tuple[bool, str]], this_rank: int, problem: Exception | None
) -> None:
    """Refuse plans that differ between ranks, or that a rank could not make.

    Args:
        verdicts: of each rank whether it made a plan, and the plan's digest or what it raised.
        this_rank: the number of this rank.
        problem: what this rank raised, if it did.

    Raises:
        PipelineError: names the rank; its cause is `problem`.
    """
    texts = [None if is_made else text for is_made, text in verdicts]
    check_problems("make its programs", texts, this_rank, problem)
    rank_or_none = odd_one_out(verdicts)
    if rank_or_none is not None:
        raise refusal(
            rank_or_none,
            f"rank {rank_or_none} has other stages or another loss than the other ranks: "
            "fpipe.pipeline must get the same functions on every rank, also of a remat= policy, "
            "which must not depend on the rank",
        )


def warn_of_other_numbers(offers: Sequence[Offer]) -> None:
    """Say that ranks were given batches of one shape that are not the same batch."""
    difference = unlike([offer.sample for offer in offers], ROUNDING)
    if difference is None:
        return
    path, rank, other = difference
    log.warning(
        "rank %d has other numbers in batch%s than rank %d: all ranks of a pipeline must be given "
        "the same batch, so seed their loaders alike, and divide data by replicas alone",
        other,
        path,
        rank,
    )


def check_numbers(samples: Sequence[Sample | None]) -> None:
    """Refuse batches of other numbers on ranks that had the same in the steps before.

    Raises:
        PipelineError: names the rank and the leaf.
    """
    difference = unlike(samples, ROUNDING)
    if difference is not None:
        path, rank, other = difference
        raise refusal(
            other,
            f"rank {other} has other numbers in batch{path} than rank {rank}, and had the same in "
            "the steps before: one of them is a step ahead, as where it has left out a call or a "
            "batch after an error that was caught, such as its data loader's; let all ranks leave "
            "out the same",
        )


def warn_of_other_copies(samples: Sequence[Sample]) -> None:
    """Say that ranks hold different copies of a parameter that they all read.

    Args:
        samples: of each rank, of the parameters that it reads and others do too.
    """
    difference = unlike(samples, COPIED)
    if difference is None:
        return
    path, rank, other = difference
    log.warning(
        "rank %d has other numbers in params%s than rank %d, and both read it: each goes on with a "
        "copy of its own, so let them begin alike (one seed, pipe.init or pipe.load), and all "
        "optimizers have the same settings",
        other,
        path,
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


def _unlike(one: BatchShape, other: BatchShape, at: int) -> str:
    """How two microbatches differ; the caller's message shows leaves, but no structures."""
    tree, other_tree = one.microbatch(at)[1], other.microbatch(at)[1]
    if tree.spec != other_tree.spec:
        return "of another structure"
    same = tree.orders == other_tree.orders
    return "of another shape" if same else f"with keys {unlike_keys(tree, other_tree)}"


def _first_unlike(one: BatchShape, other: BatchShape) -> int:
    """The first microbatch in which two batches differ; both have as many, as the schedule has."""
    differs = (n for n in range(len(one.rows)) if one.microbatch(n) != other.microbatch(n))
    return next(differs, 0)


def _rows(batch: BatchShape, at: int) -> str:
    """The rows of a batch, and one of its microbatches."""
    spec, shapes, _ = batch.microbatch(at)[1]
    named_leaves = zip(pytree.paths(spec), shapes, strict=True)
    leaves = ", ".join(f"batch{path}: {in_words(leaf)}" for path, leaf in named_leaves)
    which = f"of which microbatch {at} is" if at else "in microbatches of"
    return f"{sum(batch.rows)} rows {which} [{leaves}]"
