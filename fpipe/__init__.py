"""fpipe: a pipeline-parallel training step as a pure function.

``loss, grads = fpipe.step(params, batch)``
"""

from fpipe import schedules
from fpipe.errors import BatchError, FpipeError, PipelineError, ScheduleError, StageError
from fpipe.schedule import Action, Op, Schedule
from fpipe.schedule.verifier import verify

__all__ = [
    "Action",
    "BatchError",
    "FpipeError",
    "Op",
    "PipelineError",
    "Schedule",
    "ScheduleError",
    "StageError",
    "schedules",
    "verify",
]
