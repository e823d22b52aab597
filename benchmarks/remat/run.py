"""What does it cost, and what does it save, to compute activations again?

    python -m benchmarks.remat.run

See the README beside this file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fpipe
from benchmarks.harness import (
    Cell,
    Report,
    add_arguments,
    add_uncompiled,
    command,
    interleave,
    keep_memory,
    machine,
    publish,
)
from benchmarks.memory import peak
from benchmarks.models import (
    HEAD_WIDTH,
    Block,
    block,
    gradients,
    init_blocks,
    mean_square,
    trainable,
)

aten = torch.ops.aten

Stage = Callable[[list[Block], Tensor], Tensor]
Step = Callable[[], list[Block]]


class Size(NamedTuple):
    """Shapes of the stage and its batch."""

    depth: int = 6
    width: int = 256
    length: int = 128
    rows: int = 4  # in a microbatch
    microbatches: int = 4


# ── the stage ───────────────────────────────────────────────────────────────────────────────────


def stack(layers: list[Block], x: Tensor, *, layer: Callable[[Block, Tensor], Tensor]) -> Tensor:
    """The blocks one after the other."""
    for own in layers:
        x = layer(own, x)
    return x


def plain(own: Block, x: Tensor) -> Tensor:
    """One block."""
    return block(own, x, x.shape[-1] // HEAD_WIDTH)


PRODUCTS: Final = [aten.mm.default, aten.addmm.default]

plain_stack: Final = partial(stack, layer=plain)

STAGES: Final[Mapping[str, Stage]] = {
    "nothing": plain_stack,
    "each block": partial(stack, layer=partial(checkpoint, plain, use_reentrant=False)),
    "each block but for products": partial(
        stack,
        layer=partial(
            checkpoint,
            plain,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, PRODUCTS),
        ),
    ),
}
"""By what is computed again."""

REMAT: Final = {"the whole stage": "full", "but of the last microbatch": "except_last"}


# ── the steps ───────────────────────────────────────────────────────────────────────────────────


class Case(NamedTuple):
    """One way to take a step.

    Attributes:
        run: returns the gradients.
        base: the case of the same library that computes nothing again.
        planned: bytes that it will hold at most, where that is known before it runs.
    """

    run: Step
    base: str
    planned: int | None = None


def fpipe_case(
    stage: Stage, layers: list[Block], batch: Tensor, size: Size, compile: bool, remat: str = "none"
) -> Case:
    """All microbatches forward, then all backward, on one rank."""
    schedule = fpipe.schedules.gpipe(ranks=1, microbatches=size.microbatches)
    pipe = fpipe.pipeline([stage], mean_square, schedule, compile=compile, remat=remat)
    (program,) = pipe.programs([layers], batch)
    return Case(lambda: pipe.step([layers], batch).grads[0], "fpipe: nothing", program.peak_bytes)


def torch_case(stage: Stage, layers: list[Block], batch: Tensor, size: Size, compile: bool) -> Case:
    """The same by autograd, on one compiled function."""
    own = trainable(layers)
    leaves = [leaf for layer in own for leaf in layer.values()]
    chunks = batch.chunk(size.microbatches)

    @torch.compile(fullgraph=True, backend="inductor" if compile else "aot_eager")
    def loss(own: list[Block], x: Tensor) -> Tensor:
        return mean_square(stage(own, x), x) / size.microbatches

    def run() -> list[Block]:
        for leaf in leaves:
            leaf.grad = None
        losses = [loss(own, chunk) for chunk in chunks]
        while losses:
            losses.pop(0).backward()
        return gradients(own)

    return Case(run, "torch: nothing")


def cases_of(size: Size, compile: bool) -> dict[str, Case]:
    """All ways to take a step, by library and by what is computed again."""
    generator = torch.Generator().manual_seed(1)
    rows = size.rows * size.microbatches
    batch = torch.randn(rows, size.length, size.width, generator=generator)
    layers = init_blocks(size.depth, size.width, batch.device, batch.dtype)
    ours = {name: fpipe_case(stage, layers, batch, size, compile) for name, stage in STAGES.items()}
    for name, how in REMAT.items():
        ours[name] = fpipe_case(plain_stack, layers, batch, size, compile, how)
    theirs = {
        name: torch_case(stage, layers, batch, size, compile) for name, stage in STAGES.items()
    }
    return {f"fpipe: {name}": case for name, case in ours.items()} | {
        f"torch: {name}": case for name, case in theirs.items()
    }


def check(cases: Mapping[str, Case]) -> None:
    """All compute the same gradients, or the comparison means nothing."""
    expected = cases["torch: nothing"].run()
    for name, case in cases.items():
        for mine, theirs in zip(case.run(), expected, strict=True):
            for leaf, grad in mine.items():
                difference = (grad - theirs[leaf]).norm() / theirs[leaf].norm()
                assert difference < 1e-4, f"{name}: {leaf} differs by {difference:.1e}"


def measure(size: Size, rounds: int, compile: bool) -> list[list[Cell]]:
    """The rows of the table."""
    cases = cases_of(size, compile)
    check(cases)
    timings = interleave({name: case.run for name, case in cases.items()}, rounds)
    held = {name: peak(case.run) for name, case in cases.items()}
    return [
        [
            name,
            timings.median(name) * 1e3,
            timings.ratio(name, case.base),
            held[name] / 2**20,
            held[name] / held[case.base],
            None if case.planned is None else case.planned / 2**20,
        ]
        for name, case in cases.items()
    ]


COLUMNS: Final = (
    "computed again",
    "ms",
    "time / that of nothing",
    "peak MiB",
    "peak / that of nothing",
    "planned MiB",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in Size._field_defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    add_uncompiled(parser)
    add_arguments(parser, rounds=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    size = Size(**{name: getattr(arguments, name) for name in Size._fields})
    report = Report(
        title="Activations computed again",
        command=command("benchmarks.remat.run"),
        machine=machine(torch.device("cpu")),
        settings={
            **size._asdict(),
            "compiled": not arguments.uncompiled,
            "rounds": arguments.rounds,
        },
        columns=COLUMNS,
        rows=measure(size, arguments.rounds, not arguments.uncompiled),
    )
    publish(report, arguments)


if __name__ == "__main__":
    main()
