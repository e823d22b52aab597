"""The controller that drives the ranks of this process, chosen by the definition.

definition ──► tracer, compiler, policies ──► stage_compiler ──┐
     └──────────── schedule, lowering ───────────────────┴──► planner ──► controller
"""

from __future__ import annotations

from functools import partial

from fpipe.divide.function_tracer import FunctionTracer
from fpipe.execute.multi import MultiController
from fpipe.execute.requests import Controller, Reader
from fpipe.execute.single import SingleController
from fpipe.pieces.compiler import Compiler
from fpipe.pieces.partition import policies
from fpipe.plan.planner import Planner
from fpipe.plan.stage_compiler import StageCompiler
from fpipe.program.lower import lower
from fpipe.program.order import lower_for_group
from fpipe.spec.definition import Definition
from fpipe.trace.chain import ChainTracer


def stage_compiler_of(definition: Definition) -> StageCompiler:
    """The compiler of the stages of a definition.

    It depends on no more of the schedule than the number of stages and the device of each.
    """
    both = policies(definition.remat, definition.schedule.num_stages)
    return StageCompiler(_tracer(definition), Compiler(definition.compile), both)


def controller_of(
    definition: Definition, reader: Reader, stage_compiler: StageCompiler
) -> Controller:
    """The controller that drives the ranks of this process.

    Args:
        definition: of the pipeline.
        reader: reads the parameters and batches of calls.
        stage_compiler: of this definition, or of one that differs in what it does not depend on.
    """
    schedule, group = definition.schedule, definition.group
    planner = Planner(
        stage_compiler=stage_compiler,
        schedule=schedule,
        mean=definition.reduction == "mean",
        cotangent=definition.loss_cotangent,
        lower=partial(
            lower if group is None else partial(lower_for_group, rank=group.rank()),
            tied=definition.function,
            sink=definition.sink,
        ),
        sink=definition.sink,
        modes=definition.modes,
        data=definition.data,
        offload=definition.offload,
        rank=None if group is None else group.rank(),
        in_dims=definition.in_dims,
    )

    if definition.group is None:
        return SingleController(planner, reader, definition)
    return MultiController(planner, reader, definition, definition.group)


def _tracer(definition: Definition) -> ChainTracer | FunctionTracer:
    """The tracer that turns the user's functions into a chain of graphs."""
    if definition.function:
        return FunctionTracer(
            definition.loss,
            definition.schedule.num_stages,
            definition.objective,
            has_key=definition.has_key,
            keyed=definition.keyed,
            devices=definition.stage_devices,
        )
    return ChainTracer(
        definition.stages,
        definition.loss,
        definition.objective,
        devices=definition.stage_devices,
    )
