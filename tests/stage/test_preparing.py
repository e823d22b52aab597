"""What no microbatch goes into has a piece of its own, and no other computes or keeps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fpipe.pieces.partition import save_all, save_nothing
from fpipe.pieces.piece import PREPARE
from tests.models import adapted_layer, rand
from tests.stage.pieces import count, ops, pieces_of

X = rand(4, 3)
ADAPTED = {"w": rand(3, 3), "up": rand(3, 1), "down": rand(1, 3), "gain": rand(3)}


@pytest.mark.parametrize(("policy", "again"), [(save_all, 0), (save_nothing, 1)])
def test_weights_made_of_parameters_are_made_apart(policy: Any, again: int) -> None:
    pieces = pieces_of(adapted_layer, ADAPTED, X, policy)
    made = pieces[PREPARE]
    assert {"mm", "add", "div", "exp"} <= set(ops(made))
    # The product with x, and its cotangent; the gradients of the weight, of up and of down.
    products = {op: count(piece, ["mm"]) for op, piece in pieces.items()}
    backward = {"B": 4 + again, "B+": 4 + again, "I": 1 + again, "W": 3, "W+": 3}
    assert products == {PREPARE: 1, "F": 1, **backward}
    for op, piece in pieces.items():
        if op != PREPARE:
            assert set(made.outputs) & set(piece.inputs), op
            assert not set(made.outputs) & set(piece.outputs), op


def test_what_nobody_else_reads_is_not_returned() -> None:
    made = pieces_of(lambda p, x: x @ p.bfloat16().double().mul(2), rand(3, 3), X)[PREPARE]
    assert len(made.outputs) == 1
    assert ops(made) == ["_to_copy", "_to_copy", "mul"]


def test_views_are_made_where_they_are_read() -> None:
    assert PREPARE not in pieces_of(lambda p, x: x @ p.t(), rand(3, 3), X)
    pieces = pieces_of(lambda p, x: x @ p.exp().t(), rand(3, 3), X)
    assert ops(pieces[PREPARE]) == ["exp"]
    assert "t" in ops(pieces["F"])


def test_of_several_results_those_that_are_read() -> None:
    pieces = pieces_of(lambda p, x: x @ torch.linalg.qr(p)[0], rand(3, 3), X)
    assert "linalg_qr" in ops(pieces[PREPARE])
    assert "linalg_qr" not in ops(pieces["F"])


def test_tensors_that_are_closed_over_are_as_fixed() -> None:
    table = rand(3, 3)
    pieces = pieces_of(lambda p, x: x @ p + table.cos(), rand(3, 3), X[:3])
    assert ops(pieces[PREPARE]) == ["cos"]


def test_what_is_made_of_nothing_is_made_where_it_is_read() -> None:
    def masked(p: Tensor, x: Tensor) -> Tensor:
        return (x @ p).masked_fill(torch.ones(4, 3, dtype=torch.bool).triu(1), 0.0)

    pieces = pieces_of(masked, rand(3, 3), X)
    assert PREPARE not in pieces
    for op in ("F", "B", "I"):
        assert "triu" in ops(pieces[op])
    # x, which the gradient of the weight reads, is the one value that is there from before.
    assert len(pieces["F"].outputs) == 1
    assert not {"triu", "ones"} & set(ops(pieces["W"]))


@pytest.mark.parametrize(
    "mask",
    [
        lambda y: torch.ones_like(y, dtype=torch.bool).tril(),
        lambda y: torch.zeros_like(y) == torch.full_like(y, 0.0).triu(1),
        lambda y: y.new_ones(4, 3).tril() != y.new_zeros(3),
        lambda y: y.new_full((4, 3), 2).tril() > 1,
    ],
)
def test_a_shape_is_nothing(mask: Any) -> None:
    def masked(p: Tensor, x: Tensor) -> Tensor:
        y = x @ p
        return y.masked_fill(mask(y.exp()), 0.0)

    pieces = pieces_of(masked, rand(3, 3), X)
    assert "exp" not in ops(pieces["F"])
    assert len(pieces["F"].outputs) == 1
    assert "full" in ops(pieces["B"])


def test_products_of_nothing_are_computed_once() -> None:
    def transformed(p: Tensor, x: Tensor) -> Tensor:
        place = torch.arange(3, dtype=x.dtype)
        return x @ p @ (torch.outer(place, place).cos() @ torch.ones(3, 3, dtype=x.dtype))

    pieces = pieces_of(transformed, rand(3, 3), X)
    assert ops(pieces[PREPARE]).count("mm") == 1
    assert count(pieces["F"], ["mm", "cos"]) == 2


def test_random_values_are_drawn_for_each_microbatch() -> None:
    pieces = pieces_of(lambda p, x: x @ F.dropout(p.exp()), rand(3, 3), X)
    assert ops(pieces[PREPARE]) == ["exp"]


def test_an_output_is_made_by_the_forward() -> None:
    def returning(p: Tensor, x: Tensor) -> Any:
        weight = p.exp()
        return x @ weight, weight

    assert "exp" in ops(pieces_of(returning, rand(3, 3), X)["F"])


def test_of_several_results_one_of_which_is_an_output() -> None:
    # The op, whose results are no one value, was to be returned.
    def returning(p: Tensor, x: Tensor) -> Any:
        values, vectors = torch.linalg.eigh(p @ p.t())
        return x @ vectors, values

    pieces = pieces_of(returning, rand(3, 3), X)
    assert "_linalg_eigh" in ops(pieces["F"])
    assert "_linalg_eigh" not in ops(pieces[PREPARE])
