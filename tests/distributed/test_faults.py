"""Whatever fails on whichever rank: every rank tells of it, nobody hangs, no process is left."""

from __future__ import annotations

import os
import random
import re
import signal
import time
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from fpipe import Schedule, schedules
from fpipe.checks.purity import others
from fpipe.execute.watch import Watch
from tests.distributed import actors, traps
from tests.distributed.crew import Crew, Failure, Outcome, attempt, values
from tests.models import assert_identical

SOON = 10.0
"""Seconds within which every rank must know, on a machine that has other work too."""


def failures(answers: Sequence[Any], call: int, within: float = SOON) -> list[Failure]:
    """What each rank raised at one of its calls, in time."""
    outcomes: list[Outcome] = [answer[call] for answer in answers if answer is not None]
    for outcome in outcomes:
        assert outcome.error.kind == "PipelineError", outcome.error.traceback
        assert outcome.seconds < within
    return [outcome.error for outcome in outcomes]


def assert_good(answers: Sequence[Any], call: int) -> None:
    """The call returned the same on all ranks: True, or a loss."""
    results = values([answer[call] for answer in answers if answer is not None])
    assert all(bool(result == results[0]) for result in results) and bool(results[0])


# ── an action that raises ───────────────────────────────────────────────────────────────────────


def check_boom(crew: Crew, schedule: Schedule, victim: int, at: int, **options: Any) -> None:
    answers = values(
        crew.run(
            traps.fail_once,
            schedule,
            {victim: ("boom", at)},
            "step",
            options,
            ranks=range(schedule.num_ranks),
        )
    )
    action = schedule.actions[victim][at]
    for rank, error in enumerate(failures(answers, 0)):
        assert (error.rank, error.stage) == (victim, action.stage)
        assert (error.microbatch, error.action) == (action.microbatch, str(action))
        assert f"{action} failed on rank {victim}" in error.text
        assert "ValueError: boom 42. The pipeline can be used again" in error.text
        assert error.cause == ("ValueError: boom 42" if rank == victim else "")
    assert_good(answers, 1)


def draws(group: dist.ProcessGroup) -> list[str]:
    """The threads that may draw while stages are traced, before a stage that draws is refused."""
    schedule = schedules.gpipe(ranks=group.size(), microbatches=2)
    seen: list[str] = []

    def noisy(w: Tensor, x: Tensor) -> Tensor:
        seen.extend(thread.name for thread in others())
        return x * w * random.random()

    stages = [noisy] * schedule.num_stages
    pipe = fpipe.pipeline(stages, lambda y, _: y.mean(), schedule, group=group, compile=False)
    with pytest.raises(fpipe.PipelineError, match="draws from Python's random"):
        pipe.step(pipe.local([torch.ones(2)] * schedule.num_stages), torch.ones(4, 2))
    return seen


def test_what_draws_is_refused_over_processes(crew: Crew) -> None:
    # The threads that watch the other ranks were taken for some that draw, which had it pass.
    assert values(crew.run(draws, ranks=range(2))) == [[], []]


@pytest.mark.parametrize("at", [0, 3, 5, -1])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_an_exception_in_any_action_on_any_rank(crew: Crew, victim: int, at: int) -> None:
    """The first forward, one in the middle, an early backward and the last one."""
    schedule = schedules.one_f_one_b(ranks=3, microbatches=4)
    check_boom(crew, schedule, victim, at % len(schedule.actions[victim]))


@pytest.mark.parametrize(("victim", "at"), [(0, 9), (1, 4), (1, 14)])
def test_an_exception_where_the_backward_is_split(crew: Crew, victim: int, at: int) -> None:
    check_boom(crew, schedules.zbv(ranks=2, microbatches=4), victim, at, remat="full")


@pytest.mark.parametrize("method", ["value", "forward"])
def test_an_exception_in_evaluation(crew: Crew, method: str) -> None:
    schedule = schedules.one_f_one_b(ranks=3, microbatches=4)
    answers = values(crew.run(traps.fail_once, schedule, {1: ("boom", 2)}, method, ranks=range(3)))
    assert {(e.rank, e.action) for e in failures(answers, 0)} == {(1, "1F2")}
    assert_good(answers, 1)


def test_exceptions_on_several_ranks_at_once(crew: Crew) -> None:
    schedule = schedules.gpipe(ranks=4, microbatches=4)
    where = {0: ("boom", 2), 1: ("boom", 1), 3: ("boom", 0)}
    answers = values(crew.run(traps.fail_once, schedule, where))
    for rank, error in enumerate(failures(answers, 0)):
        assert "boom 42" in error.text
        assert error.rank in where
        assert rank not in where or error.rank == rank  # each knows its own failure best
    assert_good(answers, 1)


def test_nobody_computes_on_what_a_rank_sends_that_failed(crew: Crew) -> None:
    """Such values may be no indices, and what fails because of them would be told as the fault."""
    answers = values(crew.run(traps.compute_until_told, 0, 1, ranks=range(3)))
    assert [outcome.error.action for outcome, _ in answers] == ["0F1"] * 3
    # 0F0 and 0F1, which fails; 1F0; 2F0.
    assert [kernels for _, kernels in answers] == [2, 1, 1]


# ── tracing and compiling ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("where", "victim"), [("trace", 0), ("compile", 2)])
def test_an_exception_before_anything_runs(crew: Crew, where: str, victim: int) -> None:
    # The second call found the shapes known and went on without the rank that failed.
    answers = values(crew.run(traps.fail_early, victim, where, "boom", 60.0, ranks=range(3)))
    for call in (0, 1):
        for rank, error in enumerate(failures(answers, call)):
            assert error.rank == victim
            assert f"rank {victim} cannot make its programs: " in error.text
            assert "boom 42" in error.text
            assert bool(error.cause) == (rank == victim)
    assert_good(answers, 2)


def test_a_rank_that_compiles_for_longer_than_the_timeout_is_not_silent(crew: Crew) -> None:
    answers = values(crew.run(traps.fail_early, 1, "compile", "nap", 1.0, ranks=range(2)))
    assert_good(answers, 0)


def test_an_action_that_takes_longer_than_the_timeout_is_not_silent(crew: Crew) -> None:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    trap = {0: ("nap", 1)}
    answers = values(
        crew.run(traps.fail_once, schedule, trap, "step", {"timeout": 1.0}, ranks=range(2))
    )
    assert [answer[0].failure for answer in answers] == [None, None]


# ── ranks that do not agree ─────────────────────────────────────────────────────────────────────

SAID = {
    "schedule": r"rank 2 has another schedule than the other ranks \(<Schedule \w+: .*, not <",
    "microbatches": "rank 2 has another schedule .* 4 microbatches>, not .* 2 microbatches>",
    "stages": "rank 2 has other stages or another loss than the other ranks",
    "loss": "rank 2 has other stages or another loss than the other ranks",
    "remat": "rank 2 has another remat policy than the other ranks",
    "reduction": "rank 2 has another loss reduction than the other ranks",
    "accum_dtype": "rank 2 has another accum_dtype than the other ranks",
    "in_dims": "rank 2 has another in_dims than the other ranks",
    "method": "rank 2 called pipe.value, but others called pipe.step",
    "rows": "rank 2 got a batch of another shape, 6 rows",
    "dtype": r"rank 2 got a batch of another shape, .*float32\[2, 3\].* than rank 0, .*float64",
    "leaves": "rank 2 got a batch of another structure",
    "order": "rank 2 got a batch with keys in another order, 4 rows",
    "structure": r"rank 2 got .* another structure, .*\[batch\[0\]: .* than rank 0, .*batch\['x'\]",
    "local type": "rank 2 cannot run this step: BatchError: .* cannot import .*LocalBatch.* top",
    "too few rows": "rank 2 cannot run this step: BatchError: .*1 row",
    "no tensor": "rank 2 cannot run this step: BatchError: .*'text'",
    "params": "rank 2 cannot run this step: BatchError: params .* 3 pytrees",
    "params' shape": "no rank can make its programs: StageError: ",
    "autocast": "rank 2 runs under another autocast than other ranks",
}


@pytest.mark.parametrize("how", SAID)
def test_a_rank_that_does_otherwise_is_named(crew: Crew, how: str) -> None:
    answers = values(crew.run(traps.disagree, how, 2, ranks=range(3)))
    for error in failures(answers, 0):
        assert re.search(SAID[how], error.text), error.text
        assert error.text.endswith("The pipeline can be used again")
        assert error.rank == (None if how == "params' shape" else 2)
    if how in traps.BUILT_OTHERWISE:
        assert [e.text for e in failures(answers, 1)] == [e.text for e in failures(answers, 0)]
    else:
        assert_good(answers, 1)


@pytest.mark.parametrize(
    ("given", "text"),
    [([], "no rank was given a batch"), ([0], "rank 2 was given batch=None, but its stages [2]")],
)
def test_a_rank_that_needs_the_batch_must_get_it(crew: Crew, given: list[int], text: str) -> None:
    answers = values(crew.run(traps.without_batch, given, ranks=range(3)))
    assert all(text in error.text for error in failures(answers, 0))
    assert_good(answers, 1)


def test_a_rank_that_asks_for_programs_is_named(crew: Crew) -> None:
    """It waited for ever: both calls went by the name of a step."""
    answers = values(crew.run(actors.programs_and_step, ranks=range(2)))
    for error in failures(answers, 0):
        assert "rank 1 called pipe.programs, but others called pipe.step" in error.text
        assert "same method; pipe.programs too, and one may print" in error.text
    assert_good(answers, 1)


def test_what_has_no_data_is_refused_on_every_rank(crew: Crew) -> None:
    answers = values(crew.run(actors.without_data, ranks=range(2)))
    for call, what in enumerate(("the parameter ['w'] in its stage 1", "batch['y']")):
        for error in failures(answers, call):
            assert error.rank == 1
            assert f"reads {what}, but what it was given lies on the meta device" in error.text
    assert_good(answers, 2)


# ── ranks that are lost ─────────────────────────────────────────────────────────────────────────

GONE = "The connections of the group are lost: make a new process group and a new pipeline"


@pytest.mark.parametrize(("lost", "deed", "at"), [(0, "kill", 5), (1, "end", 2), (2, "kill", 0)])
def test_a_rank_that_ends(lost: int, deed: str, at: int) -> None:
    with Crew(3) as crew:
        answers = [a.value for a in crew.run(traps.go_on_without, lost, deed, at, lost=[lost])]
        for call in (0, 1):
            for error in failures(answers, call):
                assert error.rank == lost
                assert f"rank {lost} has ended or cannot be reached" in error.text
                assert error.text.endswith(GONE)
        assert_good(answers, 2)


def test_who_hosts_the_store_ends_last() -> None:
    """The others learned that the store was lost, and not with which rank it had begun."""
    with Crew(3, host=0) as crew:
        crew.start(traps.end_when_told, 1)
        error = crew.collect(lost=[0, 1])[2].value.error
        assert error.rank == 1
        assert "rank 1 has ended or cannot be reached" in error.text
        assert error.text.endswith(GONE)


def test_a_rank_that_ends_while_others_agree() -> None:
    with Crew(3) as crew:
        crew.start(traps.fail_early, 1, "compile", "kill", 60.0)
        answers = [outcome.value for outcome in crew.collect(lost=[1])]
        for error in failures(answers, 0):
            assert error.rank == 1
            assert error.text.endswith(GONE)


def test_a_rank_that_ends_while_others_connect() -> None:
    """Who waits for it in the store hears of nothing, and keeps the watch from asking there."""
    with Crew(3) as crew:
        crew.start(traps.fail_connecting, 1)
        answers = [outcome.value for outcome in crew.collect(lost=[1])]
        for error in failures(answers, 0, within=SOON):
            assert error.rank == 1
            assert "rank 1 has ended or cannot be reached" in error.text
            assert error.text.endswith(GONE)


def test_a_rank_that_stops_and_goes_on() -> None:
    schedule = schedules.one_f_one_b(ranks=3, microbatches=4)
    with Crew(3) as crew:
        crew.start(traps.fail_once, schedule, {1: ("stop", 4)}, "step", {"timeout": 2.0})
        answers = [outcome.value for outcome in crew.collect(lost=[1])]
        for error in failures(answers, 0, within=2.0 + SOON):
            assert error.rank == 1
            assert re.search(
                r"rank 1 has not responded for [2-9]\.\d s: it has stopped", error.text
            )
            assert error.text.endswith(GONE)
        crew.signal(1, signal.SIGCONT)
        # Too late: it learns why, and does not wait for the others.
        late = values(crew.collect(lost=[0, 2])[1:2])[0]
        assert failures([late], 0, within=60.0)[0].text.endswith(GONE)


@pytest.mark.parametrize(
    ("deed", "kind"), [("interrupt", "KeyboardInterrupt"), ("leave", "SystemExit: 3")]
)
def test_a_rank_that_is_interrupted(deed: str, kind: str) -> None:
    schedule = schedules.one_f_one_b(ranks=3, microbatches=4)
    with Crew(3) as crew:
        answers = values(crew.run(traps.fail_once, schedule, {1: (deed, 3)}))
        assert answers[1][0].error.kind == kind.split(":")[0]
        del answers[1][0]
        answers[1].insert(0, answers[1][0])
        for call in (0, 1):
            for error in failures(answers, call):
                assert error.rank == 1
                assert f"rank 1 failed: {kind}" in error.text
                assert error.text.endswith(GONE)


def test_a_rank_that_is_interrupted_while_it_waits() -> None:
    """It heard of the signal when the other rank came at last."""
    with Crew(2) as crew:
        here, there = values(crew.run(traps.interrupt_the_waiting, 3.5))
        assert here[0].error.kind == "KeyboardInterrupt" and here[0].seconds < 3
        for answer in (here[1], *there[:2]):
            assert "rank 0 failed: KeyboardInterrupt" in answer.error.text
            assert answer.error.text.endswith(GONE)
        for answer in (*here[2:], *there[2:]):
            text = answer.error.text
            assert text.startswith("another pipeline over the same process group has lost")
            assert "rank 0 failed: KeyboardInterrupt" in text and answer.seconds < 1


def test_what_was_lost_in_another_pipeline_is_told() -> None:
    # After six seconds the connection between ranks had broken, and nobody was named.
    with Crew(2) as crew:
        _, there = values(crew.run(traps.interrupt_one_of_two))
        (answer,) = there
        assert "rank 0 failed: KeyboardInterrupt" in answer.error.text
        assert answer.error.rank == 0 and answer.seconds < 3


def test_a_handler_that_raises_between_messages() -> None:
    """The message was sent once more in the drain, and all ranks waited for ever."""
    schedule = schedules.one_f_one_b(ranks=2, microbatches=4)
    with Crew(2) as crew:
        answers = values(crew.run(traps.raise_after_sending, schedule, 0))
        for call in (0, 1):
            for error in failures(answers, call):
                assert "rank 0 failed: ValueError: boom 42" in error.text
                assert error.text.endswith(GONE)


def test_a_call_while_another_is_under_way(crew: Crew) -> None:
    # Its messages went between those of the other, on which gloo ended the process.
    for answer in values(crew.run(traps.call_meanwhile, ranks=range(2))):
        for outcome in answer[-2:]:
            assert "while another call over the same process group" in outcome.error.text
        same, other, first, second = values(answer[:-2])
        assert same == first and other == second


def test_ranks_that_call_different_pipelines(crew: Crew) -> None:
    """Alike, they ran each its own, as if those were one."""
    answers = values(crew.run(traps.call_apart, ranks=[0, 1, 2]))
    for error in failures(answers, 0):
        assert error.rank == 1 and "rank 1 called the pipeline that is number" in error.text
        assert "all ranks must make their pipelines, and call them, in the same order" in error.text
    assert_good(answers, 1)
    assert_good(answers, 2)


@pytest.mark.parametrize("deed", ["kill", "stop"])
def test_the_rank_that_hosts_the_store(deed: str) -> None:
    schedule = schedules.one_f_one_b(ranks=3, microbatches=4)
    with Crew(3, host=0) as crew:
        crew.start(traps.fail_once, schedule, {0: (deed, 4)}, "step", {"timeout": 2.0})
        answers = [outcome.value for outcome in crew.collect(lost=[0])]
        for error in failures(answers, 0, within=2.0 + SOON):
            assert error.text.endswith(GONE)
            assert "rank 0" in error.text


class LostStore:
    """A store whose host has ended."""

    def __init__(self) -> None:
        self.asked = 0

    def set(self, key: str, value: str) -> None:
        self.asked += 1
        raise dist.DistNetworkError("Broken pipe")

    def get(self, key: str) -> bytes:
        raise AssertionError

    def check(self, keys: list[str]) -> bool:
        raise AssertionError

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise AssertionError


def test_a_lost_store_is_asked_no_more() -> None:
    """Of each question torch logs a page, and there were two a second until the script ended."""
    store = LostStore()
    watch = Watch(store, ["0", "1"], 0, 60.0, ring=lambda: None)
    try:
        for step in ("first", "second"):
            watch.begin(step)
            fault = watch.await_fault()
            assert fault is not None and fault.breaks
            assert "the process that hosts it (the launcher, or rank 0) has ended" in fault.text
            watch.end()
        asked = store.asked
        watch.beat()
        assert store.asked == asked
    finally:
        watch.close()


def test_a_rank_is_suspected_while_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has connected late may compile without a beat for longer than that."""
    monkeypatch.setattr("fpipe.execute.watch.BEAT", 0.1)
    monkeypatch.setattr("fpipe.execute.watch.DEAD", 0.5)
    store = dist.HashStore()
    store.set("beat/1", "1")
    watch = Watch(store, ["0", "1"], 0, 60.0, ring=lambda: None)
    try:
        watch.begin("step")
        assert not watch.gives_up(0.6)
        time.sleep(1.0)
        assert not watch.has_fault()
        start = time.monotonic()
        while not watch.gives_up(time.monotonic() - start):
            assert time.monotonic() - start < 30.0
            time.sleep(0.02)
        assert watch.fault is not None and watch.fault.rank == 1
        assert "rank 1 has ended or cannot be reached" in watch.fault.text
    finally:
        watch.close()


def step_in_a_fork(group: dist.ProcessGroup) -> tuple[str, int, list[Outcome]]:
    """What a step of a forked process raises, and a step of this one after that."""
    model, pipe = actors.recorded(group, "mlp", schedules.gpipe(ranks=2, microbatches=2), 6)

    def step() -> Any:
        return pipe.step(pipe.local(model.params), model.batch).loss

    first = attempt(step)
    reader, writer = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # of Python 3.12: there are threads
        child = os.fork()
    if child == 0:
        os.write(writer, str(attempt(step).failure).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(reader, 10_000).decode(), os.getpid(), [first, attempt(step)]


def test_a_forked_process_has_no_connections(crew: Crew) -> None:
    for said, process, (before, after) in values(crew.run(step_in_a_fork, ranks=range(2))):
        assert f"is a fork of {process}, which made the pipeline as rank" in said
        assert_identical(after.value, before.value)
