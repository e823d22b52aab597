"""What does it cost to split the backward pass in two?

    python -m benchmarks.split.run
    python -m benchmarks.split.run --device cuda

See the README beside this file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

import fpipe
from benchmarks.flops import FORMULA, flops_of_token, peak_of
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
from benchmarks.models import Block, blocks, gradients, init_blocks, mean_square, trainable
from fpipe.program.program import Compute, Program

Step = Callable[[], object]


class Size(NamedTuple):
    """Shapes of one run; the defaults of each device fill it."""

    depth: int  # blocks
    width: int
    length: int
    rows: int  # in a microbatch
    microbatches: int
    dtype: torch.dtype


SIZES: Final = {
    "cpu": Size(4, width=256, length=128, rows=4, microbatches=4, dtype=torch.float32),
    # 8192 tokens a microbatch and 0.8 billion parameters: matrix products, not launches, count.
    "cuda": Size(4, width=4096, length=2048, rows=4, microbatches=4, dtype=torch.bfloat16),
}

SHAPES: Final = ("depth", "width", "length", "rows", "microbatches")


def schedule_of(pattern: str, microbatches: int) -> fpipe.Schedule:
    """One stage on one rank; each microbatch in turn goes through the ops of `pattern`."""
    texts = [f"0{op}{number}" for number in range(microbatches) for op in pattern]
    return fpipe.Schedule([0], [map(fpipe.Action.parse, texts)], name="+".join(pattern))


# ── the peer ────────────────────────────────────────────────────────────────────────────────────


def autograd_step(
    params: list[Block], batch: Tensor, microbatches: int, backend: str
) -> tuple[Step, Callable[[], int]]:
    """The unpipelined step: one compiled function, gradients accumulated by autograd.

    Returns:
        The step, and a function that says how many bytes its forward keeps for its backward.
    """
    params = trainable(params)
    leaves = [leaf for block in params for leaf in block.values()]
    chunks = batch.chunk(microbatches)

    @torch.compile(fullgraph=True, backend=backend)
    def loss(params: list[Block], x: Tensor) -> Tensor:
        return mean_square(blocks(params, x), x) / microbatches

    def step() -> list[Block]:
        for chunk in chunks:
            loss(params, chunk).backward()
        found = gradients(params)
        for leaf in leaves:  # they are the caller's, and no part of what is there before a step
            leaf.grad = None
        return found

    def saved() -> int:
        found: Any = loss(params, chunks[0])  # its graph is freed with it
        node = found.grad_fn
        kept = {t.untyped_storage().data_ptr(): t for t in node.saved_tensors if t is not None}
        for given in (*leaves, *chunks):
            kept.pop(given.untyped_storage().data_ptr(), None)
        return sum(t.untyped_storage().nbytes() for t in kept.values())

    return step, saved


# ── bytes ───────────────────────────────────────────────────────────────────────────────────────


def held_after(program: Program, action: str) -> int:
    """Bytes that `program` still holds when its first `action` has ended, for later actions.

    Losses and final gradients are results, and nothing waits for them: they do not count.
    """
    held: dict[int, tuple[int, int]] = {}  # slot: the instruction that filled it, bytes
    snapshot: set[tuple[int, tuple[int, int]]] = set()
    for index, instruction in enumerate(program.instructions):
        if not isinstance(instruction, Compute):
            continue
        for slot in instruction.last_use:
            held.pop(slot, None)
        written = [slot for slot in instruction.outputs if slot >= 0]
        held.update((slot, (index, program.sizes[index, slot])) for slot in written)
        if str(instruction.action) == action:
            snapshot = set(held.items())
    # What is never let go is a result. A slot's number tells nothing: slots are used again.
    return sum(size for _, (_, size) in snapshot - set(held.items()))


def peak_bytes(run: Step, device: torch.device) -> float | None:
    """MiB that a step allocates on a CUDA device at most, beyond what was there before it."""
    if device.type != "cuda":
        return None
    run()  # what the last case left in gradients is not this one's
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


# ── the comparison ──────────────────────────────────────────────────────────────────────────────


def check(steps: dict[str, Step], params: list[Block], tolerance: float) -> None:
    """All compute the same gradients, or the comparison means nothing."""
    expected: Any = steps["compiled autograd"]()
    for name in ("F+B", "F+I+W"):
        outcome: Any = steps[name]()
        for mine, theirs in zip(outcome.grads[0], expected, strict=True):
            for leaf, grad in mine.items():
                difference = (grad - theirs[leaf]).float().norm() / theirs[leaf].float().norm()
                assert difference < tolerance, f"{name}: {leaf} differs by {difference:.1e}"


def measure(
    size: Size, device: torch.device, peak: float, rounds: int, compile: bool
) -> list[list[Cell]]:
    """The rows of the table."""
    generator = torch.Generator(device).manual_seed(1)
    rows = size.rows * size.microbatches
    shape = (rows, size.length, size.width)
    batch = torch.randn(shape, generator=generator, device=device).to(size.dtype)
    params = init_blocks(size.depth, size.width, device, size.dtype)

    pipes = {
        pattern: fpipe.pipeline(
            [blocks], mean_square, schedule_of(pattern, size.microbatches), compile=compile
        )
        for pattern in ("FB", "FIW")
    }
    backend = "inductor" if compile else "aot_eager"
    peer, peer_saved = autograd_step(params, batch, size.microbatches, backend)
    steps: dict[str, Step] = {
        "compiled autograd": peer,
        "F+B": lambda: pipes["FB"].step([params], batch),
        "F+I+W": lambda: pipes["FIW"].step([params], batch),
    }
    check(steps, params, tolerance=1e-4 if size.dtype == torch.float32 else 5e-2)

    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    timings = interleave(steps, rounds, synchronize)
    after_f: dict[str, int] = {"compiled autograd": peer_saved()}
    after_i: dict[str, int] = {}
    for name, pattern in (("F+B", "FB"), ("F+I+W", "FIW")):
        (program,) = pipes[pattern].programs([params], batch)
        after_f[name] = held_after(program, "0F0")
        if pattern == "FIW":
            after_i[name] = held_after(program, "0I0")
    matrices = sum(leaf.numel() for block in params for leaf in block.values() if leaf.ndim == 2)
    flops = rows * size.length * flops_of_token(matrices, size.depth, size.width, size.length)
    return [
        [
            name,
            timings.median(name) / size.microbatches * 1e3,
            timings.ratio(name, "compiled autograd"),
            timings.ratio(name, "F+B"),
            flops / timings.median(name) / 1e12,
            100 * flops / timings.median(name) / peak,
            after_f[name] / 2**20,
            after_i[name] / 2**20 if name in after_i else None,
            peak_bytes(run, device),
        ]
        for name, run in steps.items()
    ]


COLUMNS: Final = (
    "step",
    "ms a microbatch",
    "/ compiled autograd",
    "/ F+B",
    "TFLOP/s",
    "MFU, %",
    "MiB held after F",
    "MiB held after I",
    "MiB peak",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=SIZES, default="cpu")
    for name in SHAPES:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--trim", action="store_true", help="let glibc give memory back")
    parser.add_argument("--blas", action="store_true", help="leave all products to torch's BLAS")
    add_uncompiled(parser)
    add_arguments(parser, rounds=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.blas:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    if not arguments.trim:
        keep_memory()
    device = torch.empty(0, device=arguments.device).device
    size = SIZES[arguments.device]
    given = {name: getattr(arguments, name) for name in SHAPES}
    size = size._replace(**{name: value for name, value in given.items() if value is not None})
    peak, source = peak_of(device, size.dtype)
    rows = measure(size, device, peak, arguments.rounds, not arguments.uncompiled)
    report = Report(
        title="A backward pass in one piece and in two",
        command=command("benchmarks.split.run"),
        machine=machine(device),
        settings={
            **{name: str(value).removeprefix("torch.") for name, value in size._asdict().items()},
            "rounds": arguments.rounds,
            "MFU": FORMULA,
            "peak": f"{peak / 1e12:.3g} TFLOP/s ({source})",
        },
        columns=COLUMNS,
        rows=rows,
    )
    publish(report, arguments)


if __name__ == "__main__":
    main()
