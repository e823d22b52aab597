"""How many tokens a second does one device train, and what share of its peak is that?

    python -m benchmarks.gpt.run
    python -m benchmarks.gpt.run --device cuda

See the README beside this file.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
from benchmarks.models import blocks, init_blocks
from benchmarks.split.run import peak_bytes
from fpipe import pytree
from fpipe.pieces.wgrad_sums import OPTION

NORM: Final = 1e9  # of which no gradient is longer: a step that is clipped is updated twice
PEER: Final = "torch, compiled"
COLUMNS: Final = (
    "step",
    "ms",
    f"/ {PEER}",
    "tokens/s",
    "TFLOP/s",
    "MFU, %",
    "MiB peak",
)


class Size(NamedTuple):
    """The model and its batch; the defaults of each device fill it."""

    layers: int
    width: int
    length: int
    vocabulary: int
    rows: int  # in a microbatch
    microbatches: int
    dtype: torch.dtype


SIZES: Final = {
    "cpu": Size(4, 256, 128, 1024, rows=4, microbatches=4, dtype=torch.float32),
    # A billion parameters, and 8192 tokens a microbatch.
    "cuda": Size(16, 2048, 2048, 50304, rows=4, microbatches=4, dtype=torch.bfloat16),
}
SHAPES: Final = ("layers", "width", "length", "vocabulary", "rows", "microbatches")


# ── the model ───────────────────────────────────────────────────────────────────────────────────


def logits(params: Any, tokens: Tensor) -> Tensor:
    """One for each token of the vocabulary, at each place."""
    x = F.embedding(tokens, params["tokens"]) + params["places"]
    x = blocks(params["blocks"], x)
    return F.linear(F.layer_norm(x, x.shape[-1:], params["norm"]), params["head"])


def cross_entropy(output: Tensor, batch: Any) -> Tensor:
    """The mean over all places."""
    return F.cross_entropy(output.flatten(0, 1).float(), batch["targets"].flatten())


def make_params(size: Size, device: torch.device) -> Any:
    """Fresh parameters."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(rows: int) -> Tensor:
        drawn = torch.randn(rows, size.width, generator=generator, device=device)
        return (drawn / math.sqrt(size.width)).to(size.dtype)

    return {
        "tokens": draw(size.vocabulary),
        "places": draw(size.length),
        "blocks": init_blocks(size.layers, size.width, device, size.dtype),
        "norm": torch.ones(size.width, device=device, dtype=size.dtype),
        "head": draw(size.vocabulary),
    }


def products_in(params: Any) -> int:
    """The parameters of matrix products."""
    matrices = [leaf for leaf in pytree.flatten(params["blocks"])[0] if leaf.ndim == 2]
    return sum(leaf.numel() for leaf in [*matrices, params["head"]])


# ── the steps ───────────────────────────────────────────────────────────────────────────────────


def ours(
    size: Size, params: Any, batch: Any, compile: Any, accum_dtype: torch.dtype | None = None
) -> Callable[[], Tensor]:
    """A step of `fpipe.train`, which writes into the parameters and moments of the last one."""
    pipe = fpipe.pipeline(
        [lambda params, batch: logits(params, batch["inputs"])],
        cross_entropy,
        fpipe.schedules.one_f_one_b(ranks=1, microbatches=size.microbatches),
        compile=compile,
        accum_dtype=accum_dtype,
    )
    trainer = fpipe.train(pipe, torch.optim.AdamW, lr=1e-3, max_norm=NORM, donate=True)
    held: list[Any] = [[pytree.tree_map(torch.clone, params)]]
    held.append(trainer.init(held[0]))

    def run() -> Tensor:
        loss, *held[:], _ = trainer.step(held[0], held[1], batch)
        return loss

    return run


def theirs(size: Size, params: Any, batch: Any, backend: str) -> Callable[[], Tensor]:
    """The compiled loss without a pipeline, gradients accumulated, clipped; AdamW, fused."""
    params = pytree.tree_map(lambda leaf: leaf.clone().requires_grad_(), params)
    leaves = pytree.flatten(params)[0]
    optimizer = torch.optim.AdamW(leaves, lr=1e-3, fused=True)
    parts = zip(
        *(batch[name].chunk(size.microbatches) for name in ("inputs", "targets")), strict=True
    )
    chunks = [{"inputs": inputs, "targets": targets} for inputs, targets in parts]

    @torch.compile(fullgraph=True, backend=backend)
    def loss_of(params: Any, chunk: Any) -> Tensor:
        return cross_entropy(logits(params, chunk["inputs"]), chunk) / size.microbatches

    def run() -> Tensor:
        losses = []
        for chunk in chunks:
            loss = loss_of(params, chunk)
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(leaves, NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()

    return run


def check(steps: dict[str, Callable[[], Tensor]], tolerance: float) -> None:
    """All learn alike, or the comparison means nothing."""
    losses = {name: [run().item() for _ in range(3)] for name, run in steps.items()}
    for name, found in losses.items():
        for mine, theirs in zip(found, losses[PEER], strict=True):
            assert abs(mine - theirs) < tolerance * theirs, f"{name}: losses {losses}"


def measure(
    size: Size, params: Any, device: torch.device, peak: float, rounds: int, compile: bool
) -> list[list[Cell]]:
    """The rows of the table."""
    shape = (size.rows * size.microbatches, size.length)
    generator = torch.Generator(device).manual_seed(1)
    batch = {
        name: torch.randint(size.vocabulary, shape, generator=generator, device=device)
        for name in ("inputs", "targets")
    }
    steps = {
        PEER: theirs(size, params, batch, "inductor" if compile else "aot_eager"),
        "fpipe": ours(size, params, batch, compile),
    }
    if size.dtype != torch.float32:
        wide, off = torch.float32, {"options": {OPTION: False}}
        steps["fpipe, float32 sums"] = ours(size, params, batch, compile, wide)
        steps["fpipe, float32 sums, Inductor"] = ours(size, params, batch, compile and off, wide)
    check(steps, 1e-4 if size.dtype == torch.float32 else 2e-2)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    timings = interleave(steps, rounds, synchronize)
    tokens = shape[0] * shape[1]
    flops = flops_of_token(products_in(params), size.layers, size.width, size.length)
    rows: list[list[Cell]] = []
    for name, run in steps.items():
        speed = tokens / timings.median(name)
        share = 100 * speed * flops / peak
        rows.append(
            [
                name,
                1e3 * timings.median(name),
                timings.ratio(name, PEER),
                speed,
                speed * flops / 1e12,
                share,
                peak_bytes(run, device),
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=SIZES, default="cpu")
    for name in SHAPES:
        parser.add_argument(f"--{name}", type=int)
    add_uncompiled(parser)
    add_arguments(parser, rounds=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    device = torch.empty(0, device=arguments.device).device
    size = SIZES[arguments.device]
    chosen = {name: getattr(arguments, name) for name in SHAPES}
    size = size._replace(**{name: value for name, value in chosen.items() if value is not None})
    peak, source = peak_of(device, size.dtype)
    params = make_params(size, device)
    parameters = sum(leaf.numel() for leaf in pytree.flatten(params)[0])
    report = Report(
        title="A whole training step on one device",
        command=command("benchmarks.gpt.run"),
        machine=machine(device),
        settings={
            **{name: str(value).removeprefix("torch.") for name, value in size._asdict().items()},
            "parameters": f"{parameters / 1e6:.1f} million",
            "rounds": arguments.rounds,
            "MFU": FORMULA,
            "peak": f"{peak / 1e12:.3g} TFLOP/s ({source})",
        },
        columns=COLUMNS,
        rows=measure(size, params, device, peak, arguments.rounds, not arguments.uncompiled),
    )
    publish(report, arguments)


if __name__ == "__main__":
    main()
