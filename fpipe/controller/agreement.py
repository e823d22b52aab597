"""Agreement: what ranks tell each other so that they run the same step.

Every step starts with a header of seven integers from each rank. When the header shows something
new, or something wrong, the ranks exchange offers: what each was given, or why it could not use it.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import struct
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe import tree
from fpipe.controller.sample import Sample, other_batches
from fpipe.errors import BatchError, PipelineError
from fpipe.runtime.transport import ConnectionLost
from fpipe.runtime.waiting import look_out
from fpipe.shapes import Ambient, TreeShape, in_words

T = TypeVar("T")

log = logging.getLogger("fpipe")

CALLS = (
    *("pipe.step", "pipe.value", "pipe.forward", "pipe.add_up", "pipe.programs"),
    *("pipe.load_into", "fpipe.balance", "fpipe.global_norm"),
)
"""What all ranks do together."""


class Header(NamedTuple):
    """The first word of a rank in a step.

    Attributes:
        failed: 1 if the rank cannot use what it was given.
        call: index in `CALLS`.
        batch: identity of the batch's shapes, 0 for a rank that was given no batch; for ``add_up``
            the bits of the number.
        params: identity of its parameters' shapes.
        records: 1 if it records the step.
        key: of the step, 0 for none.
    """

    failed: int
    call: int
    batch: int
    params: int
    records: int
    key: int = 0


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


class OtherPipeline(PipelineError):
    """Ranks have called different pipelines."""


def start_headers(
    header: Header, group: dist.ProcessGroup, pipeline: int
) -> Callable[[], list[Header]]:
    """Send the header of this rank; what comes back waits for those of all ranks.

    Args:
        header: of this rank.
        group: the ranks.
        pipeline: the number of the pipeline that was called, among those of the group.

    Raises:
        OtherPipeline: what comes back does, where a rank has called another one.
    """
    words = _start(torch.tensor([*header, pipeline], device="cpu"), group)

    def wait() -> list[Header]:
        rows = words().tolist()
        numbers = [row.pop() for row in rows]
        rank = odd_one_out(numbers)
        if rank is not None:
            other = next(number for number in numbers if number != numbers[rank])
            raise refusal(
                rank,
                f"rank {rank} called the pipeline that is number {numbers[rank]} of those that it "
                f"has made over this group, but others called number {other}: all ranks must make "
                "their pipelines, and call them, in the same order",
                OtherPipeline,
            )
        return [Header(*row) for row in rows]

    return wait


def gather_headers(header: Header, group: dist.ProcessGroup, pipeline: int) -> list[Header]:
    """The headers of all ranks."""
    return start_headers(header, group, pipeline)()


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """One picklable value of each rank."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [int(size) for size in gather(torch.tensor(len(data), device="cpu"), group)]
    padded = torch.nn.functional.pad(data, (0, max(sizes) - len(data)))
    return [
        pickle.loads(bytes(row[:size].tolist()))
        for row, size in zip(gather(padded, group), sizes, strict=True)
    ]


def gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks, all of one shape, along a new first dimension."""
    return _start(own, group)()


def _start(own: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    # Gloo gathers and reduces around a ring, one rank after the other. This is one message to each,
    # and takes a fourth of the time on four ranks whose cores are asleep.
    copies = own.expand(group.size(), *own.shape).contiguous()
    everyone = torch.empty_like(copies)
    work = group.alltoall_base(everyone, copies, [], [])

    def wait() -> Tensor:
        look_out(work.is_completed)
        work.wait()
        return everyone

    return wait


def connected(operation: Callable[[], T]) -> T:
    """Run an operation of all ranks; its failure is a lost connection."""
    try:
        return operation()
    except PipelineError:
        raise
    except RuntimeError as error:
        raise ConnectionLost(None, str(error)) from error


@lru_cache(maxsize=256)
def identity(value: Hashable) -> int:
    """A positive integer that stands for a value that prints, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big") + 1


def digest(text: str) -> str:
    """A short stand-in for a long text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def odd_one_out(values: Sequence[Hashable]) -> int | None:
    """The first rank that differs from most others, None if all are equal."""
    common = Counter(values).most_common(1)[0][0]
    return next((rank for rank, value in enumerate(values) if value != common), None)


def check_calls(headers: Sequence[Header]) -> None:
    """Refuse ranks that were called for different things.

    Raises:
        PipelineError: names the rank.
    """
    calls = [header.call for header in headers]
    rank = odd_one_out(calls)
    if rank is not None:
        other = next(call for call in calls if call != calls[rank])
        raise refusal(
            rank,
            f"rank {rank} called {CALLS[calls[rank]]}, but others called {CALLS[other]}: all ranks "
            "must call the same method",
        )


def check_keys(headers: Sequence[Header]) -> None:
    """Refuse ranks that got different keys.

    Raises:
        PipelineError: names the rank.
    """
    ready = [rank for rank, header in enumerate(headers) if not header.failed]
    odd = odd_one_out([headers[rank].key for rank in ready]) if ready else None
    if odd is not None:
        raise refusal(
            ready[odd],
            f"rank {ready[odd]} got another key than the other ranks: pass the same key on all",
        )


def meet(call: str, group: dist.ProcessGroup, pipeline: int) -> None:
    """Wait for all ranks to come to the same call.

    Raises:
        PipelineError: a rank does something else.
    """
    own = Header(0, CALLS.index(call), 0, 0, 0)
    check_calls(connected(lambda: gather_headers(own, group, pipeline)))


def of_number(value: float) -> Header:
    """The header of ``add_up``."""
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return Header(0, CALLS.index("pipe.add_up"), bits, 0, 0)


def sum_of(headers: Sequence[Header]) -> float:
    """The sum of the numbers of all ranks.

    Raises:
        PipelineError: a rank does something else.
    """
    check_calls(headers)
    return sum(struct.unpack("<d", struct.pack("<q", header.batch))[0] for header in headers)


def check_offers(offers: Sequence[Offer], own: int, problem: Exception | None) -> None:
    """Refuse offers that do not fit together.

    Args:
        offers: of all ranks.
        own: this rank.
        problem: what is wrong with what this rank was given, if anything is.

    Raises:
        PipelineError: names the rank and what it brought; its cause is `problem`.
    """
    _check_problems("run this step", [offer.problem for offer in offers], own, problem)
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
            "runs under another autocast or default dtype",
            [(o.ambient.casts, o.ambient.dtype) for o in offers],
        ),
        ("has its module in another mode (train, eval)", [o.ambient.modes for o in offers]),
    ):
        rank_or_none = odd_one_out(settings)
        if rank_or_none is not None:
            raise refusal(rank_or_none, f"rank {rank_or_none} {what} than other ranks")


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
    _check_problems("make its programs", texts, own, problem)
    rank_or_none = odd_one_out(verdicts)
    if rank_or_none is not None:
        raise refusal(
            rank_or_none,
            f"rank {rank_or_none} has other stages or another loss than the other ranks: "
            "fpipe.pipeline must get the same functions on every rank",
        )


def _check_problems(
    what: str, texts: Sequence[str | None], own: int, problem: Exception | None
) -> None:
    """Raise the problem of this rank if it has one, else the first."""
    found = [rank for rank, text in enumerate(texts) if text is not None]
    if found:
        rank = own if own in found else found[0]
        raise refusal(rank, f"rank {rank} cannot {what}: {texts[rank]}") from problem


def _rows(offer: Offer) -> str:
    assert offer.rows is not None and offer.batch is not None
    spec, shapes = offer.batch[0]
    named_leaves = zip(tree.paths(spec), shapes, strict=True)
    leaves = ", ".join(f"batch{path}: {in_words(leaf)}" for path, leaf in named_leaves)
    return f"{sum(offer.rows)} rows in microbatches of [{leaves}]"


def refusal(
    rank: int | None, text: str, kind: type[PipelineError] = PipelineError
) -> PipelineError:
    """The error of a step that did not begin."""
    return kind(f"{text}. The pipeline can be used again", rank=rank)


def named(error: BaseException) -> str:
    """The error's kind and text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
