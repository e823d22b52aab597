"""What a piece holds while it runs, against what uncompiled code holds after each op."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fpipe.pieces.compiler import Compiler
from fpipe.pieces.piece import Piece, footprint
from tests.meter import Meter
from tests.models import MODELS
from tests.program.lowering import codes_of


def held(piece: Piece, handed: Collection[int]) -> int:
    """Most bytes that an uncompiled call holds beyond its start; it alone holds those handed."""
    fakes = [node.meta["val"] for node in piece.graph.find_nodes(op="placeholder")]
    inputs = [
        torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).zero_() for fake in fakes
    ]
    call = Compiler(False)(piece, "a piece")
    others = [value for number, value in enumerate(inputs) if number not in handed]
    with Meter(inputs) as meter:
        call(inputs)
    del others
    return meter.peak


@pytest.mark.parametrize("name", MODELS)
def test_is_what_uncompiled_pieces_hold(name: str) -> None:
    # In float64 torch before 2.13 tells another dtype of what attention keeps than it has.
    for code in codes_of(MODELS[name](3, 4, torch.float32), 2):
        for op, piece in code.pieces.items():
            everything = range(len(piece.inputs))
            for handed in ((), everything, everything[::2]):
                expected = held(piece, handed)
                assert footprint(piece.graph, handed, fuses=False) == expected, (op, handed)


def graph_of(function: Any, *inputs: Tensor) -> fx.Graph:
    return make_fx(function, tracing_mode="fake")(*inputs).graph


X = torch.zeros(8, 16)  # 512 bytes
W = torch.zeros(16, 16)  # 1024


def test_fused_values_take_no_memory() -> None:
    graph = graph_of(lambda x: (x.sin().exp().cos(),), X)
    assert footprint(graph, (), fuses=False) == 2 * 512
    assert footprint(graph, (), fuses=True) == 512
    # The input is read until the last is written.
    assert footprint(graph, (0,), fuses=True) == 512


def test_products_read_and_write_memory() -> None:
    graph = graph_of(lambda x, w: (x.sin() @ w,), X, W)
    assert footprint(graph, (), fuses=True) == 2 * 512
    assert footprint(graph, (0,), fuses=True) == 512


def test_attention_reads_memory() -> None:
    """Its kernel on the CPU, which torch's table of products lacks, is a library's as well."""

    def attend(q: Tensor) -> Any:
        return (torch.nn.functional.scaled_dot_product_attention(q.sin(), q, q),)

    # What it makes of q beside the output, the log of sums, has one float per query.
    graph = graph_of(attend, torch.zeros(1, 1, 8, 16))
    assert footprint(graph, (), fuses=True) == 2 * 512 + 8 * 4


def test_a_sum_that_is_handed_over_is_held_twice_one_at_a_time() -> None:
    """Sums of two parameters: each is let go when what comes in its place is there."""

    def sums(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Any:
        return a + x.T @ y, b + y.T @ x

    graph = graph_of(sums, W, W.clone(), X, X.clone())
    assert footprint(graph, (), fuses=True) == 2 * 1024
    assert footprint(graph, (0, 1), fuses=True) == 1024
    assert footprint(graph, (0, 1), fuses=False) == 2 * 1024


def test_fused_code_writes_over_what_it_reads_last() -> None:
    graph = graph_of(lambda x, w: ((x @ w).relu() @ w,), X, W)
    assert footprint(graph, (), fuses=False) == 2 * 512
    assert footprint(graph, (), fuses=True) == 2 * 512
    wide = graph_of(lambda x, w: ((x @ w).relu().T @ x,), X, W[:, :8].contiguous())
    assert footprint(wide, (), fuses=True) == 8 * 8 * 4 + 8 * 16 * 4
