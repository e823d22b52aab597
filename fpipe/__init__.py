"""fpipe: a pipeline-parallel training step as a pure function.

``loss, grads = fpipe.step(params, batch)``
"""

from fpipe import schedules
from fpipe.errors import BatchError, FpipeError, PipelineError, ScheduleError, StageError
from fpipe.schedule import Action, Op, Schedule
from fpipe.schedule.bound import lower_bound
from fpipe.schedule.cost import Cost
from fpipe.schedule.simulator import simulate
from fpipe.schedule.timeline import Timeline
from fpipe.schedule.verifier import verify

__all__ = [
    "Action",
    "BatchError",
    "Cost",
    "FpipeError",
    "Op",
    "PipelineError",
    "Schedule",
    "ScheduleError",
    "StageError",
    "Timeline",
    "lower_bound",
    "schedules",
    "simulate",
    "verify",
]
