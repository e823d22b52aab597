"""`fpipe.use` and the function `fpipe.step`; one pipeline in several threads."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fpipe
from fpipe import FpipeError
from tests.models import assert_identical, boxed, mlp, plain_pipeline

MODEL = mlp(2, 4)
MEAN = plain_pipeline(MODEL.stages)
DOUBLE = plain_pipeline(MODEL.stages, lambda y, batch: 2 * MODEL.loss(y, batch))
ONE = MEAN.step(MODEL.params, MODEL.batch)
TWO = DOUBLE.step(MODEL.params, MODEL.batch)


def step() -> fpipe.Step:
    return fpipe.step(MODEL.params, MODEL.batch)


def test_step_is_the_pipelines_own() -> None:
    assert_identical(fpipe.step(MODEL.params, MODEL.batch, pipe=MEAN), ONE)
    with fpipe.use(MEAN) as pipe:
        assert pipe is MEAN
        assert_identical(step(), ONE)


def test_an_argument_goes_before_use() -> None:
    with fpipe.use(MEAN):
        assert_identical(fpipe.step(MODEL.params, MODEL.batch, pipe=DOUBLE), TWO)


def test_use_nests() -> None:
    with fpipe.use(MEAN):
        with fpipe.use(DOUBLE):
            assert_identical(step(), TWO)
        assert_identical(step(), ONE)
    with pytest.raises(FpipeError, match="needs a pipeline"):
        step()


def test_one_use_may_be_entered_again() -> None:
    use = fpipe.use(MEAN)
    with use, fpipe.use(DOUBLE), use:
        assert_identical(step(), ONE)


def test_use_ends_with_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), fpipe.use(MEAN):
        raise ZeroDivisionError
    with pytest.raises(FpipeError, match="needs a pipeline"):
        step()


def in_a_thread(function: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_use_holds_for_its_own_thread() -> None:
    def inside() -> fpipe.Step:
        with fpipe.use(DOUBLE):
            return step()

    with fpipe.use(MEAN):
        with pytest.raises(FpipeError, match="needs a pipeline"):
            in_a_thread(step)
        assert_identical(in_a_thread(inside), TWO)
        assert_identical(step(), ONE)


def calling(meanwhile: Callable[[], object]) -> fpipe.Pipeline:
    """A pipeline whose one stage calls a function whenever it runs."""

    return fpipe.pipeline(
        [lambda w, x: x * w],
        lambda y, _: y.mean(),
        fpipe.schedules.gpipe(ranks=1, microbatches=1),
        compile=lambda graph, _: boxed(graph, meanwhile),
    )


def test_threads_are_in_a_pipeline_at_one_time() -> None:
    both = threading.Barrier(2)
    pipe = calling(lambda: both.wait(30))
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(pipe.value, [torch.tensor(w)], torch.ones(4)) for w in (2.0, 3.0)]
        assert [call.result().item() for call in calls] == [2, 3]


def test_a_signal_may_call_the_pipeline_that_it_interrupts() -> None:
    """It waited for ever for the step that had been interrupted, in its own thread, to end."""
    signals, found = [signal.SIGUSR1], []

    def interrupt() -> None:
        if signals:
            signal.raise_signal(signals.pop())

    pipe = calling(interrupt)

    def evaluate(*_: object) -> None:
        found.append(pipe.value([torch.tensor(3.0)], torch.ones(4)).item())

    before = signal.signal(signal.SIGUSR1, evaluate)
    try:
        assert pipe.value([torch.tensor(2.0)], torch.ones(4)) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [3]


def test_threads_may_share_a_pipeline() -> None:
    start = threading.Barrier(4)
    pipe = plain_pipeline(MODEL.stages, microbatches=4)
    scales = [1.0, 2.0, 3.0, 4.0]
    params = [[{k: v * s for k, v in part.items()} for part in MODEL.params] for s in scales]

    def work(index: int) -> list[fpipe.Step]:
        torch.set_num_threads(1)
        start.wait()
        return [pipe.step(params[index], MODEL.batch) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))
    for index, steps in enumerate(found):
        expected = pipe.step(params[index], MODEL.batch)
        for one in steps:
            assert_identical(one, expected)
