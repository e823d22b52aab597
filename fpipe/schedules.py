"""The schedule generators: one pure function per family, and `get` by name.

Every family takes the keyword arguments ``ranks`` and ``microbatches`` (and ``stages_per_rank``, 2
by default, if a rank may hold any number of stages), and returns a `fpipe.Schedule`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

from fpipe.errors import ScheduleError
from fpipe.schedule.arguments import plain_counts
from fpipe.schedule.cost import Cost
from fpipe.schedule.families.building_blocks import v_half, v_min
from fpipe.schedule.families.evaluation import forward_only
from fpipe.schedule.families.looped import (
    group_1f1b,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
)
from fpipe.schedule.families.single_stage import eager_1f1b, gpipe, one_f_one_b, zb_h1, zb_h2
from fpipe.schedule.families.v_shaped import dualpipev, zbv
from fpipe.schedule.orders.zero_bubble import zb_auto
from fpipe.schedule.schedule import Schedule

__all__ = [
    "FAMILIES",
    "dualpipev",
    "eager_1f1b",
    "forward_only",
    "get",
    "gpipe",
    "group_1f1b",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "v_half",
    "v_min",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zbv",
]


def __dir__() -> list[str]:
    return __all__


FAMILIES: Final[Mapping[str, Callable[..., Schedule]]] = MappingProxyType(
    {
        family.__name__: family
        for family in (
            gpipe,
            one_f_one_b,
            eager_1f1b,
            interleaved_1f1b,
            looped_bfs,
            zb_h1,
            zb_h2,
            zb_auto,
            interleaved_zero_bubble,
            zbv,
            v_half,
            v_min,
            dualpipev,
            group_1f1b,
        )
    }
)
"""Every family of training schedules by its name, from the oldest to the newest idea. Add new ones
here. `forward_only`, for evaluation, is not one of them: it has no gradients."""

# The names of torch.distributed.pipelining that differ from ours by more than case and "_".
_TORCH_NAMES: Final = MappingProxyType({"1F1B": "one_f_one_b", "ZBVZeroBubble": "zbv"})


def get(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    memory: float | Iterable[float] | None = None,
    cost: Cost | None = None,
) -> Schedule:
    """Make a schedule by the name of its family, such as the value of a configuration file.

    Args:
        name: a name of `FAMILIES`, or torch's name for it (GPipe, 1F1B, Interleaved1F1B, LoopedBFS,
            InterleavedZeroBubble, ZBVZeroBubble, DualPipeV; ScheduleGPipe and so on). Case, ``_``
            and ``-`` do not matter.
        ranks: number of ranks, 1 or more.
        microbatches: number of microbatches, 1 or more.
        stages_per_rank: stages on each rank; None for the default of the family. A family with a
            fixed number accepts that number only.
        memory: the memory limit, for `zb_auto`; other families refuse it.
        cost: the cost, for `zb_auto`; other families refuse it.

    Returns:
        The schedule of the family.

    Raises:
        ScheduleError: the family is unknown, or refuses an argument.

    Example:
        >>> get("ZBVZeroBubble", ranks=2, microbatches=4)
        <Schedule zbv: 2 ranks, 4 stages, 4 microbatches>
    """
    family = _find(name)
    options = {"memory": memory, "cost": cost}
    extra = {option: value for option, value in options.items() if value is not None}
    for option in extra:
        if not takes(name, option):
            raise ScheduleError(
                f"{option} is not for name={name!r}, which is the same for every {option}: leave "
                f"it out, or take {', '.join(other for other in FAMILIES if takes(other, option))}"
            )
    if stages_per_rank is None:
        return family(ranks=ranks, microbatches=microbatches, **extra)
    if takes(name, "stages_per_rank"):
        return family(ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    (count,) = plain_counts(stages_per_rank=stages_per_rank)
    schedule = family(ranks=ranks, microbatches=microbatches, **extra)
    fixed = schedule.num_stages // schedule.num_ranks
    if count != fixed:
        raise ScheduleError(
            f"stages_per_rank={stages_per_rank!r} does not fit name={name!r}: {schedule.name} has "
            f"{fixed} per rank; leave it out, or take interleaved_1f1b, looped_bfs, "
            "interleaved_zero_bubble or group_1f1b, which take any number"
        )
    return schedule


def takes(name: str, argument: str) -> bool:
    """Whether a family has an argument.

    Args:
        name: as for `get`.
        argument: such as ``"memory"``.

    Raises:
        ScheduleError: there is no such family.

    Example:
        >>> takes("zb_auto", "memory"), takes("1F1B", "memory")
        (True, False)
    """
    return argument in inspect.signature(_find(name)).parameters


def _find(name: str) -> Callable[..., Schedule]:
    known = {_plain(family): family for family in FAMILIES}
    known |= {_plain(torch): family for torch, family in _TORCH_NAMES.items()}
    plain = _plain(str(name))
    for key in (plain, plain.removeprefix("schedule")):  # as torch's classes are named
        if key in known:
            return FAMILIES[known[key]]
    if plain == _plain(forward_only.__name__):
        raise ScheduleError(
            f"name={name!r} is not a family of training schedules, for it owes no gradients: call "
            "fpipe.schedules.forward_only, which takes the placement of the training's schedule"
        )
    close = difflib.get_close_matches(plain, known, n=1)
    # A substring of several names is close to the shortest only.
    close += [other for other in known if len(plain) > 3 and plain in other and other not in close]
    named = [repr(family) for family in dict.fromkeys(known[other] for other in close)]
    hint = f" Did you mean {' or '.join(named)}?" if named else ""
    raise ScheduleError(
        f"name={name!r:.60} is not a schedule family.{hint} The families are "
        f"{', '.join(FAMILIES)}; of torch's names {', '.join(_TORCH_NAMES)} and those that differ "
        "in case and '_' only."
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
