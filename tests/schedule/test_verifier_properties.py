"""`verify` accepts exactly what is whole and what the brute-force executor can run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fpipe import Action, Op, Schedule, ScheduleError, verify
from tests.schedule.brute import run

# What a stage owes, and each way to do it.
WAYS = {"F": ["F"], "FI": ["FI", "FB"], "FW": ["FW", "FB", "FIW"], "FIW": ["FB", "FIW"]}


@dataclass(frozen=True)
class Case:
    """A valid schedule, what its stages owe, and a source of chance that hypothesis controls."""

    schedule: Schedule
    requires: list[str]
    random: Random


def inputs(action: Action, every: set[Action], stages: int) -> list[Action]:
    """What an action reads, by the rules of pipelines and apart from the library's own graph."""
    stage, op, microbatch = action
    if op == "F":
        read = [Action(stage - 1, Op.F, microbatch)]
    elif op == "W" and Action(stage, Op.I, microbatch) in every:
        read = [Action(stage, Op.I, microbatch)]
    else:
        read = [Action(stage, Op.F, microbatch)]
        read += [Action(stage + 1, kind, microbatch) for kind in (Op.B, Op.I)]
    return [one for one in read if one in every]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks, stages, microbatches = (draw(st.integers(1, most)) for most in (4, 5, 4))
    placement = draw(st.lists(st.integers(0, ranks - 1), min_size=stages, max_size=stages))
    frozen = draw(st.sampled_from([0, 0, stages - 1, stages]))  # stages that train nothing
    requires = ["F"] * frozen + ["FW"] * bool(frozen < stages) + ["FIW"] * (stages - frozen - 1)
    if not frozen:
        requires = [draw(st.sampled_from(["FI", "FIW"])) for _ in range(stages)]
    random = draw(st.randoms(use_true_random=False))
    every = {
        Action(stage, Op(op), microbatch)
        for stage in range(stages)
        for microbatch in range(microbatches)
        for op in random.choice(WAYS[requires[stage]])
    }
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while rest := sorted(every - done):  # a random topological order, dealt out to the ranks
        ready = [one for one in rest if done.issuperset(inputs(one, every, stages))]
        action = random.choice(ready)
        rows[placement[action.stage]].append(action)
        done.add(action)
    return Case(Schedule(placement, rows), requires, random)


def accepts(schedule: Schedule, requires: list[str]) -> bool:
    try:
        verify(schedule, requires)
    except ScheduleError:
        return False
    return True


def is_whole(schedule: Schedule, requires: list[str]) -> bool:
    """Whether each stage does what it owes, once and on its own rank, on each microbatch."""
    done: defaultdict[tuple[int, int | None], list[str]] = defaultdict(list)
    for rank, row in enumerate(schedule.actions):
        for stage, op, microbatch in row:
            if schedule.placement[stage] != rank:
                return False
            done[stage, microbatch].append(op)
    return schedule.num_microbatches > 0 and all(
        sorted(done[stage, microbatch]) in map(sorted, WAYS[owed])
        for stage, owed in enumerate(requires)
        for microbatch in range(schedule.num_microbatches)
    )


def mutated(case: Case) -> Schedule:
    """The schedule with one edit, which may or may not leave it valid."""
    random = case.random
    rows = [list(row) for row in case.schedule.actions]
    rank = random.choice([rank for rank, row in enumerate(rows) if row])
    row = rows[rank]
    at, other = random.randrange(len(row)), random.randrange(len(row))
    match random.choice(["swap", "shift", "drop", "repeat", "move", "op", "microbatch", "stage"]):
        case "swap":
            row[at], row[other] = row[other], row[at]
        case "shift":
            row.insert(other, row.pop(at))
        case "drop":
            del row[at]
        case "repeat":
            row.insert(other, row[at])
        case "move":
            target = random.choice(rows)
            target.insert(random.randint(0, len(target)), row.pop(at))
        case "op":
            row[at] = row[at]._replace(op=random.choice([Op.F, Op.B, Op.I, Op.W]))
        case "microbatch":
            row[at] = row[at]._replace(microbatch=random.randrange(5))
        case "stage":
            row[at] = row[at]._replace(stage=random.randrange(case.schedule.num_stages))
    return Schedule(case.schedule.placement, rows)


@settings(max_examples=150)
@given(cases())
def test_any_topological_order_is_accepted(case: Case) -> None:
    assert is_whole(case.schedule, case.requires)
    assert run(case.schedule) is not None
    verify(case.schedule, case.requires)


@settings(max_examples=400)
@given(cases())
@example(Case(Schedule([0], [[Action(0, Op.F, 0)]]), ["F"], Random(0)))
def test_an_edit_is_refused_exactly_when_it_cannot_run(case: Case) -> None:
    edited = mutated(case)
    can_run = is_whole(edited, case.requires) and run(edited) is not None
    assert accepts(edited, case.requires) == can_run


@settings(max_examples=200)
@given(cases())
def test_shuffled_rows_are_refused_exactly_when_they_cannot_run(case: Case) -> None:
    rows = [case.random.sample(row, len(row)) for row in case.schedule.actions]
    shuffled = Schedule(case.schedule.placement, rows)
    assert accepts(shuffled, case.requires) == (run(shuffled) is not None)
