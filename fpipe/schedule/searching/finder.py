"""The search itself: seeds, tightened; beams, random policies, mutation, annealing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from random import Random

from fpipe.errors import ScheduleError
from fpipe.schedule.arguments import plain_counts, plain_integer, plain_number
from fpipe.schedule.bounds.lower import Memory, Objective
from fpipe.schedule.cost import Cost, check_cost
from fpipe.schedule.placements import (
    PlacementName,
    linear,
    looped,
    named_placement,
    plain_placement,
    waves,
)
from fpipe.schedule.schedule import Schedule
from fpipe.schedule.searching.annealing import anneal
from fpipe.schedule.searching.arranging import arranged, exchanged, turn_of
from fpipe.schedule.searching.beam import beam
from fpipe.schedule.searching.budget import Budget
from fpipe.schedule.searching.evaluator import make_evaluator
from fpipe.schedule.searching.list_scheduler import list_schedule
from fpipe.schedule.searching.policy import known_policies
from fpipe.schedule.searching.pool import Breeder, Candidate, played_in_full, reduced
from fpipe.schedule.searching.problem import Problem, by_size, make_problem, to_schedule
from fpipe.schedule.searching.result import SearchResult
from fpipe.schedule.searching.seeds import order_of, seeds
from fpipe.schedule.searching.tightening import tighten
from fpipe.schedule.timing.simulator import simulate
from fpipe.schedule.verifying.verifier import check_schedule, verify

_EFFORT_A_SECOND = 6_000  # states to look at for a bound, in a second of search
_SEARCHED = 0.75  # of the seconds; the bound takes about as much as is left
_EFFORT = 10  # the same in an iteration
_LEAST_EFFORT, _MOST_EFFORT = 2_000, 60_000  # the least is what `timeline.bound` takes
_ARRANGED = 4  # orders whose microbatches change places
_PLAIN = 4  # policies that are played with microbatches arranged by size
_PLAYED = 300_000  # actions of each placement, in so doing: half a second
_AT_ONCE = 1_000_000  # actions, for which nobody is asked whether there is time
_ACTIONS_A_SECOND = 20_000  # that are made and compared, before the search begins
_IN_FULL = 4  # policies that are played in full, where they were compared on fewer microbatches


def search(
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    cost: Cost,
    memory: Memory = None,
    placement: Sequence[int] | PlacementName | None = None,
    start: Schedule | None = None,
    seconds: float = 10.0,
    objective: Objective = "makespan",
    seed: int = 0,
    iterations: int | None = None,
) -> SearchResult:
    """The best schedule that can be found for these costs within this memory.

    Starts from every family that fits, so it is never worse than the best of them, and moves their
    actions into the gaps that they leave; then sends beams through the states that can be, which
    finds the best of all where memory leaves few, draws and mutates policies of a list scheduler,
    and anneals the best order. It ends early when it meets the lower bound, which proves that there
    is nothing better. Large cases (more than some ten thousand actions) are tuned on fewer
    microbatches, and the best policies are played in full; above 100,000 actions it starts from the
    few families that take least by what they take with fewer microbatches, which another may beat
    where stages are very unequal and there is no time to search.

    Where microbatches differ in size (``cost.sizes``) it also looks for the order in which they
    come: the schedule names them as you do, and takes them in that order. There are no beams then,
    and large cases are tuned on microbatches of the mean size.

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
        start: a schedule of your own to be bettered: what is found is never worse. Its placement is
            the one that is searched. Whole-stage actions are left out.
        seconds: time to search, the bound included, for which a quarter is set aside; what that
            does not need is not searched. The families come first, and in large cases the best
            policies are played in full afterwards: some 20 seconds more for a million actions.
            Processes that search by their clocks find different schedules: see `iterations`.
        objective: "makespan", or "span" for the longest rank's own time.
        seed: of all random choices.
        iterations: evaluations to make, in place of `seconds`: then the result depends on the
            arguments alone, not on the machine, and is the same on all ranks of a group.

    Returns:
        The schedule, its timeline, the lower bound and the gap to it.

    Raises:
        ScheduleError: an argument is out of range, the cost does not fit a placement, the memory
            admits no schedule, or `start` cannot run, is of another size or does not fit
            the memory; or there are more than a million actions (three for each stage and
            microbatch), and not a second for every 20,000 of them.

    Example:
        >>> import fpipe
        >>> found = fpipe.search(
        ...     ranks=4, microbatches=12, cost=fpipe.Cost(f=1, i=1, w=1, comm=0.5), memory=4,
        ...     placement=[0, 1, 2, 3], iterations=200,
        ... )
        >>> found.value, found.gap  # no schedule is better
        (45.0, 0.0)
    """
    if start is not None:
        check_schedule(start)
        ranks = start.num_ranks if ranks is None else ranks
        microbatches = start.num_microbatches if microbatches is None else microbatches
    ranks, microbatches = plain_counts(ranks=ranks, microbatches=microbatches)
    check_cost(cost)
    seed, iterations = _plain_seed(seed), _plain_budget(seconds, iterations)
    if isinstance(placement, str):
        placement = named_placement(placement, ranks, _stages_per_rank(ranks, cost))
    if start is not None:
        placement = _check_start(start, microbatches, placement)
    _refuse_endless(ranks, microbatches, cost, placement, seconds)
    problems = _problems(ranks, microbatches, cost, memory, placement, objective)
    candidates = [Candidate(problem, order) for problem, order in seeds(problems)]
    if start is not None:
        candidates.insert(0, _started(problems[0], start))
    bound = min(problem.bound for problem in problems)
    best = min(candidates, key=lambda found: found.value)
    if problems[0].uneven:
        for found in _arranged(tuple(candidates)):
            if best.value <= bound * (1 + 1e-9):
                break
            candidates.append(found)
            best = min(best, found, key=lambda candidate: candidate.value)
    spent = 0.0
    if best.value > bound * (1 + 1e-9):
        problems = _examined(problems, seconds, iterations)
        bound = min(problem.bound for problem in problems)
        hopeful = [problem for problem in problems if not problem.solved(best.value)]
        if best.value > bound * (1 + 1e-9):
            # From here on the clock runs: a machine that is slow at bounds searches all the same.
            budget = Budget(_SEARCHED * seconds, iterations)
            best = _improved(hopeful, candidates, Random(seed), budget)
            spent = budget.spent
    schedule = to_schedule(best.problem, best.order, name=f"searched_{objective}")
    return SearchResult(
        schedule=schedule,
        timeline=simulate(schedule, cost),
        objective=objective,
        bound=bound,
        iterations=round(spent),
    )


def _check_start(
    start: Schedule, microbatches: int, placement: Sequence[int] | None
) -> tuple[int, ...]:
    """The placement of a schedule that a search is to start from."""
    verify(start)
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


def _started(problem: Problem, start: Schedule) -> Candidate:
    order = order_of(problem, start)
    if order is None:
        raise ScheduleError(
            f"start={start.name!r:.60} holds more than the memory of a rank: give more, or another "
            "schedule (timeline.peak of fpipe.simulate says what it holds)"
        )
    return Candidate(problem, order)


def _examined(problems: list[Problem], seconds: float, iterations: int | None) -> list[Problem]:
    """The problems with better bounds, for which about a quarter of the budget may go."""
    effort = round(_EFFORT_A_SECOND * seconds) if iterations is None else _EFFORT * iterations
    effort = max(_LEAST_EFFORT, min(_MOST_EFFORT, effort // len(problems)))
    return [problem.examined(effort) for problem in problems]


def _improved(
    problems: list[Problem], families: list[Candidate], random: Random, budget: Budget
) -> Candidate:
    """Something better than the best family, if the budget suffices to find it."""
    best = min(families, key=lambda found: found.value)
    if problems[0].uneven:
        budget.share = 0.3
        best = _exchanged(families, best, random, budget)
        families = [best, *families]
        taken = turn_of(best.problem, best.order)
        problems = [replace(problem, turn=taken) for problem in problems]
    small = reduced(problems)
    large = small[0].microbatches < problems[0].microbatches
    if not large:
        budget.share = 0.4 if problems[0].uneven else 0.1
        best = _tightened(problems, families, best, budget)
        begun = budget.progress
        # Beams take all microbatches as alike.
        beamed = [] if problems[0].uneven else problems
        for nth, problem in enumerate(beamed, 1):
            budget.share = min(1.0, begun + 0.35 * nth / len(problems))
            if (order := beam(problem, best.value, budget)) is not None:
                best = Candidate(problem, order)
    breeder = Breeder(small, random, budget, best=math.inf if large else best.value)
    budget.share = 0.55
    bred = breeder.draw()
    budget.share = 0.8
    bred = breeder.mutate(bred)
    found = [best, *played_in_full(bred[:_IN_FULL], problems, best.value)]
    best = min(found, key=lambda candidate: candidate.value)
    if large:
        return best
    budget.share = 0.85
    best = _tightened(problems, found, best, budget)
    budget.share = 1.0
    order = anneal(make_evaluator(best.problem), best.order, random, budget)
    return Candidate(best.problem, order)


def _arranged(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Candidates with their microbatches arranged by size: the best, and those of plain policies,
    which fit whatever memory there is; of large problems few."""
    few = sorted(candidates, key=lambda candidate: candidate.value)[:_ARRANGED]
    for problem, order in few:
        for other in arranged(make_evaluator(problem), order):
            yield Candidate(problem, other)
    for problem in {id(own.problem): own.problem for own in candidates}.values():
        turns = (problem.turn, *map(tuple, by_size(problem.sizes, problem.turn)))
        ways = product(known_policies(problem)[:_PLAIN], turns)
        actions = 3 * len(problem.placement) * problem.microbatches
        for policy, turn in islice(ways, max(2, _PLAYED // actions)):
            played = list_schedule(problem, replace(policy, turn=turn))
            if played is not None:
                yield Candidate(problem, played)


def _exchanged(
    found: list[Candidate], best: Candidate, random: Random, budget: Budget
) -> Candidate:
    """The best of all when microbatches of the few that take least change places."""
    few = sorted(found, key=lambda candidate: candidate.value)[:_ARRANGED]
    begun, whole = budget.progress, budget.share
    for nth, (problem, order) in enumerate(few, 1):
        budget.share = begun + (whole - begun) * nth / len(few)
        order = exchanged(make_evaluator(problem), order, random, budget)
        if order.value < best.value:
            best = Candidate(problem, order)
    return best


def _tightened(
    problems: list[Problem], found: list[Candidate], best: Candidate, budget: Budget
) -> Candidate:
    """The best of all when each is tightened, from the least value on."""
    evaluators = {problem.placement: make_evaluator(problem) for problem in problems}
    for candidate in sorted(found, key=lambda candidate: candidate.value):
        evaluator = evaluators.get(candidate.problem.placement)
        if evaluator is not None and not evaluator.problem.solved(best.value):
            order = tighten(evaluator, candidate.order, budget)
            if order.value < best.value:
                best = Candidate(evaluator.problem, order)
    return best


def _plain_seed(seed: int) -> int:
    if (plain := plain_integer(seed)) is None:
        raise ScheduleError(f"seed={seed!r:.60} must be an integer")
    return plain


def _plain_budget(seconds: float, iterations: int | None) -> int | None:
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
    """Refuse a search whose families alone take far more time than there is.

    Raises:
        ScheduleError: says how much they take.
    """
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
    if isinstance(memory, Iterator):
        memory = tuple(memory)  # it is read once per placement
    if placement is not None:
        placement = plain_placement(placement)
        if set(placement) != set(range(ranks)):
            raise ScheduleError(
                f"placement={tuple(placement)!r:.60} must put a stage on each of the ranks 0 to "
                f"{ranks - 1}, and on no other"
            )
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


def _placements(ranks: int, cost: Cost) -> list[tuple[int, ...]]:
    """Linear, V and looped; of as many stages as the cost has values for, and then waves too."""
    per_rank = _stages_per_rank(ranks, cost)
    if per_rank is None:
        return list(dict.fromkeys([linear(ranks), waves(ranks, 2), looped(ranks, 2)]))
    folded = [waves(ranks, per_rank)] if per_rank % 2 == 0 else []
    return list(dict.fromkeys([*folded, looped(ranks, per_rank)]))


def _stages_per_rank(ranks: int, cost: Cost) -> int | None:
    """How many stages each rank has, by the values that the cost has; None where it has none."""
    values = (cost.f, cost.i, cost.w, cost.b, cost.activation, cost.freed_by_i)
    lengths = {len(value) for value in values if isinstance(value, tuple)}
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
