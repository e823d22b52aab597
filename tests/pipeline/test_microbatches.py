"""Batches that the caller has split, into microbatches of different shapes."""

from __future__ import annotations

import itertools
import logging
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fpipe
from fpipe import BatchError, Microbatches, Schedule, pytree, random, schedules
from fpipe.plan.plan import Latest
from tests.laid_out import laid_out
from tests.models import assert_same, rand

Tree = dict[str, Any]
LENGTHS = (3, 5, 3, 4)
ROWS = (4, 2, 4, 3)
TOKENS = 7


def make_params() -> Tree:
    torch.manual_seed(0)
    shapes = {"table": (TOKENS, 4), "mix": (4, 4), "out": (4, 4)}
    return {k: torch.randn(v, dtype=torch.float64) for k, v in shapes.items()}


def make_parts(lengths: Sequence[int] = LENGTHS, rows: Sequence[int] = ROWS) -> list[Tree]:
    torch.manual_seed(1)
    return [
        {
            "tokens": torch.randint(TOKENS, (count, length)),
            "mask": (torch.rand(count, length) < 0.8).double(),
            "shift": torch.randn(count, 1, 4, dtype=torch.float64),
        }
        for count, length in zip(rows, lengths, strict=True)
    ]


def language_model(params: Tree, batch: Tree) -> tuple[Tensor, Tensor]:
    """A sum over tokens and their number; the table is tied, and the shift is a skip."""
    x = params["table"][batch["tokens"]] + batch["shift"]
    h = fpipe.cut(torch.tanh(x @ params["mix"]))
    h = h.cumsum(1) / batch["mask"].cumsum(1).clamp(1).unsqueeze(-1)
    logits = fpipe.cut(torch.tanh(h @ params["out"]) + x) @ params["table"].T
    each = F.cross_entropy(logits[:, :-1].mT, batch["tokens"][:, 1:], reduction="none")
    return (each * batch["mask"][:, 1:]).sum(), batch["mask"][:, 1:].sum()


def plain(params: Tree, parts: Sequence[Tree]) -> Tensor:
    sums, weights = zip(*(language_model(params, part) for part in parts), strict=True)
    return torch.stack(sums).sum() / torch.stack(weights).sum()


def language_pipe(
    schedule: Schedule, group: dist.ProcessGroup | None = None, **options: Any
) -> fpipe.Pipeline:
    return fpipe.pipeline(
        language_model,
        schedule=schedule,
        reduction="weighted",
        compile=False,
        group=group,
        **options,
    )


SCHEDULES = [
    schedules.gpipe(ranks=3, microbatches=4),
    schedules.one_f_one_b(ranks=3, microbatches=4),
    schedules.zb_h1(ranks=3, microbatches=4),
    schedules.zb_h2(ranks=3, microbatches=4),
]


# ── the same answers ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("remat", ["none", "full", "except_last"])
def test_lengths_of_one_step_differ(remat: str) -> None:
    params, parts = make_params(), make_parts()
    grads, loss = torch.func.grad_and_value(plain)(params, parts)
    pipe = language_pipe(SCHEDULES[0], remat=remat)
    for schedule in SCHEDULES:
        step = pipe.with_schedule(schedule).step(params, Microbatches(parts))
        assert_same(step.loss, loss)
        assert_same(step.grads, grads)


def mean_square(y: Tensor, microbatch: Any) -> Tensor:
    return (y - microbatch["x"].mean()).square().mean()


def widen(w: Tensor, x: Any) -> Tensor:
    """Rows are sums over a length, so that a row counts as any other."""
    value = x["x"].sum(1) if isinstance(x, dict) else x
    return torch.tanh(value @ w)


@pytest.mark.parametrize("split_v", [schedules.zbv, schedules.dualpipev], ids=["zbv", "dualpipev"])
def test_mean_is_over_rows(split_v: Callable[..., Schedule]) -> None:
    schedule = split_v(ranks=2, microbatches=4)
    parts = [{"x": rand(rows, length, 3)} for rows, length in zip(ROWS, LENGTHS, strict=True)]
    params = [rand(3, 3) for _ in range(4)]

    def whole(params: list[Tensor]) -> Tensor:
        losses = []
        for part in parts:
            y: Any = part
            for w in params:
                y = widen(w, y)
            losses.append(mean_square(y, part) * len(part["x"]))
        return torch.stack(losses).sum() / sum(ROWS)

    grads, loss = torch.func.grad_and_value(whole)(params)
    pipe = fpipe.pipeline([widen] * 4, mean_square, schedule, compile=False)
    step = pipe.step(params, Microbatches(parts))
    assert_same(step.loss, loss)
    assert_same(step.grads, grads)


def scaled(params: Tree, batch: Tree) -> tuple[Tensor, dict[str, Tensor]]:
    h = fpipe.cut(batch["x"] * params["w"] * batch["row"].unsqueeze(-1) + batch["shared"])
    return h.square().mean(1).mean(), {"h": h, "rows": h.sum(1), "count": h.new_tensor(h.numel())}


ROW_DIMS = {"x": 0, "row": 0, "shared": None}


def make_mixed() -> tuple[Tree, Tree, list[Tree]]:
    """Parameters, a batch of which some is split already, and its microbatches."""
    xs = [rand(rows, length) for rows, length in zip((2, 1, 2), (3, 2, 4), strict=True)]
    row, shared = rand(5), rand()
    batch = {"x": Microbatches(xs), "row": row, "shared": shared}
    parts = [
        {"x": x, "row": own, "shared": shared}
        for x, own in zip(xs, row.split([2, 1, 2]), strict=True)
    ]
    return {"w": rand()}, batch, parts


def mixed_pipe(**options: Any) -> fpipe.Pipeline:
    schedule = schedules.one_f_one_b(ranks=2, microbatches=3)
    return fpipe.pipeline(
        scaled, schedule=schedule, in_dims=ROW_DIMS, has_aux=True, compile=False, **options
    )


def mixed_loss(params: Tree, batch: Tree) -> Tensor:
    """What the mixed pipeline computes of its batch."""
    rows = [len(x) for x in batch["x"]]
    parts = zip(batch["x"], batch["row"].split(rows), strict=True)
    losses = [
        scaled(params, {"x": x, "row": row, "shared": batch["shared"]})[0] * len(x)
        for x, row in parts
    ]
    return torch.stack(losses).sum() / sum(rows)


APART = {"h": Microbatches, "rows": 0, "count": 0}


def test_some_of_the_batch_is_split_and_some_is_shared() -> None:
    params, batch, parts = make_mixed()
    pipe = mixed_pipe(out_dims=APART)
    loss, grads, aux = pipe.step(params, batch)
    expected = torch.func.grad_and_value(mixed_loss)(params, batch)
    assert_same((grads, loss), expected)
    each = [scaled(params, part)[1] for part in parts]
    assert type(aux["h"]) is Microbatches
    assert_same(list(aux["h"]), [own["h"] for own in each])
    assert_same(aux["rows"], torch.cat([own["rows"] for own in each]))
    assert aux["count"].tolist() == [6, 2, 8]


def test_rows_of_parts_without_any_are_those_of_the_rest() -> None:
    params, batch, _ = make_mixed()
    pipe = mixed_pipe(out_dims=APART)
    unsplit = batch | {"x": Microbatches(x[:1] for x in batch["x"])}
    own = fpipe.pipeline(
        scaled,
        schedule=pipe.schedule,
        in_dims={"x": None, "row": 0, "shared": None},
        has_aux=True,
        out_dims=APART,
        compile=False,
    )
    losses = [
        scaled(params, {"x": x[:1], "row": row, "shared": batch["shared"]})[0] * len(row)
        for x, row in zip(batch["x"], batch["row"].split([2, 2, 1]), strict=True)
    ]
    assert_same(own.step(params, unsplit).loss, torch.stack(losses).sum() / 5)


def test_parts_of_one_shape_are_those_of_a_batch_that_is_split() -> None:
    params, x = {"w": rand()}, rand(6, 3)
    batch = {"x": x, "row": rand(6), "shared": rand()}
    pipe = mixed_pipe(out_dims=0)
    expected = pipe.step(params, batch)
    found = pipe.step(params, batch | {"x": Microbatches(x.split(2))})
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.grads["w"], expected.grads["w"])
    assert len(pipe._engine.stage_compiler._chains) == 1


def test_compiled() -> None:
    params, batch, _ = make_mixed()
    xs = Microbatches([batch["x"][0], batch["x"][1], batch["x"][0]])
    pipe = fpipe.pipeline(
        lambda p, x: fpipe.cut(x * p["w"]).square().mean(),
        schedule=schedules.gpipe(ranks=2, microbatches=3),
        compile=laid_out,
    )
    grads, loss = torch.func.grad_and_value(
        lambda p: torch.stack([(x * p["w"]).square().mean() * len(x) for x in xs]).sum() / 5
    )(params)
    step = pipe.step(params, xs)
    assert_same(step.loss, loss)
    assert_same(step.grads, grads)


# ── what comes out, and derivatives ─────────────────────────────────────────────────────────────


def test_forward_leaves_apart_what_cannot_be_put_together() -> None:
    params, batch, parts = make_mixed()
    pipe = mixed_pipe()
    with pytest.raises(BatchError, match=r"fpipe\.Microbatches there leaves them apart"):
        pipe.forward(params, batch)
    loss, aux = pipe.forward(params, batch, out_dims=Microbatches)
    assert_same(loss, mixed_loss(params, batch))
    assert [own.item() for own in aux["count"]] == [6.0, 2.0, 8.0]
    assert_same(list(aux["h"]), [scaled(params, part)[1]["h"] for part in parts])


def test_gradients_by_the_batch_are_as_the_batch() -> None:
    params, batch, _ = make_mixed()
    pipe = fpipe.grad(mixed_pipe(out_dims=APART), ("params", "batch"))
    _, (by_params, by_batch), _ = pipe.step(params, batch)
    expected = torch.func.grad(mixed_loss, (0, 1))(params, dict(batch, x=list(batch["x"])))
    assert_same(by_params, expected[0])
    assert type(by_batch["x"]) is Microbatches
    assert_same(by_batch | {"x": list(by_batch["x"])}, expected[1])


def test_history_of_the_loss_and_of_what_comes_out() -> None:
    params, batch, parts = make_mixed()
    pipe = mixed_pipe(out_dims=APART)
    leaves = [params["w"], *batch["x"], batch["row"]]
    for leaf in leaves:
        leaf.requires_grad_()
    expected = torch.autograd.grad(mixed_loss(params, batch), leaves)
    assert_same(torch.autograd.grad(pipe.value(params, batch), leaves), expected)

    def of(aux: Sequence[Tree]) -> Tensor:
        return aux[1]["h"].sum() * 2 + torch.cat([own["rows"] for own in aux]).square().sum()

    rows = [2, 1, 2]
    again = [
        {"x": x, "row": row, "shared": batch["shared"]}
        for x, row in zip(batch["x"], batch["row"].split(rows), strict=True)
    ]
    expected = torch.autograd.grad(of([scaled(params, part)[1] for part in again]), leaves)
    _, aux = pipe.forward(params, batch)
    total = aux["h"][1].sum() * 2 + aux["rows"].square().sum()
    assert_same(torch.autograd.grad(total, leaves), expected)
    assert len(parts) == 3


def test_vjp_takes_a_cotangent_for_each_microbatch() -> None:
    params, batch, parts = make_mixed()
    pipe = mixed_pipe(out_dims=APART)
    cotangent = {"h": Microbatches(map(torch.ones_like, batch["x"])), "rows": None, "count": None}
    product, grads = fpipe.vjp(pipe).step(params, batch, cotangent)

    def whole(params: Tree) -> Tensor:
        return torch.stack([scaled(params, part)[1]["h"].sum() for part in parts]).sum()

    assert_same((grads, product), torch.func.grad_and_value(whole)(params))


def test_transforms() -> None:
    params, batch, _ = make_mixed()
    pipe = mixed_pipe(out_dims=APART)
    direction = {"w": rand()}

    def loss(params: Tree) -> Tensor:
        return mixed_loss(params, batch)

    found = fpipe.jvp(pipe).value(params, batch, direction).jvp
    assert_same(found, torch.func.jvp(loss, (params,), (direction,))[1])
    product = fpipe.hvp(pipe).step(params, batch, direction).hvp
    expected = torch.func.jvp(torch.func.grad(loss), (params,), (direction,))[1]
    assert_same(product, expected)
    members = {"w": rand(2)}
    step = fpipe.vmap(pipe).step(members, batch)
    each = [torch.func.grad_and_value(loss)({"w": w}) for w in members["w"]]
    assert_same(step.loss, torch.stack([value for _, value in each]))
    assert_same(step.grads["w"], torch.stack([grads["w"] for grads, _ in each]))
    # Members that have a batch each, and torch's own vmap of a call.
    stacked = pytree.tree_map(lambda leaf: torch.stack([leaf, 2 * leaf]), batch)
    own = fpipe.vmap(pipe, (0, 0)).step(members, stacked)
    one, two = (
        torch.func.grad_and_value(mixed_loss)(
            {"w": w}, pytree.tree_map(lambda v, n=n: n * v, batch)
        )
        for n, w in zip((1, 2), members["w"], strict=True)
    )
    assert_same(own.loss, torch.stack([one[1], two[1]]))
    assert_same(own.grads["w"], torch.stack([one[0]["w"], two[0]["w"]]))
    losses = torch.vmap(lambda w: pipe.value({"w": w}, batch))(members["w"])
    assert_same(losses, step.loss)
    one_of = Microbatches([0, None, None])
    with pytest.raises(BatchError, match="stacked along the same dimensions in all parts"):
        fpipe.vmap(pipe, (0, {"x": one_of, "row": None, "shared": None}))


def test_single_examples() -> None:
    params, batch, _ = make_mixed()
    pipe = mixed_pipe(out_dims=APART)
    losses, grads, _ = fpipe.per_example_grads(pipe).step(params, batch)
    rows = [(x[i : i + 1], k) for x in batch["x"] for i, k in enumerate([0] * len(x))]
    for number, (x, _) in enumerate(rows):
        own = {"x": x, "row": batch["row"][number : number + 1], "shared": batch["shared"]}
        grad, loss = torch.func.grad_and_value(lambda p, own=own: scaled(p, own)[0])(params)
        assert_same(losses[number], loss)
        assert_same(grads["w"][number], grad["w"])


def reading_when_long(params: Tree, x: Tensor) -> Tensor:
    h = fpipe.cut(x * params["a"])
    return (h * params["b"] if x.shape[1] > 3 else h).square().mean()


def test_single_examples_where_a_parameter_is_read_by_some() -> None:
    params = {"a": rand(), "b": rand() + 1}
    xs = [rand(2, 3), rand(1, 5) + 2, rand(2, 7)]
    pipe = fpipe.pipeline(
        reading_when_long, schedule=schedules.gpipe(ranks=2, microbatches=3), compile=False
    )
    rows = [row for x in xs for row in x.split(1)]
    each = [torch.func.grad(reading_when_long)(params, row) for row in rows]
    grads = fpipe.per_example_grads(pipe).step(params, Microbatches(xs)).grads
    for name in params:
        assert_same(grads[name], torch.stack([own[name] for own in each]))
    norms = [torch.stack([own["a"], own["b"]]).norm() for own in each]
    found = fpipe.per_example_norms(pipe).step(params, Microbatches(xs))
    assert_same(found.norms, torch.stack(norms))
    stacked = pytree.tree_map(lambda p: torch.stack([p, 2 * p]), params)
    of_all = fpipe.per_example_grads(fpipe.vmap(pipe)).step(stacked, Microbatches(xs)).grads
    assert of_all["b"].numel() == 2 * len(rows)


def test_one_microbatch_of_those_that_torch_maps() -> None:
    pipe = fpipe.pipeline(
        lambda w, x: fpipe.cut(torch.tanh(x) * w).square().mean(),
        schedule=schedules.gpipe(ranks=2, microbatches=2),
        compile=False,
    )
    w, a, b = rand(), rand(2, 3), rand(1, 5)

    def plain(w: Tensor, a: Tensor) -> Tensor:
        halves = [torch.tanh(x).mul(w).square().mean() * len(x) for x in (a, b)]
        return torch.stack(halves).sum() / 3

    def value(w: Tensor, a: Tensor) -> Tensor:
        return pipe.value(w, Microbatches([a, b]))

    many = torch.stack([a, 2 * a])
    for own, expected in ((value, plain), (torch.func.grad(value), torch.func.grad(plain))):
        both = [torch.vmap(fn, (None, 0))(w, many) for fn in (own, expected)]
        assert_same(*both)
        assert_same(*(torch.func.jacfwd(fn, 1)(w, a) for fn in (own, expected)))


def drawing(params: Tree, batch: Tree, key: Tensor) -> Tensor:
    h = fpipe.cut(random.dropout(random.fold_in(key, 0), batch["x"] * params["w"]))
    return h.square().mean()


def test_each_microbatch_draws_from_its_own_key() -> None:
    params, batch, _ = make_mixed()
    key, xs = random.key(3), batch["x"]
    pipe = fpipe.pipeline(
        drawing, schedule=schedules.gpipe(ranks=2, microbatches=3), has_key=True, compile=False
    )
    losses = [
        drawing(params, {"x": x}, random.fold_in(key, number)) * len(x)
        for number, x in enumerate(xs)
    ]
    found = pipe.step(params, {"x": xs}, key).loss
    assert_same(found, torch.stack(losses).sum() / sum(map(len, xs)))


def counting(params: Tree, state: Tensor, batch: Tree) -> tuple[Tensor, Tensor]:
    h = batch["x"] * params["w"] + state
    left = state * 0.5 + h.detach().sum()
    return fpipe.cut(h).square().mean(), left


def test_state_goes_through_the_microbatches_in_order() -> None:
    params, batch, _ = make_mixed()
    xs, state, losses = batch["x"], rand(), []
    pipe = fpipe.pipeline(
        counting, schedule=schedules.gpipe(ranks=2, microbatches=3), has_state=True, compile=False
    )
    found = pipe.step(params, state, {"x": xs})
    for x in xs:
        loss, state = counting(params, state, {"x": x})
        losses.append(loss * len(x))
    assert_same(found.loss, torch.stack(losses).sum() / sum(map(len, xs)))
    assert_same(found.state, state)


class Tagger(nn.Module):
    """A module whose forward takes sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.mix(self.table(tokens).tanh())
        return out


def test_modules() -> None:
    torch.manual_seed(0)
    module = Tagger().double()
    pipe = fpipe.from_module(
        module,
        cuts=["table"],
        schedule=schedules.zb_h1(ranks=2, microbatches=4),
        loss=lambda output, batch: output.square().mean(),
        compile=False,
    )
    parts = [{"tokens": part["tokens"]} for part in make_parts()]
    params = dict(module.named_parameters())
    loss, grads = pipe.step(params, Microbatches(parts))
    total = sum(module(**own).square().mean() * len(own["tokens"]) for own in parts) / sum(ROWS)
    assert isinstance(total, Tensor)
    assert_same(loss, total.detach())
    expected = torch.autograd.grad(total, list(params.values()))
    assert_same(grads, dict(zip(params, expected, strict=True)))


# ── plans ───────────────────────────────────────────────────────────────────────────────────────


def test_shapes_are_traced_once_in_any_order(caplog: pytest.LogCaptureFixture) -> None:
    params, parts = make_params(), make_parts()
    pipe = language_pipe(SCHEDULES[1])
    with caplog.at_level(logging.INFO, "fpipe"):
        first = pipe.step(params, Microbatches(parts))
        assert len(pipe._engine.stage_compiler._chains) == 3  # two of the four are alike
        turned = pipe.step(params, Microbatches(reversed(parts)))
        pipe.step(params, Microbatches(parts))
    assert len(pipe._engine.stage_compiler._chains) == 3
    assert_same(turned, first)
    with caplog.at_level(logging.INFO, "fpipe"):
        pipe.step(params, Microbatches([parts[3], *parts[:2], *make_parts([9], [1])]))
    told = [r.getMessage() for r in caplog.records if "microbatches" in r.getMessage()]
    assert "the microbatch changed: ['mask'] is float64[1, 9]" in told.pop()
    assert [text.split()[0] for text in told] == ["tracing", "planning"]
    assert told[0] == "tracing step for microbatches of 4 and 2 and 3 rows"


def test_lengths_are_told_where_rows_are_alike(caplog: pytest.LogCaptureFixture) -> None:
    pipe = fpipe.pipeline(
        lambda w, x: fpipe.cut(x * w).mean(),
        schedule=schedules.gpipe(ranks=2, microbatches=2),
        compile=False,
    )
    with caplog.at_level(logging.INFO, "fpipe"):
        pipe.step(rand(), Microbatches([rand(2, 3), rand(2, 4)]))
    assert "microbatches of 2 and 2 rows, float64[2, 3] and float64[2, 4]" in caplog.text


def test_shapes_alone_make_programs() -> None:
    params, parts = make_params(), make_parts()
    pipe = language_pipe(SCHEDULES[1])
    on_meta = pytree.tree_map(lambda leaf: leaf.to("meta"), (params, Microbatches(parts)))
    programs = pipe.programs(*on_meta)
    pipe.step(params, Microbatches(parts))
    assert programs == pipe.programs(params, Microbatches(parts))
    alike = pipe.programs(params, Microbatches([parts[0]] * 4))
    assert alike[0].peak_bytes != programs[0].peak_bytes


def test_structure_of_what_comes_out_may_not_differ() -> None:
    def growing(w: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        return fpipe.cut(x * w).sum(), [*x.unbind(1)]

    schedule = schedules.gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(growing, schedule=schedule, has_aux=True, compile=False)
    with pytest.raises(fpipe.StageError, match=r"another structure .* microbatches of one step"):
        pipe.step(rand(), Microbatches([rand(2, 3), rand(2, 4)]))


def test_a_slice_of_one_row_lies_as_any_other() -> None:
    pipe = fpipe.pipeline(
        lambda w, x: fpipe.cut(x * w).mean(),
        schedule=schedules.gpipe(ranks=2, microbatches=2),
        compile=False,
    )
    for width in (6, 7, 8):
        pipe.step(rand(), Microbatches([rand(2, 3), rand(1, width)[:, :5]]))
    assert len(pipe._engine.stage_compiler._chains) == 2


def test_keys_in_another_order_in_one_microbatch() -> None:
    """A function may go through a dict in the order of its keys."""

    def loss_fn(w: Tensor, batch: Tree) -> Tensor:
        first, second = batch.values()
        return fpipe.cut(first * w).sum() + second.sum()

    schedule = schedules.gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, reduction="sum", compile=False)
    one, w = {"x": rand(1), "y": rand(1) + 5}, rand()
    parts = [one, dict(reversed(one.items()))]
    expected = torch.stack([loss_fn(w, part) for part in parts]).sum()
    assert_same(pipe.value(w, Microbatches(parts)), expected)


def test_memory_is_that_of_the_biggest() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    parts = [{"input": torch.ones(2, length, 4)} for length in (4, 400)]
    found = [
        fpipe.balance(module, schedule, batch, loss=lambda output, _: output.mean()).stages
        for batch in (Microbatches(parts), Microbatches(parts[::-1]))
    ]
    assert found[0] == found[1]
    measured = fpipe.balance(
        module,
        schedule,
        Microbatches(parts),
        loss=lambda output, _: output.mean(),
        measure=True,
        compile=False,
    )
    assert measured.unit == "s"


def test_orders_of_known_shapes_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no end of them; the traces are kept."""
    monkeypatch.setattr("fpipe.plan.planner.MANY", 3)
    pipe = fpipe.pipeline(
        lambda w, x: fpipe.cut(x * w).mean(),
        schedule=schedules.gpipe(ranks=2, microbatches=4),
        compile=False,
    )
    planner = pipe._engine._controller.planner
    planner.plans = Latest(4)
    w, shapes = rand(), [rand(2, 3), rand(1, 5)]
    with caplog.at_level(logging.INFO, "fpipe"):
        for order in itertools.product((0, 1), repeat=4):
            parts = [shapes[kind] for kind in order]
            losses = [(x * w).mean() * len(x) for x in parts]
            expected = torch.stack(losses).sum() / sum(map(len, parts))
            assert_same(pipe.value(w, Microbatches(parts)), expected)
    assert len(planner.plans) == 4 and len(pipe._engine.stage_compiler._chains) == 2
    told = [record.getMessage() for record in caplog.records]
    assert not [text for text in told if "have been traced" in text]
    assert [text for text in told if "come in another order" in text]


# ── what is refused ─────────────────────────────────────────────────────────────────────────────


def refused_batch(batch: Any, match: str, in_dims: Any = 0) -> None:
    schedule = schedules.gpipe(ranks=1, microbatches=2)
    pipe = fpipe.pipeline(
        lambda w, batch: sum(leaf.sum() for leaf in pytree.flatten(batch)[0]) * w,
        schedule=schedule,
        in_dims=in_dims,
        compile=False,
    )
    with pytest.raises(BatchError, match=match):
        pipe.step(rand(), batch)


def test_refusals() -> None:
    two, x = Microbatches([rand(2, 3), rand(2, 4)]), rand(2, 3)
    refused_batch(Microbatches([two, two]), "microbatch 0 has Microbatches within it")
    refused_batch(Microbatches([]), "of 0 parts, .*an iterator gives its values once")
    refused_batch(
        Microbatches([x, x]), "in_dims is <class .* for a leaf of micro", in_dims=Microbatches
    )
    refused_batch(Microbatches([x]), "has Microbatches of 1 parts, but the schedule has 2")
    refused_batch({"x": two, "y": Microbatches([x])}, "Microbatches of 1 and 2 parts stand in one")
    refused_batch(Microbatches([{"x": x}, {"y": x}]), "microbatch 1 has the structure .*'y'")
    refused_batch(
        Microbatches([x, x.float()]), "of microbatch 1 is float32 with 2 dimensions on cpu"
    )
    refused_batch(
        Microbatches([x, x[0]]), "of microbatch 1 is float64 with 1 dim.*of their dim.* alone"
    )
    refused_batch(Microbatches([x, x[:0]]), "microbatch 1 has 0 rows")
    refused_batch(
        {"x": two, "y": rand(5)}, r"batch\['y'\] has 5 rows, but the Microbatches .* 4, 2 \+ 2"
    )
    refused_batch({"x": two, "y": Microbatches([x[:1], x])}, "0 has 1 rows in .'y'. and 2 in .'x'.")
    refused_batch(two, "in_dims is 2 for a leaf of microbatch 0, of shape .2, 3.", in_dims=2)
    refused_batch({"x": two}, "in_dims must be a pytree prefix of microbatch 0", in_dims={"x": [0]})
    refused_batch(Microbatches([x, "text"]), r"batch\[1\]='text' is a str")
    refused_batch(Microbatches([x, [x, x].__iter__()]), "gives its values once")


def test_dtype_of_what_comes_out_may_not_differ() -> None:
    schedule = schedules.gpipe(ranks=2, microbatches=2)

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        loss = fpipe.cut(x * w).mean()
        return loss.float() if x.shape[1] > 3 else loss

    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    with pytest.raises(fpipe.StageError, match=r"float32\[\] .* float64\[\] .* one dtype"):
        pipe.step(rand(), Microbatches([rand(2, 3), rand(2, 4)]))


def test_cotangent_of_what_is_left_apart() -> None:
    params, batch, _ = make_mixed()
    pipe = fpipe.vjp(mixed_pipe(out_dims=APART))
    cotangent = {"h": rand(5, 3), "rows": None, "count": None}
    with pytest.raises(BatchError, match=r"cotangent\['h'\] is of an output that out_dims leaves"):
        pipe.step(params, batch, cotangent)


def test_torch_knows_it_too() -> None:
    found = torch.func.grad(lambda parts: parts[0].sum() * parts[1].sum())(
        Microbatches([torch.ones(2), torch.ones(3)])
    )
    assert type(found) is Microbatches
    assert [own.tolist() for own in found] == [[3.0, 3.0], [2.0, 2.0, 2.0]]


def test_is_a_tuple_and_a_node() -> None:
    parts: Any = Microbatches([{"x": 1}, {"x": 2}])
    assert parts == ({"x": 1}, {"x": 2})
    assert repr(parts) == "fpipe.Microbatches([{'x': 1}, {'x': 2}])"
    copy = pickle.loads(pickle.dumps(parts))
    assert type(copy) is Microbatches and copy == parts
    doubled = optree.tree_map(lambda v: 2 * v, parts, namespace="fpipe")
    assert type(doubled) is Microbatches and doubled[1] == {"x": 4}
    assert Microbatches(part for part in parts) == parts
