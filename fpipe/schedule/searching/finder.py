"""`fpipe.search`: checks the arguments, composes the phases, returns the best schedule."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from random import Random
from typing import get_args

from fpipe.errors import ScheduleError
from fpipe.live_line import working
from fpipe.schedule.arguments import (
    check_kept,
    plain_counts,
    plain_integer,
    plain_number,
    plain_seed,
)
from fpipe.schedule.bounds.makespan import Memory, Objective
from fpipe.schedule.cost import Cost, check_cost, values_per_stage
from fpipe.schedule.orders.evaluator import make_evaluator
from fpipe.schedule.orders.list_scheduler import list_schedule, plain_policy
from fpipe.schedule.orders.problem import (
    LARGE,
    Candidate,
    Problem,
    make_problem,
    to_schedule,
)
from fpipe.schedule.phases.annealing import annealings
from fpipe.schedule.phases.beam import beams
from fpipe.schedule.phases.breeding import breeding, reduced
from fpipe.schedule.phases.patterns import patterns
from fpipe.schedule.phases.portfolio import (
    Entry,
    Incumbents,
    Meter,
    bounding,
    improving,
    run,
    without_gc,
)
from fpipe.schedule.phases.seeds import GUESSED, order_of, seeds
from fpipe.schedule.phases.tightening import tighten
from fpipe.schedule.phases.windows import reorder_windows
from fpipe.schedule.placements import (
    PlacementName,
    linear,
    looped,
    named_placement,
    plain_placement,
    waves,
)
from fpipe.schedule.schedule import Schedule
from fpipe.schedule.searching.choices import Cuts, Recomputing
from fpipe.schedule.searching.choosing import Task, best_choice
from fpipe.schedule.searching.result import USUAL, SearchObjective, SearchResult
from fpipe.schedule.searching.robust import find_robust, steadiest
from fpipe.schedule.simulation.jitter import Jitter, plain_jitter
from fpipe.schedule.simulator import simulate, with_whole_stage
from fpipe.schedule.verifier import check_schedule, verify

log = logging.getLogger("fpipe")

_LEAST_EFFORT = 2_000  # of a bound, as that of `timeline.bound`
_END = 1.2  # the time of making the result, in runs of the list scheduler
_BROAD = 8  # times LARGE: the largest problem that is tightened
_EFFORTS = (5_000, 10_000, 20_000, 60_000)  # of better bounds, in the course of the search
_AT_ONCE = 1_000_000  # actions: smaller searches may take longer than `seconds`
_ACTIONS_A_SECOND = 20_000  # that are made and compared before the search begins


def search(
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    cost: Cost,
    memory: Memory = None,
    placement: Sequence[int] | PlacementName | None = None,
    start: Schedule | None = None,
    seconds: float = 10.0,
    objective: SearchObjective = "makespan",
    seed: int = 0,
    iterations: int | None = None,
    remat: bool = False,
    jitter: Jitter | float = USUAL,
    cut: bool = False,
) -> SearchResult:
    """Search for the best schedule for these costs within this memory.

    It starts from every family that fits, so the result is never worse than the best of them. Then
    several methods work side by side and build on each other's results: beam search, which finds
    the best schedule of all where states are few; a list scheduler whose policies are drawn and
    mutated; moves of actions into the gaps that orders leave; simulated annealing; windows of a few
    ranks and actions, which branch and bound orders anew; patterns of one microbatch that are
    repeated (modulo scheduling), on linear, looped, V and wave placements; and closer lower bounds.
    None of them knows how long the search lasts: a search is the beginning of any longer one, so
    more iterations never give a worse answer. It ends early when it meets the lower bound, which
    proves that there is nothing better.

    Large cases (more than some ten thousand actions) are tuned on fewer microbatches, and the best
    policies are run in full; above 100,000 actions the search makes the few families that take
    least with fewer microbatches.

    Where microbatches differ in size (``cost.sizes``) it also searches for the order in which they
    come: the schedule names them as you do, and takes them in that order. Large cases are tuned on
    microbatches of the mean size.

    Where the cost has times of whole-stage work (`unshard`, `reduce_grad`, `update`), the objective
    counts it: gathers before the first action, reductions and updates behind the last gradients.
    The schedule has these actions, once a step, as `Schedule.sharded` and `Schedule.updated` put
    them; other policies of theirs are not tried.

    Args:
        ranks: number of ranks; that of `start` by default.
        microbatches: number of microbatches; that of `start` by default.
        cost: times, latencies and activations (see `fpipe.Cost`).
        memory: the most activations that a rank may hold, in the unit of ``cost.activation``: a
            number, one per rank, or None for no limit.
        placement: the rank of each stage; or by name, ``"linear"``, ``"looped"`` or ``"v"`` (two
            stages per rank), ``"wave"`` (down and up again twice, four stages per rank); None to
            choose among the first three. A cost with a value per stage says how many stages there
            are, and narrows the choice to placements of as many.
        start: a schedule of your own to improve: the result is never worse. The search keeps its
            placement, and puts its whole-stage actions in anew, where the cost has times of them.
        seconds: time to search, all included: processor time of the calling thread, which on an
            idle machine is wall time. Searches by the clock may find different schedules: see
            `iterations`.
        objective: "makespan"; "span", the longest time from the first start to the last end of
            one rank; or "robust", the mean makespan over trials with `jitter`. A robust search
            takes half of its budget to search for the makespan, and the other half to better the
            means of what it met. Of schedules with equal makespans `jitter` decides, too.
        seed: of all random choices.
        iterations: work to do, in place of `seconds`: then the result depends on the arguments
            alone, not on the machine, and is the same on all ranks of a group. An iteration is
            about one run of the list scheduler, or some dozen small changes of an order.
        remat: choose for each stage as well whether it keeps its activation or computes it again
            (``cost.recompute``, ``cost.kept``, see `Cost.with_remat`). Each choice that may be best
            is searched on its own, with all of `iterations` or a share of `seconds`: none, all, the
            first stages, those of the first ranks, and what differs from the best of these in a
            stage; all choices where stages are few. So with `iterations` the result is never worse
            than a search for one of those.

        jitter: how times vary, or a number for ``Jitter(each=number)``.
        cut: the values of the cost are those of a chain of layers: choose how many of them each
            stage has, together with the stages a rank (up to four), placement and order. Cuts are
            searched as choices of `remat` are: even ones, those that balance the ranks by their
            speeds, and what differs from the best of these by a layer. It goes neither with `remat`
            nor with `start`.

    Returns:
        The schedule, its timeline, the lower bound and the gap to it; the choice of `remat` or of
        `cut`.

    Raises:
        ScheduleError: an argument is out of range, the cost does not fit a placement, the memory
            admits no schedule, or `start` cannot run, has another size or does not fit the
            memory; or there are more than a million actions (three for each stage and
            microbatch), and not a second for every 20,000 of them.

    Example:
        >>> import fpipe
        >>> result = fpipe.search(
        ...     ranks=4, microbatches=12, cost=fpipe.Cost(f=1, i=1, w=1, comm=0.5), memory=4,
        ...     placement=[0, 1, 2, 3], iterations=200,
        ... )
        >>> result.value, result.gap  # no schedule is better
        (45.0, 0.0)
    """
    if start is not None:
        check_schedule(start)
        ranks = start.num_ranks if ranks is None else ranks
        microbatches = start.num_microbatches if microbatches is None else microbatches
    ranks, microbatches = plain_counts(ranks=ranks, microbatches=microbatches)
    check_cost(cost)
    iterations = _checked_budget(seconds, iterations)
    seed = plain_seed(seed)
    if objective not in get_args(SearchObjective):
        raise ScheduleError(f"objective={objective!r:.60} must be 'makespan', 'span' or 'robust'")
    jitter = plain_jitter(jitter)
    robust = objective == "robust"
    timed: Objective = "makespan" if objective == "robust" else objective
    if cut and (remat or start is not None):
        raise ScheduleError("cut=True goes neither with remat=True nor with start=: leave them out")
    if not isinstance(remat, bool):
        raise ScheduleError(
            f"remat={remat!r:.60} must be True or False: cost.with_remat makes the cost of a choice"
        )
    if isinstance(placement, str):
        placement = named_placement(
            placement, ranks, None if cut else _stages_per_rank(ranks, cost)
        )
    if start is not None:
        if placement is None:
            log.warning(
                "the search keeps the placement of start, %s: leave start out to search others, or "
                "give placement=start.placement to say so",
                start.placement,
            )
        placement = _check_start(start, microbatches, placement)
    if not cut:
        _refuse_endless(ranks, microbatches, cost, placement, seconds)
    if start is not None:
        verify(start)
    if isinstance(memory, Iterator):
        memory = tuple(memory)  # it is read once per placement
    if remat or cut:
        cuts = Cuts(cost) if cut else None
        if cuts is None:
            check_kept(cost.kept)
        choices = _placements(ranks, cost) if cuts is None else cuts.placements(ranks)
        return best_choice(
            Task(microbatches, cost, memory, timed, cuts or Recomputing()),
            partial(search, jitter=jitter, objective=objective),
            [_checked_placement(placement, ranks)] if placement else choices,
            start=start,
            seconds=seconds,
            seed=seed,
            iterations=iterations,
        )
    problems = _problems(ranks, microbatches, cost, memory, placement, timed)
    share = 2 if robust else 1
    meter = Meter(seconds / share, None if iterations is None else -(-iterations // share))
    incumbents = Incumbents()
    for problem in problems:
        incumbents.raise_bound(problem, problem.bound)
    if iterations is None and (large := max(problems, key=lambda each: each.actions)).scale > 1:
        small = reduced([large])[0]
        begun = time.thread_time()
        list_schedule(small, plain_policy(len(small.placement)))
        meter.step = (time.thread_time() - begun) * large.actions / small.actions
        meter.end = _END * meter.step
    if start is not None:
        order = order_of(problems[0], start)
        if order is None:
            raise ScheduleError(
                f"start={start.name!r:.60} holds more than the memory of a rank: give more, or "
                "another schedule (timeline.peak of fpipe.simulate says what it holds)"
            )
        incumbents.offer(Candidate(problems[0], order))
    with working("searching", unit="steps"):
        run(_phases(problems, incumbents, seed), incumbents, meter)

    def schedule_of(candidate: Candidate) -> Schedule:
        name = f"searched_{objective}"
        return with_whole_stage(to_schedule(candidate.problem, candidate.order, name), cost)

    best, spent = incumbents.best, meter.spent
    if robust:
        meter = Meter(seconds / 2, None if iterations is None else iterations // 2)
        with working("choosing the best under jitter"):
            best = find_robust(problems, incumbents, meter, schedule_of, jitter, seed)
        spent += meter.spent
    elif objective == "makespan":
        best = steadiest(incumbents.ties, schedule_of, jitter)
    with without_gc():
        schedule = schedule_of(best)
        return SearchResult(
            schedule=schedule,
            timeline=simulate(schedule, cost, jitter=jitter if robust else None),
            objective=objective,
            bound=incumbents.bound,
            iterations=round(spent),
            problems=tuple(problems),
        )


def _check_start(
    start: Schedule, microbatches: int, placement: Sequence[int] | None
) -> tuple[int, ...]:
    """The placement of a schedule that a search is to start from."""
    if start.num_microbatches != microbatches:
        raise ScheduleError(
            f"start has {start.num_microbatches} microbatches, and microbatches={microbatches}: "
            "they must be the same"
        )
    if placement is not None and plain_placement(placement) != start.placement:
        raise ScheduleError(
            f"start has the placement {start.placement}, and placement={tuple(placement)}: leave "
            "placement out"
        )
    return start.placement


def _phases(problems: list[Problem], incumbents: Incumbents, seed: int) -> list[Entry]:
    """All phases, each with its share of the work and its own random numbers."""

    def random(name: str) -> Random:
        return Random(f"{seed} {name}")

    evaluators = {
        problem.placement: make_evaluator(problem)
        for problem in problems
        if problem.actions <= LARGE
    }
    # Larger problems can be tightened, but not annealed.
    broad = {
        problem.placement: make_evaluator(problem)
        for problem in problems
        if problem.actions <= _BROAD * LARGE
    }
    # Families come first, unless they are so large that it takes long to make them.
    first = 4.0 if any(problem.actions > GUESSED for problem in problems) else math.inf
    return [
        Entry(first, seeds(problems), free=True),
        Entry(first, bounding(problems, incumbents, (_LEAST_EFFORT,)), free=True),
        Entry(0.5, bounding(problems, incumbents, _EFFORTS)),
        Entry(2.0, improving(broad, incumbents, tighten)),
        Entry(
            1.0 if evaluators else 40.0,
            chain.from_iterable(
                patterns(problem, random(f"patterns {nth}")) for nth, problem in enumerate(problems)
            ),
        ),
        Entry(2.0, breeding(problems, incumbents, random("breeding"))),
        *(
            # Beams find the best schedules of small problems.
            Entry(
                max(0.5, 6.0 * min(1.0, 300 / evaluator.problem.actions) / len(evaluators)),
                beams(evaluator, incumbents, random(f"beams {nth}")),
            )
            for nth, evaluator in enumerate(evaluators.values())
        ),
        Entry(3.0, annealings(evaluators, incumbents, random("annealing"))),
        Entry(2.0, improving(evaluators, incumbents, reorder_windows)),
    ]


def _checked_budget(seconds: float, iterations: int | None) -> int | None:
    if (time := plain_number(seconds)) is None or not 0 <= time < math.inf:
        raise ScheduleError(f"seconds={seconds!r:.60} must be a finite number, 0 or more")
    if iterations is None:
        return None
    if (plain := plain_integer(iterations)) is None or plain < 0:
        raise ScheduleError(f"iterations={iterations!r:.60} must be an integer, 0 or more, or None")
    return plain


def _refuse_endless(
    ranks: int,
    microbatches: int,
    cost: Cost,
    placement: Sequence[int] | None,
    seconds: float,
) -> None:
    """Refuse a search whose families alone take far more time than there is."""
    per_rank = _stages_per_rank(ranks, cost) if placement is None else None
    stages = (per_rank or 2) * ranks if placement is None else len(plain_placement(placement))
    actions = 3 * stages * microbatches
    if actions > max(_AT_ONCE, _ACTIONS_A_SECOND * seconds):
        raise ScheduleError(
            f"ranks={ranks} and microbatches={microbatches} make {actions:,} actions, of which the "
            f"families alone take some {math.ceil(actions / _ACTIONS_A_SECOND):,} seconds, and "
            f"seconds={seconds:g}: give so many, or search with fewer microbatches, whose order "
            "goes on in the same way"
        )


def _problems(
    ranks: int,
    microbatches: int,
    cost: Cost,
    memory: Memory,
    placement: Sequence[int] | None,
    objective: Objective,
) -> list[Problem]:
    """One problem per placement that the cost and the memory admit."""
    if placement is not None:
        placement = _checked_placement(placement, ranks)
        return [make_problem(placement, microbatches, cost, memory, objective)]
    problems, refusals = [], []
    for choice in _placements(ranks, cost):
        try:
            problems.append(make_problem(choice, microbatches, cost, memory, objective))
        except ScheduleError as refusal:
            refusals.append(refusal)
    if not problems:
        raise refusals[0]
    return problems


def _checked_placement(placement: Sequence[int], ranks: int) -> tuple[int, ...]:
    plain = plain_placement(placement)
    if set(plain) != set(range(ranks)):
        raise ScheduleError(
            f"placement={tuple(placement)!r:.60} must put a stage on each of the ranks 0 to "
            f"{ranks - 1}, and on no other"
        )
    return plain


def _placements(ranks: int, cost: Cost) -> list[tuple[int, ...]]:
    """Linear, V and looped; of as many stages as the cost has values for, and then waves too."""
    per_rank = _stages_per_rank(ranks, cost)
    if per_rank is None:
        return list(dict.fromkeys([linear(ranks), waves(ranks, 2), looped(ranks, 2)]))
    folded = [waves(ranks, per_rank)] if per_rank % 2 == 0 else []
    return list(dict.fromkeys([*folded, looped(ranks, per_rank)]))


def _stages_per_rank(ranks: int, cost: Cost) -> int | None:
    """How many stages each rank has, by the values that the cost has; None where it has none."""
    lengths = {len(value) for value in values_per_stage(cost).values()}
    if not lengths:
        return None
    stages = max(lengths)
    if len(lengths) > 1 or stages % ranks or not stages:
        raise ScheduleError(
            f"the cost has values for {' and '.join(map(str, sorted(lengths)))} stages: give "
            f"each of its sequences one value per stage, as many as ranks={ranks} divides, or "
            "say the placement"
        )
    return stages // ranks
