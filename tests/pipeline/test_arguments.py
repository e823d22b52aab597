"""What each argument of `fpipe.pipeline` and of `step` means."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import fpipe
from fpipe import pytree, schedules
from tests.models import (
    assert_identical,
    assert_same,
    check,
    gpt,
    mean_square,
    mlp,
    mlp_first,
    mlp_layer,
    plain_pipeline,
    rand,
    unpipelined,
)

MODEL = mlp(2, 6)
X, Y = MODEL.batch["x"], MODEL.batch["y"]


# ── by name ──────────────────────────────────────────────────────────────────────────────────────


def test_the_batch_may_come_by_name() -> None:
    pipe = plain_pipeline(MODEL.stages)
    params, batch = MODEL.params, MODEL.batch
    expected = pipe.step(params, batch)
    assert_identical(pipe.step(params=params, batch=batch), expected)
    assert_identical(fpipe.step(params, pipe=pipe, batch=batch), expected)
    assert_identical(pipe.value(params, batch=batch), expected[0])
    assert_identical(pipe.forward(params, batch=batch), pipe.forward(params, batch))
    losses = torch.func.vmap(lambda x: pipe.value(params, batch={"x": x, "y": Y}))(X[None])
    assert_same(losses, expected[0][None])


def test_names_that_do_not_fit_are_told() -> None:
    pipe = plain_pipeline(MODEL.stages)
    with pytest.raises(fpipe.BatchError, match="2 arguments by position, and by name batch: it ta"):
        pipe.step(MODEL.params, MODEL.batch, batch=MODEL.batch)
    with pytest.raises(fpipe.BatchError, match="by name data: it takes params, batch, and key=;"):
        pipe.value(MODEL.params, data=MODEL.batch)


# ── in_dims ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("in_dims", [{"x": 1, "y": 0}, {"x": -1, "y": -2}])
def test_split_along_another_dimension(in_dims: Any) -> None:
    def first(p: Any, batch: Any) -> Tensor:
        return mlp_layer(p, batch["x"].t())

    batch = {"x": X.t(), "y": Y}
    check([first, mlp_layer], MODEL.params, batch, in_dims=in_dims)


def test_leaf_that_is_not_split() -> None:
    def first(p: Any, batch: Any) -> Tensor:
        return mlp_first(p, batch) * batch["scale"]

    batch = MODEL.batch | {"scale": rand(3)}
    check([first, mlp_layer], MODEL.params, batch, in_dims={"x": 0, "y": 0, "scale": None})


def test_prefix_of_a_nested_batch() -> None:
    def first(p: Any, batch: Any) -> Tensor:
        return mlp_first(p, batch["data"]) * batch["scales"][0] + batch["scales"][1]

    def loss(y: Tensor, batch: Any) -> Tensor:
        return mean_square(y, batch["data"])

    batch = {"data": MODEL.batch, "scales": [rand(3), rand(1)], "nothing": None}
    in_dims = {"data": 0, "scales": None, "nothing": None}
    check([first, mlp_layer], MODEL.params, batch, loss, in_dims=in_dims)


def test_nothing_to_split_and_one_microbatch() -> None:
    check(MODEL.stages, MODEL.params, MODEL.batch, microbatches=1, in_dims=None)


def test_batch_that_is_one_tensor() -> None:
    check([mlp_layer, mlp_layer], MODEL.params, X, lambda y, x: (y - x).square().mean())


def test_strided_batch() -> None:
    wide = rand(12, 6)
    batch = {"x": wide[::2, ::2], "y": wide.t()[:3].t()[:6]}
    check(MODEL.stages, MODEL.params, batch, microbatches=4)


# ── reduction ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_sum_of_losses(microbatches: int) -> None:
    def loss(y: Tensor, batch: Any) -> Tensor:
        return (y - batch["y"]).square().sum()

    check(MODEL.stages, MODEL.params, MODEL.batch, loss, microbatches=microbatches, reduction="sum")


# ── accum_dtype ─────────────────────────────────────────────────────────────────────────────────


def test_gradients_are_summed_in_accum_dtype() -> None:
    """Sums in float32 are rounded to bfloat16 once, at the end."""

    def loss(y: Tensor, _: Any) -> Tensor:
        return y.float().sum()

    x = torch.full((512, 1), 0.125, dtype=torch.bfloat16)
    params = [torch.ones(1, dtype=torch.bfloat16)]
    options: Any = {"microbatches": 512, "reduction": "sum"}
    wide = plain_pipeline([lambda p, x: x * p], loss, accum_dtype=torch.float32, **options)
    narrow = plain_pipeline([lambda p, x: x * p], loss, **options)
    assert wide.step(params, x).grads[0].item() == 64
    assert narrow.step(params, x).grads[0].item() < 64  # where 0.125 is lost beside 32
    assert wide.step(params, x).grads[0].dtype == torch.bfloat16


def test_accum_dtype_follows_float32_accumulation() -> None:
    model = gpt(2, 8, torch.bfloat16)
    schedule = schedules.one_f_one_b(ranks=2, microbatches=4)
    pipe = fpipe.pipeline(
        model.stages, model.loss, schedule, compile=False, accum_dtype=torch.float32
    )
    sums = pytree.tree_map(lambda leaf: torch.zeros_like(leaf, dtype=torch.float32), model.params)
    for start in range(0, 8, 2):
        part = {name: leaf[start : start + 2] for name, leaf in model.batch.items()}
        one = unpipelined(model.stages, lambda y, b: model.loss(y, b) / 4, model.params, part).grads
        sums = pytree.tree_map(lambda total, grad: total + grad.float(), sums, one)
    expected = pytree.tree_map(lambda total: total.bfloat16(), sums)
    assert_same(pipe.step(model.params, model.batch).grads, expected, tolerance=1e-2)


def test_complex_gradients_are_never_summed_in_a_real_dtype() -> None:
    params = [torch.complex(rand(3), rand(3, 1).flatten())]
    check(
        [lambda p, x: x["x"] * p],
        params,
        MODEL.batch,
        lambda y, _: y.abs().square().mean(),
        accum_dtype=torch.float64,
    )


# ── devices ─────────────────────────────────────────────────────────────────────────────────────


def test_a_device_for_each_rank() -> None:
    check(MODEL.stages, MODEL.params, MODEL.batch, devices=["cpu", torch.device("cpu")])


def test_parameters_are_made_on_the_devices_of_their_stages() -> None:
    """The meta device stands for one that is not the CPU's."""
    pipe = plain_pipeline(MODEL.stages, devices=["cpu", "meta"])
    made = pipe.init(
        lambda key, _, like: fpipe.random.normal(key, like.shape, like.dtype),
        fpipe.random.key(0),
        shapes=MODEL.params,
    )
    found = [{leaf.device.type for leaf in pytree.flatten(part)[0]} for part in made]
    assert found == [{"cpu"}, {"meta"}]


def test_default_device_is_the_callers_alone() -> None:
    """Stages follow it; what the pipeline makes for itself does not."""

    seen: set[str] = set()

    def layer(w: Tensor, x: Tensor) -> Tensor:
        seen.add(torch.empty(0).device.type)
        return torch.tanh(x @ w)

    def square(y: Tensor, _: Any) -> Tensor:
        return y.square().mean()

    weights, x = [rand(3, 3), rand(3, 3)], rand(6, 3)
    stages = [layer, layer]
    expected = unpipelined(stages, square, weights, x)
    seen.clear()
    tracked = [w.clone().requires_grad_() for w in weights]
    with torch.device("meta"):
        step = plain_pipeline(stages, square).step(weights, x)
        plain_pipeline(stages, square).value(tracked, x).backward()
        stacked = [torch.stack([w, w]) for w in weights]
        both = torch.func.vmap(plain_pipeline(stages, square).step, in_dims=(0, None))(stacked, x)
    assert_same(step, expected)
    assert_same([w.grad for w in tracked], expected.grads)
    assert_same(pytree.tree_map(lambda leaf: leaf[1], both), expected)
    assert seen == {"meta"}


@pytest.mark.cuda
def test_cuda_and_cpu() -> None:
    """Ranks on two devices: parameters lie there, gradients come back there."""
    params = [
        pytree.tree_map(lambda leaf, d=device: leaf.to(d), part)
        for part, device in zip(MODEL.params, ("cuda", "cpu"), strict=True)
    ]
    step = plain_pipeline(MODEL.stages, devices=["cuda", "cpu"]).step(params, MODEL.batch)
    assert step.grads[0]["w"].is_cuda
    assert not step.grads[1]["w"].is_cuda
    on_cpu = pytree.tree_map(lambda leaf: leaf.cpu(), step)
    assert_same(on_cpu, unpipelined(MODEL.stages, mean_square, MODEL.params, MODEL.batch))


# ── params ──────────────────────────────────────────────────────────────────────────────────────


class Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None


@optree.dataclasses.dataclass(namespace="fpipe")  # type: ignore[call-overload]
class Scale:
    by: Tensor
    name: str = field(default="scale", metadata={"pytree_node": False})


@dataclass
class Opaque:
    """Registered with optree by hand."""

    shift: Tensor


register: Any = optree.register_pytree_node
register(
    Opaque,
    lambda node: ((node.shift,), None),
    lambda _, children: Opaque(*children),
    namespace="fpipe",
)


def test_params_in_containers_of_many_kinds() -> None:
    def first(p: Linear, batch: Any) -> Any:
        return Scale(batch["x"] @ p.weight)

    def second(p: tuple[Scale, Opaque, None], x: Scale) -> Tensor:
        return torch.tanh(x.by * p[0].by + p[1].shift)

    params = (Linear(rand(3, 3), None), (Scale(rand(3)), Opaque(rand(1)), None))
    step = check([first, second], params, MODEL.batch)
    assert isinstance(step.grads, tuple)
    assert isinstance(step.grads[0], Linear)
    assert step.grads[1][0].name == "scale"


def test_stages_without_parameters() -> None:
    def halve(p: None, x: Tensor) -> Tensor:
        return x / 2

    first, last = MODEL.params
    params = [first, None, (), {}, last]
    check([mlp_first, halve, halve, halve, mlp_layer], params, MODEL.batch)


def test_leaves_without_influence_and_without_gradient() -> None:
    def first(p: Any, batch: Any) -> Tensor:
        return mlp_first(p, batch) * p["table"][0]

    extra = {"unused": rand(2), "table": torch.arange(1, 3), "flag": torch.tensor(True)}
    step = check([first, mlp_layer], [MODEL.params[0] | extra, MODEL.params[1]], MODEL.batch)
    assert step.grads[0]["unused"].equal(torch.zeros(2, dtype=torch.float64))
    assert step.grads[0]["table"] is None
    assert step.grads[0]["flag"] is None


@pytest.mark.parametrize("loss", [lambda y, b: b["y"].mean(), lambda y, b: y.detach().mean()])
def test_loss_that_no_parameter_has_influence_on(loss: Any) -> None:
    step = check(MODEL.stages, MODEL.params, MODEL.batch, loss)
    assert not any(leaf.any() for leaf in pytree.flatten(step.grads)[0])


def test_stages_whose_parameters_have_no_influence() -> None:
    def ignore(p: Any, x: Tensor) -> Tensor:
        return x * 2

    check([mlp_first, ignore, mlp_layer], [MODEL.params[0], rand(2), MODEL.params[1]], MODEL.batch)


WIDE = rand(8, 8)
LAYOUTS = {
    "transposed": WIDE[:3, :3].t(),
    "strided": WIDE[:6:2, 1:7:2],
    "expanded": WIDE[:3, :1].expand(3, 3),
    "overlapping": WIDE.flatten()[:5].as_strided((3, 3), (1, 1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_in_any_layout(name: str) -> None:
    params = [part | {"w": LAYOUTS[name]} for part in MODEL.params]
    step = check(MODEL.stages, params, MODEL.batch)
    assert step.grads[0]["w"].shape == (3, 3)


@pytest.mark.inductor
def test_compiled_parameters_in_other_layouts() -> None:
    layouts = (LAYOUTS["transposed"], torch.complex(WIDE, WIDE).conj().imag[:3, :3])
    params = [part | {"w": w} for part, w in zip(MODEL.params, layouts, strict=True)]
    check(MODEL.stages, params, MODEL.batch, compile=True, microbatches=1)


def test_empty_and_scalar_leaves() -> None:
    def first(p: Any, batch: Any) -> Tensor:
        return mlp_first(p, batch) * p["scalar"] + p["empty"].sum() + batch["none"].sum()

    extra = {"scalar": torch.tensor(2.0, dtype=torch.float64), "empty": rand(0, 3)}
    batch = MODEL.batch | {"none": rand(6, 0)}
    check([first, mlp_layer], [MODEL.params[0] | extra, MODEL.params[1]], batch)


def test_complex_parameters() -> None:
    params = [torch.complex(rand(3), rand(3, 1).flatten()), torch.complex(rand(3), rand(3))]
    batch = {"x": torch.complex(X, Y).conj()}  # lazily conjugated
    stages = [lambda p, x: x["x"] * p, lambda p, x: torch.tanh(x * p)]
    check(stages, params, batch, lambda y, _: (y * y.conj()).real.mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    model = mlp(2, 4, dtype)
    step = check(model.stages, model.params, model.batch, tolerance=3e-2)
    assert {leaf.dtype for leaf in pytree.flatten(step)[0]} == {dtype}


def test_mixed_dtypes() -> None:
    def last(p: Any, x: Tensor) -> Tensor:
        return mlp_layer(p, x.float()).double()

    params = [MODEL.params[0], pytree.tree_map(lambda leaf: leaf.float(), MODEL.params[1])]
    step = check([mlp_first, last], params, MODEL.batch, tolerance=1e-6)
    assert step.grads[1]["w"].dtype == torch.float32


def test_parameter_read_for_some_sizes_of_microbatch_only() -> None:
    # Its sum was started by one size of microbatch and missed by the other.
    def last(p: Any, x: Tensor) -> Tensor:
        y = x @ p["w"]
        return y + p["b"] if len(x) == 2 else y

    def loss(y: Tensor, batch: Any) -> Tensor:
        return (y - batch["y"]).square().sum()

    pipe = plain_pipeline([mlp_first, last], loss, reduction="sum")
    batch = {name: leaf[:5] for name, leaf in MODEL.batch.items()}
    step = pipe.step(MODEL.params, batch)
    parts = [
        unpipelined([mlp_first, last], loss, MODEL.params, {k: v[rows] for k, v in batch.items()})
        for rows in (slice(0, 3), slice(3, 5))
    ]
    assert_same(step, pytree.tree_map(lambda a, b: a + b, *parts))


# ── out_dims ────────────────────────────────────────────────────────────────────────────────────


def test_outputs_merge_along_out_dims() -> None:
    def last(p: Any, x: Tensor) -> Any:
        return {"y": mlp_layer(p, x), "columns": x.t(), "whole": p["b"]}

    pipe = plain_pipeline([mlp_first, last], microbatches=4)
    out_dims = {"y": 0, "columns": 1, "whole": None}
    output = pipe.forward(MODEL.params, {"x": X}, out_dims=out_dims)
    expected = last(MODEL.params[1], mlp_first(MODEL.params[0], {"x": X}))
    assert_same(output, expected)


# ── how it is called ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_within_grad_modes(mode: Any) -> None:
    expected = unpipelined(MODEL.stages, mean_square, MODEL.params, MODEL.batch)
    pipe = plain_pipeline(MODEL.stages)
    with mode():
        inside = pipe.step(MODEL.params, MODEL.batch)
    assert_same(inside, expected)
    assert_identical(pipe.step(MODEL.params, MODEL.batch), inside)


def test_anomaly_mode_does_not_look_into_traces(caplog: pytest.LogCaptureFixture) -> None:
    """It looked for NaN in abstract gradients, and the stage was told not to branch on data."""
    expected = unpipelined(MODEL.stages, mean_square, MODEL.params, MODEL.batch)
    pipe = plain_pipeline(MODEL.stages)
    with torch.autograd.set_detect_anomaly(True):
        assert_same(pipe.step(MODEL.params, MODEL.batch), expected)
        assert torch.is_anomaly_enabled()
    assert "anomaly mode of torch.autograd does not see into a pipeline" in caplog.text


def test_step_is_a_named_tuple() -> None:
    step = plain_pipeline(MODEL.stages).step(MODEL.params, MODEL.batch)
    assert step._fields == ("loss", "grads")
    assert step.loss.shape == ()
    assert "Pipeline of <Schedule zb_h1" in repr(plain_pipeline(MODEL.stages))


def test_programs_take_what_a_step_takes() -> None:
    """It was a TypeError that named a function of fpipe's own."""
    pipe = fpipe.pipeline(
        lambda w, state, x: ((fpipe.cut(x * w) * w).sum(), state + 1),
        schedule=schedules.gpipe(ranks=2, microbatches=1),
        has_state=True,
        compile=False,
    )
    params, state, batch = torch.ones(1), torch.ones(1), torch.ones(2, 1)
    assert len(pipe.programs(params, state, batch, key=fpipe.random.key(0))) == 2
    for more in ((batch,), (state, batch, batch), (state, batch, batch, batch)):
        with pytest.raises(fpipe.BatchError, match=r"\d arguments, but takes 3: params, state, ba"):
            pipe.programs(params, *more)
    with pytest.raises(fpipe.BatchError, match=r"by name stat: it takes params, state, batch, an"):
        pipe.programs(params, batch=batch, stat=state)
    named, placed = (
        pipe.programs(params, batch=batch, state=state),
        pipe.programs(params, state, batch),
    )
    assert list(map(str, named)) == list(map(str, placed))


@pytest.mark.parametrize("cuts", [False, True])
def test_the_order_in_which_a_function_goes_through_a_dict(cuts: bool) -> None:
    """A dict with its keys in another order was answered from the trace of the first."""

    def stage(params: Any, x: Tensor) -> Tensor:
        for weight in params.values():
            x = torch.tanh(x @ weight)
        return x

    def whole(params: Any, x: Tensor) -> Tensor:
        return fpipe.cut(stage(params, x)).square().mean()

    schedule = schedules.gpipe(ranks=2, microbatches=2)
    a, b, x = rand(3, 3), rand(3, 3), rand(4, 3)
    if cuts:
        pipe = fpipe.pipeline(whole, schedule=schedule, compile=False)
    else:
        # Stages of one function, whose traces are shared.
        pipe = fpipe.pipeline([stage, stage], lambda y, _: y.square().mean(), schedule,
                              compile=False)  # fmt: skip
    for own in ({"a": a, "b": b}, {"b": b, "a": a}):
        params: Any = own if cuts else [own, dict(reversed(own.items()))]
        plain = whole(own, x) if cuts else stage(params[1], stage(own, x)).square().mean()
        torch.testing.assert_close(pipe.step(params, x).loss, plain)


@pytest.mark.parametrize("wrap", [dict, OrderedDict, lambda d: defaultdict(int, d)])
@pytest.mark.parametrize("keys", [(1, True, 1.0), ((2, 0), (2, False), (2.0, 0))])
def test_keys_that_are_equal_and_of_different_types(
    keys: tuple[Any, ...], wrap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A dict with the key True was answered from the trace of one with the key 1."""

    def stage(params: Any, x: Tensor) -> Tensor:
        (key,) = params
        return x * params[key] * len(repr(key))

    def loss(y: Any, _: Any) -> Tensor:
        return y.square().mean()

    pipe = fpipe.pipeline([stage] * 2, loss, schedules.gpipe(ranks=2, microbatches=2),
                          compile=False)  # fmt: skip
    w, x = rand(), rand(4)
    for _ in range(2):
        for key in keys:
            params = [wrap({key: w}), {"same": w}]
            plain = stage(params[1], stage(params[0], x)).square().mean()
            with caplog.at_level(logging.INFO, logger="fpipe"):
                torch.testing.assert_close(pipe.step(params, x).loss, plain)
    told = [r.message for r in caplog.records if r.message.startswith("tracing step")]
    assert len(told) == 3
    assert told[-1].endswith("the parameters of stage 0 changed: its keys are of another type")
