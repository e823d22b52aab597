"""fpipe: a pipeline-parallel training step as a pure function.

A pipeline is made of functions, one for each stage, and of a schedule::

    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=8)
    pipe = fpipe.pipeline([encode, decode], loss, schedule)
    value, grads = pipe.step(params, batch)

To make one: `pipeline` (of stages, or of one function with `cut`), `Stage`, `from_module`,
`balance`, `load_buffers`.
To train with one: `train`.
To run one: `step`, `use`, `global_norm`, `clip_by_global_norm`, `Microbatches`, `random`, `nn`,
`reductions`, `losses`.
To transform one: `vmap`, `grad`, `per_example_grads`, `per_example_norms`, `jvp`, `vjp`, `hvp`,
`ggnvp`. Schedules: `schedules`, `Schedule`, `Action`, `Op`, `verify`, `Cost`, `Jitter`, `simulate`,
`search`, `lower_bound`, `profile`, `record`, `Timeline`. `progress` shows long work.
"""

from typing import TYPE_CHECKING, Any

from fpipe import schedules
from fpipe.errors import BatchError, FpipeError, PipelineError, ScheduleError, StageError
from fpipe.live_line import progress
from fpipe.program.step_timelines import record
from fpipe.schedule import Action, Op, Schedule
from fpipe.schedule.bounds.makespan import lower_bound
from fpipe.schedule.cost import Cost
from fpipe.schedule.searching.finder import search
from fpipe.schedule.searching.result import SearchResult
from fpipe.schedule.simulation.jitter import Jitter
from fpipe.schedule.simulator import simulate
from fpipe.schedule.timeline import Timeline
from fpipe.schedule.verifier import verify
from fpipe.version import __version__ as __version__

if TYPE_CHECKING:
    from fpipe import losses, nn, random, reductions
    from fpipe.divide.cuts import cut
    from fpipe.entry import pipeline
    from fpipe.microbatches import Microbatches
    from fpipe.modules.balancing import balance
    from fpipe.modules.module_buffers import load_buffers
    from fpipe.modules.module_entry import from_module
    from fpipe.modules.module_pipeline import ModulePipeline
    from fpipe.modules.stage_shares import Balance
    from fpipe.pipelines import Pipeline, step, use
    from fpipe.profiling import profile
    from fpipe.spec.results import ForwardAux, Step, StepAux, StepState, StepStateAux
    from fpipe.spec.user_functions import Stage
    from fpipe.training.train_entry import train
    from fpipe.training.train_step import (
        TrainState,
        TrainStep,
        TrainStepAux,
        TrainStepState,
        TrainStepStateAux,
    )
    from fpipe.training.trainer import Trainer
    from fpipe.transforms.directional import Directional, Hvp, HvpAux, Jvp, ggnvp, hvp, jvp
    from fpipe.transforms.mapped import (
        ExampleNorms,
        ExampleNormsAux,
        NormPipeline,
        per_example_grads,
        per_example_norms,
        vmap,
    )
    from fpipe.transforms.norms import Clipped, clip_by_global_norm, global_norm
    from fpipe.transforms.reverse_mode import grad, vjp

__all__ = [
    "Action",
    "Balance",
    "BatchError",
    "Clipped",
    "Cost",
    "Directional",
    "ExampleNorms",
    "ExampleNormsAux",
    "ForwardAux",
    "FpipeError",
    "Hvp",
    "HvpAux",
    "Jitter",
    "Jvp",
    "Microbatches",
    "ModulePipeline",
    "NormPipeline",
    "Op",
    "Pipeline",
    "PipelineError",
    "Schedule",
    "ScheduleError",
    "SearchResult",
    "Stage",
    "StageError",
    "Step",
    "StepAux",
    "StepState",
    "StepStateAux",
    "Timeline",
    "TrainState",
    "TrainStep",
    "TrainStepAux",
    "TrainStepState",
    "TrainStepStateAux",
    "Trainer",
    "balance",
    "clip_by_global_norm",
    "cut",
    "from_module",
    "ggnvp",
    "global_norm",
    "grad",
    "hvp",
    "jvp",
    "load_buffers",
    "losses",
    "lower_bound",
    "nn",
    "per_example_grads",
    "per_example_norms",
    "pipeline",
    "profile",
    "progress",
    "random",
    "record",
    "reductions",
    "schedules",
    "search",
    "simulate",
    "step",
    "train",
    "use",
    "verify",
    "vjp",
    "vmap",
]

# Schedules need no torch: what does is imported when it is first asked for.
_LAZY = {
    name: module
    for module, names in (
        ("fpipe.pipelines", "Pipeline step use"),
        ("fpipe.entry", "pipeline"),
        ("fpipe.microbatches", "Microbatches"),
        ("fpipe.modules.balancing", "balance"),
        ("fpipe.modules.module_entry", "from_module"),
        ("fpipe.modules.module_pipeline", "ModulePipeline"),
        ("fpipe.modules.module_buffers", "load_buffers"),
        ("fpipe.modules.stage_shares", "Balance"),
        ("fpipe.transforms.norms", "Clipped clip_by_global_norm global_norm"),
        ("fpipe.profiling", "profile"),
        ("fpipe.spec.results", "ForwardAux Step StepAux StepState StepStateAux"),
        ("fpipe.divide.cuts", "cut"),
        ("fpipe.spec.user_functions", "Stage"),
        (
            "fpipe.training.train_step",
            "TrainState TrainStep TrainStepAux TrainStepState TrainStepStateAux",
        ),
        ("fpipe.training.train_entry", "train"),
        ("fpipe.training.trainer", "Trainer"),
        ("fpipe.transforms.reverse_mode", "grad vjp"),
        ("fpipe.transforms.directional", "Directional Hvp HvpAux Jvp ggnvp hvp jvp"),
        ("fpipe.transforms.mapped", "ExampleNorms ExampleNormsAux NormPipeline"),
        ("fpipe.transforms.mapped", "per_example_grads per_example_norms vmap"),
    )
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("losses", "nn", "random", "reductions"):
        return importlib.import_module(f"fpipe.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'fpipe' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
