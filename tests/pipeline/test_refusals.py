"""What is refused before anything runs, and what the refusal says."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import random
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

import fpipe
from fpipe import (
    Action,
    BatchError,
    FpipeError,
    Schedule,
    ScheduleError,
    StageError,
    pytree,
    schedules,
)
from fpipe.checks import purity
from tests.eager import check_stages
from tests.models import mean_square, mlp, mlp_first, mlp_layer, plain_pipeline, rand

MODEL = mlp(2, 4)


class Numbers(list[float]):
    """A class that pytrees do not know."""


def step(*stages: Callable[..., Any], **options: Any) -> Any:
    """A step of two stages on the small model's data."""
    return plain_pipeline(stages, **options).step(MODEL.params, MODEL.batch)


def after_first(stage: Callable[..., Any]) -> list[Callable[..., Any]]:
    return [mlp_first, stage]


# ── arguments of fpipe.pipeline ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"stages": [mlp_first]}, "stages has 1 functions, but the schedule zb_h1 has 2 stages"),
        ({"stages": 3}, "stages=3 is an int: it must be a list or tuple with one function per"),
        (
            {"stages": [None, mlp_layer]},
            r"stages\[0\] is None: every rank passes the functions of all stages",
        ),
        ({"stages": [mlp_first, 3]}, "fn=3 is not callable: a stage is a function"),
        (
            {"stages": [mlp_first, torch.nn.Linear(2, 2)]},
            "a stage is a Linear, a module with parameters .* fpipe.from_module",
        ),
        ({"loss": None}, r"loss=None is not callable: it is a function \(y, microbatch\)"),
        ({"schedule": "gpipe"}, "schedule='gpipe' is a str: make one with fpipe.schedules"),
        ({"reduction": "max"}, "reduction='max' must be one of 'mean', 'sum'"),
        ({"remat": "some"}, "remat='some' must be one of 'none', 'full', 'except_last', or a"),
        ({"remat": 3}, "remat=3 must be one of"),
        ({"compile": 3}, "compile=3 must be True"),
        ({"compile": None}, "compile=None must be True"),
        ({"compile": {"fullgraph": True}}, r"has \['fullgraph'\]: it takes what torch.compile"),
        ({"compile": {"mode": "reduce-overhead"}}, "asks for CUDA graphs, .* choose another mode"),
        ({"compile": {"mode": "fast"}}, "is not what Inductor takes: Unrecognized mode=fast, sh"),
        ({"compile": {"options": {"fas": 1}}}, "Unexpected optimization option fas$"),
        ({"compile": {"options": {"size_asserts": "no"}}}, "takes: Unexpected type of attr"),
        ({"compile": "fast"}, r"compile=\{'backend': 'fast'\} names no backend: torch._dynamo"),
        ({"accum_dtype": torch.int32}, "accum_dtype=torch.int32 must be a floating-point dtype"),
        ({"accum_dtype": "float32"}, "accum_dtype='float32' must be a floating-point dtype"),
        ({"devices": ["cpu"]}, "devices has 1 entries, but the schedule has 2 ranks"),
        ({"has_aux": None}, "has_aux=None must be True or False"),
        ({"has_state": torch.ones(2)}, r"has_state=tensor\(\[1., 1.\]\) must be True or False"),
        ({"has_key": "yes"}, "has_key='yes' must be True or False"),
        ({"timeout": float("nan")}, "timeout=nan must be a positive number of seconds"),
        ({"timeout": True}, "timeout=True must be a positive number of seconds"),
        ({"devices": "cpu"}, "devices='cpu' is one name: give a list with one device per rank"),
        ({"devices": ["cpu", "nope"]}, r"devices=\['cpu', 'nope'\] cannot be used: "),
        ({"devices": {"cpu"}}, r"devices=\{'cpu'\} must be a list or tuple with one device per"),
        ({"devices": ["cpu", None]}, r"devices=\['cpu', None\] must be a list or tuple with one"),
    ],
)
def test_wrong_argument(options: Any, rule: str) -> None:
    schedule = schedules.zb_h1(ranks=2, microbatches=2)
    right = {"stages": MODEL.stages, "loss": mean_square, "schedule": schedule}
    with pytest.raises(StageError, match=rule):
        fpipe.pipeline(**(right | options))


ALONE = dist.ProcessGroup(dist.HashStore(), 0, 1)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"group": -100}, r"group=-100 is no process group .* dist.group.WORLD"),
        ({"mesh": 3}, "mesh=3 is an int: it must be a DeviceMesh"),
        ({"group": ALONE, "mesh": object.__new__(DeviceMesh)}, "group and mesh are both given"),
        ({"group": ALONE, "timeout": 0}, "timeout=0 must be a positive number of seconds"),
        ({"group": ALONE, "timeout": 0.4}, "timeout=0.4 is shorter than 1 s: a rank that is well"),
        ({"group": ALONE, "timeout": "3"}, "timeout='3' must be a positive number of seconds"),
        ({"group": ALONE}, "the process group has 1 processes, but the schedule zb_h1 has 2 ranks"),
        (
            {"group": dist.ProcessGroup(dist.HashStore(), 0, 2)},
            "the process group has been destr",
        ),
        ({"group": ALONE, "devices": ["cpu"] * 2}, "devices is for a pipeline in one process"),
    ],
)
def test_wrong_group(options: Any, rule: str) -> None:
    schedule = schedules.zb_h1(ranks=2, microbatches=2)
    with pytest.raises(StageError, match=rule):
        fpipe.pipeline(MODEL.stages, mean_square, schedule, **options)


def test_schedule_that_cannot_run() -> None:
    rows = [[Action.parse(word) for word in text.split()] for text in ("0F0 0B0", "1B0 1F0")]
    with pytest.raises(ScheduleError, match=r"rank 1 runs 1B0 .* before 1F0"):
        fpipe.pipeline(MODEL.stages, mean_square, Schedule([0, 1], rows))


@pytest.mark.parametrize("way", [copy.deepcopy, pickle.dumps])
def test_a_pipeline_is_no_value(way: Any) -> None:
    """Copies of a module that holds one, and processes that are spawned with one, meet this."""
    with pytest.raises(FpipeError, match=r"cannot be copied or pickled.*make another of the same"):
        way({"held": plain_pipeline(MODEL.stages)})
    program = plain_pipeline(MODEL.stages).programs(MODEL.params, MODEL.batch)[0]
    with pytest.raises(FpipeError, match=r"<Program of rank 0.* cannot be copied or pickled"):
        way(program)


# ── the batch ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"y": rand(3, 3)}, r"batch\['y'\] has 3 rows along dimension 0, but batch\['x'\] has 4"),
        ({"y": 3.0}, r"batch\['y'\]=3.0 is a float: every leaf of batch must be a dense tensor"),
        ({"y": rand(4, 3).to_sparse()}, r"batch\['y'\] has layout torch.sparse_coo"),
        ({"y": [Numbers([3.0])]}, r"batch\['y'\]\[0\] is a Numbers, .*: use list\(…\) of it"),
        ({"z": torch.tensor(1.0)}, r"in_dims is 0 for batch\['z'\] of shape \(\): it must be one"),
    ],
)
def test_wrong_batch(change: Any, rule: str) -> None:
    pipe = plain_pipeline(MODEL.stages)
    with pytest.raises(BatchError, match=rule):
        pipe.step(MODEL.params, MODEL.batch | change)


def test_microbatches_in_place_of_a_batch() -> None:
    parts = [{"x": rand(rows, 3), "y": rand(rows, 3)} for rows in (2, 1)]
    pipe = plain_pipeline(MODEL.stages)
    with pytest.raises(BatchError, match=r"batch\[0\].* has 2.*make fpipe.Microbatches\(batch\)"):
        pipe.step(MODEL.params, parts)
    with pytest.raises(BatchError, match=r"batch is a list_iterator, .* a call takes one batch"):
        pipe.step(MODEL.params, iter(parts))
    with pytest.raises(BatchError, match=r"params\[1\] is a .*: pass list.*named_parameters"):
        pipe.step([MODEL.params[0], iter([rand(3)])], MODEL.batch)


@pytest.mark.parametrize(
    ("batch", "rule"),
    [
        (None, "batch=None has no tensor to split into the 2 microbatches"),
        ({}, r"batch=\{\} has no tensor to split"),
        ({"x": rand(0, 3), "y": rand(0, 3)}, r"batch\['x'\] has 0 rows, of which each micro"),
    ],
)
def test_batch_without_rows(batch: Any, rule: str) -> None:
    with pytest.raises(BatchError, match=rule):
        plain_pipeline(MODEL.stages).step(MODEL.params, batch)


def test_batch_smaller_than_microbatches() -> None:
    pipe = plain_pipeline(MODEL.stages, microbatches=5)
    with pytest.raises(BatchError, match=r"batch\['x'\] has 4 rows, fewer than the 5 microbatches"):
        pipe.step(MODEL.params, MODEL.batch)


@pytest.mark.parametrize(
    ("in_dims", "rule"),
    [
        ({"x": [0], "y": 0}, r"must be a pytree prefix of batch.*\n *in_dims\['x'\]"),
        ({"x": 0, "z": 0}, r"(?s)missing key.*\['z'\].*extra key.*\['y'\]"),
        ({"x": 2, "y": 0}, r"in_dims is 2 for batch\['x'\] of shape \(4, 3\)"),
        ({"x": "rows", "y": 0}, r"in_dims is 'rows' for batch\['x'\]"),
        (True, r"in_dims is True for batch\['x'\]"),
        (None, r"in_dims=\[None, None\] splits no leaf of the batch"),
    ],
)
def test_in_dims_that_do_not_fit(in_dims: Any, rule: str) -> None:
    pipe = plain_pipeline(MODEL.stages, in_dims=in_dims)
    with pytest.raises(BatchError, match=rule):
        pipe.step(MODEL.params, MODEL.batch)


# ── the parameters ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        (MODEL.params[:1], "params is a list of 1: it must be a list or tuple of 2 pytrees"),
        (dict(enumerate(MODEL.params)), "params is a dict of 2: it must be a list or tuple"),
        (rand(2, 3), "params is a Tensor: it must be a list or tuple of 2 pytrees"),
        ((p for p in MODEL.params), "params is a generator: it must be a list or tuple"),
        ([None, {"w": 3.0}], r"params\[1\]\['w'\]=3.0 is a float: every leaf of params must be"),
        ([None, rand(3, 3).to_sparse()], r"params\[1\] has layout torch.sparse_coo"),
    ],
)
def test_wrong_params(params: Any, rule: str) -> None:
    with pytest.raises(BatchError, match=rule):
        plain_pipeline(MODEL.stages).step(params, MODEL.batch)


def test_params_of_none_for_a_stage_that_has_some() -> None:
    rule = r"stage 1 \(mlp_layer\) cannot be traced .* with params: None at .*NoneType"
    with pytest.raises(StageError, match=rule):
        plain_pipeline(MODEL.stages).step([MODEL.params[0], None], MODEL.batch)


def test_parameters_in_which_nothing_is_summed() -> None:
    stages, loss = [lambda p, x: x @ p.to(x.dtype)] * 2, lambda y, _: y.square().mean()
    pipe = plain_pipeline(stages, loss)
    params = [torch.eye(3).to(torch.float8_e4m3fn)] * 2
    with pytest.raises(StageError, match=r"has params of torch\.float8_e4m3fn, .* accum_dtype="):
        pipe.step(params, rand(4, 3))
    assert pipe.value(params, rand(4, 3)).isfinite()
    frozen = plain_pipeline(stages, loss, trainable=[False, True])
    grads = frozen.step([params[0], torch.eye(3).double()], rand(4, 3)).grads
    assert grads[0] is None and grads[1].dtype == torch.float64


def test_parameter_on_another_device_than_its_rank() -> None:
    pipe = plain_pipeline(MODEL.stages, devices=["cpu", "meta"])
    with pytest.raises(StageError, match=r"params\['b'\] of stage 1 .* lies on cpu, but .* meta"):
        pipe.step(MODEL.params, MODEL.batch)


# ── stages that are no pure functions of tensors ────────────────────────────────────────────────

NOTES = torch.zeros(3, dtype=torch.float64)
COUNTS = torch.arange(4)


def writes_param(p: Any, x: Tensor) -> Tensor:
    return x @ p["w"].mul_(2)


def writes_view_of_param(p: Any, x: Tensor) -> Tensor:
    p["w"].detach()[0].fill_(0)
    return x @ p["w"]


def writes_activation(p: Any, x: Tensor) -> Tensor:
    x[:, 0] = 0
    return x @ p["w"]


def writes_closure(p: Any, x: Tensor) -> Tensor:
    return x @ p["w"] + NOTES.add_(1)


def writes_view_of_closure(p: Any, x: Tensor) -> Tensor:
    NOTES[1:].add_(x.detach().mean())
    return x @ p["w"]


def writes_by_out(p: Any, x: Tensor) -> Tensor:
    torch.mul(x.detach()[0], 2, out=NOTES)
    return x @ p["w"]


@pytest.mark.parametrize(
    ("stage", "written"),
    [
        (writes_param, r"its input params\['w'\] \(aten.mul_"),
        (writes_view_of_param, r"its input params\['w'\] \(aten.fill_"),
        (writes_activation, r"its input x \(aten.fill_"),
        (writes_closure, r"a tensor that it closes over \('NOTES'\) \(aten.add_"),
        (writes_view_of_closure, r"a tensor that it closes over \('NOTES'\) \(aten.add_"),
        (writes_by_out, r"a tensor that it closes over \('NOTES'\) \(aten.mul.out"),
    ],
)
@pytest.mark.parametrize("goal", ["step", "value", "forward"])
def test_stage_that_writes_to_what_is_not_its_own(
    stage: Callable[..., Any], written: str, goal: str
) -> None:
    pipe = plain_pipeline(after_first(stage))
    rule = rf"stage 1 \({stage.__name__}\) at .*test_refusals.py:\d+ writes in place to {written}"
    with pytest.raises(StageError, match=rule):
        getattr(pipe, goal)(MODEL.params, MODEL.batch)
    assert not NOTES.any(), "it was refused after it had written"


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:1].expand(4, -1),
        lambda x: x.mean().expand(3),
        lambda x: x.as_strided((2, 2), (1, 1)),
    ],
    ids=["expand", "of one", "as_strided"],
)
@pytest.mark.parametrize("cut", [True, False])
def test_write_to_a_view_whose_elements_are_one(
    view: Callable[[Tensor], Tensor], cut: bool
) -> None:
    """torch writes the one element some number of times, and functionalisation none or a sum."""

    def stage(p: Any, x: Tensor) -> Tensor:
        y = x @ p["w"]
        view(y).zero_()
        return y.square().mean()

    schedule = fpipe.schedules.gpipe(ranks=1, microbatches=1)
    pipe = (
        fpipe.pipeline(lambda p, x: stage(p[0], x), schedule=schedule, compile=False)
        if cut
        else fpipe.pipeline([stage], lambda y, _: y, schedule, compile=False)
    )
    with pytest.raises(StageError, match=r"several elements are one \(aten\.zero_.*clone\(\)"):
        pipe.step([{"w": torch.ones(3, 3)}], torch.ones(4, 3))


def test_stage_that_writes_to_an_integer_leaf() -> None:
    def stage(p: Any, batch: Any) -> Tensor:
        batch["i"] += 1
        return mlp_first(p, batch)

    pipe = plain_pipeline([stage, mlp_layer])
    with pytest.raises(StageError, match=r"writes in place to its input x\['i'\]"):
        pipe.step(MODEL.params, MODEL.batch | {"i": COUNTS})
    assert COUNTS.equal(torch.arange(4))


def test_batch_norm_with_running_statistics() -> None:
    norm = torch.nn.BatchNorm1d(3, dtype=torch.float64, affine=False)
    rule = r"writes in place to a tensor that it closes over \('norm.num_batches_tracked'\)"
    with pytest.raises(StageError, match=rule):
        step(mlp_first, lambda p, x: norm(x @ p["w"]))
    assert norm.num_batches_tracked == 0


def branches(p: Any, x: Tensor) -> Tensor:
    return x @ p["w"] if x.sum() > 0 else x


def reads_a_value(p: Any, x: Tensor) -> Tensor:
    return x @ p["w"] * x.max().item()


def selects_rows(p: Any, x: Tensor) -> Tensor:
    return x[x.sum(1) > 0] @ p["w"]


def leaves_torch(p: Any, x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy()) @ p["w"]


def lists_values(p: Any, x: Tensor) -> Tensor:
    return x @ p["w"] * x.tolist()[0][0]


def asks_for_memory(p: Any, x: Tensor) -> Tensor:
    return x @ p["w"] * (x.data_ptr() != 0)


@pytest.mark.parametrize(
    "stage", [branches, reads_a_value, leaves_torch, lists_values, asks_for_memory]
)
def test_stage_that_depends_on_data(stage: Callable[..., Any]) -> None:
    rule = rf"stage 1 \({stage.__name__}\) branches on data .*test_refusals.py:\d+.* torch.where"
    with pytest.raises(StageError, match=rule):
        step(*after_first(stage))


@pytest.mark.parametrize(
    ("stage", "instead"),
    [
        (lambda p, x: torch.linalg.lstsq(x, x).solution @ p["w"], r"torch\.linalg\.pinv"),
        (lambda p, x: x.repeat_interleave(x[:, 0].int(), 0) @ p["w"], "say output_size="),
        (lambda p, x: p["w"][0] * torch.bincount(x[:, 0].int(), minlength=9), "one_hot"),
        (lambda p, x: p["w"].masked_select(x.sum() > 0), r"torch\.where"),
        (selects_rows, "weigh by the mask"),
    ],
)
def test_stage_whose_result_is_shaped_by_data(stage: Callable[..., Any], instead: str) -> None:
    rule = rf"stage 1 .* calls aten\.\w+ at .*py:\d+, whose .* depends on data: .*{instead}"
    with pytest.raises(StageError, match=rule):
        step(*after_first(stage))


@pytest.mark.parametrize(
    ("stage", "rule"),
    [
        (
            lambda p, x: {"h": x["x"] @ p["w"], "n": 3.0},
            r"stage 0 .* returns y\['n'\]=3.0, a float",
        ),
        (lambda p, x: x["x"].to_sparse(), "stage 0 .* returns y in layout torch.sparse_coo"),
    ],
)
def test_stage_that_returns_no_dense_tensor(stage: Callable[..., Any], rule: str) -> None:
    with pytest.raises(StageError, match=rule):
        step(stage, mlp_layer)


def test_last_stage_that_returns_no_tensor() -> None:
    with pytest.raises(StageError, match=r"stage 1 .* returns y=3.0, a float"):
        step(mlp_first, lambda p, x: 3.0, loss=lambda y, _: torch.tensor(y))


def narrow(p: Any, batch: Any) -> Tensor:
    return batch["x"][:, :2]


def in_a_dict(p: Any, batch: Any) -> Any:
    return {"h": batch["x"]}


@pytest.mark.parametrize(
    ("stage", "returned"),
    [(narrow, r"x: float64\[2, 2\]"), (in_a_dict, r"x\['h'\]: float64\[2, 3\]")],
)
def test_output_that_does_not_fit_the_next_stage(stage: Callable[..., Any], returned: str) -> None:
    rule = (
        r"stage 1 \(mlp_layer\) cannot be traced on what stage 0 "
        rf"\({stage.__name__}\) returns \({returned}\) "
        r"with params\['b'\]: float64\[.*\], params\['w'\]: float64\[.*\] at .*models.py:\d+"
    )
    with pytest.raises(StageError, match=rule):
        step(stage, mlp_layer)


def test_batch_that_does_not_fit_the_first_stage() -> None:
    rule = r"stage 0 \(mlp_layer\) cannot be traced on a microbatch \(x\['x'\]: float64\[2, 3\]"
    with pytest.raises(StageError, match=rule):
        step(mlp_layer, mlp_layer)


@dataclass
class Fields:
    """No node of a pytree."""

    h: Tensor


def test_dataclass_that_optree_does_not_know() -> None:
    def fields(p: Any, x: Any) -> Fields:
        return Fields(x["x"] @ p["w"])

    rule = r"returns y=Fields\(.*, a Fields: .*optree.dataclasses.dataclass\(namespace=\"fpipe\"\)"
    with pytest.raises(StageError, match=rule):
        step(fields, mlp_layer)
    with pytest.raises(BatchError, match=r"params\[0\].*is a Fields, .*optree.dataclasses"):
        plain_pipeline([mlp_first, mlp_layer]).step(
            [Fields(MODEL.batch["x"]), MODEL.params[1]], MODEL.batch
        )


def test_product_of_two_dtypes() -> None:
    singles = [{"w": p["w"].float(), "b": p["b"].float()} for p in MODEL.params]
    rule = (
        r"stage 0 \(mlp_first\) cannot be traced on a microbatch .* at .*models.py:\d+: "
        r"RuntimeError: aten.mm.default multiplies or adds float64 and float32: give the parameters"
    )
    with pytest.raises(StageError, match=rule):
        plain_pipeline([mlp_first, mlp_layer]).step(singles, MODEL.batch)


def test_product_of_two_dtypes_in_one_function() -> None:
    def loss_fn(params: Tensor, batch: Tensor) -> Tensor:
        return fpipe.cut(batch @ params).square().mean()

    schedule = schedules.gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    with pytest.raises(StageError, match=r"test_refusals.*: aten.mm.default .* float64 and float"):
        pipe.step(torch.eye(3), torch.ones(4, 3, dtype=torch.float64))


def offloads(p: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return torch.tanh(x @ p["w"])


def uses_autograd(p: Any, x: Tensor) -> Tensor:
    energy = (x @ p["w"]).square().sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def makes_a_parameter(p: Any, x: Tensor) -> Tensor:
    return x @ torch.nn.Parameter(p["w"] * 2)


def first_of_dict(p: Any, x: Tensor) -> Tensor:
    return (x @ p["w"]).tanh()


@pytest.mark.parametrize("stage", [uses_autograd, offloads, makes_a_parameter])
def test_what_is_not_refused(stage: Callable[..., Any]) -> None:
    """It was, when stages ran by torch.func: inner gradients, saved-tensor hooks, new leaves."""
    check_stages([first_of_dict, stage], [{"w": rand(3, 3)}, {"w": rand(3, 3).sin()}], rand(4, 3))


EDGES = torch.eye(3, dtype=torch.float64).to_sparse()


def closes_over_sparse(p: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm(EDGES, x.T).T @ p["w"]


def chooses(p: Any, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


@torch.library.custom_op("fpipe_tests::doubled_", mutates_args=("x",))
def doubled_(x: Tensor) -> None:
    x.mul_(2)


def writes_by_a_registered_op(p: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    doubled_(y)
    return x @ p["w"] + y


def gathers_numbers(p: Any, x: Tensor) -> Tensor:
    return x * torch.tensor([p["w"][0, 0], p["w"][1, 1], 1.0])


@pytest.mark.parametrize(
    ("stage", "rule"),
    [
        (gathers_numbers, r"reads the memory of a tensor .* at .*test_refusals.* torch\.stack"),
        (closes_over_sparse, r"closes over a sparse tensor \('EDGES', .* close over a dense one"),
        (chooses, "uses torch's higher-order operator cond at .*test_refusals.* torch.where"),
        (
            writes_by_a_registered_op,
            r"calls fpipe_tests\.doubled_\.default, .* that writes .* mutates_args=\(\)",
        ),
    ],
)
def test_what_cannot_be_traced(stage: Any, rule: str) -> None:
    with pytest.raises(StageError, match=rule):
        step(*after_first(stage))


def test_write_to_a_parameter_of_one_function() -> None:
    def loss_fn(params: Tensor, batch: Tensor) -> Tensor:
        params.mul_(2)
        return fpipe.cut(batch @ params).square().mean()

    schedule = schedules.gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    with pytest.raises(
        StageError, match=r"loss_fn at .*refusals.* writes in place to its input params"
    ):
        pipe.step(torch.eye(3), torch.ones(4, 3))


def test_sparse_gradient() -> None:
    # It was torch's error of the step: unsupported memory format option Contiguous.
    def embed(p: Any, x: Any) -> Tensor:
        rows = (x["x"][:, 0] > 9).long()
        return torch.nn.functional.embedding(rows, p["w"], sparse=True, padding_idx=padding)

    padding = None
    with pytest.raises(StageError, match=r"sparse gradient by params\['w'\].* say sparse=False"):
        step(embed, mlp_layer)
    padding = 0
    with pytest.raises(StageError, match=r"backward that looks at data .* say sparse=False"):
        step(embed, mlp_layer)


def test_generator_of_its_own() -> None:
    own = torch.Generator()

    def noisy(p: Any, x: Tensor) -> Tensor:
        return x @ p["w"] + torch.randn(3, generator=own, dtype=torch.float64)

    with pytest.raises(
        StageError,
        match=r"stage 1 \(.*noisy\) draws from a torch\.Generator of its own at .*:\d+: .* key",
    ):
        step(mlp_first, noisy)


def test_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before it seeds: torch would seed the generators of all devices."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)

    def seeded(p: Any, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return torch.nn.functional.dropout(x @ p["w"])

    def caught(p: Any, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError, fpipe.FpipeError):
            torch.manual_seed(0)
        return torch.nn.functional.dropout(x @ p["w"])

    before = torch.get_rng_state()
    here = r"seeds torch's generator at .*test_refusals.py:\d+: .* key"
    with pytest.raises(StageError, match=rf"stage 1 \(.*seeded\) {here}"):
        step(mlp_first, seeded)
    with pytest.raises(StageError, match=r"stage 1 \(.*caught\) seeds torch's generator"):
        step(mlp_first, caught)
    assert torch.equal(torch.get_rng_state(), before) and not seeds


DRAWS: dict[str, Callable[[], float]] = {
    "Python's random": random.random,
    "numpy.random": lambda: float(np.random.rand()),
}


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("generator", DRAWS)
def test_draws_that_are_not_torch_s(
    generator: str, cuts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the trace drew was drawn in each step, and by each rank other numbers."""
    monkeypatch.setattr(purity, "others", list)  # other tests may have left threads

    def noisy(p: Any, x: Tensor) -> Tensor:
        return x @ p["w"] * DRAWS[generator]()

    def whole(params: Any, batch: Any) -> Tensor:
        return noisy(params, fpipe.cut(batch @ params["w"])).square().mean()

    def states() -> Any:
        return random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()

    before = states()
    with pytest.raises(StageError, match=rf"(noisy|whole).* draws from {generator}.* has_key=True"):
        if cuts:
            pipe = fpipe.pipeline(
                whole, schedule=schedules.gpipe(ranks=2, microbatches=2), compile=False
            )
            pipe.step({"w": torch.ones(3, 3)}, torch.ones(4, 3))
        else:
            step(mlp_first, noisy)
    assert states() == before


def test_draws_while_other_threads_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that loads data may have drawn: it went by without a word."""
    monkeypatch.setattr(purity, "others", lambda: [threading.current_thread()])
    with caplog.at_level(logging.WARNING, "fpipe"):
        step(mlp_first, lambda p, x: x @ p["w"] * random.random())
    assert "Python's random was drawn from while a stage was traced" in caplog.text


def test_draws_of_what_is_refused_for_another_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purity, "others", list)

    def both(p: Any, x: Tensor) -> Tensor:
        return x[: int(x.sum() * random.random() * np.random.rand())]

    before = random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]
    with pytest.raises(StageError, match="branches on data or reads a value"):
        step(mlp_first, both)
    assert (random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]) == before


def test_threads_that_draw_nothing() -> None:
    before, end = purity.others(), threading.Event()
    threads = [threading.Thread(target=end.wait, name=name) for name in ("fpipe beat", "my")]
    for thread in threads:
        thread.start()
    AsyncCompile.pool().submit(int).result()
    others = [t for t in purity.others() if t not in before]
    end.set()
    for thread in threads:
        thread.join()
    assert others == threads[1:]


# ── tensors that a stage closes over ────────────────────────────────────────────────────────────

TRAINED = torch.ones(3, dtype=torch.float64, requires_grad=True)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, p: Any, x: Tensor) -> Tensor:
        return self.linear(x) @ p["w"]


def bound(scale: Tensor, p: Any, x: Tensor) -> Tensor:
    return x @ p["w"] * scale


def helped(x: Tensor) -> Tensor:
    return x * TRAINED


class Holder:
    def __init__(self) -> None:
        self.tables = {"scale": TRAINED}

    def stage(self, p: Any, x: Tensor) -> Tensor:
        return x @ p["w"] * self.tables["scale"]


def by_default(p: Any, x: Tensor, scale: Tensor = TRAINED) -> Tensor:
    return x @ p["w"] * scale


def make_closure() -> Callable[..., Any]:
    layer = Layer()
    return lambda p, x: layer(p, x)


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (lambda p, x: x @ p["w"] * TRAINED, "'TRAINED'"),
        (Layer().forward, "'Layer.linear.weight'"),
        (make_closure(), "'layer.linear.weight'"),
        (partial(bound, TRAINED), "'scale'"),
        (Holder().stage, r"\"Holder.tables\['scale'\]\""),
        (by_default, "'scale'"),
        (lambda p, x: helped(x @ p["w"]), "'TRAINED'"),
    ],
)
def test_closed_over_tensor_that_requires_grad(stage: Callable[..., Any], name: str) -> None:
    rule = rf"closes over a tensor that requires grad \({name}, shape .* pass it in the parameters"
    with pytest.raises(StageError, match=rule):
        step(*after_first(stage))


def test_loss_closes_over_a_tensor_that_requires_grad() -> None:
    with pytest.raises(StageError, match=r"closes over a tensor that requires grad \('TRAINED'"):
        step(mlp_first, mlp_layer, loss=lambda y, batch: (y * TRAINED).sum())


def test_a_partial_is_called_by_the_name_of_its_function() -> None:
    with pytest.raises(StageError, match=r"stage 1 \(bound\) cannot be traced"):
        step(*after_first(partial(bound, None)))  # type: ignore[arg-type]


# ── the loss ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda y, batch: y - batch["y"], r"float64\[2, 3\]"),
        (lambda y, batch: 1.0, "a float"),
        (lambda y, batch: y.argmax(), r"int64\[\]"),
        (lambda y, batch: (y * 1j).sum(), r"complex128\[\]"),
    ],
)
def test_loss_that_is_no_real_scalar(loss: Callable[..., Any], found: str) -> None:
    rule = rf"the loss after stage 1 \(mlp_layer\) is {found}: .* must return one floating-point"
    with pytest.raises(StageError, match=rule):
        step(*MODEL.stages, loss=loss)


def test_loss_that_does_not_fit_the_output() -> None:
    rule = (
        r"the loss after stage 1 \(mlp_layer\) cannot be traced on y: float64\[2, 3\], "
        r"microbatch\['x'\].* at .*test_refusals.py:\d+"
    )
    with pytest.raises(StageError, match=rule):
        step(*MODEL.stages, loss=lambda y, batch: (y @ batch["y"]).sum())


def test_loss_that_takes_the_microbatch_for_labels() -> None:
    rule = r"'dict' object has no attribute 'size' \(it is called as loss\(y, microbatch\), with th"
    with pytest.raises(StageError, match=rule):
        step(*MODEL.stages, loss=torch.nn.functional.mse_loss)


# ── where a pipeline is called ──────────────────────────────────────────────────────────────────


def test_no_pipeline_to_run() -> None:
    with pytest.raises(FpipeError, match=r"needs a pipeline: call it within `with fpipe.use"):
        fpipe.step(MODEL.params, MODEL.batch)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda three: fpipe.step([], {}, pipe=three), "pipe=3 is an int: .* fpipe.step"),
        (lambda three: fpipe.use(three), "pipe=3 is an int: .* makes what fpipe.use takes"),
        (
            lambda three: fpipe.global_norm([], pipe=three),
            "pipe=3 .*fpipe.global_norm takes",
        ),
        (lambda three: fpipe.profile(three, [], {}), "pipe=3 .*fpipe.profile takes"),
    ],
)
def test_what_is_no_pipeline(call: Any, rule: str) -> None:
    with pytest.raises(FpipeError, match=rule):
        call(3)


@pytest.mark.parametrize("flag", ["reads_batch", "reads_key"])
def test_flags_of_a_stage(flag: str) -> None:
    options: Any = {flag: 1}
    with pytest.raises(StageError, match=f"{flag}=1 must be True or False"):
        fpipe.Stage(mlp_first, **options)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_leaf() -> None:
    batch = MODEL.batch | {"y": torch.quantize_per_tensor(torch.ones(4, 3), 0.1, 0, torch.quint8)}
    with pytest.raises(BatchError, match=r"batch\['y'\] is quantized: every leaf of batch must be"):
        plain_pipeline(MODEL.stages).step(MODEL.params, batch)


@pytest.mark.parametrize("steps", [0, "3", 2.0, True])
def test_steps_to_profile(steps: Any) -> None:
    pipe = plain_pipeline(MODEL.stages)
    with pytest.raises(FpipeError, match=r"steps=.* must be an integer, 1 or more"):
        fpipe.profile(pipe, MODEL.params, MODEL.batch, steps=steps)


def test_numbers_of_numpy() -> None:
    options: Any = {"timeout": np.float32(5), "steps": np.int64(1)}
    pipe = plain_pipeline(MODEL.stages, timeout=options["timeout"])
    cost = fpipe.profile(pipe, MODEL.params, MODEL.batch, steps=options["steps"])
    assert len(cost.on([0, 1]).f) == 2


def test_a_failure_without_a_text() -> None:
    def without_words(params: Any, x: Tensor) -> Tensor:
        raise AssertionError

    with pytest.raises(StageError, match=r"stage 1 .* at .*: AssertionError$"):
        plain_pipeline([mlp_first, without_words]).step(MODEL.params, MODEL.batch)


def test_the_cause_is_shown_where_the_user_wrote_it(caplog: pytest.LogCaptureFixture) -> None:
    """With the frames of the tracers it was five times as long; they are logged."""

    def inner(x: Tensor) -> Tensor:
        return x @ x

    with caplog.at_level(logging.DEBUG, "fpipe"), pytest.raises(StageError) as refused:
        step(lambda p, batch: inner(batch["x"]), mlp_layer)
    assert refused.value.__cause__ is not None
    frames = traceback.extract_tb(refused.value.__cause__.__traceback__)
    assert [(frame.filename, frame.name) for frame in frames] == [
        (__file__, "<lambda>"),
        (__file__, "inner"),
    ]
    (logged,) = [record for record in caplog.records if record.levelno == logging.DEBUG]
    assert "is refused" in logged.message and logged.exc_info


def test_torch_does_not_report_what_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """It printed a traceback of its own before the refusal."""
    fakes = logging.getLogger("torch._subclasses.fake_tensor")
    with caplog.at_level(logging.ERROR, fakes.name), pytest.raises(StageError, match="must have"):
        params = [{"w": rand(5, 5), "b": rand(3)}, MODEL.params[1]]
        plain_pipeline(MODEL.stages).step(params, MODEL.batch)
    assert not [record for record in caplog.records if record.name == fakes.name]
    assert not fakes.filters


def test_abstract_tensor_in_a_cache() -> None:
    # The loss was an abstract tensor, too.
    @cache
    def positions(length: int) -> Tensor:
        return torch.arange(length, dtype=torch.float64)

    def stage(p: Any, x: Any) -> Any:
        return mlp_layer(p, x) + positions(3)

    loss = step(mlp_first, stage).loss.item()  # the trace that has filled the cache is right
    assert loss > 0
    with pytest.raises(
        StageError,
        match=r"closes over an abstract tensor \(.*, shape \(3,\)\), which a cache .* has kept "
        r"while it was traced: clear that cache, and call the function once on real data",
    ):
        step(mlp_first, stage)
    positions.cache_clear()
    positions(3)
    assert step(mlp_first, stage).loss.item() == loss


def test_use_of_something_else() -> None:
    with pytest.raises(FpipeError, match=r"pipe=3 is an int: fpipe.pipeline\(...\) makes what"):
        fpipe.use(3)  # type: ignore[arg-type]


def test_an_output_inside_grad() -> None:
    pipe = plain_pipeline(MODEL.stages)

    def loss(x: Tensor) -> Any:
        return pipe.forward(MODEL.params, MODEL.batch | {"x": x}).sum()

    with pytest.raises(FpipeError, match=r"cannot run inside torch\.func\.grad"):
        torch.func.grad(loss)(MODEL.batch["x"])


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("stage", "out_dims", "rule"),
    [
        (lambda p, x: x.sum(), 1, r"out_dims is 1 for output of shape \(\) per microbatch"),
        (mlp_layer, 2, r"out_dims is 2 for output of shape \(2, 3\) per microbatch"),
        (mlp_layer, {"y": 0}, "out_dims must be a pytree prefix of the output"),
    ],
)
def test_output_that_cannot_be_merged(stage: Any, out_dims: Any, rule: str) -> None:
    pipe = plain_pipeline(after_first(stage))
    with pytest.raises(BatchError, match=rule):
        pipe.forward(MODEL.params, MODEL.batch, out_dims=out_dims)


@pytest.mark.parametrize(
    ("stage", "shapes"),
    [
        (lambda p, x: x @ x.T, r"of shape \(2, 2\) in microbatch 0 and of shape \(1, 1\)"),
        (lambda p, x: x[:, 0].squeeze(), r"of shape \(2,\) in microbatch 0 and of shape \(\)"),
        (lambda p, x: x[1:].sum(1).squeeze(), r"of shape \(\) in microbatch 0 and of shape \(0,\)"),
    ],
)
def test_outputs_that_differ_in_more_than_rows(stage: Any, shapes: str) -> None:
    pipe = plain_pipeline(after_first(stage))
    rows = MODEL.batch["x"].shape[0] - 1
    batch = {name: leaf[:rows] for name, leaf in MODEL.batch.items()}
    with pytest.raises(BatchError, match=f"output is {shapes}"):
        pipe.forward(MODEL.params, batch)


# ── what is no function, and what has no numbers ────────────────────────────────────────────────


@pytest.mark.parametrize(
    "module", [torch.nn.Linear(2, 2), torch.nn.ModuleList([torch.nn.Linear(2, 2)])]
)
@pytest.mark.parametrize("loss", [None, mean_square])
def test_a_module_is_no_function(module: Any, loss: Any) -> None:
    schedule = schedules.gpipe(ranks=2, microbatches=2)
    with pytest.raises(StageError, match=r"a module with parameters: fpipe\.from_module\(module, "):
        fpipe.pipeline(module, loss, schedule)


def test_a_stage_that_lacks_the_microbatch() -> None:
    def reads(p: Any, x: Tensor, batch: Any) -> Tensor:
        return x

    rule = r"'batch' \(it is called as fn\(params, x\); fpipe\.Stage\(fn, reads_batch=True\) takes"
    with pytest.raises(StageError, match=rule):
        step(*after_first(reads))


def test_fake_tensors_are_shapes() -> None:
    pipe = plain_pipeline(MODEL.stages)
    mode = FakeTensorMode()
    params, batch = pytree.tree_map(mode.from_tensor, (MODEL.params, MODEL.batch))
    programs = pipe.programs(params, batch)
    assert list(map(str, programs)) == list(map(str, pipe.programs(MODEL.params, MODEL.batch)))
    for call in (pipe.step, pipe.value, pipe.forward):
        with pytest.raises(BatchError, match=r"\(or is a FakeTensor\), so it has a shape and no"):
            call(params, batch)


def test_a_key_without_numbers() -> None:
    pipe = fpipe.pipeline(
        lambda w, x, key: (w * x * fpipe.random.uniform(key, x.shape)).sum(),
        schedule=schedules.gpipe(ranks=1, microbatches=1),
        has_key=True,
        compile=False,
    )
    for key in (fpipe.random.key(0).to("meta"), FakeTensorMode().from_tensor(fpipe.random.key(0))):
        with pytest.raises(BatchError, match="key has a shape and no numbers"):
            pipe.step(torch.ones(1), torch.ones(2), key=key)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("method", ["step", "value"])
def test_pipeline_within_a_stage(method: str, cut: bool) -> None:
    """It was refused by words about fpipe's own functions, or about the tensors of a trace."""
    schedule = fpipe.schedules.gpipe(ranks=2, microbatches=2)
    options: dict[str, Any] = {"schedule": schedule, "compile": False}
    inner = fpipe.pipeline([torch.mul, torch.mul], lambda y, _: y.mean(), **options)

    def within(w: Tensor, x: Tensor) -> Tensor:
        return inner.value([w, w], x)

    if cut:
        pipe = fpipe.pipeline(lambda w, x: within(w, fpipe.cut(w * x)), **options)
        params: Any = torch.ones(3)
    else:
        pipe = fpipe.pipeline([torch.mul, within], lambda y, _: y.mean(), **options)
        params = [torch.ones(3), torch.ones(3)]
    said = r"calls a pipeline at .*test_refusals\.py:\d+: a stage is a function that is traced"
    with pytest.raises(fpipe.StageError, match=said):
        getattr(pipe, method)(params, torch.ones(4, 3))
