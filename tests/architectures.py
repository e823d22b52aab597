"""Hugging Face models, compiled, against themselves without a pipeline.

    python -m tests.architectures [gpt2 t5 …]
    python -m tests.architectures --device cuda --dtype float32

`make test` runs them uncompiled, on every schedule. Compiled they take minutes: each with both
kinds of attention; and with dropout from a key, where it has any, against the same pipeline
uncompiled. Which kernels attention has depends on the device and the dtype.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import fpipe
from tests.modules.helpers import detached, unpipelined
from tests.modules.hugging_face import ARCHITECTURES, ROWS, batch_of, build, cross_entropy

LAYERS = 2
ROUNDING = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 3e-2}
"""Several of them take norms, angles or a softmax in float32, whatever their dtype."""

DROPPING = ("bert", "gpt2", "t5")
"""Those that have dropout by default."""


def differences(got: fpipe.Step, expected: fpipe.Step, rounding: float) -> Iterator[str]:
    """What differs by more than rounding."""
    pairs: dict[str, tuple[Any, Any]] = {"loss": (got.loss, expected.loss)}
    pairs |= {name: (got.grads[name], grad) for name, grad in expected.grads.items()}
    for name, (one, other) in pairs.items():
        distance = (one - other).abs().max().item()
        if not distance <= rounding * (1 + other.abs().max().item()):
            yield f"{name} by {distance:.1e}"


def compare(name: str, attention: str, drops: bool, device: str, dtype: str) -> list[str]:
    """What a compiled step of a model computes otherwise."""
    module: Any = build(name, LAYERS)
    kind = getattr(torch, dtype)
    module.to(device, kind).train(drops)
    module.set_attn_implementation(attention)
    batch = {
        key: leaf.to(device, kind if leaf.is_floating_point() else None)
        for key, leaf in batch_of(name, ROWS).items()
    }
    params = detached(module)

    def step(compile: bool) -> fpipe.Step:
        pipe = fpipe.from_module(
            module,
            schedule=fpipe.schedules.zb_h1(ranks=2, microbatches=2),
            cuts=ARCHITECTURES[name].cuts(LAYERS),
            loss=cross_entropy,
            compile=compile,
            has_key=drops,
        )
        return pipe.step(params, batch, *([fpipe.random.key(0)] if drops else []))

    expected = step(False) if drops else unpipelined(module, params, batch, cross_entropy)
    return list(differences(step(True), expected, ROUNDING[dtype]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile them all; 1 if one differs."""
    parser = argparse.ArgumentParser(description="Hugging Face models, compiled.")
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(ARCHITECTURES))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=ROUNDING, default="float64")
    given = parser.parse_args(arguments)
    torch.backends.cudnn.allow_tf32 = False
    names = given.names or list(ARCHITECTURES)
    if unknown := set(names) - set(ARCHITECTURES):
        parser.error(f"{', '.join(sorted(unknown))}: choose of {', '.join(ARCHITECTURES)}")
    failed = 0
    for name in names:
        for attention in ("eager", "sdpa"):
            for drops in (False, True)[: 1 + (name in DROPPING)]:
                start = time.perf_counter()
                found = compare(name, attention, drops, given.device, given.dtype)
                failed += bool(found)
                says = "differs: " + "; ".join(found) if found else "equal"
                seconds = time.perf_counter() - start
                how = f"{attention}{' with dropout' if drops else ''}"
                print(f"{name:8} {how:20} {seconds:5.1f} s  {says}", flush=True)
    print(f"{failed} differ")
    return int(failed > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
