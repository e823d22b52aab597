"""Headers: the few integers with which ranks tell each other what they were called for.

Whatever ranks do together begins with one of each rank. When they show something new, or something
wrong, the ranks exchange offers.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from fpipe.errors import PipelineError
from fpipe.execute.fault import odd_one_out, refusal
from fpipe.execute.gathering import start_gather
from fpipe.inputs.keys import Words, as_number

log = logging.getLogger("fpipe")

HISTORY = "pipe.value of parameters that require a gradient"
"""It is a step, and other ranks may have called ``pipe.value`` of parameters that require none."""

PROGRAMS: Final[Mapping[str, str]] = {
    "step": "pipe.programs",
    "update": "trainer.programs",
    "clip": "trainer.programs with max_norm",
}
"""The call that returns the programs of each goal."""

CALLS = (
    *("pipe.step", HISTORY, "pipe.value", "pipe.forward", "pipe.add_up", PROGRAMS["step"]),
    *("pipe.load_into", "fpipe.balance", "fpipe.profile"),
    NORMS := "fpipe.global_norm or fpipe.clip_by_global_norm",
    PREPARES := "pipe.init, pipe.load or pipe.load_into",
    TRAINS := "trainer.step",
    CLIPS := "trainer.step with max_norm",
    PROGRAMS["update"],
    PROGRAMS["clip"],
)
"""The calls that all ranks make together."""

Marked = tuple[float, bool]
"""A sum, and a mark that it has if one of the numbers that were added up has it."""


class Addend(NamedTuple):
    """A rank's addend in a sum over all ranks.

    Attributes:
        number: to be added up.
        marked: whether it has the mark.
        key: that all ranks must have alike; None for none.
    """

    number: float
    marked: bool = False
    key: Words | None = None


class Header(NamedTuple):
    """The first word of a rank in a step.

    Attributes:
        failed: 1 if the rank cannot use what it was given.
        call: index in `CALLS`.
        batch: identity of the batch's shapes, 0 for a rank that was given no batch; where
            a number is added up, its bits.
        params: identity of its parameters' shapes; where a number is added up, whether it is
            marked.
        records: 1 if it records the step.
        key: of the step, 0 for none.
        offsets: identity of where in their memory the arguments begin, as far as kernels for them
            differ; 0 for the most common.
        numbers: tells the numbers of its batch from those of another step, as `trace_of` makes it;
            0 where there is nothing to tell.
        divided: 1 if its parameters have DTensors, so that rows of the mesh take the step together.
    """

    failed: int
    call: int
    batch: int
    params: int
    records: int
    key: int = 0
    offsets: int = 0
    numbers: int = 0
    divided: int = 0


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

    def tell(seconds: float) -> None:
        log.warning(
            "rank %d has called %s and waited for %.0f s for all others to do so: a rank that "
            "lives may be in something else, such as a collective or a barrier that it alone has "
            "called, a data loader or a checkpoint; or another thread uses the group, such as that "
            "of dcp.async_save",
            group.rank(),
            CALLS[header.call],
            seconds,
        )

    words = start_gather(torch.tensor([*header, pipeline], device="cpu"), group, tell)

    def wait() -> list[Header]:
        rows = words().tolist()
        numbers = [row.pop() for row in rows]
        rank = odd_one_out(numbers)
        if rank is not None:
            other = next(number for number in numbers if number != numbers[rank])
            raise OtherPipeline(
                f"rank {rank} called the pipeline that is number {numbers[rank]} of those that it "
                f"has made over this group, but others called number {other}: all ranks must make "
                "their pipelines, and call them, in the same order. Over a new group, as "
                "torch.distributed.new_group makes it, they are counted anew",
                rank=rank,
            )
        return [Header(*row) for row in rows]

    return wait


def gather_headers(header: Header, group: dist.ProcessGroup, pipeline: int) -> list[Header]:
    """The headers of all ranks."""
    return start_headers(header, group, pipeline)()


def check_calls(headers: Sequence[Header]) -> None:
    """Refuse ranks that were called for different things.

    Raises:
        PipelineError: names the rank.
    """
    plain, history = CALLS.index("pipe.value"), CALLS.index(HISTORY)
    calls = [header.call for header in headers]
    if {*calls} == {plain, history}:
        return
    rank = odd_one_out(calls)
    if rank is not None:
        other = next(call for call in calls if call != calls[rank])
        programs_call = next(
            (CALLS[call] for call in calls if CALLS[call] in PROGRAMS.values()), None
        )
        more = (
            f"; {programs_call} too, and one may print what it returns"
            if programs_call is not None
            else ""
        )
        raise refusal(
            rank,
            f"rank {rank} called {CALLS[calls[rank]]}, but others called {CALLS[other]}: all ranks "
            f"must call the same method{more}",
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
    header = Header(0, CALLS.index(call), 0, 0, 0)
    check_calls(gather_headers(header, group, pipeline))


def of_number(call: str, value: Addend | None) -> Header:
    """The header of a call that adds a number up; None where this rank has none."""
    addend = value or Addend(0.0)
    (bits,) = struct.unpack("<q", struct.pack("<d", addend.number))
    failed = int(value is None)
    return Header(failed, CALLS.index(call), bits, int(addend.marked), 0, as_number(addend.key))


def sum_of(headers: Sequence[Header]) -> Marked:
    """The sum of the numbers of all ranks, and whether one of them is marked."""
    numbers = (struct.unpack("<d", struct.pack("<q", header.batch))[0] for header in headers)
    return sum(numbers), any(header.params for header in headers)


@lru_cache(maxsize=256)
def identity(value: Hashable) -> int:
    """A positive integer that stands for a value that prints, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big") + 1


def digest(text: str) -> str:
    """A short stand-in for a long text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
