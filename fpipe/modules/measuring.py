"""What each part of a module takes, measured on real inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fpipe import pytree, random
from fpipe.definition import Definition
from fpipe.engine import Pipeline
from fpipe.errors import StageError
from fpipe.inputs.batch import split
from fpipe.modules.costs import Loads, Part
from fpipe.modules.module_config import held_by, with_cuts
from fpipe.modules.module_loss import ModuleLoss
from fpipe.profiling import profile
from fpipe.schedule.forwards import all_forwards_first


def measured(definition: Definition, batch: Any) -> Loads:
    """Loads in seconds: forward and backward of a part, of one microbatch.

    The parts run as the stages of a pipeline in this process, one after the other, compiled as the
    definition says.

    Args:
        definition: of the module, which is not cut; its schedule says how `batch` is split.
        batch: real tensors, as is the module.

    Raises:
        StageError: a parameter or a leaf of the batch has no data.
    """
    assert isinstance(definition.loss, ModuleLoss)
    held = held_by(definition)
    for name, value in (("batch", batch), ("module", held[0])):
        leaves, spec = pytree.flatten(value)
        for path, leaf in zip(pytree.paths(spec), leaves, strict=True):
            if leaf.is_meta:
                raise StageError(
                    f"measure=True runs the module, but {name}{path} is on the meta device: give "
                    "real tensors, or count with measure=False"
                )
    parts = split(batch, definition.in_dims, definition.schedule.num_microbatches)
    biggest = parts.biggest()
    microbatch = pytree.unflatten(parts.specs[biggest], parts.leaves[biggest])

    def loads(parts: Sequence[Part]) -> Sequence[float]:
        cut = with_cuts(definition, [part.name for part in parts[:-1]])
        one = all_forwards_first((0,) * len(parts), 1, split=False)
        key = random.key(0) if definition.reads_key else None
        probe = Pipeline(replace(cut, schedule=one, group=None, devices=None))
        cost = profile(probe, *held, microbatch, key=key).on(one.placement)
        return [forward + backward for forward, backward in zip(cost.f, cost.b, strict=True)]

    return loads
