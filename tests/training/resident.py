"""The anonymous memory of a process that trains: ``python -m tests.training.resident KIND``.

KIND is ``memory``, ``params`` (parameters in files), ``states`` (the optimizer's state in files) or
``both``. It prints MiB of RssAnon after the last of a few donated steps, above what the process had
before it made parameters, and then those of parameters and of the state.

`stay` trains so in a process that is then killed.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import fpipe
from fpipe import pytree, schedules

WIDTH: Final = 1024
LAYERS: Final = 4
MIB: Final = 1 << 20


def main() -> None:
    """Train, and print."""
    with tempfile.TemporaryDirectory() as folder:
        print(*trained(sys.argv[1], folder)[0], flush=True)


def stay(folder: str, told: Connection) -> None:
    """Train with all that may lie in files there, tell the sizes, and wait with all of it held."""
    sizes, _held = trained("both", folder)
    told.send(sizes)
    signal.pause()


def trained(kind: str, folder: str) -> tuple[list[int], Any]:
    """The sizes that `main` prints, and parameters and state after the last step."""
    torch.set_num_threads(1)
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline([stage, stage], loss, schedule, compile=False)
    shapes = [[torch.empty(WIDTH, WIDTH, device="meta")] * LAYERS] * 2
    storage = folder if kind in ("params", "both") else None
    offload = folder if kind in ("states", "both") else None
    before = anonymous()
    params = pipe.init(even, fpipe.random.key(0), shapes=shapes, storage=storage)
    trainer = fpipe.train(pipe, torch.optim.AdamW, lr=1e-3, donate=True, offload=offload)
    state, batch = trainer.init(params), torch.ones(4, WIDTH)
    for _ in range(3):
        _, params, state, _ = trainer.step(params, state, batch)
    sizes = [sum(leaf.nbytes for leaf in pytree.flatten(tree)[0]) for tree in (params, state)]
    own = anonymous() - before
    return [value // MIB for value in (own, *sizes)], (params, state)


def stage(params: Any, x: Tensor) -> Tensor:
    """Some layers."""
    for weight in params:
        x = torch.tanh(x @ weight)
    return x


def loss(y: Tensor, _: Any) -> Tensor:
    """Of the last output."""
    return y.square().mean()


def even(key: Tensor, name: str, like: Tensor) -> Tensor:
    """A weight whose elements are one number: to draw millions of them takes seconds."""
    return torch.full(like.shape, 1 / WIDTH, dtype=like.dtype)


def anonymous() -> int:
    """Bytes of RssAnon, without what the allocator keeps of memory that nobody holds."""
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    [line] = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
