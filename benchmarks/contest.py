"""fpipe and torch.distributed.pipelining on the same ranks, stages and numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

import fpipe
from fpipe.program.program import Compute, Recv, Send, WaitRecv, WaitSend
from fpipe.transport.group import GroupTransport

CPU: Final = torch.device("cpu")

# What both libraries call a schedule, and how many stages it puts on each rank.
SHARED: Final = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}

StageFn = Callable[[Any, Any], Tensor]
"""A stage: ``(params, x) -> y``."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""The mean loss of some rows: ``(y, target) -> scalar``."""


@dataclass(frozen=True)
class Problem:
    """A chain of stages and a batch, the same for everyone.

    Attributes:
        functions: of each stage.
        params: of each stage, on every rank.
        loss: of the last stage's output and the targets.
        inputs: of the first stage; rows first.
        targets: rows first.
    """

    functions: Sequence[StageFn]
    params: Sequence[Any]
    loss: Loss
    inputs: Tensor
    targets: Tensor


class Outcome(NamedTuple):
    """What a rank has after a step.

    Attributes:
        loss: of the batch; None on a rank that is not told.
        grads: of its own stages, leaf by leaf.
    """

    loss: Tensor | None
    grads: list[Tensor]


class Case(NamedTuple):
    """One way to take a step.

    Attributes:
        run: what is timed.
        read: the outcome, from what `run` returned.
        clear: lets go of the last outcome, where `run` does not return it.
        planned: bytes that a rank holds in a step at most, known without running one.
        pipe: what runs, where it is fpipe's.
    """

    run: Callable[[], Any]
    read: Callable[[Any], Outcome]
    clear: Callable[[], object] = lambda: None
    planned: Callable[[], int] | None = None
    pipe: fpipe.Pipeline | None = None


def schedule_of(name: str, ranks: int, microbatches: int) -> fpipe.Schedule:
    """The schedule that both run under this name."""
    return fpipe.schedules.get(
        name, ranks=ranks, microbatches=microbatches, stages_per_rank=SHARED.get(name)
    )


# ── no pipeline ─────────────────────────────────────────────────────────────────────────────────


def trainable(params: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
    """The same parameters for autograd, as trees and as a flat list of leaves."""
    tree: Any = list(params)
    flat, spec = optree.tree_flatten(tree)
    leaves = [leaf.detach().requires_grad_() for leaf in flat]
    return list(optree.tree_unflatten(spec, leaves)), leaves


def reference(problem: Problem) -> tuple[Tensor, list[list[Tensor]]]:
    """Loss and gradients of each stage by plain autograd, on the whole batch at once."""
    params, _ = trainable(problem.params)
    x: Any = problem.inputs
    for function, own in zip(problem.functions, params, strict=True):
        x = function(own, x)
    loss = problem.loss(x, problem.targets)
    loss.backward()
    grads = [[leaf.grad for leaf in optree.tree_leaves(own)] for own in params]
    return loss.detach(), grads


def check(problem: Problem, stages: Sequence[int], cases: Mapping[str, Case]) -> None:
    """All compute the same, twice in a row, or the comparison means nothing.

    Args:
        problem: what they compute.
        stages: those of this rank.
        cases: all ways to take a step.
    """
    loss, grads = reference(problem)
    expected = [grad for stage in stages for grad in grads[stage]]
    for name, case in cases.items():
        for _ in range(2):
            outcome = case.read(case.run())
            if outcome.loss is not None:
                torch.testing.assert_close(outcome.loss, loss, msg=f"the loss of {name} differs")
            for mine, theirs in zip(outcome.grads, expected, strict=True):
                difference = float((mine - theirs).norm() / theirs.norm())
                assert difference < 1e-4, f"a gradient of {name} differs by {difference:.1e}"


# ── fpipe ───────────────────────────────────────────────────────────────────────────────────────


def stages_and_loss(
    problem: Problem,
) -> tuple[list[StageFn], Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]]:
    """The problem as functions of a batch ``(inputs, targets)``."""

    def first(params: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return problem.functions[0](params, batch[0])

    def loss(y: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return problem.loss(y, batch[1])

    return [first, *problem.functions[1:]], loss


def fpipe_pipeline(
    problem: Problem, schedule: fpipe.Schedule, compile: bool, *, alone: bool = False
) -> Case:
    """A step of a pipeline over all ranks, or in this process alone."""
    stages, loss = stages_and_loss(problem)
    group = None if alone else dist.group.WORLD
    pipe = fpipe.pipeline(stages, loss, schedule, compile=compile, group=group)
    params, batch = pipe.local(problem.params), (problem.inputs, problem.targets)
    return Case(
        run=lambda: pipe.step(params, batch),
        read=lambda step: Outcome(step.loss, optree.tree_leaves(step.grads)),
        planned=lambda: max(program.peak_bytes for program in pipe.programs(params, batch)),
        pipe=pipe,
    )


def messages_alone(
    problem: Problem,
    schedule: fpipe.Schedule,
    instead: Callable[[fpipe.Action], object] = lambda action: None,
) -> Callable[[], None]:
    """The messages of a step in their order, with `instead` in place of each compute action.

    What a step takes beyond it is the library's; what it takes itself is gloo's and the machine's.
    """
    pipe: Any = fpipe_pipeline(problem, schedule, compile=False).pipe
    batch = (problem.inputs, problem.targets)
    program = pipe.programs(pipe.local(problem.params), batch)[dist.get_rank()]
    transport: GroupTransport = pipe._engine._controller._transports[0]
    blanks = {
        i.message: [torch.zeros(spec.shape, dtype=spec.dtype) for spec in i.message.specs]
        for i in program.instructions
        if isinstance(i, Send)
    }

    def run() -> None:
        for instruction in program.instructions:
            match instruction:
                case Compute(action=action):
                    instead(action)
                case Recv(message):
                    transport.post(message)
                case WaitRecv(message):
                    transport.receive(message)
                case Send(message):
                    transport.send(message, blanks[message])
                case WaitSend(message):
                    transport.wait_sent(message)

    return run


# ── torch.distributed.pipelining ────────────────────────────────────────────────────────────────


class StageModule(nn.Module):
    """A stage function as a module, whose parameters share the memory of the given ones."""

    def __init__(self, function: StageFn, params: Any) -> None:
        super().__init__()
        leaves, spec = optree.tree_flatten(params)
        self.leaves = nn.ParameterList(nn.Parameter(leaf) for leaf in leaves)
        # In a list, where nn.Module does not look for parameters once more.
        self._params = [optree.tree_unflatten(spec, list(self.leaves))]
        self._function = function

    def forward(self, x: Any) -> Tensor:
        return self._function(self._params[0], x)


def torch_pipeline(
    problem: Problem,
    name: str,
    schedule: fpipe.Schedule,
    compile: bool,
    backend: str = "inductor",
) -> Case:
    """A step of torch's schedule `name` on the placement of `schedule`.

    Args:
        problem: what is computed.
        name: of a schedule of `SHARED`.
        schedule: the same as a value.
        compile: whether the stages are compiled.
        backend: of `torch.compile`.

    Raises:
        RuntimeError: the schedule does not take compiled stages.
    """
    rank, microbatches = dist.get_rank(), schedule.num_microbatches
    own = schedule.stages_of(rank)
    modules = nn.ModuleList(
        StageModule(problem.functions[stage], problem.params[stage]) for stage in own
    )
    stages = [
        PipelineStage(
            # torch.compile of a module returns a module, which its signature does not say.
            torch.compile(module, backend=backend) if compile else module,  # type: ignore[arg-type]
            stage,
            schedule.num_stages,
            CPU,
        )
        for stage, module in zip(own, modules, strict=True)
    ]
    make: Any = get_schedule_class(name)
    single = issubclass(make, PipelineScheduleSingle)
    runner = make(stages[0] if single else stages, microbatches, loss_fn=problem.loss)
    inputs = (problem.inputs,) if 0 in own else ()
    targets = problem.targets if schedule.num_stages - 1 in own else None

    def run() -> list[Tensor]:
        losses: list[Tensor] = []
        modules.zero_grad(set_to_none=True)
        # Merged outputs would cost it time and memory that nobody asked for.
        runner.step(*inputs, target=targets, losses=losses, return_outputs=False)
        return losses

    def read(losses: list[Tensor]) -> Outcome:
        loss = torch.stack(losses).mean().detach() if losses else None
        grads = [parameter.grad for parameter in modules.parameters()]
        assert all(grad is not None for grad in grads)
        return Outcome(loss, [grad for grad in grads if grad is not None])

    return Case(run, read, clear=modules.zero_grad)
