"""What a stage function may do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from fpipe import Stage, hvp
from tests.models import (
    assert_same,
    check,
    mean_square,
    mlp,
    mlp_first,
    mlp_layer,
    plain_pipeline,
    rand,
    unpipelined,
)

MODEL = mlp(2, 4)


class Cube(torch.autograd.Function):
    """With a backward that is wrong on purpose, so that it is seen to be used."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 5 * ctx.saved_tensors[0]


def autograd_function(x: Tensor) -> Tensor:
    return Cube.apply(x)


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = 0
    y[:, 1] += y[:, 2]
    y.mul_(2)
    return y.t().contiguous().t_()


def splits(x: Tensor) -> Tensor:
    a, b, c = x.split(1, 1)
    return torch.cat([c * a, b, a], 1)


def unbinds(x: Tensor) -> Tensor:
    return torch.stack(x.unbind(1)[::-1], 1)


def largest(x: Tensor) -> Tensor:
    values, indices = x.max(1, keepdim=True)
    return x * values + indices


def top(x: Tensor) -> Tensor:
    values, indices = x.topk(2, dim=1)
    return torch.cat([values, x.gather(1, indices[:, :1])], 1)


def sorts(x: Tensor) -> Tensor:
    return x.sort(1).values


def normalises(x: Tensor) -> Tensor:
    return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


def of_vmap(x: Tensor) -> Tensor:
    return vmap(lambda row: row.outer(row).sum(0))(x)


def of_grad(x: Tensor) -> Tensor:
    return vmap(grad(lambda row: row.sin().sum()))(x)


def of_jvp(x: Tensor) -> Tensor:
    result: Any = jvp(torch.sin, (x,), (torch.ones_like(x),))
    tangent: Tensor = result[1]
    return tangent


def solves(x: Tensor) -> Tensor:
    return torch.linalg.solve(x.t() @ x + torch.eye(3, dtype=x.dtype), x.t()).t()


def one_hot(x: Tensor) -> Tensor:
    return x * F.one_hot(x.argmax(1), 3)


def selects(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, x.exp())


def without_gradient(x: Tensor) -> Tensor:
    return x * x.detach()


def default_dtype(x: Tensor) -> Tensor:
    return x * torch.arange(3) + torch.full((), 0.5)


def branches_on_its_own_values(x: Tensor) -> Tensor:
    mask = torch.ones(3, dtype=torch.bool)
    mask[0] = False
    places = torch.arange(3).unsqueeze(0).expand(2, 3)
    if mask.all() or torch.equal(mask, ~mask) or (places.diff() != 1).sum().item():
        raise AssertionError("these do not depend on x")
    return x * mask * places.tril()[1, 1].item()


def loses_its_layout(x: Tensor) -> Tensor:
    # The backward of mse_loss has other strides than torch's abstract one, and a view of it failed.
    rows = x.reshape(-1, 1, 3).expand(-1, 2, 3) * 2
    return x + F.mse_loss(rows.transpose(1, 2), torch.ones(len(x), 3, 2, dtype=x.dtype))


# torch's own forward-mode formulas are still scripted.
USES_JIT = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


@pytest.mark.parametrize(
    "op",
    [
        autograd_function,
        in_place,
        splits,
        unbinds,
        largest,
        top,
        sorts,
        normalises,
        of_vmap,
        of_grad,
        pytest.param(of_jvp, marks=USES_JIT),
        solves,
        one_hot,
        selects,
        without_gradient,
        default_dtype,
        branches_on_its_own_values,
        loses_its_layout,
    ],
)
def test_operations_within_a_stage(op: Callable[[Tensor], Tensor]) -> None:
    """Before the weight, where the gradient goes upstream, and after it."""

    def first(p: Any, batch: Any) -> Tensor:
        return op(mlp_first(p, batch))

    def second(p: Any, x: Tensor) -> Tensor:
        return mlp_layer(p, op(x))

    check([first, second], MODEL.params, MODEL.batch, microbatches=1)


@pytest.mark.parametrize(
    "itself", [lambda x: x.type_as(x), torch.atleast_2d, lambda x: x.to_dense()]
)
def test_write_to_what_an_operation_returns_of_its_argument(itself: Any) -> None:
    """Where nothing is differentiated too."""

    def layer(p: Any, x: Tensor) -> Tensor:
        y = mlp_layer(p, x) * 1
        itself(y)[:, 0] = 0.5
        return y

    check([mlp_first, layer], MODEL.params, MODEL.batch)
    pipe = plain_pipeline([mlp_first, layer])
    expected = unpipelined([mlp_first, layer], mean_square, MODEL.params, MODEL.batch).loss
    assert_same(pipe.value(MODEL.params, MODEL.batch), expected)


def convolutions(p: Any, x: Tensor) -> Tensor:
    h = F.conv2d(x, p["wide"], p["bias"], stride=2, padding=1)
    h = F.conv_transpose2d(h, p["back"], stride=2, padding=1)
    return F.conv2d(h.to(memory_format=torch.channels_last), p["grouped"], groups=2).tanh()


def check_convolutions(first: Any = convolutions, **options: Any) -> None:
    params = [
        {
            "wide": rand(4, 2, 3, 3).to(memory_format=torch.channels_last),
            "bias": rand(4),
            "back": rand(4, 2, 3, 3),
            "grouped": rand(2, 1, 3, 3),
        }
        for _ in range(2)
    ]
    x = rand(4, 2, 9, 9).to(memory_format=torch.channels_last)
    check([first, convolutions], params, x, lambda y, _: y.square().mean(), **options)


@USES_JIT
def test_one_hot_of_a_transformed_stage_looks_at_no_data() -> None:
    def first(p: Any, batch: Any) -> Tensor:
        return one_hot(mlp_first(p, batch))

    pipe = plain_pipeline([first, mlp_layer])
    product = hvp(pipe).step(MODEL.params, MODEL.batch, MODEL.params)
    assert_same(product.grads, pipe.step(MODEL.params, MODEL.batch).grads)


def test_convolutions_in_any_memory_format() -> None:
    check_convolutions()


@pytest.mark.inductor
def test_compiled_convolutions_in_any_memory_format() -> None:
    """A value that lies by channels goes in, and its gradient comes out."""

    def scaled(p: Any, x: Tensor) -> Tensor:
        return x * p["bias"][:2, None, None]

    check_convolutions(scaled, compile=True, microbatches=1)


# ── what goes from stage to stage ───────────────────────────────────────────────────────────────


def test_a_leaf_that_stages_only_pass_on() -> None:
    def first(p: Any, batch: Any) -> Any:
        return {"h": mlp_first(p, batch), "skip": batch["x"] * p["b"], "raw": batch["x"]}

    def middle(p: Any, x: Any) -> Any:
        return {**x, "h": mlp_layer(p, x["h"])}

    def last(p: Any, x: Any) -> Tensor:
        return mlp_layer(p, x["h"] + x["skip"] * x["raw"])

    model = mlp(4, 5)
    check([first, middle, middle, last], model.params, model.batch)


def test_one_value_returned_twice() -> None:
    def twice(p: Any, batch: Any) -> Any:
        h = mlp_first(p, batch)
        return h, h, [h]

    def last(p: Any, x: Any) -> Tensor:
        return mlp_layer(p, x[0] * x[1] - x[2][0])

    check([twice, lambda p, x: x, last], [MODEL.params[0], None, MODEL.params[1]], MODEL.batch)


def test_output_that_nobody_reads() -> None:
    def first(p: Any, batch: Any) -> Any:
        return mlp_first(p, batch), batch["x"] @ p["w"] * 3

    check([first, lambda p, x: mlp_layer(p, x[0])], MODEL.params, MODEL.batch)


def test_parameter_returned_as_an_output() -> None:
    def first(p: Any, batch: Any) -> Any:
        return {"h": mlp_first(p, batch), "b": p["b"], "row": p["w"][0], "w": p["w"]}

    def middle(p: Any, x: Any) -> Any:
        return x

    def last(p: Any, x: Any) -> Tensor:
        return mlp_layer(p, x["h"] * x["b"] + x["row"]) @ x["w"].t()

    params = [MODEL.params[0], None, MODEL.params[1]]
    check([first, middle, last], params, MODEL.batch, microbatches=3)


def test_parameter_returned_as_an_output_belongs_to_its_own_rank() -> None:
    # Another process would not have it.
    def first(p: Any, batch: Any) -> Any:
        return mlp_first(p, batch), p["w"]

    pipe = plain_pipeline([first, lambda p, x: mlp_layer(p, x[0]) @ x[1]])
    for program in pipe.programs(MODEL.params, MODEL.batch):
        assert {stage for stage, _, _ in program.bindings.params} == {program.rank}


def test_lazily_negated_output() -> None:
    def first(p: Any, batch: Any) -> Tensor:
        return torch.complex(batch["x"], mlp_first(p, batch)).conj().imag

    check([first, mlp_layer], MODEL.params, MODEL.batch)


# ── Stage ───────────────────────────────────────────────────────────────────────────────────────


def test_stage_that_reads_the_batch() -> None:
    def first(p: Any, x: Any, batch: Any) -> Tensor:
        return mlp_first(p, x) * batch["mask"]

    def second(p: Any, x: Tensor, batch: Any) -> Tensor:
        return mlp_layer(p, x) * batch["mask"] + batch["x"]

    stages = [Stage(first, reads_batch=True), Stage(second, reads_batch=True)]
    batch = MODEL.batch | {"mask": rand(4, 3) > 0}
    check(stages, MODEL.params, batch)


def test_batch_is_read_where_it_is_needed_and_never_sent() -> None:
    def second(p: Any, x: Tensor, batch: Any) -> Tensor:
        return mlp_layer(p, x) * batch["mask"]

    batch = MODEL.batch | {"mask": rand(4, 3) > 0}
    pipe = plain_pipeline([mlp_first, Stage(second, reads_batch=True)])
    text = str(pipe.programs(MODEL.params, batch)[0])
    sent = [line for line in text.splitlines() if " send " in line]
    assert len(sent) == 2
    assert all(line.count("%") == 1 for line in sent)


def scaled(by: float, p: Any, x: Tensor) -> Tensor:
    return mlp_layer(p, x) * by


def test_partials_methods_and_modules() -> None:
    module = torch.nn.Linear(3, 3, dtype=torch.float64)

    def linear(p: Any, x: Tensor) -> Tensor:
        out: Tensor = functional_call(module, p, (x,))
        return out

    class Owner:
        by = 3

        def method(self, p: Any, x: Tensor) -> Tensor:
            return mlp_layer(p, x) * self.by

    params = [*MODEL.params, dict(module.named_parameters()), MODEL.params[0]]
    check([mlp_first, partial(scaled, 2.0), linear, Owner().method], params, MODEL.batch)


def test_function_of_no_module() -> None:
    # What it closes over was looked for as if it had one.
    names: dict[str, Any] = {"torch": torch}
    exec("def stage(p, x): return torch.tanh(x) * torch.tensor([1.0, 0, 2])", names)
    check([mlp_first, names["stage"]], MODEL.params, MODEL.batch)


def test_closed_over_tensors() -> None:
    shift = rand(3).requires_grad_()

    def constant(p: Any, x: Tensor) -> Tensor:
        return mlp_layer(p, x) + SHIFT + shift.detach()

    check([mlp_first, constant], MODEL.params, MODEL.batch)


SHIFT = rand(1)


def test_what_is_made_of_a_closed_over_tensor_may_be_written_to() -> None:
    # As attention does with a mask of bools: it was taken for a write to somebody's tensor.
    blocked = torch.tensor([[False, True, False]])

    def masked(p: Any, x: Tensor) -> Tensor:
        scores = torch.zeros_like(blocked, dtype=x.dtype).masked_fill_(blocked, -torch.inf)
        return mlp_layer(p, x) + (x + scores).softmax(1) * torch.ones_like(SHIFT).mul_(SHIFT)

    check([mlp_first, masked], MODEL.params, MODEL.batch)
    pipe = plain_pipeline([mlp_first, masked])
    assert_same(pipe.value(MODEL.params, MODEL.batch), pipe.step(MODEL.params, MODEL.batch).loss)
    vector = hvp(pipe).step(MODEL.params, MODEL.batch, MODEL.params)
    assert_same(vector.grads, pipe.step(MODEL.params, MODEL.batch).grads)


def test_composite_operation_that_writes_within() -> None:
    # Where nothing is differentiated it came out of the trace with the write, and was refused.
    def smooth(y: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(y, batch["target"], label_smoothing=0.1)

    batch = MODEL.batch | {"target": torch.tensor([0, 2, 1, 1])}
    pipe = plain_pipeline(MODEL.stages, smooth)
    expected = unpipelined(MODEL.stages, smooth, MODEL.params, batch)
    assert_same(pipe.step(MODEL.params, batch), expected)
    assert_same(pipe.value(MODEL.params, batch), expected.loss)


def test_closed_over_tensor_returned_as_an_output() -> None:
    # Only the stage that closes over it knows it: lowering looked for it at its readers.
    def first(p: Any, batch: Any) -> Any:
        return mlp_first(p, batch), SHIFT, torch.tensor(2)

    check([first, lambda p, x: mlp_layer(p, x[0]) * x[1] * x[2]], MODEL.params, MODEL.batch)
    loss, grads = plain_pipeline([mlp_first, mlp_layer], loss=lambda y, b: SHIFT[0] + 0).step(
        MODEL.params, MODEL.batch
    )
    assert_same(loss, SHIFT[0])
    assert not any(leaf.any() for part in grads for leaf in part.values())
    constant = torch.tensor(3.0)
    pipe = plain_pipeline([mlp_first, mlp_layer], loss=lambda y, b: constant)
    assert pipe.step(MODEL.params, MODEL.batch).loss == 3


def test_forward_needs_only_what_the_stages_read() -> None:
    pipe = plain_pipeline(MODEL.stages)
    output = pipe.forward(MODEL.params, {"x": MODEL.batch["x"]})
    assert_same(output, mlp_layer(MODEL.params[1], mlp_first(MODEL.params[0], MODEL.batch)))
