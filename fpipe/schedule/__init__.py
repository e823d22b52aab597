"""Schedules as values: pure Python, never imports torch."""

from fpipe.schedule.action import COMPUTE_OPS, WHOLE_STAGE_OPS, Action, Op
from fpipe.schedule.schedule import Schedule

__all__ = ["COMPUTE_OPS", "WHOLE_STAGE_OPS", "Action", "Op", "Schedule"]
