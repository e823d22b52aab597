"""Choose the cuts of a module: weigh its parts and divide them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo

from fpipe import pytree, random
from fpipe.definition import Definition
from fpipe.engine import Pipeline
from fpipe.errors import PipelineError, StageError, check_flags, told
from fpipe.execute.controller import Gather
from fpipe.inputs.batch import split
from fpipe.inputs.signature import batch_shapes
from fpipe.modules.division import divide
from fpipe.modules.module_loss import Loss, ModuleLoss, declared, held_by, with_cuts
from fpipe.modules.module_parts import Part, parts_of
from fpipe.modules.stage_shares import Balance, Memory, StageShare
from fpipe.pieces.compiler import Compile
from fpipe.profiling import profile
from fpipe.schedule import Schedule
from fpipe.schedule.arguments import plain_number
from fpipe.schedule.families.evaluation import all_forwards_first
from fpipe.trace.isolation import one_at_a_time, uncompiled

log = logging.getLogger("fpipe")

Loads = Callable[[Sequence[Part]], Sequence[float]]
"""What each part is taken to cost, all in one unit: `counted`, or `measured`."""

INTENSITY = 10
"""FLOPs that a machine does while it moves a byte, unless told."""


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
    is_compiling: bool = False,
    candidates: Sequence[str] | None = None,
    memory: float = inf,
    intensity: float = INTENSITY,
    slack: float = 0.02,
    measure: bool = False,
    compile: Compile = True,
) -> Balance:
    """Choose the cuts of a module for a schedule, by what its parts cost.

    The module is recorded on abstract tensors, so it may be as big as it likes: its parameters,
    and the example, may lie on the meta device. Of all ways to divide the chain of candidates it
    takes the one whose step is shortest, ``m * busiest rank + (p - 1) * slowest stage`` for `m`
    microbatches on `p` ranks; among those within `slack` of it, the one that sends least between
    ranks. With one stage a rank that is the one whose slowest stage is fastest, found exactly
    (dynamic programming); on V-shaped and looped placements chains of some ten candidates are
    divided exactly, and of longer ones the most promising ways are followed.

    Args:
        module: as for `from_module`.
        schedule: its placement says which stages lie on one rank, its number of microbatches how
            the batch is split.
        example: a batch; only its shapes count, unless times are measured. Of microbatches of
            several shapes the biggest counts.
        loss: as for `from_module`, as are `in_dims`, `has_aux`, `has_state` and `reduction`.
        in_dims: how the batch is split.
        has_aux: the loss function returns aux.
        has_state: buffers that change are a state.
        reduction: what the loss function returns.
        is_compiling: as for `from_module`.
        candidates: names of submodules after which a cut may be; None takes the children of the
            outermost `ModuleList`s and `Sequential`s; where these are too few for the stages,
            those of the lists within them, and then submodules of any kind, the outer ones first.
            Those not called exactly once are left out.
        memory: bytes that a rank may hold: parameters and their gradients; for each microbatch that
            the schedule lets a stage hold at once, the values that its backward needs, those from
            other ranks included; and what is on its way, or in use by an operation. This is judged
            operation by operation, without `remat`, and errs on the safe side: where ranks have
            several stages, what each holds at most is added up, although they do not come together.
            A tied parameter counts for each stage that reads it.
        intensity: FLOPs that the machine does in the time of moving one byte: a part costs its
            FLOPs and this many for each byte that it reads or writes.
        slack: fraction.
        measure: run every part, forward and backward, and balance the times instead of what is
            counted. The module and one microbatch must fit into the memory of this process.
        compile: how the parts that are measured are made callable.

    Raises:
        StageError: the module cannot be traced, has too few candidates, or does not fit.

    Example:
        >>> import torch, fpipe
        >>> module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
        >>> found = fpipe.balance(
        ...     module,
        ...     fpipe.schedules.one_f_one_b(ranks=3, microbatches=4),
        ...     {"input": torch.ones(8, 8)},
        ...     loss=lambda output, batch: output.sum(),
        ... )
        >>> found.cuts
        ('1', '3')
    """
    check_flags(is_compiling=is_compiling)
    definition = declared(
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
    return chosen(
        definition,
        example,
        candidates=candidates,
        memory=memory,
        intensity=intensity,
        slack=slack,
        measure=measure,
    )


def chosen(
    definition: Definition,
    batch: Any,
    *,
    candidates: Sequence[str] | None = None,
    memory: float = inf,
    intensity: float = INTENSITY,
    slack: float = 0.02,
    measure: bool = False,
    finished: Callable[[], Definition] | None = None,
) -> Balance:
    """The cuts of a module that is declared and not cut; the other arguments are `balance`'s.

    Where times are measured over a process group, the first rank chooses.

    Args:
        definition: of the module.
        batch: an example.
        candidates: for cuts.
        memory: of a rank.
        intensity: FLOPs for each byte.
        slack: fraction.
        measure: time instead of counts.
        finished: gives the definition with all that this rank has for it, the same at each call,
            or raises what is wrong, of which the others must hear. None for `definition`.

    Raises:
        StageError: as `balance` does.
        PipelineError: the first rank cannot choose, or another cannot take part; says why.
    """
    _check_numbers(memory=memory, intensity=intensity, slack=slack)
    check_flags(measure=measure)
    whole = finished or (lambda: definition)
    if not measure:
        return _divided(whole(), batch, counted(intensity), "FLOP", candidates, memory, slack)

    def by_time() -> Balance:
        loads = measured(whole(), batch)
        return _divided(whole(), batch, loads, "s", candidates, memory, slack)

    def check() -> None:
        whole()

    return by_time() if definition.group is None else _of_first(by_time, check, definition)


def _check_numbers(**numbers: Any) -> None:
    """Refuse what is no number, or a negative one; the keyword is the name to report."""
    units = {"memory": "bytes", "intensity": "FLOPs for each byte", "slack": "a fraction"}
    for name, given in numbers.items():
        number = plain_number(given)
        if number is None or not number >= 0:
            raise StageError(
                f"{name}={given!r:.60} must be a number, {units[name]}, and not negative"
            )


def _of_first(
    choice: Callable[[], Balance], check: Callable[[], None], definition: Definition
) -> Balance:
    """What the first rank of a group chooses, while the others wait and watch it."""
    meeting = Pipeline(definition)  # it is not cut, and never runs
    failure: Exception | None = None

    def tried(action: Callable[[], object]) -> tuple[Any, str]:
        nonlocal failure
        try:
            return action(), ""
        except Exception as error:
            failure = error
            return None, told(error)

    def work(gather: Gather) -> tuple[str, list[tuple[Any, str]]]:
        answers = gather(tried(check))
        if any(problem for _, problem in answers):
            return "make its pipeline", answers
        answers = gather(tried(choice if meeting.rank == 0 else lambda: None))
        return "measure the parts of the module", answers

    deed, answers = meeting.together("fpipe.balance", work)
    if failure is not None:
        raise failure
    for rank, (_, problem) in enumerate(answers):
        if problem:
            raise PipelineError(f"rank {rank} could not {deed}: {problem}", rank=rank)
    found: Balance = answers[0][0]
    return found


def _divided(
    definition: Definition,
    batch: Any,
    loads: Loads,
    unit: str,
    candidates: Sequence[str] | None,
    limit: float,
    slack: float,
) -> Balance:
    assert isinstance(definition.loss, ModuleLoss)
    module, schedule = definition.loss.module, definition.schedule
    split_batch = split(batch, definition.in_dims, schedule.num_microbatches)
    with one_at_a_time(), uncompiled():
        kind = split_batch.kinds[split_batch.biggest()]  # by which it is decided what is held
        parts = parts_of(definition, batch_shapes(split_batch)[kind], candidates)
    sizes = {name: p.numel() * p.element_size() for name, p in module.named_parameters()}
    memory = Memory(parts, sizes, schedule)
    weighed = loads(parts)
    widths = [part.width for part in parts]
    found = divide(
        weighed,
        widths,
        schedule.placement,
        microbatches=schedule.num_microbatches,
        memory=memory.of,
        least=memory.at_least,
        limit=limit,
        slack=slack,
    )
    shares = []
    for stage, (first, end) in enumerate(zip((0, *found.ends), found.ends, strict=False)):
        own = parts[first:end]
        shares.append(
            StageShare(
                rank=schedule.placement[stage],
                first=own[0].name,
                last=own[-1].name,
                flops=sum(part.flops for part in own),
                moved=sum(part.moved for part in own),
                load=sum(weighed[first:end]),
                params=memory.params(first, end),
                memory=memory.of(stage, first, end),
                sends=own[-1].width,
            )
        )
    return Balance(
        cuts=tuple(share.last for share in shares[:-1]),
        stages=tuple(shares),
        parts=tuple((part.name, load) for part, load in zip(parts, weighed, strict=True)),
        unit=unit,
    )


def counted(intensity: float) -> Loads:
    """Loads in FLOPs: those of a part, and so many for each byte that it reads or writes."""

    def loads(parts: Sequence[Part]) -> Sequence[float]:
        if uncounted := sorted(frozenset().union(*(part.uncounted for part in parts))):
            log.warning(
                "fpipe.balance counts no FLOPs for %s: measure=True balances times instead",
                ", ".join(uncounted),
            )
        return [part.flops + intensity * part.moved for part in parts]

    return loads


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
