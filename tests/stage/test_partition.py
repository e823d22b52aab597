"""What each piece computes, and what goes from piece to piece."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fpipe.pieces.partition import save_all, save_nothing
from fpipe.pieces.piece import Piece
from tests.models import Model, rand
from tests.program.lowering import codes_of
from tests.stage.pieces import count, ops, pieces_of

X = rand(4, 3)


def linear(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


LINEAR = {"w": rand(3, 3), "b": rand(3)}
RANDOM = ("bernoulli", "rand", "rand_like", "native_dropout", "normal_functional", "randn")


def read_from(piece: Piece, maker: Piece) -> set[str]:
    """What `piece` reads of what `maker` returns."""
    return set(piece.inputs) & set(maker.outputs)


def test_every_op_has_a_piece() -> None:
    assert set(pieces_of(linear, LINEAR, X)) == {"F", "B", "B+", "I", "W", "W+"}


def test_one_product_each() -> None:
    pieces = pieces_of(linear, LINEAR, X)
    products = {op: count(piece, ["mm", "addmm"]) for op, piece in pieces.items()}
    assert products == {"F": 1, "B": 2, "B+": 2, "I": 1, "W": 1, "W+": 1}


def test_input_gradient_and_weight_gradient_share_no_work() -> None:
    pieces = pieces_of(linear, LINEAR, X)
    assert "tanh_backward" in ops(pieces["I"])
    assert "tanh_backward" not in ops(pieces["W"])
    views = {"t", "view", "transpose"}
    once = [op for op in (*ops(pieces["I"]), *ops(pieces["W"])) if op not in views]
    assert sorted(once) == sorted(op for op in ops(pieces["B"]) if op not in views)


def test_weight_gradient_waits_for_values_of_earlier_pieces_alone() -> None:
    pieces = pieces_of(linear, LINEAR, X)
    sources = {name for op in ("F", "I") for name in pieces[op].outputs}
    upstream = set(pieces["F"].inputs)
    assert set(pieces["W"].inputs) <= sources | upstream
    # The cotangent of the product, and the sum for the bias, which is done.
    assert len(read_from(pieces["W"], pieces["I"])) == 2


def test_cheap_shrinking_ops_are_done_at_once() -> None:
    """JaxPP's rule: the sum for the bias costs less memory done in I than put off to W."""
    pieces = pieces_of(linear, LINEAR, X)
    assert "sum" in ops(pieces["I"])
    assert "sum" not in ops(pieces["W"])


def test_growing_ops_are_put_off() -> None:
    def outer(p: Any, x: Tensor) -> Tensor:
        return (x.unsqueeze(2) * p).sum(1)

    pieces = pieces_of(outer, rand(3, 5), X)
    assert "sum" in ops(pieces["W"])


def test_ops_that_grow_in_bytes_are_put_off() -> None:
    def shift(p: Tensor, x: Tensor) -> Tensor:
        return x.half() + p.half()

    pieces = pieces_of(shift, rand(4, 3), X)
    assert ops(pieces["W"]) == ["_to_copy"]


def test_sums_continue_in_the_graph() -> None:
    pieces = pieces_of(linear, LINEAR, X)
    for plain, continued in (("B", "B+"), ("W", "W+")):
        assert ops(pieces[continued]).count("add") == ops(pieces[plain]).count("add") + 2
        more = set(pieces[continued].inputs) - set(pieces[plain].inputs)
        assert {"sum_so_far_0", "sum_so_far_1"} <= more


def test_neither_parameters_nor_views_are_saved() -> None:
    def stage(p: Any, x: Tensor) -> Tensor:
        h = (x @ p["w"]).view(2, 2, 3).transpose(0, 1)
        return (torch.tanh(h) * p["b"]).reshape(4, 3) @ p["w"].t()

    pieces = pieces_of(stage, LINEAR, X)
    made = {n.name: n for n in pieces["F"].graph.nodes}
    forward = pieces["F"]
    for name in forward.outputs:
        assert name in made
        assert made[name].target not in (
            torch.ops.aten.view.default,
            torch.ops.aten.transpose.int,
            torch.ops.aten.t.default,
        )
    assert not set(forward.outputs) & set(forward.inputs)


def test_leaves_of_ops_with_many_outputs_are_saved() -> None:
    def stage(p: Any, x: Tensor) -> Tensor:
        return F.layer_norm(x, (3,), p["w"][0], p["b"])

    pieces = pieces_of(stage, LINEAR, X)
    assert "native_layer_norm" in ops(pieces["F"])
    for op in ("B", "I", "W"):
        assert "native_layer_norm" not in ops(pieces[op])


def test_what_is_not_saved_is_computed_again() -> None:
    saved, again = (pieces_of(linear, LINEAR, X, policy) for policy in (save_all, save_nothing))
    assert len(again["F"].outputs) == 1
    assert "tanh" not in ops(saved["B"])
    assert "tanh" in ops(again["B"])
    assert "tanh" in ops(again["I"])


def test_a_policy_chooses_by_node() -> None:
    def keep_products(node: fx.Node) -> bool:
        return "mm" in str(node.target)

    def two(p: Any, x: Tensor) -> Tensor:
        return linear(p, linear(p, x))

    pieces = pieces_of(two, LINEAR, X, keep_products)
    assert count(pieces["B"], ["mm", "addmm"]) == 4  # none of the forward
    assert "tanh" in ops(pieces["B"])


def test_policy_sees_traced_nodes_with_shapes() -> None:
    seen = []

    def look(node: fx.Node) -> bool:
        seen.append((str(node.target), tuple(node.meta["val"].shape)))
        return True

    pieces_of(linear, LINEAR, X, look)
    assert ("aten.tanh.default", (4, 3)) in seen


def test_random_values_are_saved_and_never_drawn_again() -> None:
    def stage(p: Any, x: Tensor) -> Tensor:
        h = F.dropout(linear(p, x), 0.5)
        return h * torch.rand_like(h)

    for policy in (save_all, save_nothing):
        pieces = pieces_of(stage, LINEAR, X, policy)
        assert count(pieces["F"], RANDOM) == 2
        for op in ("B", "B+", "I", "W", "W+"):
            assert count(pieces[op], RANDOM) == 0


def test_outputs_are_not_saved_twice() -> None:
    pieces = pieces_of(linear, LINEAR, X)
    outputs = pieces["F"].outputs
    assert len(set(outputs)) == len(outputs)
    # tanh's backward reads its result, which is the stage's output.
    assert len(outputs) == 1


def test_stage_without_parameters_has_no_weight_gradient() -> None:
    pieces = pieces_of(lambda p, x: torch.tanh(x), None, X)
    assert set(pieces) == {"F", "B", "B+", "I"}


def test_stage_that_does_nothing_has_no_pieces() -> None:
    assert pieces_of(lambda p, x: x, None, X) == {}


def test_convolution_backward_is_split() -> None:
    def stage(p: Any, x: Tensor) -> Tensor:
        return torch.tanh(F.conv1d(x.unsqueeze(1), p["w"], p["b"], padding=1).flatten(1))

    pieces = pieces_of(stage, {"w": rand(3, 1, 3), "b": rand(3)}, X)

    def masks(op: str) -> list[Any]:
        return [
            node.args[-1]
            for node in pieces[op].graph.nodes
            if node.target is torch.ops.aten.convolution_backward.default
        ]

    assert masks("I") == [[True, False, False]]
    assert masks("W") == [[False, True, True]]


def test_attention_forward_is_not_run_again() -> None:
    def stage(p: Any, x: Tensor) -> Tensor:
        q = (x @ p["w"]).view(1, 1, 4, 3)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).view(4, 3) * p["b"]

    pieces = pieces_of(stage, LINEAR, X)
    forward = [op for op in ops(pieces["F"]) if "attention" in op]
    assert len(forward) == 1
    for op in ("B", "I", "W"):
        assert forward[0] not in ops(pieces[op])


def test_first_stage_keeps_what_serves_many_parameters_apart() -> None:
    """It has no input gradient; its I is the chain of cotangents that its parameters share."""

    def first(p: Any, x: Tensor) -> Tensor:
        return linear(p, linear(p, linear(p, x)))

    model = Model([first, lambda p, x: x * p], lambda y, _: y.sum(), [LINEAR, rand(3)], X)
    pieces = codes_of(model, 1)[0].pieces
    assert count(pieces["I"], ["tanh_backward"]) == 3
    assert count(pieces["W"], ["tanh_backward"]) == 0
    assert count(pieces["W"], ["mm"]) == 3
