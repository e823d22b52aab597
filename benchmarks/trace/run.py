"""How long does it take to divide and trace a model of billions of parameters, without weights?

    python -m benchmarks.trace.run

See the README beside this file.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
import transformers
from torch import nn

import fpipe
from benchmarks.harness import Cell, Report, add_arguments, command, machine, publish

T = TypeVar("T")

COLUMNS: Final = ("step", "seconds", "peak, GiB")


def llama(layers: int) -> nn.Module:
    """Llama 2 7B at 32 layers, by its shapes alone."""
    library: Any = transformers
    config = library.LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        max_position_embeddings=2048,
    )
    with torch.device("meta"):
        module: nn.Module = library.LlamaForCausalLM(config)
    return module


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32, help="32 make 6.7 billion parameters")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16, help="of one row of 2048 tokens")
    add_arguments(parser, rounds=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[Cell]] = []

    def timed(name: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
        kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rows.append([name, seconds, kibibytes / 2**20])
        return result

    schedule = fpipe.schedules.one_f_one_b(
        ranks=arguments.ranks, microbatches=arguments.microbatches
    )
    tokens = torch.ones(arguments.microbatches, 2048, dtype=torch.int64, device="meta")
    batch = {"input_ids": tokens, "labels": tokens}
    module = timed("build on the meta device", lambda: llama(arguments.layers))
    balance = timed("fpipe.balance", lambda: fpipe.balance(module, schedule, batch))
    pipe = timed(
        "fpipe.from_module",
        lambda: fpipe.from_module(module, schedule=schedule, cuts=balance.cuts, compile=False),
    )
    params = dict(module.named_parameters())
    programs = timed("pipe.programs", lambda: pipe.programs(params, batch))
    rows.append(["all of it", sum(float(row[1] or 0) for row in rows), rows[-1][2]])
    report = Report(
        "A model without weights: " + " ".join(__doc__.splitlines()[0].split()),
        command("benchmarks.trace.run"),
        machine(torch.device("cpu")),
        {
            "parameters": f"{sum(p.numel() for p in params.values()) / 1e9:.3f} billion",
            "schedule": f"{schedule.name}, {arguments.ranks} ranks, "
            f"{arguments.microbatches} microbatches of 1 × 2048 tokens",
        },
        COLUMNS,
        rows,
    )
    publish(report, arguments)
    peaks = ", ".join(f"{program.peak_bytes / 2**20:,.0f}" for program in programs)
    after = f"\n{balance}\n\nMiB that each rank holds beside its parameters: {peaks}\n"
    print(after)
    if arguments.markdown:
        indented = "".join(f"    {line}\n" if line else "\n" for line in after.splitlines())
        with arguments.markdown.open("a", encoding="utf-8") as file:
            file.write(indented)


if __name__ == "__main__":
    main()
