"""The facts of a chart in words: in its title, beside its lanes, and for who does not see it."""

from __future__ import annotations

from typing import Final

from fpipe.schedule.grid import one_line, sizes
from fpipe.schedule.picture.captions import short, timed
from fpipe.schedule.picture.chart import Chart

SPOKEN: Final = 16  # ranks of which a description tells one by one
BETWEEN: Final = " · "  # between two facts


def facts(chart: Chart) -> str:
    """The size and the makespan of a schedule, and the note on its times."""
    texts = [
        sizes(len(chart.rows), len(chart.placement), chart.microbatches),
        f"makespan {timed(chart.makespan, chart.unit)}",
        *([chart.note] if chart.note else []),
    ]
    return BETWEEN.join(texts)


def stage_names(chart: Chart, rank: int) -> str:
    """The stages of a rank in words; empty if it runs only the stage of the same number."""
    stages = chart.stages_of(rank)
    if stages == (rank,):
        return ""
    if not stages:
        return "no stage"
    named = ", ".join(map(str, stages)) if len(stages) < 4 else f"{stages[0]}, {stages[1]}, …"
    return f"{'stage' if len(stages) == 1 else 'stages'} {named}"


def idle(chart: Chart, rank: int) -> str:
    """The idle share of a rank, in percent."""
    return f"idle {100 * chart.idle(rank):.1f} %"


def described(chart: Chart) -> str:
    """A picture of the chart in words, for readers who do not see it."""
    ranks = range(len(chart.rows))
    each = [f"rank {rank} {idle(chart, rank)}, peak {short(chart.peaks[rank])}" for rank in ranks]
    if len(each) > SPOKEN:
        least, most = (short(100 * edge(map(chart.idle, ranks))) for edge in (min, max))
        peaks = f"peaks up to {short(max(chart.peaks))}"
        each = [f"idle {least} to {most} % of the time of a rank, {peaks}"]
    name = one_line(chart.name)
    return f"{name}: {facts(chart).replace(BETWEEN, ', ')}; {'; '.join(each)}."
