"""`fpipe.balance`: choose the cuts of a module, by weighing its parts and dividing them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from torch import nn
from torch._compile import _disable_dynamo

from fpipe import pytree, random
from fpipe.engine import Engine
from fpipe.errors import StageError, check_flags
from fpipe.inputs.signature import batch_shapes
from fpipe.inputs.split_batch import split
from fpipe.modules.division import divide
from fpipe.modules.module_loss import Loss, ModuleLoss, definition_of, held_by, with_cuts
from fpipe.modules.module_parts import Part, parts_of
from fpipe.modules.stage_shares import Balance, Memory, StageShare
from fpipe.pieces.backends import Compile
from fpipe.pipelines import Pipeline
from fpipe.profiling import profile
from fpipe.schedule import Schedule
from fpipe.schedule.arguments import is_several, plain_number
from fpipe.schedule.families.evaluation import all_forwards_first
from fpipe.spec.definition import Definition
from fpipe.trace.isolation import once_more, one_at_a_time, uncompiled

log = logging.getLogger("fpipe")

Loads = Callable[[Sequence[Part]], Sequence[float]]
"""From parts to the cost of each, in one unit: `counted_loads`, or `measured_loads`."""

BALANCES = "fpipe.balance"
"""The call that ranks make together, as `fpipe.execute.header` lists it."""

INTENSITY = 10
"""FLOPs that a machine does while it moves a byte, unless the user says otherwise."""


@_disable_dynamo  # torch.compile would go into it, and fail there
def balance(
    module: nn.Module,
    schedule: Schedule,
    example: Any,
    *,
    loss: Loss | None = None,
    in_dims: Any = 0,
    has_aux: bool = False,
    has_state: bool = False,
    reduction: str = "mean",
    is_compiling: bool | None = None,
    candidates: Sequence[str] | None = None,
    memory: float = inf,
    intensity: float = INTENSITY,
    slack: float = 0.02,
    measure: bool = False,
    compile: Compile = True,
    speed: Sequence[float] | None = None,
) -> Balance:
    """Choose the cuts of a module for a schedule, by what its parts cost.

    The module is recorded on abstract tensors, so it may be larger than memory: its parameters, and
    the example, may lie on the meta device. Among all divisions of the chain of candidates this
    function takes the one whose step is shortest, ``m * busiest rank + (p - 1) * slowest stage``
    for `m` microbatches on `p` ranks; among those within `slack` of it, the one that sends least
    between ranks. With one stage per rank that is the one whose slowest stage is fastest, found
    exactly by dynamic programming. On V-shaped and looped placements, chains of about ten
    candidates are divided exactly; on longer chains the search follows the most promising ways.

    Args:
        module: as for `from_module`.
        schedule: its placement says which stages lie on one rank, its number of microbatches how
            the batch is split.
        example: a batch, of any dtypes that the forward takes; only its shapes count, unless times
            are measured. Where microbatches differ in shape, the biggest counts.
        loss: as for `from_module`, as are `in_dims`, `has_aux`, `has_state` and `reduction`.
        in_dims: how the batch is split.
        has_aux: the loss function returns aux.
        has_state: buffers that change are a state.
        reduction: what the loss function returns.
        is_compiling: as for `from_module`.
        candidates: names of submodules after which a stage may end; None takes the children of
            each outermost `ModuleList` and `Sequential`; where these are too few for the stages,
            those of the lists within them, and then submodules of any kind, the outer ones first.
            Those not called exactly once are left out.
        memory: bytes that a rank may hold: parameters and their gradients; for each microbatch that
            the schedule lets a stage hold at once, the values that its backward needs, those from
            other ranks included; values on their way to or from other ranks; and the values in use
            by one operation. It is estimated operation by operation, without `remat`, and errs on
            the safe side: where ranks have several stages, the peaks of all of them are added up,
            although they do not come at once. A tied parameter counts for each stage that reads it.
        intensity: FLOPs that the machine does in the time of moving one byte: a part costs its
            FLOPs and this many for each byte that it reads or writes.
        slack: how much longer than the shortest a step may be, as a fraction.
        measure: run every part, forward and backward, and balance seconds instead of counts. The
            module and one microbatch must fit into the memory of this process.
        compile: how the measured parts are made callable.
        speed: of each rank, where they are unequal: a rank of speed 2 is given twice as much as one
            of speed 1. `Cost.speed` tells the search the same.

    Returns:
        The cuts, and for each stage its FLOPs, bytes and load; it prints as a table, and
        `from_module` takes it as ``cuts=``.

    Raises:
        StageError: an argument is wrong, or the module cannot be traced, has too few candidates, or
            does not fit into `memory`.

    Example:
        >>> import torch, fpipe
        >>> module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
        >>> balance = fpipe.balance(
        ...     module,
        ...     fpipe.schedules.one_f_one_b(ranks=3, microbatches=4),
        ...     {"input": torch.ones(8, 8)},
        ...     loss=lambda output, batch: output.sum(),
        ... )
        >>> balance.cuts
        ('1', '3')
    """
    definition = definition_of(
        module,
        loss,
        schedule,
        in_dims=in_dims,
        has_aux=has_aux,
        has_state=has_state,
        reduction=reduction,
        is_compiling=is_compiling,
        compile=compile,
    )
    return choose_cuts(
        definition,
        example,
        candidates=candidates,
        memory=memory,
        intensity=intensity,
        slack=slack,
        measure=measure,
        speed=speed,
    )


def choose_cuts(
    definition: Definition,
    batch: Any,
    *,
    candidates: Sequence[str] | None = None,
    memory: float = inf,
    intensity: float = INTENSITY,
    slack: float = 0.02,
    measure: bool = False,
    speed: Sequence[float] | None = None,
    complete: Callable[[], Definition] | None = None,
) -> Balance:
    """Choose the cuts of a module whose definition has none yet.

    Where times are measured over a process group, the first rank chooses.

    Args:
        definition: of the pipeline, without cuts.
        batch: an example; the arguments after it are those of `balance`.
        complete: gives the definition with the buffers of this rank, the same one at each call, or
            raises an error, of which the other ranks must hear. None for `definition`.

    Raises:
        StageError: as `balance` does.
        PipelineError: the first rank cannot choose, or another cannot take part; says why.
    """
    _check_numbers(memory=memory, intensity=intensity, slack=slack)
    check_flags(measure=measure)
    limits = Limits(candidates, memory, slack, _checked_speed(speed, definition.schedule))
    completed = complete or (lambda: definition)
    if not measure:
        loads = counted_loads(intensity)
        return _divide_module(completed(), batch, loads, "FLOP", limits)

    def by_time() -> Balance:
        loads = measured_loads(completed(), batch)
        return _divide_module(completed(), batch, loads, "s", limits)

    if definition.group is None:
        return by_time()
    return _on_first_rank(by_time, completed, definition)


class Limits(NamedTuple):
    """The limits of the choice of cuts; as for `balance`."""

    candidates: Sequence[str] | None
    memory: float
    slack: float
    speed: tuple[float, ...] | None


def _checked_speed(speed: Any, schedule: Schedule) -> tuple[float, ...] | None:
    """A number above 0 for each rank."""
    if speed is None:
        return None
    ranks = schedule.num_ranks
    values = tuple(map(plain_number, speed)) if is_several(speed) else ()
    numbers = tuple(value for value in values if value is not None and 0 < value < inf)
    if len(numbers) != len(values) or len(values) != ranks or isinstance(speed, Mapping | Set):
        raise StageError(
            f"speed={speed!r:.60} must be a sequence with a number above 0 for each of the {ranks} "
            "ranks, or None"
        )
    return numbers


def _check_numbers(**numbers: Any) -> None:
    """Refuse negative numbers, and other things; the keywords are the names to report."""
    units = {"memory": "bytes", "intensity": "FLOPs for each byte", "slack": "a fraction"}
    for name, value in numbers.items():
        number = plain_number(value)
        if number is None or not number >= 0:
            raise StageError(
                f"{name}={value!r:.60} must be a number, {units[name]}, and not negative"
            )


def _on_first_rank(
    choose: Callable[[], Balance], check: Callable[[], object], definition: Definition
) -> Balance:
    """Let the first rank of a group choose, while the others wait for it and watch it."""
    meeting = Engine(definition)  # it has no cuts, and never runs
    meeting.each("make its pipeline", check, call=BALANCES)
    chosen = meeting.each(
        "measure the parts of the module",
        choose if meeting.rank == 0 else lambda: None,
        call=BALANCES,
    )
    balance: Balance = meeting.together(BALANCES, lambda gather: gather(chosen))[0]
    return balance


def _divide_module(
    definition: Definition,
    batch: Any,
    loads: Loads,
    unit: str,
    limits: Limits,
) -> Balance:
    """Record the parts of a module, weigh them, and divide them into stages."""
    assert isinstance(definition.loss, ModuleLoss)
    module, schedule = definition.loss.module, definition.schedule
    split_batch = split(batch, definition.in_dims, schedule.num_microbatches)
    with one_at_a_time(), uncompiled():
        kind = split_batch.kinds[split_batch.biggest()]  # the biggest decides how much is held
        shape = batch_shapes(split_batch)[kind]
        parts = once_more(lambda: parts_of(definition, shape, limits.candidates))
    sizes = {name: p.numel() * p.element_size() for name, p in module.named_parameters()}
    memory = Memory(parts, sizes, schedule)
    weights = loads(parts)
    division = divide(
        weights,
        [part.width for part in parts],
        schedule.placement,
        microbatches=schedule.num_microbatches,
        memory=memory.of,
        least=memory.at_least,
        limit=limits.memory,
        slack=limits.slack,
        speed=limits.speed,
    )
    shares = []
    for stage, (first, end) in enumerate(zip((0, *division.ends), division.ends, strict=False)):
        stage_parts, rank = parts[first:end], schedule.placement[stage]
        shares.append(
            StageShare(
                rank=rank,
                first=stage_parts[0].name,
                last=stage_parts[-1].name,
                flops=sum(part.flops for part in stage_parts),
                moved=sum(part.moved for part in stage_parts),
                load=sum(weights[first:end]) / (limits.speed[rank] if limits.speed else 1),
                params=memory.params(first, end),
                memory=memory.of(stage, first, end),
                sends=stage_parts[-1].width,
            )
        )
    return Balance(
        cuts=tuple(share.last for share in shares[:-1]),
        stages=tuple(shares),
        parts=tuple((part.name, load) for part, load in zip(parts, weights, strict=True)),
        unit=unit,
    )


def counted_loads(intensity: float) -> Loads:
    """Weigh parts in FLOPs: those of a part, and `intensity` for each byte that it moves."""

    def loads(parts: Sequence[Part]) -> Sequence[float]:
        if uncounted := sorted(frozenset().union(*(part.uncounted for part in parts))):
            log.warning(
                "fpipe.balance counts no FLOPs for %s: measure=True balances times instead",
                ", ".join(uncounted),
            )
        return [part.flops + intensity * part.moved for part in parts]

    return loads


def measured_loads(definition: Definition, batch: Any) -> Loads:
    """Weigh parts in seconds: forward and backward of one microbatch.

    The parts run as the stages of a pipeline in this process, one after the other, compiled as the
    definition says.

    Args:
        definition: of the pipeline, without cuts; its schedule says how `batch` is split.
        batch: real tensors, as those of the module must be.

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
    microbatches = split(batch, definition.in_dims, definition.schedule.num_microbatches)
    biggest = microbatches.biggest()
    microbatch = pytree.unflatten(microbatches.specs[biggest], microbatches.leaves[biggest])

    def loads(parts: Sequence[Part]) -> Sequence[float]:
        cut = with_cuts(definition, [part.name for part in parts[:-1]])
        schedule = all_forwards_first((0,) * len(parts), 1, split=False)
        key = random.key(0) if definition.reads_key else None
        probe = Pipeline(replace(cut, schedule=schedule, group=None, devices=None))
        cost = profile(probe, *held, microbatch, key=key).on(schedule.placement)
        return [forward + backward for forward, backward in zip(cost.f, cost.b, strict=True)]

    return loads
