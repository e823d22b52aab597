"""What is written beside a chart: its title line, its ranks."""

from __future__ import annotations

from fpipe.schedule.picture.axis import readable_unit, short
from fpipe.schedule.picture.chart import Chart


def facts(chart: Chart) -> str:
    """The size of a schedule, how long it takes, and what must be known about its times."""
    factor, unit = readable_unit(chart.makespan, chart.unit)
    counts = (
        (len(chart.rows), "rank"),
        (len(chart.placement), "stage"),
        (chart.microbatches, "microbatch"),
    )
    parts = [
        ", ".join(_count(number, noun) for number, noun in counts),
        f"makespan {short(chart.makespan * factor)} {unit}".rstrip(),
        *([chart.note] if chart.note else []),
    ]
    return " · ".join(parts)


def stage_names(chart: Chart, rank: int) -> str:
    """The stages of a rank; nothing where the rank has the stage of its own number alone."""
    stages = chart.stages_of(rank)
    if stages == (rank,):
        return ""
    named = ", ".join(map(str, stages)) if len(stages) < 4 else f"{stages[0]}, {stages[1]}, …"
    return f"{'stage' if len(stages) == 1 else 'stages'} {named}"


def idle(chart: Chart, rank: int) -> str:
    """How much of the time a rank does nothing."""
    return f"idle {100 * chart.idle(rank):.1f} %"


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"
