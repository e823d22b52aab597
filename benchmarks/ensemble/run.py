"""How much sooner is an ensemble done in one pipeline than member by member?

    python -m benchmarks.ensemble.run

See the README beside this file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.nn.attention import SDPBackend, sdpa_kernel

import fpipe
from benchmarks.harness import (
    Cell,
    Report,
    add_arguments,
    add_uncompiled,
    command,
    interleave,
    machine,
    publish,
)
from benchmarks.models import Block, blocks, init_blocks, mean_square
from fpipe import pytree

STAGES: Final = 2
MEMBERS: Final = (1, 2, 4, 8, 16)

Params = list[list[Block]]


class Size(NamedTuple):
    """Shapes of one member."""

    width: int = 64
    length: int = 16
    rows: int = 8  # in a batch
    microbatches: int = 4


def whole(params: Params, batch: Tensor) -> Tensor:
    """The loss of one member without a pipeline."""
    x = batch
    for stage in params:
        x = blocks(stage, x)
    return mean_square(x, batch)


def init(size: Size, seed: int) -> Params:
    """Fresh parameters of one member: a block per stage."""
    made = init_blocks(STAGES, size.width, torch.device("cpu"), torch.float32, seed)
    return [[block] for block in made]


def stack(alone: list[Params]) -> Any:
    """All members' parameters along a new first dimension."""
    return pytree.tree_map(_together, *alone)


def _together(*leaves: Tensor) -> Tensor:
    return torch.stack(leaves)


def cases_of(
    pipe: fpipe.Pipeline, alone: list[Params], batch: Tensor, compile: bool
) -> dict[str, Callable[[], Any]]:
    """The ways to take one step of each member."""
    stacked = stack(alone)
    ensemble = fpipe.vmap(pipe)
    plain = torch.func.vmap(grad_and_value(whole), in_dims=(0, None))
    peer = torch.compile(plain) if compile else plain

    def mapped() -> Any:
        # vmap would run the fused kernel of the CPU member by member.
        with sdpa_kernel(SDPBackend.MATH):
            return peer(stacked, batch)

    return {
        "loop": lambda: [pipe.step(own, batch) for own in alone],
        "ensemble": lambda: ensemble.step(stacked, batch),
        "torch.func.vmap": mapped,
    }


def check(cases: dict[str, Callable[[], Any]]) -> None:
    """All compute the same, or the comparison means nothing."""
    steps = cases["loop"]()
    expected = stack([[step.loss, step.grads] for step in steps])
    loss, grads = cases["ensemble"]()
    peer_grads, peer_loss = cases["torch.func.vmap"]()
    for name, found in (("ensemble", [loss, grads]), ("torch.func.vmap", [peer_loss, peer_grads])):
        for ours, theirs in zip(pytree.flatten(found)[0], pytree.flatten(expected)[0], strict=True):
            difference = (ours - theirs).norm() / theirs.norm()
            assert difference < 1e-4, f"{name} differs by {difference:.1e}"


def measure(size: Size, numbers: list[int], rounds: int, compile: bool) -> list[list[Cell]]:
    """The rows of the table."""
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(size.rows, size.length, size.width, generator=generator)
    schedule = fpipe.schedules.one_f_one_b(ranks=STAGES, microbatches=size.microbatches)
    pipe = fpipe.pipeline([blocks] * STAGES, mean_square, schedule, compile=compile)
    rows: list[list[Cell]] = []
    for number in numbers:
        # Without this a new number of members would be compiled with a symbol in its place.
        torch.compiler.reset()
        cases = cases_of(pipe, [init(size, seed) for seed in range(number)], batch, compile)
        check(cases)
        timings = interleave(cases, rounds)
        rows.append(
            [
                str(number),
                *(timings.median(name) * 1e3 for name in cases),
                timings.ratio("ensemble", "loop"),
                timings.ratio("torch.func.vmap", "loop"),
            ]
        )
    return rows


COLUMNS: Final = (
    "members",
    "Python loop, ms",
    "ensemble, ms",
    "torch.func.vmap, ms",
    "ensemble / loop",
    "torch.func.vmap / loop",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in Size._field_defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--members", type=int, nargs="+", default=list(MEMBERS))
    add_uncompiled(parser)
    add_arguments(parser, rounds=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = Size(**{name: getattr(arguments, name) for name in Size._fields})
    compile = not arguments.uncompiled
    report = Report(
        title="A step of N members at once and one by one",
        command=command("benchmarks.ensemble.run"),
        machine=machine(torch.device("cpu")),
        settings={
            **size._asdict(),
            "schedule": "1F1B on 2 ranks",
            "compiled": not arguments.uncompiled,
            "rounds": arguments.rounds,
        },
        columns=COLUMNS,
        rows=measure(size, arguments.members, arguments.rounds, compile),
    )
    publish(report, arguments)


if __name__ == "__main__":
    main()
