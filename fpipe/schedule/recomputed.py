"""What a cost of stages becomes where some of them compute again what they do not keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fpipe.errors import ScheduleError
from fpipe.schedule.stage_costs import StageCosts


def choices_of(remat: str | Sequence[str], stages: int) -> list[str]:
    """``"full"`` or ``"none"`` for each stage.

    Raises:
        ScheduleError: `remat` is neither of them, and has not one of them for each stage.
    """
    each = [remat] * stages if isinstance(remat, str) else list(remat)
    if len(each) != stages or not set(each) <= {"none", "full"}:
        raise ScheduleError(
            f"remat={remat!r:.60} must be 'none' or 'full', or one of these for each of the "
            f"{stages} stages"
        )
    return each


def recomputed(
    costs: StageCosts, choices: Sequence[str], more: Sequence[float], keeps: Sequence[float]
) -> dict[str, Any]:
    """The arguments of a cost with these choices, a value for each stage.

    Args:
        costs: where no stage computes again.
        choices: ``"full"`` for each stage that does, ``"none"`` for the others.
        more: by how much longer the backward of each stage is then.
        keeps: what F of each stage keeps then.

    Raises:
        ScheduleError: a stage would keep more than where it does not compute again.
    """
    i, b, kept, freed = map(list, (costs.i, costs.b, costs.activation, costs.freed_by_i))
    for stage, choice in enumerate(choices):
        if choice == "none":
            continue
        if keeps[stage] > kept[stage] * (1 + 1e-9):
            raise ScheduleError(
                f"cost.kept is {keeps[stage]:g} for stage {stage} and cost.activation is "
                f"{kept[stage]:g}: a stage that computes again keeps no more than one that "
                "does not"
            )
        i[stage] += more[stage]
        b[stage] += more[stage]
        freed[stage] += keeps[stage] - kept[stage]
        kept[stage] = keeps[stage]
    return {"f": costs.f, "i": i, "w": costs.w, "b": b, "activation": kept, "freed_by_i": freed}
