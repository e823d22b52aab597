"""Who drives the ranks of this process, by what a definition says.

definition ──► tracer, compiler, policies ──► workshop ──┐
     └──────────── schedule, lowering ───────────────────┴──► planner ──► controller
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fpipe.arguments.microbatch import split
from fpipe.arguments.parameters import Parameters, keep
from fpipe.controller.controller import Controller, Reader
from fpipe.controller.keys import read_key
from fpipe.controller.multi import MultiController
from fpipe.controller.single import SingleController
from fpipe.definition import Definition
from fpipe.planning.planner import Planner
from fpipe.runtime.connect import device_of
from fpipe.runtime.lower import lower
from fpipe.runtime.order import lower_for_group
from fpipe.stage.cutting.function import FunctionTracer
from fpipe.stage.pieces.compiler import Compiler
from fpipe.stage.pieces.remat import policies
from fpipe.stage.tracing.chain import ChainTracer
from fpipe.stage.workshop import Workshop


def workshop_of(definition: Definition) -> Workshop:
    """What makes the code of the stages.

    Of the schedule it depends on the number of stages, and on the device of each, alone.
    """
    both = policies(definition.remat, definition.schedule.num_stages)
    return Workshop(_tracer(definition), Compiler(definition.compile), both)


def controller_of(definition: Definition, workshop: Workshop) -> Controller:
    """Who drives the ranks of this process.

    Args:
        definition: of the pipeline.
        workshop: that of this definition, or of one that differs in what it does not depend on.
    """
    schedule, group = definition.schedule, definition.group
    planner = Planner(
        workshop=workshop,
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
    )

    def read(params: Any) -> Parameters:
        if definition.has_state:
            return Parameters.with_state(params, schedule.num_stages)
        if definition.function:
            return Parameters.whole(params, schedule.num_stages)
        if group is not None:
            # Parts of other ranks' stages are neither looked at nor kept.
            params = keep(params, schedule.stages_of(group.rank()))
        return Parameters.read(params, schedule.num_stages)

    reader = Reader(
        read,
        partial(split, in_dims=definition.in_dims, microbatches=schedule.num_microbatches),
        partial(read_key, wanted=definition.reads_key),
        definition.convention.common,
    )
    if group is None:
        return SingleController(planner, reader, definition)
    return MultiController(
        planner,
        reader,
        schedule,
        group,
        device=device_of(group),
        timeout=definition.timeout,
        setup=definition.setup,
    )


def _tracer(definition: Definition) -> ChainTracer | FunctionTracer:
    """What turns the user's functions into a chain of graphs."""
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
