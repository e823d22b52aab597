"""Ranks that fail in the midst of a step, and what they and the others tell of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, fx

import fpipe
from fpipe import Schedule, pytree
from fpipe.execute import watch
from fpipe.execute.fault import Fault
from fpipe.execute.watch import Watch
from fpipe.pieces.boxed import Boxed
from fpipe.transport.group import GroupTransport
from tests.distributed.actors import model_of, pipeline, recorded
from tests.distributed.crew import Outcome, attempt
from tests.models import Model


def boom() -> None:
    raise ValueError("boom 42")


def interrupt() -> None:
    raise KeyboardInterrupt


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def end() -> None:
    os._exit(0)


def leave() -> None:
    sys.exit(3)


def nap() -> None:
    time.sleep(2)


DEEDS: dict[str, Callable[[], None]] = {
    deed.__name__: deed for deed in (boom, interrupt, kill, stop, end, leave, nap)
}


class Trap:
    """A ``compile=`` whose kernels count their calls; one of them does a deed when it is armed.

    Attributes:
        calls: how many there were.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._left = -1
        self._deed: Callable[[], None] = boom

    def arm(self, deed: str, at: int) -> None:
        """Do the deed at the kernel call after `at` others."""
        self._deed, self._left = DEEDS[deed], at

    def disarm(self) -> None:
        """Let a deed that was not done be."""
        self._left = -1

    def __call__(self, module: fx.GraphModule, examples: Sequence[Tensor]) -> Boxed:
        def call(inputs: list[Tensor]) -> Sequence[Tensor]:
            self.calls += 1
            self._left -= 1
            if self._left == -1:
                self._deed()
            outputs: Sequence[Tensor] = module(*inputs)
            inputs.clear()
            return outputs

        return call


TRAP = Trap()
"""What many tests compile with: in a process those of one model share their kernels."""


def fail_once(
    group: dist.ProcessGroup,
    schedule: Schedule,
    traps: dict[int, tuple[str, int]],
    method: str = "step",
    options: dict[str, Any] | None = None,
) -> list[Outcome]:
    """A good call, one with a trap on some ranks, and another good one if that is possible.

    Returns:
        What came of the second and the third call; the value of the third is whether it returned
        what the first did.
    """
    rows = 2 * schedule.num_microbatches
    model, pipe = recorded(group, "mlp", schedule, rows, compile=TRAP, **(options or {}))
    params = pipe.local(model.params)

    def call() -> Any:
        return getattr(pipe, method)(params, model.batch)

    before = call()
    if group.rank() in traps:
        TRAP.arm(*traps[group.rank()])
    failed = attempt(call)
    failed.value = None  # where the trap lets the step end
    TRAP.disarm()  # where another rank's ended it before
    return [failed, attempt(lambda: same(call(), before))]


def compute_until_told(group: dist.ProcessGroup, victim: int, at: int) -> tuple[Outcome, int]:
    """A step of GPipe in which a rank fails; returns what came of it, and how many kernels ran."""
    schedule = fpipe.schedules.gpipe(ranks=group.size(), microbatches=2)
    model, pipe = recorded(group, "mlp", schedule, 4, compile=TRAP)
    params = pipe.local(model.params)
    pipe.step(params, model.batch)
    before = TRAP.calls
    if group.rank() == victim:
        TRAP.arm("boom", at)
    return attempt(pipe.step, params, model.batch), TRAP.calls - before


def same(ours: Any, theirs: Any) -> bool:
    """Whether two results have the same bits."""
    pairs = zip(pytree.flatten(ours)[0], pytree.flatten(theirs)[0], strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def go_on_without(group: dist.ProcessGroup, lost: int, deed: str, at: int) -> list[Outcome]:
    """Lose a rank in the midst of a step, then go on in a new group of the others.

    Returns:
        What came of the step, of another, and of one of a new pipeline in the new group: its loss.
    """
    schedule = fpipe.schedules.zb_h1(ranks=group.size(), microbatches=4)
    outcomes = fail_once(group, schedule, {lost: (deed, at)})
    rest = [rank for rank in range(group.size()) if rank != lost]
    smaller = dist.new_group(rest, use_local_synchronization=True)

    def again() -> Tensor:
        model = model_of("mlp", len(rest), 8)
        pipe = pipeline(smaller, model, fpipe.schedules.gpipe(ranks=len(rest), microbatches=4))
        return pipe.step(pipe.local(model.params), model.batch).loss

    return [*outcomes, attempt(again)]


def raise_after_sending(group: dist.ProcessGroup, schedule: Schedule, victim: int) -> list[Outcome]:
    """What the handler of a signal raises comes between a message and the next instruction."""
    model = model_of("mlp", schedule.num_stages, 2 * schedule.num_microbatches)
    pipe = pipeline(group, model, schedule)
    params = pipe.local(model.params)
    send = GroupTransport.send

    def send_and_raise(*arguments: Any) -> None:
        send(*arguments)
        boom()

    def call() -> Tensor:
        return pipe.step(params, model.batch).loss

    call()
    with patch.object(GroupTransport, "send", send_and_raise if group.rank() == victim else send):
        failed = attempt(call)
    return [failed, attempt(call)]


def call_apart(group: dist.ProcessGroup) -> list[Outcome]:
    """Two pipelines of one kind, of which one rank calls another; then all call the same."""
    schedule = fpipe.schedules.one_f_one_b(ranks=group.size(), microbatches=2)
    both = [recorded(group, "mlp", schedule, 4) for _ in range(2)]
    model, pipes = both[0][0], [pipe for _, pipe in both]
    params = pipes[0].local(model.params)

    def call(index: int) -> Tensor:
        return pipes[index].step(params, model.batch).loss

    call(0), call(1)
    mixed = attempt(call, int(group.rank() == 1))
    return [mixed, attempt(call, 0), attempt(call, 1)]


def call_meanwhile(group: dist.ProcessGroup) -> list[Outcome]:
    """A call within a call, in another thread: of the same pipeline, and of one over its group."""
    schedule = fpipe.schedules.one_f_one_b(ranks=group.size(), microbatches=2)
    both = [recorded(group, "mlp", schedule, 4, compile=TRAP) for _ in range(2)]
    model, pipes = both[0][0], [pipe for _, pipe in both]
    params = pipes[0].local(model.params)

    def call(index: int) -> Tensor:
        return pipes[index].step(params, model.batch).loss

    found = [attempt(call, 0), attempt(call, 1)]

    def meanwhile() -> None:
        for index in (0, 1):
            thread = threading.Thread(target=lambda i=index: found.append(attempt(call, i)))
            thread.start()
            thread.join()

    with patch.dict(DEEDS, meanwhile=meanwhile):
        TRAP.arm("meanwhile", 1)
        return [attempt(call, 0), attempt(call, 1), *found]


def fail_early(
    group: dist.ProcessGroup, victim: int, where: str, deed: str, timeout: float
) -> list[Outcome]:
    """Do a deed while a stage is traced or compiled, at the first two calls; the third is good."""
    schedule = fpipe.schedules.one_f_one_b(ranks=group.size(), microbatches=2)
    model = model_of("mlp", schedule.num_stages, 4)
    bad = group.rank() == victim

    def layer(p: Any, x: Tensor) -> Tensor:
        if bad and where == "trace":
            DEEDS[deed]()
        return torch.tanh(x @ p["w"] + p["b"])

    def compile(module: fx.GraphModule, examples: Sequence[Tensor]) -> Boxed:
        nonlocal bad
        if bad and where == "compile":
            bad = deed != "nap"  # one is long enough
            DEEDS[deed]()
        return Trap()(module, examples)

    model = model._replace(stages=[*model.stages[:-1], layer])
    pipe = pipeline(group, model, schedule, compile=compile, timeout=timeout)

    def call() -> Tensor:
        return pipe.step(pipe.local(model.params), model.batch).loss

    outcomes = [attempt(call), attempt(call)]
    bad = False
    return [*outcomes, attempt(call)]


def fail_connecting(group: dist.ProcessGroup, victim: int) -> list[Outcome]:
    """A rank is killed when all have agreed on a first plan and make the channels for it."""
    schedule = fpipe.schedules.one_f_one_b(ranks=group.size(), microbatches=2)
    model = model_of("mlp", schedule.num_stages, 4)

    def open_or_die(transport: GroupTransport, programs: Any) -> None:
        if group.rank() == victim:
            kill()
        make_channels(transport, programs)

    make_channels = GroupTransport.open
    with patch.object(GroupTransport, "open", open_or_die):
        pipe = pipeline(group, model, schedule)
        params = pipe.local(model.params)
        return [attempt(pipe.step, params, model.batch) for _ in range(2)]


def end_when_told(group: dist.ProcessGroup, victim: int) -> Outcome:
    """A rank is killed; rank 0, which hosts the store, ends when it knows; rank 2 learns late."""
    schedule = fpipe.schedules.one_f_one_b(ranks=group.size(), microbatches=2)
    model = model_of("mlp", schedule.num_stages, 4)
    trap = Trap()
    pipe = pipeline(group, model, schedule, compile=trap)
    params = pipe.local(model.params)
    pipe.step(params, model.batch)
    if group.rank() == victim:
        trap.arm("kill", 1)
    look = Watch._look

    def look_late(own: Watch, topic: str) -> Fault | None:
        time.sleep(watch.DEAD / 2 * (group.rank() == 2))
        return look(own, topic)

    with patch.object(Watch, "_look", look_late):
        outcome = attempt(pipe.step, params, model.batch)
    if group.rank() == 0:
        end()
    return outcome


# ── ranks that do not agree ─────────────────────────────────────────────────────────────────────


class Setting(NamedTuple):
    """Everything that a rank may do otherwise than the others."""

    schedule: Schedule
    model: Model
    options: dict[str, Any]
    method: str = "step"
    autocast: bool = False


def usual() -> Setting:
    schedule = fpipe.schedules.one_f_one_b(ranks=3, microbatches=2)
    return Setting(schedule, model_of("mlp", 3, 4), {})


def other_stage(p: Any, x: Tensor) -> Tensor:
    return torch.sin(x @ p["w"] + p["b"])


def other_loss(y: Tensor, batch: Any) -> Tensor:
    return (y - batch["y"]).abs().mean()


def with_batch(s: Setting, batch: Any) -> Setting:
    return s._replace(model=s.model._replace(batch=batch))


def with_params(s: Setting, params: Any) -> Setting:
    return s._replace(model=s.model._replace(params=params))


BUILT_OTHERWISE: dict[str, Callable[[Setting], Setting]] = {
    "schedule": lambda s: s._replace(schedule=fpipe.schedules.gpipe(ranks=3, microbatches=2)),
    "microbatches": lambda s: s._replace(
        schedule=fpipe.schedules.one_f_one_b(ranks=3, microbatches=4)
    ),
    "stages": lambda s: s._replace(
        model=s.model._replace(stages=[*s.model.stages[:2], other_stage])
    ),
    "loss": lambda s: s._replace(model=s.model._replace(loss=other_loss)),
    "remat": lambda s: s._replace(options={"remat": "full"}),
    "reduction": lambda s: s._replace(options={"reduction": "sum"}),
    "accum_dtype": lambda s: s._replace(options={"accum_dtype": torch.float32}),
    "in_dims": lambda s: s._replace(options={"in_dims": {"x": 0, "y": 0}}),
}

CALLED_OTHERWISE: dict[str, Callable[[Setting], Setting]] = {
    "method": lambda s: s._replace(method="value"),
    "rows": lambda s: with_batch(s, model_of("mlp", 3, 6).batch),
    "dtype": lambda s: with_batch(s, {k: v.float() for k, v in s.model.batch.items()}),
    "leaves": lambda s: with_batch(s, {**s.model.batch, "more": torch.ones(4)}),
    "order": lambda s: with_batch(s, dict(reversed(s.model.batch.items()))),
    "structure": lambda s: with_batch(s, [s.model.batch["x"], s.model.batch["y"]]),
    "local type": lambda s: with_batch(s, local_batch()),
    "too few rows": lambda s: with_batch(s, {k: v[:1] for k, v in s.model.batch.items()}),
    "no tensor": lambda s: with_batch(s, {**s.model.batch, "x": "text"}),
    "params": lambda s: with_params(s, s.model.params[:2]),
    "params' shape": lambda s: with_params(s, [{"w": torch.ones(5, 7), "b": torch.ones(2)}] * 3),
    "autocast": lambda s: s._replace(autocast=True),
}


def local_batch() -> Any:
    """A batch of a type that no other process can import."""

    class LocalBatch(NamedTuple):
        x: Tensor

    return LocalBatch(torch.ones(4, 3))


def disagree(group: dist.ProcessGroup, how: str, odd: int) -> list[Outcome]:
    """Rank `odd` builds its pipeline otherwise than the others, or calls it so.

    Returns:
        What came of that call, and of one in which no rank calls its pipeline otherwise.
    """
    good = built = called = usual()
    if group.rank() == odd and how in BUILT_OTHERWISE:
        good = built = called = BUILT_OTHERWISE[how](good)
    elif group.rank() == odd:
        called = CALLED_OTHERWISE[how](good)
    if how in BUILT_OTHERWISE and group.rank() == odd:
        pipe = pipeline(group, built.model, built.schedule, **built.options)
    else:
        _, pipe = recorded(group, "mlp", built.schedule, 4)

    def call(setting: Setting) -> Any:
        with torch.autocast("cpu", enabled=setting.autocast):
            model = setting.model
            return getattr(pipe, setting.method)(model.params, model.batch).loss

    return [attempt(call, called), attempt(call, good)]


def without_batch(group: dist.ProcessGroup, given: Sequence[int]) -> list[Outcome]:
    """Only the ranks in `given` pass the batch; then all of them do."""
    model, pipe = recorded(group, "mlp", usual().schedule, 4)
    batch = model.batch if group.rank() in given else None
    params = pipe.local(model.params)
    return [attempt(lambda given: pipe.step(params, given).loss, b) for b in (batch, model.batch)]


PREPARED: list[Callable[[], Any]] = []
"""The step that `prepare` has left."""


def prepare(group: dist.ProcessGroup, schedule: Schedule, timeout: float) -> None:
    """Make a pipeline and run a step, for `step_until_it_fails`."""
    model = model_of("mlp", schedule.num_stages, 2 * schedule.num_microbatches)
    pipe = pipeline(group, model, schedule, timeout=timeout)
    params = pipe.local(model.params)
    before = pipe.step(params, model.batch)
    PREPARED[:] = [lambda: same(pipe.step(params, model.batch), before)]


def step_until_it_fails(group: dist.ProcessGroup) -> tuple[int, float, list[Outcome]]:
    """Steps without end, for a test that kills or stops a rank at any time.

    Returns:
        How many steps were right, when the next one failed on the machine's clock, and what came of
        it and of one more.
    """
    steps = 0
    while (outcome := attempt(PREPARED[0])).value:
        steps += 1
    return steps, time.monotonic(), [outcome, attempt(PREPARED[0])]


def interrupt_the_waiting(group: dist.ProcessGroup, seconds: float) -> list[Outcome]:
    """Rank 0 is interrupted while it waits for rank 1, which comes after so many seconds."""
    model = model_of("mlp", 2, 4)
    pipe = pipeline(group, model, fpipe.schedules.gpipe(ranks=2, microbatches=2))
    params = pipe.local(model.params)
    pipe.step(params, model.batch)
    if group.rank():
        time.sleep(seconds)
    else:
        # A shell's background jobs, and all that they start, ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    # Another over the same group shares its connections.
    other = pipe.with_schedule(fpipe.schedules.one_f_one_b(ranks=2, microbatches=2))
    failed = [attempt(own.step, params, model.batch) for own in (pipe, pipe, other)]
    return [*failed, attempt(lambda: pipe.with_schedule(pipe.schedule))]


def interrupt_one_of_two(group: dist.ProcessGroup) -> list[Outcome]:
    """Rank 0 is interrupted in one pipeline over a group, before rank 1 calls another."""
    model = model_of("mlp", 2, 4)
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=2)
    first, second = (pipeline(group, model, schedule) for _ in range(2))
    params = first.local(model.params)
    for pipe in (first, second):
        pipe.step(params, model.batch)
    if group.rank():
        time.sleep(1.5)
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    return [attempt((second if group.rank() else first).step, params, model.batch)]
