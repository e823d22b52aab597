"""Who drives the ranks of this process, by what a definition says.

definition ──► tracer, compiler, policies ──► workshop ──┐
     └──────────── schedule, lowering ───────────────────┴──► planner ──► controller
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fpipe.definition import Definition
from fpipe.divide.function_tracer import FunctionTracer
from fpipe.execute.controller import Controller, Reader
from fpipe.execute.keys import read_key
from fpipe.execute.multi import MultiController
from fpipe.execute.single import SingleController
from fpipe.inputs.batch import split
from fpipe.inputs.params import Parameters, Updating, keep
from fpipe.pieces.compiler import Compiler
from fpipe.pieces.remat import policies
from fpipe.plan.planner import Planner
from fpipe.plan.workshop import Workshop
from fpipe.program.lower import lower
from fpipe.program.order import lower_for_group
from fpipe.trace.chain import ChainTracer
from fpipe.transport.connect import device_of


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
        data=definition.data,
    )

    def read(params: Any) -> Parameters:
        if isinstance(params, Updating):
            return replace(read(params.params), updating=params)
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
        partial(
            split,
            in_dims=definition.in_dims,
            microbatches=schedule.num_microbatches,
            may_lack_rows=definition.data is not None,
        ),
        partial(
            read_key,
            wanted=definition.reads_key,
            replica=None if definition.data is None else definition.data.replica,
        ),
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
        data=definition.data,
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
