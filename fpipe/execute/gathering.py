"""All-gathers: tensors of one shape, picklable values, and the norm of all gradients of a step."""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe import pytree
from fpipe.errors import PipelineError
from fpipe.execute.run_result import GradientKind, RunResult
from fpipe.inputs.params import Parameters
from fpipe.program.interpreter import ConnectionLost
from fpipe.transport.waiting import look_now_and_then, look_out

T = TypeVar("T")


def connected(operation: Callable[[], T]) -> T:
    """Run an operation of all ranks; its failure is a lost connection."""
    try:
        return operation()
    except PipelineError:
        raise
    except RuntimeError as error:
        raise ConnectionLost(None, str(error)) from error


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """One picklable value of each rank."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [int(size) for size in gather(torch.tensor(len(data), device="cpu"), group)]
    padded = torch.nn.functional.pad(data, (0, max(sizes) - len(data)))
    return [
        pickle.loads(ctypes.string_at(row.data_ptr(), size))
        for row, size in zip(gather(padded, group), sizes, strict=True)
    ]


def gather(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks, all of one shape, along a new first dimension.

    Raises:
        ConnectionLost: a rank is gone.
    """
    return start_gather(value, group)()


def start_gather(
    value: Tensor, group: dist.ProcessGroup, tell: Callable[[float], None] | None = None
) -> Callable[[], Tensor]:
    """Begin to gather; what comes back waits for the tensors of all ranks.

    Where that takes long, it calls `tell` with the seconds so far.
    """
    # Gloo gathers and reduces around a ring, one rank after the other. This is one message to each,
    # and takes a fourth of the time on four ranks whose cores are asleep.
    copies = value.expand(group.size(), *value.shape).contiguous()
    everyone = torch.empty_like(copies)
    work = connected(lambda: group.alltoall_base(everyone, copies, [], []))

    def wait() -> Tensor:
        look_out(work.is_completed)
        look_now_and_then(work.is_completed, tell)
        work.wait()
        return everyone

    return lambda: connected(wait)


_ABSENT: Final = -1.0
_WIDE: Final = frozenset({torch.float64, torch.complex128})


def norm_of(result: RunResult) -> Tensor:
    """The norm of the gradients of one process that drives all ranks, as `fpipe.global_norm`."""
    squares, is_wide = _by_leaf(result)
    return _norm(squares[squares != _ABSENT], is_wide=is_wide)


def squares_to_send(result: RunResult) -> list[float]:
    """Numbers from which ranks make the norm of the gradients of all of them; as many on each."""
    squares, is_wide = _by_leaf(result)
    if not result.params.shared:
        squares = squares[squares != _ABSENT].sum()[None]
    return [float(is_wide), *squares.tolist()]


def count_to_send(params: Parameters) -> int:
    """How many numbers those are."""
    return 1 + (len(params.stages[0]) if params.shared else 1)


def norm_of_ranks(rows: Sequence[Sequence[float]], params: Parameters) -> Tensor:
    """The norm of the gradients of all ranks, from what each has sent.

    A parameter that several ranks read counts once.
    """
    is_wide = any(row[0] for row in rows)
    columns = list(zip(*(row[1:] for row in rows), strict=True))
    if not params.shared:
        squares = [sum(column) for column in columns]
    else:
        paths = pytree.paths(params.spec)
        present = ([square for square in column if square != _ABSENT] for column in columns)
        first = {path: known[0] for path, known in zip(paths, present, strict=True) if known}
        # In the order of `fpipe.global_norm`, so that the bits are the same.
        squares = [first[path] for path in sorted(first)]
    return _norm(torch.tensor(squares, dtype=torch.float64, device="cpu"), is_wide=is_wide)


def home_of(leaves: Sequence[Tensor]) -> torch.device:
    """Where the first leaf lies that this process has; those of others lie on the meta device."""
    return next((leaf.device for leaf in leaves if not leaf.is_meta), torch.device("cpu"))


def _norm(squares: Tensor, *, is_wide: bool) -> Tensor:
    return squares.sum().sqrt().to(torch.float64 if is_wide else torch.float32)


def _by_leaf(result: RunResult) -> tuple[Tensor, bool]:
    """The square of each leaf's gradient, float64, and whether any has double precision."""
    params, updates = result.params, result.updates()
    stages = params.stages[:1] if params.shared else params.stages
    leaves = [leaf for stage in stages for leaf in stage]
    squares: list[Tensor] = []
    is_wide = False
    device = home_of(leaves)
    for place, (leaf, kind) in enumerate(zip(leaves, result.kinds, strict=True)):
        is_wide = is_wide or (kind != GradientKind.NONE and leaf.dtype in _WIDE)
        if kind == GradientKind.SUM:
            square = updates[place].square
            assert square is not None
            squares.append(square.to(device))
        else:
            number = 0.0 if kind == GradientKind.ZEROS else _ABSENT
            squares.append(torch.tensor(number, dtype=torch.float64, device=device))
    return torch.stack(squares) if squares else torch.zeros(0, dtype=torch.float64), is_wide
