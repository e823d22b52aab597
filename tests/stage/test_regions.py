"""Pieces that are divided where their layers meet: the same numbers, of fewer distinct graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe import Stage, StageError, pytree, random, schedules
from fpipe.graph.nodes import is_view
from fpipe.pieces import compiler
from fpipe.pieces.boxed import in_sequence
from fpipe.pieces.piece import Piece
from fpipe.pieces.regions import divide
from tests.laid_out import laid_out
from tests.models import (
    CONTEXT,
    WIDTH,
    Model,
    assert_identical,
    assert_same,
    block,
    conv,
    gpt,
    gpt_embed,
    gpt_loss,
    head,
    normed,
    rand,
    residual,
    unpipelined,
)
from tests.stage.pieces import pieces_of

Blocks = Callable[[Sequence[Any], Any], Any]


class Counting:
    """A compiler that holds values to their layouts.

    Attributes:
        graphs: that it was given.
        largest: the operations of the largest of them.
    """

    def __init__(self) -> None:
        self.graphs = self.largest = 0

    def __call__(self, module: fx.GraphModule, examples: Sequence[Tensor]) -> Any:
        self.graphs += 1
        self.largest = max(self.largest, sum(n.op == "call_function" for n in module.graph.nodes))
        return laid_out(module, examples)


@pytest.fixture
def divides(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether pieces are divided that a compiler of one's own gets whole."""
    return lambda wanted: monkeypatch.setattr(
        compiler, "without_regions", lambda compile: (compile, wanted)
    )


def deep(make: Callable[..., Model], layers: int, dtype: torch.dtype = torch.float64) -> Model:
    """Two stages of several blocks each: the embedding is before them, the head behind."""
    model = make(2 * layers + 2, 4, dtype)
    parts = [own.get("block", own) for own in model.params]
    own = residual if make is conv else block
    ends = model.stages[0], model.stages[-1]

    def first(p: Any, batch: Any) -> Any:
        x = ends[0]({"embed": p["embed"], "block": p["blocks"][0]}, batch)
        for one in p["blocks"][1:]:
            x = own(one, x)
        return x

    def last(p: Any, x: Any) -> Any:
        for one in p["blocks"][:-1]:
            x = own(one, x)
        return ends[1]({"head": p["head"], "block": p["blocks"][-1]}, x)

    half = len(parts) // 2
    params = [
        {"embed": model.params[0]["embed"], "blocks": parts[:half]},
        {"head": model.params[-1]["head"], "blocks": parts[half:]},
    ]
    return Model([first, last], model.loss, params, model.batch)


def layer(p: Any, x: Tensor) -> Tensor:
    """A layer with the fewest operations that is large enough for a region of its own."""
    return x + torch.tanh(normed(p["norm"], x) @ p["up"]) @ p["down"]


def layers_of(count: int) -> list[Any]:
    return [
        {
            "norm": {"weight": 1 + rand(WIDTH) / 3, "bias": rand(WIDTH) / 3},
            "up": rand(WIDTH, 2 * WIDTH) / 3,
            "down": rand(2 * WIDTH, WIDTH) / 3,
        }
        for _ in range(count)
    ]


def stack(layers: int, dtype: torch.dtype) -> Model:
    """Two stages of so many layers."""

    def stage(p: Any, x: Tensor) -> Tensor:
        for own in p:
            x = layer(own, x)
        return x

    params = [layers_of(layers), layers_of(layers)]
    params = pytree.tree_map(lambda leaf: leaf.to(dtype), params)
    x = rand(4, CONTEXT, WIDTH).to(dtype)
    return Model([stage, stage], lambda y, batch: (y - batch).square().mean(), params, x)


def stepped(model: Model, compile: Any, schedule: str = "zb_h1", **options: Any) -> Any:
    rows = schedules.get(schedule, ranks=2, microbatches=2)
    pipe = fpipe.pipeline(model.stages, model.loss, rows, compile=compile, **options)
    return pipe.step(model.params, model.batch)


@pytest.mark.parametrize(("make", "schedule"), [(gpt, "zb_h1"), (conv, "one_f_one_b")])
def test_graphs_grow_with_distinct_layers_and_not_with_layers(
    make: Callable[..., Model], schedule: str, divides: Callable[[bool], None]
) -> None:
    divides(True)
    found = []
    for layers in (2, 3):
        model = deep(make, layers)
        counting = Counting()
        step = stepped(model, counting, schedule)
        assert_same(step, unpipelined(*model))
        found.append(counting.graphs)
    assert found[0] == found[1]
    # Each piece has a layer, in which stages are alike, and what is before or behind it.
    pieces = 4 if schedule == "zb_h1" else 3
    assert found[1] <= pieces * 3


@pytest.mark.parametrize(
    ("remat", "make", "dtype"),
    [
        ("none", gpt, torch.float64),
        ("full", conv, torch.float32),
        ("except_last", conv, torch.float64),
    ],
)
def test_a_step_is_that_of_whole_pieces(
    make: Callable[..., Model], dtype: torch.dtype, remat: str, divides: Callable[[bool], None]
) -> None:
    model = deep(make, 2, dtype)
    steps = []
    for wanted in (True, False):
        divides(wanted)
        steps.append(stepped(model, laid_out, "one_f_one_b", remat=remat))
    assert_identical(*steps)


def _autocast(model: Model) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return stepped(model, laid_out)


@pytest.mark.parametrize(
    "step",
    [
        _autocast,
        lambda model: stepped(
            model,
            laid_out,
            mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            ),
        ),
        lambda model: stepped(model, laid_out, accum_dtype=torch.float64),
        lambda model: stepped(model, laid_out, remat=lambda node: "mm" in str(node.target)),
    ],
    ids=["autocast", "mixed precision", "wide sums", "products alone"],
)
def test_a_step_in_another_precision_is_that_of_whole_pieces(
    step: Callable[[Model], Any], divides: Callable[[bool], None]
) -> None:
    model = stack(3, torch.float32)
    steps = []
    for wanted in (True, False):
        divides(wanted)
        steps.append(step(model))
    assert_identical(*steps)


def noisy_blocks(p: Any, x: Tensor, key: Tensor) -> Tensor:
    for number, own in enumerate(p):
        x = random.dropout(random.fold_in(key, number), layer(own, x), 0.3)
    return x


def checkpointed(p: Any, x: Tensor, key: Tensor) -> Tensor:
    for own in p:
        x = checkpoint(layer, own, x, use_reentrant=False)
    return x


def alternating(p: Any, x: Tensor, key: Tensor) -> Tensor:
    """Two kinds of layers, one after the other; a mask that all of them read."""
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    for number, own in enumerate(p):
        x = layer(own, x)
        if number % 2:
            q = x @ own["up"]
            x = x + F.softmax((q @ q.mT).masked_fill(~mask, -1e4), -1) @ x
    return x


def tied(p: Any, x: Tensor, key: Tensor) -> Tensor:
    """One layer, many times."""
    for _ in range(4):
        x = layer(p[0], x)
    return x


def transposed(p: Any, x: Tensor, key: Tensor) -> Tensor:
    """Layers between which a view of a part of a value is handed on."""
    for own in p:
        x = (layer(own, x).mT @ torch.ones(x.shape[1], 2 * x.shape[1], dtype=x.dtype)).mT
        x = x[:, ::2]
    return x


@pytest.mark.parametrize(
    ("stage", "remat"),
    [
        (noisy_blocks, "full"),
        (checkpointed, "none"),
        (alternating, "full"),
        (tied, "none"),
        (transposed, "full"),
    ],
)
def test_layers_of_all_sorts(
    stage: Callable[..., Any], remat: str, divides: Callable[[bool], None]
) -> None:
    model = gpt(1, 4)
    params = [model.params[0]["embed"], layers_of(4), model.params[-1]["head"]]
    stages: list[Any] = [gpt_embed, Stage(stage, reads_key=True), head]
    found = []
    for wanted in (True, False):
        divides(wanted)
        schedule = schedules.zb_h1(ranks=3, microbatches=2)
        counting = Counting()
        pipe = fpipe.pipeline(stages, gpt_loss, schedule, compile=counting, remat=remat)
        found.append(
            (pipe.step(params, model.batch, key=random.key(1)), (counting.graphs, counting.largest))
        )
    assert_identical(found[0][0], found[1][0])
    assert found[0][1] != found[1][1]  # it was divided


def test_one_function_with_cuts(divides: Callable[[bool], None]) -> None:
    model = gpt(1, 4)
    (own,) = model.params
    params = {"embed": own["embed"], "layers": layers_of(6), "head": own["head"]}

    def whole(p: Any, batch: Any) -> Tensor:
        x = gpt_embed(p["embed"], batch)
        for number, own in enumerate(p["layers"]):
            x = fpipe.cut(x) if number == 3 else x
            x = layer(own, x)
        return gpt_loss(head(p["head"], x), batch)

    steps = []
    for wanted in (True, False):
        divides(wanted)
        schedule = schedules.zb_h1(ranks=2, microbatches=2)
        counting = Counting()
        pipe = fpipe.pipeline(whole, schedule=schedule, compile=counting)
        steps.append((pipe.step(params, model.batch), counting.graphs))
    assert_identical(steps[0][0], steps[1][0])
    assert steps[0][1] > steps[1][1]


def test_a_module(divides: Callable[[bool], None]) -> None:
    torch.manual_seed(0)

    def perceptron() -> list[nn.Module]:
        return [nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)]

    layers = [nn.Sequential(*perceptron()) for _ in range(6)]
    module = nn.Sequential(*layers).double()
    x = torch.randn(4, 3, 8, dtype=torch.float64)
    steps = []
    for wanted in (True, False):
        divides(wanted)
        counting = Counting()
        pipe = fpipe.from_module(
            module,
            schedule=schedules.zb_h1(ranks=2, microbatches=2),
            stages=2,
            example={"input": x},
            loss=lambda y, _: y.square().mean(),
            compile=counting,
        )
        params = {name: p.detach() for name, p in module.named_parameters()}
        steps.append((pipe.step(params, {"input": x}), counting.graphs))
    assert_identical(steps[0][0], steps[1][0])
    assert steps[0][1] > steps[1][1]


# ── what stays whole ────────────────────────────────────────────────────────────────────────────


def mlps(p: Any, x: Tensor) -> Tensor:
    for w in p:
        x = torch.tanh(x @ w)
    return x


def elementwise(p: Any, x: Tensor) -> Tensor:
    for w in p:
        x = torch.tanh(x * w).sin().exp().cos() + x
    return x


@pytest.mark.parametrize(("stage", "count"), [(mlps, 2), (elementwise, 12)])
def test_what_is_small_or_one_loop_stays_whole(stage: Callable[..., Any], count: int) -> None:
    params = [torch.eye(3) for _ in range(count)]
    for piece in pieces_of(stage, params, torch.ones(3, 3)).values():
        assert divide(piece) == (piece,)


def test_small_layers_share_a_region() -> None:
    pieces = pieces_of(mlps, [torch.eye(3) for _ in range(12)], torch.ones(3, 3))
    regions = divide(pieces["F"])
    assert len(regions) == 6  # of two products and their tanh
    assert len({region.fingerprint for region in regions}) == 1


def test_regions_read_what_those_before_return() -> None:
    model = gpt(6, 4)
    params = [own.get("block", own) for own in model.params]

    def blocks(p: Any, x: Tensor) -> Tensor:
        for own in p:
            x = block(own, x)
        return x

    pieces = pieces_of(blocks, params, torch.ones(2, 5, 8, dtype=torch.float64))
    assert {op: len(divide(piece)) > 1 for op, piece in pieces.items()} == dict.fromkeys(
        pieces, True
    )
    for piece in pieces.values():
        known = {node.name for node in piece.graph.find_nodes(op="placeholder")}
        for region in divide(piece):
            assert known.issuperset(region.inputs)
            known.update(region.outputs)
        assert _operations([piece]) == _operations(divide(piece))


def _operations(pieces: Sequence[Piece]) -> list[str]:
    """Those that are no views, which a region repeats."""
    return sorted(
        str(node.target)
        for piece in pieces
        for node in piece.graph.nodes
        if node.op == "call_function" and not is_view(node)
    )


def test_a_sequence_lets_go_of_what_nobody_reads_any_more() -> None:
    alive: list[tuple[bool, bool]] = []
    refs: list[weakref.ref[Tensor]] = []

    def first(inputs: list[Tensor]) -> Sequence[Tensor]:
        (x,) = inputs
        inputs.clear()
        made = x + 1, x + 2
        refs.append(weakref.ref(made[0]))
        return made

    def second(inputs: list[Tensor]) -> Sequence[Tensor]:
        y = inputs[0] * 2
        inputs.clear()
        gc.collect()
        alive.append((refs[0]() is not None, refs[1]() is not None))
        return (y,)

    x = torch.zeros(2)
    refs.append(weakref.ref(x))
    call = in_sequence(
        [(first, ["x"], ["a", "b"]), (second, ["a"], ["c"]), (second, ["b"], ["d"])],
        ["x"],
        ["d", "c"],
    )
    values = [x]
    del x
    outputs = call(values)
    assert not values
    assert [float(own.sum()) for own in outputs] == [8.0, 4.0]
    assert alive == [(False, False), (False, False)]


# ── the option ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("compile", "rule"),
    [
        ({"regions": "no"}, r"says 'no' of 'regions': it is True, .* or False"),
        ({"regions": True, "dynamic": True}, r"has \['dynamic'\]: .* and regions"),
    ],
)
def test_regions_that_are_no_choice(compile: Any, rule: str) -> None:
    model = gpt(2, 4)
    with pytest.raises(StageError, match=rule):
        stepped(model, compile)


@pytest.mark.parametrize("regions", [True, False])
def test_a_backend_gets_regions_or_whole_pieces(regions: bool) -> None:
    model = stack(2, torch.float64)
    step = stepped(model, {"backend": "eager", "regions": regions})
    assert_same(step, unpipelined(*model))


@pytest.mark.inductor
def test_compiled_regions_compute_what_the_plain_function_does() -> None:
    """Where values are kept, in the first stage, and where they are computed again."""

    def stage(p: Any, x: Tensor) -> Tensor:
        for up, down in p:
            x = x + torch.tanh(F.layer_norm(x, x.shape[-1:]) @ up) @ down
        return x

    torch.manual_seed(0)
    params = [[torch.randn(2, 3, 3).double().unbind() for _ in range(6)] for _ in range(2)]
    batch = torch.randn(4, 3).double()
    model = Model([stage, stage], lambda y, batch: (y - batch).square().mean(), params, batch)
    assert_same(stepped(model, True, remat=("none", "full")), unpipelined(*model))
