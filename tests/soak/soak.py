"""Rounds of random schedules with random faults, on real processes, for as long as one likes.

    python -m tests.soak.soak --rounds 300 --seed 0

Each round draws a schedule, a fault and where it strikes. Whatever it is, every rank that is left
must raise an `fpipe.PipelineError` that names the rank at fault, in time; afterwards the pipeline
must give the same bits as before, or say that it cannot be used. The first round that breaks a rule
ends the run, with the seed that repeats it.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import time
import traceback
from collections import defaultdict
from contextlib import closing
from typing import Any, NamedTuple

import torch

from fpipe import Schedule, schedules
from tests.distributed import traps
from tests.distributed.crew import Crew, Failure, Outcome

TIMEOUT = 5.0
"""Seconds of silence, as the pipelines are told."""

SOON = 10.0
"""Seconds within which every rank must know of anything else."""

SOFT = ("nothing", "exception", "two exceptions", "disagreement", "compile")
HARD = ("killed within", "killed from outside", "stopped", "ended", "interrupted", "exit")


class Round(NamedTuple):
    """What is drawn for a round."""

    number: int
    fault: str
    schedule: Schedule
    victim: int
    at: int

    def __str__(self) -> str:
        s = self.schedule
        return (
            f"round {self.number}: {self.fault} on rank {self.victim} at its action {self.at} of "
            f"{s.name}(ranks={s.num_ranks}, microbatches={s.num_microbatches})"
        )


def draw(number: int, seed: int) -> Round:
    """The round of this number; the same for the same seed."""
    source = random.Random(f"{seed}/{number}")
    family = source.choice(list(schedules.FAMILIES))
    schedule = schedules.get(
        family, ranks=source.randint(2, 4), microbatches=source.choice([2, 4, 6])
    )
    # Faults that cost a crew take longest, so the others are drawn more often.
    fault = source.choice(SOFT if source.random() < 0.6 else HARD)
    victim = source.randrange(schedule.num_ranks)
    return Round(number, fault, schedule, victim, source.randrange(len(schedule.actions[victim])))


class Soak:
    """The crew at work, and what was measured."""

    def __init__(self) -> None:
        self.crew: Crew | None = None
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.crews = 0
        self.steps = 0

    def run(self, plan: Round) -> None:
        """Play one round.

        Raises:
            AssertionError: a rule was broken.
        """
        if self.crew is None or self.crew.closed:
            self.crew = Crew(4)
            self.crews += 1
        if plan.fault in SOFT:
            self.seconds[plan.fault].append(_soft(self.crew, plan))
            self.steps += 3
            return
        try:
            steps, seconds = _hard(self.crew, plan)
        finally:
            self.crew.close()
        self.steps += steps
        self.seconds[plan.fault].append(seconds)

    def close(self) -> None:
        """Leave no process behind."""
        if self.crew is not None:
            self.crew.close()

    def report(self) -> str:
        """A line for each kind of fault."""
        lines = [f"{'fault':20} rounds  median  longest (seconds until the last rank knew)"]
        for fault in (*SOFT, *HARD):
            if taken := self.seconds[fault]:
                middle, most = statistics.median(taken), max(taken)
                lines.append(f"{fault:20} {len(taken):6} {middle:7.2f} {most:8.2f}")
        rounds = sum(map(len, self.seconds.values()))
        lines.append(f"{rounds} rounds, {self.crews} crews, {self.steps} steps: no rule was broken")
        return "\n".join(lines)


def _soft(crew: Crew, plan: Round) -> float:
    """A fault after which the pipeline is as good as before."""
    ranks = range(plan.schedule.num_ranks)
    named = {plan.victim}
    call, last = 0, 1
    if plan.fault == "disagreement":
        # What no rank can trace is no disagreement, and fills the screen with torch's reports.
        ways = [how for how in traps.CALLED_OTHERWISE if how != "params' shape"]
        named = {plan.victim % 3}
        outcomes = crew.run(traps.disagree, ways[plan.at % len(ways)], *named, ranks=range(3))
    elif plan.fault == "compile":
        outcomes = crew.run(traps.fail_early, plan.victim, "compile", "boom", TIMEOUT, ranks=ranks)
        last = 2
    else:
        struck = {plan.victim: ("boom", plan.at)} if plan.fault != "nothing" else {}
        if plan.fault == "two exceptions":
            other = (plan.victim + 1) % len(ranks)
            struck[other] = ("boom", plan.at // 2)
            named.add(other)
        outcomes = crew.run(traps.fail_once, plan.schedule, struck, ranks=ranks)
    answers: list[list[Outcome]] = [outcome.value for outcome in outcomes]
    assert all(answers), next(o.error.traceback for o in outcomes if o.failure)
    if plan.fault != "nothing":
        for answer in answers:
            error = _pipeline_error(answer[call])
            assert error.rank in named, error.text
            assert answer[call].seconds < SOON, f"took {answer[call].seconds:.1f} s"
            assert error.text.endswith("can be used again"), error.text
    good = [answer[last] for answer in answers]
    assert all(outcome.failure is None for outcome in good), good
    assert all(bool(outcome.value == good[0].value) for outcome in good), good
    return max(answer[call].seconds for answer in answers)


def _hard(crew: Crew, plan: Round) -> tuple[int, float]:
    """A fault that takes a rank away; steps run, and seconds until the last rank knew."""
    ranks = range(plan.schedule.num_ranks)
    limit = SOON + (TIMEOUT if plan.fault == "stopped" else 0.0)
    if plan.fault in ("killed from outside", "stopped"):
        crew.run(traps.prepare, plan.schedule, TIMEOUT, ranks=ranks)
        crew.start(traps.step_until_it_fails, ranks=ranks)
        time.sleep(0.037 * plan.at)
        begin = time.monotonic()
        number = signal.SIGKILL if plan.fault == "killed from outside" else signal.SIGSTOP
        crew.signal(plan.victim, number)
        rest = [o.value for o in crew.collect(lost=[plan.victim]) if o.value is not None]
        assert len(rest) == len(ranks) - 1
        answers = [answer for _, _, answer in rest]
        seconds = max(when for _, when, _ in rest) - begin
        steps = max(steps for steps, _, _ in rest)
    else:
        deed = {"killed within": "kill", "ended": "end", "interrupted": "interrupt"}
        lost = [plan.victim] if plan.fault in ("killed within", "ended") else []
        trap = {plan.victim: (deed.get(plan.fault, "leave"), plan.at)}
        options: Any = {"timeout": TIMEOUT}
        crew.start(traps.fail_once, plan.schedule, trap, "step", options, ranks=ranks)
        values = [outcome.value for outcome in crew.collect(lost=lost)]
        values.pop(plan.victim)  # what it raised itself is its own
        answers, steps = [value for value in values if value is not None], 1
        seconds = max(answer[0].seconds for answer in answers)
    for answer in answers:
        for call in (0, 1):
            error = _pipeline_error(answer[call])
            assert error.rank == plan.victim, error.text
            assert error.text.endswith("make a new process group and a new pipeline"), error.text
    assert seconds < limit, f"took {seconds:.1f} s"
    return steps, seconds


def _pipeline_error(outcome: Outcome) -> Failure:
    assert outcome.error.kind == "PipelineError", outcome.error.traceback
    return outcome.error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    with closing(Soak()) as soak:
        for number in range(chosen.first, chosen.first + chosen.rounds):
            plan = draw(number, chosen.seed)
            try:
                soak.run(plan)
            except AssertionError:
                print(f"{plan}\n{traceback.format_exc()}", file=sys.stderr)
                print(f"repeat with: --seed {chosen.seed} --first {number}", file=sys.stderr)
                return 1
            if (number + 1) % 25 == 0:
                print(f"round {number + 1} after {time.monotonic() - start:.0f} s", flush=True)
        print(soak.report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
