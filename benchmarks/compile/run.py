"""What does the first step cost, cold and warm, and what does a step pay for compiling layers once?

    python -m benchmarks.compile.run

See the README beside this file.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpipe
from benchmarks.harness import (
    Cell,
    Report,
    add_arguments,
    command,
    interleave,
    machine,
    publish,
)
from benchmarks.models import block, trainable
from benchmarks.versus_torch.model import Size, make_problem

COLUMNS: Final = ("first step", "layers", "seconds", "processor, s", "of it compilers, s")
CASES: Final = {
    "layers once": True,
    "whole pieces": {"regions": False},
    "torch, by block": None,
    "uncompiled": False,
}
COMPILED: Final = tuple(CASES)[:3]
SHAPES: Final = Size(width=64, length=32, vocabulary=256, rows=8, microbatches=4)


def stepper(layers: int, compile: Any) -> Callable[[], object]:
    """A step of fpipe over two ranks in one process; of plain torch if `compile` is None."""
    problem = make_problem(SHAPES._replace(layers=layers), 2)
    if compile is None:
        return _plain(problem)
    first, last = problem.functions
    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=SHAPES.microbatches)
    pipe = fpipe.pipeline(
        [lambda params, batch: first(params, batch["inputs"]), last],
        lambda y, batch: problem.loss(y, batch["targets"]),
        schedule,
        compile=compile,
    )
    batch = {"inputs": problem.inputs, "targets": problem.targets}
    return lambda: pipe.step(problem.params, batch)


class Block(nn.Module):
    """A transformer block as a module, to be compiled by itself."""

    def __init__(self, params: dict[str, Tensor]) -> None:
        super().__init__()
        self.params = nn.ParameterDict({n: nn.Parameter(leaf) for n, leaf in params.items()})

    def forward(self, x: Tensor) -> Tensor:
        """In and out: (rows, length, width)."""
        return block(dict(self.params.items()), x, 1)


def _plain(problem: Any) -> Callable[[], object]:
    """Forward and backward of the microbatches, each block compiled by ``layer.compile()``."""
    modules = [Block(own) for stage in problem.params for own in stage["blocks"]]
    for module in modules:
        module.compile()
    ends = [{n: leaf for n, leaf in p.items() if n != "blocks"} for p in problem.params]
    first, last = trainable(ends)

    def step() -> Tensor:
        count, total = SHAPES.microbatches, torch.zeros(())
        pairs = zip(problem.inputs.chunk(count), problem.targets.chunk(count), strict=True)
        for tokens, targets in pairs:
            x = F.embedding(tokens, first["tokens"]) + first["places"]
            for module in modules:
                x = module(x)
            y = F.linear(F.layer_norm(x, x.shape[-1:], last["norm"]), last["head"])
            loss = problem.loss(y, targets) / count
            loss.backward()
            total += loss.detach()
        return total

    return step


def first_step(case: str, layers: int, environment: dict[str, str]) -> list[float]:
    """Seconds of a first step in a new process: by the clock, of processors, of compilers."""
    words = [sys.executable, "-m", "benchmarks.compile.run", "--first", case]
    lines = subprocess.run(
        [*words, "--layers", str(layers)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    return [float(word) for word in lines.stdout.split()[-3:]]


def _measured(case: str, layers: int) -> None:
    step = stepper(layers, CASES[case])
    before, start = _processor(), time.perf_counter()
    step()
    own, compilers = (b - a for a, b in zip(before, _processor(), strict=True))
    print(time.perf_counter() - start, own + compilers, compilers)


def _processor() -> list[float]:
    """Processor seconds of this process, and of those that it has waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return [usage.ru_utime + usage.ru_stime for usage in used]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24])
    parser.add_argument("--first", choices=list(CASES), help=argparse.SUPPRESS)
    add_arguments(parser, rounds=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.first:
        _measured(arguments.first, arguments.layers[0])
        return
    rows: list[list[Cell]] = []
    for case in COMPILED:
        for layers in arguments.layers:
            with tempfile.TemporaryDirectory() as folder:
                kept = {"TORCHINDUCTOR_CACHE_DIR": folder}
                for state in ("cold", "warm"):
                    rows.append([f"{case}, {state}", layers, *first_step(case, layers, kept)])
        with tempfile.TemporaryDirectory() as folder:
            off = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
            layers = arguments.layers[0]
            rows.append([f"{case}, caches off", layers, *first_step(case, layers, off)])
    rows += [
        ["uncompiled", layers, *first_step("uncompiled", layers, {})] for layers in arguments.layers
    ]
    layers = arguments.layers[0]
    once, whole = COMPILED[:2]
    steps = {case: stepper(layers, CASES[case]) for case in (once, whole)}
    ratio = interleave(steps, arguments.rounds, repeats=5).ratio(once, whole)
    report = Report(
        " ".join(__doc__.splitlines()[0].split()),
        command("benchmarks.compile.run"),
        machine(torch.device("cpu")),
        {
            "schedule": f"ZB-H1, 2 ranks in one process, {SHAPES.microbatches} microbatches of "
            f"{SHAPES.rows // SHAPES.microbatches} × {SHAPES.length} tokens, width {SHAPES.width}",
            f"a step of {layers} layers, {once} / {whole}": f"{ratio:.3f}",
        },
        COLUMNS,
        rows,
    )
    publish(report, arguments)


if __name__ == "__main__":
    main()
