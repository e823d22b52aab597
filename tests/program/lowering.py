"""Lower small models by hand, and drive their programs on a transport of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fpipe import Schedule
from fpipe.inputs.params import Parameters
from fpipe.inputs.signature import TreeShape
from fpipe.inputs.split_batch import SplitBatch, split
from fpipe.pieces.boxed import Boxed
from fpipe.pieces.compiler import Compiler
from fpipe.pieces.partition import Policy, save_all
from fpipe.plan.codes import StageCode, codes_of_stages, live_leaves
from fpipe.program.communication_plan import DIRECT, Windows
from fpipe.program.interpreter import Run
from fpipe.program.lower import lower
from fpipe.program.program import Compute, Message, Program
from fpipe.spec.objective import Objective
from fpipe.spec.user_functions import Stage
from fpipe.trace.chain import ChainTracer
from tests.models import Model


def codes_of(model: Model, microbatches: int, policy: Policy = save_all) -> tuple[StageCode, ...]:
    """The code of each stage, for microbatches of one size."""
    params, parts = read(model, microbatches)
    shapes = tuple(TreeShape.of(*part) for part in zip(params.specs, params.stages, strict=True))
    microbatch = TreeShape.of(parts.spec, parts.leaves[0])
    return _codes(tuple(model.stages), model.loss, shapes, microbatch, policy)


@cache
def _codes(
    stages: tuple[Callable[..., Any], ...],
    loss: Callable[[Any, Any], Tensor],
    shapes: tuple[TreeShape, ...],
    microbatch: TreeShape,
    policy: Policy,
) -> tuple[StageCode, ...]:
    tracer = ChainTracer([Stage(stage) for stage in stages], loss, Objective())
    chain = tracer(shapes, microbatch, "step")
    return codes_of_stages(chain, live_leaves([chain]), [policy] * len(stages), Compiler(False))


def read(model: Model, microbatches: int) -> tuple[Parameters, SplitBatch]:
    return Parameters.read(model.params, len(model.stages)), split(model.batch, 0, microbatches)


def lowered(
    model: Model, schedule: Schedule, windows: Windows = DIRECT, policy: Policy = save_all
) -> tuple[Program, ...]:
    codes = codes_of(model, schedule.num_microbatches, policy)
    return lower(schedule, lambda stage, microbatch: codes[stage], windows)


class Mailbox:
    """A transport in memory that writes down what is asked of it."""

    def __init__(self, mail: dict[Message, Sequence[Tensor]] | None = None) -> None:
        self.posted: list[Message] = []
        self.sent: list[Message] = []
        self.waited: list[Message] = []
        self._mail = {} if mail is None else mail

    def attach(self, run: Run) -> None:
        """Told which run it serves."""

    def post(self, message: Message) -> None:
        self.posted.append(message)

    def send(self, message: Message, values: Sequence[Tensor]) -> None:
        self.sent.append(message)
        self._mail[message] = values

    def wait_sent(self, message: Message) -> None:
        self.waited.append(message)

    def receive(self, message: Message) -> Sequence[Tensor] | None:
        return self._mail.pop(message, None)


Around = Callable[[int, Boxed, list[Tensor]], Sequence[Tensor]]
"""Calls a kernel of a rank with its inputs."""


def drive(
    programs: Sequence[Program],
    model: Model,
    transports: Sequence[Mailbox],
    around: Around = lambda rank, call, inputs: call(inputs),
) -> list[Run]:
    """Run all programs to their end, each on its own transport."""
    microbatches = 1 + max(index for p in programs for index, _, _ in p.results.outputs)
    params, parts = read(model, microbatches)
    seed = torch.tensor(1 / microbatches, dtype=params.stages[0][0].dtype)
    runs = []
    for program in programs:
        run = Run(_wrapped(program, around))
        bindings = program.bindings
        for stage, leaf, slot in bindings.params:
            run.slots[slot] = params.stages[stage][leaf]
        for microbatch, leaf, slot in bindings.batch:
            run.slots[slot] = parts.leaves[microbatch][leaf]
        for constant, slot in bindings.constants:
            run.slots[slot] = constant
        for _, slot in bindings.seeds:
            run.slots[slot] = seed
        runs.append(run)
        transports[program.rank].attach(run)
    waiting = list(zip(runs, transports, strict=True))
    while waiting:
        before = [run.next for run, _ in waiting]
        waiting = [(run, transport) for run, transport in waiting if not run.advance(transport)]
        assert not waiting or [run.next for run, _ in waiting] != before, "no rank can go on"
    return runs


def _wrapped(program: Program, around: Around) -> Program:
    instructions = tuple(
        i._replace(call=partial(around, program.rank, i.call)) if isinstance(i, Compute) else i
        for i in program.instructions
    )
    return replace(program, instructions=instructions)
