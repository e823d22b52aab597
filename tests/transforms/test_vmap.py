"""An ensemble through a pipeline: each member gets what it gets alone.

Every schedule is in test_every_schedule.py, with a small model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state

import fpipe
from fpipe import BatchError, Stage, StageError, pytree, schedules
from tests.laid_out import laid_out
from tests.models import Model, apply, assert_same, conv, mlp, pipe_of, short_gpt, unpipelined
from tests.transforms.helpers import member, stacked

MEMBERS = 3


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        (short_gpt(5), schedules.one_f_one_b(ranks=2, microbatches=2)),
        (conv(2, 5), schedules.interleaved_1f1b(ranks=1, microbatches=2)),
    ],
    ids=["gpt", "conv"],
)
def test_step_equals_each_member_alone(model: Model, schedule: fpipe.Schedule) -> None:
    """Microbatches of two sizes; models take long to trace: two stages of each."""
    params = stacked(model.params, MEMBERS)
    ensemble = fpipe.vmap(pipe_of(model, schedule))
    loss, grads = ensemble.step(params, model.batch)
    assert loss.shape == (MEMBERS,)
    for number in range(MEMBERS):
        alone = unpipelined(*model._replace(params=member(params, number)))
        assert_same(fpipe.Step(loss[number], member(grads, number)), alone)
    assert_same(ensemble.value(params, model.batch), loss)


def test_forward_puts_members_first() -> None:
    schedule = schedules.zbv(ranks=1, microbatches=2)
    model = conv(2, 5)
    params = stacked(model.params, MEMBERS)
    ensemble = fpipe.vmap(pipe_of(model, schedule))
    for out_dims in (0, {"logits": -2, "label": 0}):
        y = ensemble.forward(params, model.batch, out_dims=out_dims)
        for number in range(MEMBERS):
            alone = apply(model.stages, member(params, number), model.batch)
            assert_same(member(y, number), alone)


def test_vmap_equals_torch_func_of_the_whole_function() -> None:
    """Dimensions other than the first, differing per leaf, and a batch leaf per member."""
    model = mlp(2, 6)
    schedule = schedules.one_f_one_b(ranks=2, microbatches=3)
    params = [{"w": rand(3, 3, MEMBERS), "b": rand(MEMBERS, 3)},
              {"w": rand(3, MEMBERS, 3), "b": rand(3, MEMBERS)}]  # fmt: skip
    batch = {"x": rand(6, MEMBERS, 3), "y": model.batch["y"]}
    in_dims = ([{"w": -1, "b": 0}, {"w": 1, "b": -1}], {"x": 1, "y": None})

    def whole(params: Any, batch: Any) -> Tensor:
        return model.loss(apply(model.stages, params, batch), batch)

    ours = fpipe.vmap(pipe_of(model, schedule), in_dims).step(params, batch)
    grads, loss = torch.func.vmap(grad_and_value(whole), in_dims)(params, batch)
    assert_same(ours.loss, loss)
    dims = [leaf for part in in_dims[0] for leaf in pytree.flatten(part)[0]]
    for ours_leaf, theirs, own, dim in zip(
        *(pytree.flatten(t)[0] for t in (ours.grads, grads, params)), dims, strict=True
    ):
        assert ours_leaf.shape == own.shape
        assert_same(ours_leaf, theirs.movedim(0, dim))


def test_shared_parameters_and_a_mapped_batch() -> None:
    """Gradients of parameters that members share are stacked along the first dimension."""
    model = mlp(2, 6)
    batch = {name: torch.stack([leaf, 2 * leaf]) for name, leaf in model.batch.items()}
    schedule = schedules.zb_h1(ranks=2, microbatches=3)
    loss, grads = fpipe.vmap(pipe_of(model, schedule), (None, 0)).step(model.params, batch)
    for number in range(2):
        alone = unpipelined(*model._replace(batch=member(batch, number)))
        assert_same(fpipe.Step(loss[number], member(grads, number)), alone)


def sharpened(p: Any, x: Tensor, batch: Any) -> Tensor:
    return x @ p / batch["temperature"]


def test_a_number_for_each_member_is_a_mapped_leaf() -> None:
    """A sweep: members differ in a hyperparameter, and the first stage has no parameters."""
    stages: list[Any] = [lambda _, batch: batch["x"].sin(), Stage(sharpened, reads_batch=True)]
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(
        stages,
        lambda y, batch: F.cross_entropy(y, batch["y"]),
        schedule,
        in_dims={"x": 0, "y": 0, "temperature": None},
        compile=False,
    )
    temperatures = [0.5, 1.0, 2.0]
    weight = torch.randn(4, 3).double()
    batch = {"x": torch.randn(5, 4).double(), "y": torch.tensor([0, 2, 1, 1, 0])}
    sweep = fpipe.vmap(pipe, (None, {"x": None, "y": None, "temperature": 0}))
    loss, grads = sweep.step([None, weight], {**batch, "temperature": torch.tensor(temperatures)})
    for number, temperature in enumerate(temperatures):
        alone = pipe.step([None, weight], {**batch, "temperature": torch.tensor(temperature)})
        assert_same(loss[number], alone.loss)
        assert_same(grads[1][number], alone.grads[1])


def test_stack_module_state_is_accepted_as_it_is() -> None:
    def call(module: nn.Module) -> Any:
        return lambda state, x: functional_call(module, state, (x,))

    layers = [[nn.Linear(3, 3), nn.Linear(3, 2)] for _ in range(MEMBERS)]
    params = [stack_module_state([member[stage] for member in layers]) for stage in range(2)]
    stages = [call(layer) for layer in layers[0]]
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(stages, lambda y, _: y.square().mean(), schedule, compile=False)
    x = torch.randn(4, 3)
    loss, grads = fpipe.vmap(pipe).step(params, x)
    for number, own in enumerate(layers):
        alone = own[1](own[0](x)).square().mean()
        alone.backward()
        assert_same(loss[number], alone, 1e-5)
        assert_same(grads[0][0]["weight"][number], own[0].weight.grad, 1e-5)


class Halves(NamedTuple):
    """Parameters of two stages, by name."""

    lower: Any
    upper: Any


@pytest.mark.parametrize("container", [tuple, Halves._make])
def test_gradients_come_in_the_container_of_the_parameters(container: Any) -> None:
    model = mlp(2, 4)
    pipe = pipe_of(model, schedules.one_f_one_b(ranks=2, microbatches=2))
    params, members = container(model.params), container(stacked(model.params, MEMBERS))
    found = [
        (pipe.step(params, model.batch).grads, params),
        (fpipe.vmap(pipe).step(members, model.batch).grads, members),
        (torch.vmap(torch.func.grad(pipe.value), (0, None))(members, model.batch), members),
        (fpipe.hvp(pipe).step(params, model.batch, params).hvp, params),
        (fpipe.vmap(fpipe.hvp(pipe)).step(members, model.batch, members).hvp, members),
    ]
    for grads, given in found:
        assert pytree.structure(grads) == pytree.structure(given)


def test_ensembles_of_ensembles() -> None:
    model = mlp(2, 6)
    schedule = schedules.zbv(ranks=1, microbatches=2)
    pipe = pipe_of(model, schedule)
    members = stacked(model.params, MEMBERS)
    params = pytree.tree_map(lambda p: torch.stack([p, p.neg()], -1), members)
    batch = {"x": torch.stack([model.batch["x"], model.batch["x"].flip(0)], 1)}
    batch["y"] = model.batch["y"]
    outer = (-1, {"x": 1, "y": None})
    loss, grads = fpipe.vmap(fpipe.vmap(pipe), outer).step(params, batch)
    assert loss.shape == (2, MEMBERS)
    for number in range(2):
        own = {"x": batch["x"][:, number], "y": batch["y"]}
        alone = fpipe.vmap(pipe).step(member(params, number, -1), own)
        assert_same(fpipe.Step(loss[number], member(grads, number, -1)), alone)


def test_directions_of_ensembles_of_ensembles_with_batches_of_their_own() -> None:
    model = mlp(2, 6)
    pipe = fpipe.hvp(pipe_of(model, schedules.gpipe(ranks=2, microbatches=2)))
    params = stacked(model.params, MEMBERS)
    batch = {"x": torch.stack([model.batch["x"], model.batch["x"].flip(0)])}
    batch["y"] = model.batch["y"]
    inner, outer = (0, None, 0), (None, {"x": 0, "y": None}, None)
    found = fpipe.vmap(fpipe.vmap(pipe, inner), outer).step(params, batch, params)
    for number in range(2):
        own = {"x": batch["x"][number], "y": batch["y"]}
        alone = fpipe.vmap(pipe, inner).step(params, own, params)
        assert_same(fpipe.Hvp(*(member(part, number) for part in found)), alone)


def test_select_scatter_has_the_right_gradient() -> None:
    def replaced(params: Any, x: Tensor) -> Tensor:
        first = torch.select_scatter(x * params["w"], params["row"], 1, -1)
        return (first.select_scatter(params["row"] ** 2, dim=1, index=0) * x).square().sum()

    pipe = fpipe.pipeline(
        replaced, schedule=schedules.gpipe(ranks=1, microbatches=1), compile=False
    )
    params = {"w": torch.randn(2, 4, 3, 5).double(), "row": torch.randn(2, 4, 5).double()}
    x = torch.randn(4, 3, 5).double()
    found = fpipe.vmap(pipe).step(params, x).grads
    assert_same(found, torch.func.vmap(torch.func.grad(replaced), (0, None))(params, x))


def lu_solved(matrix: Tensor, right: Tensor) -> Tensor:
    return torch.linalg.lu_solve(*torch.linalg.lu_factor(matrix), right)


@pytest.mark.parametrize("solve", [torch.linalg.solve, lu_solved], ids=["solve", "lu_solve"])
@pytest.mark.parametrize(
    ("of_matrix", "of_right"),
    [((), (2, 3, 2)), ((2,), (3, 3)), ((2,), (1, 3, 2)), ((2,), (2, 3))],
    ids=str,
)
def test_one_matrix_with_several_right_hand_sides_and_the_reverse(
    of_matrix: tuple[int, ...], of_right: tuple[int, ...], solve: Callable[..., Tensor]
) -> None:
    """The batching of torch takes one matrix with several right-hand sides for something else, and
    reads numbers out of other memory."""
    if solve is lu_solved and of_right == (2, 3):
        of_right = (2, 3, 1)  # it knows no vectors

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        matrix = params["matrix"] + 4 * torch.eye(3).double()
        return fpipe.cut(solve(matrix, params["right"] * x.mean())).sin().mean()

    schedule = schedules.gpipe(ranks=2, microbatches=1)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    x = torch.ones(2).double()
    stacked = {"matrix": rand(3, *of_matrix, 3, 3), "right": rand(3, *of_right)}
    sides = (["matrix"], ["right"], ["matrix", "right"])
    for mapped in sides if solve is torch.linalg.solve else sides[-1:]:
        dims = {name: 0 if name in mapped else None for name in stacked}
        params = {k: leaf if k in mapped else leaf[0] for k, leaf in stacked.items()}
        vector = pytree.tree_map(torch.cos, params)
        several = fpipe.vmap(pipe, (dims, None)).step(params, x)
        both = []
        if solve is lu_solved:
            both.append(fpipe.hvp(fpipe.vmap(pipe, (dims, None))).step(params, x, vector))
            both.append(fpipe.vmap(fpipe.hvp(pipe), (dims, None, dims)).step(params, x, vector))
        for number in range(3):
            own, moved = (
                {k: leaf[number] if k in mapped else leaf for k, leaf in given.items()}
                for given in (params, vector)
            )
            grads, loss = grad_and_value(loss_fn)(own, x)
            for found in (several, *both):
                assert_same(found.loss[number], loss)
                for name in mapped:
                    assert_same(found.grads[name][number], grads[name])
            if both:
                pushed: Any = torch.func.jvp(
                    lambda p: torch.func.grad(loss_fn)(p, x), (own,), (moved,)
                )
                for found in both:
                    for name in mapped:
                        assert_same(found.hvp[name][number], pushed[1][name], 1e-9)


@pytest.mark.parametrize("right", [torch.eye(3), torch.arange(9.0).reshape(3, 3).cos()])
def test_cholesky_solve_of_square_right_hand_sides(right: Tensor) -> None:
    """With as many factors as rows, torch can take right-hand sides for one vector each."""

    def loss_fn(p: Tensor, x: Tensor) -> Tensor:
        factor = torch.linalg.cholesky(p @ p.mT + 3 * torch.eye(3).double())
        found = fpipe.cut(torch.cholesky_solve(right.double(), factor))
        return (found + torch.cholesky_inverse(factor)).sin().sum() * x.mean()

    schedule = schedules.gpipe(ranks=2, microbatches=1)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    params, x = rand(3, 3, 3), torch.ones(2).double()
    found = fpipe.vmap(pipe, (0, None)).step(params, x)
    for number in range(3):
        assert_same(member(list(found), number), list(pipe.step(params[number], x)))


def test_solve_of_single_rows() -> None:
    """The kernel reads the stride to the next matrix even of a single matrix, and that stride is
    another one for an expanded matrix under vmap."""

    def solved(p: Tensor, x: Tensor) -> Tensor:
        right = x[:, :, :2].cos() + p
        return lu_solved(x, right) + lu_solved(x, right.sin())

    def solved_at_once(p: Tensor, x: Tensor) -> Tensor:
        right = x[:, :, :2].cos() + p
        return torch.linalg.solve(x, right) + lu_solved(x, right.sin())

    def loss(y: Tensor, _: Any) -> Tensor:
        return y.square().sum((1, 2)).mean()

    stages: Any = [lambda p, x: x * p, solved]
    schedule = schedules.zb_h1(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(stages, loss, schedule, compile=False)
    params, vector = ([rand(3, 3).exp(), rand(3, 2)] for _ in range(2))
    x = rand(4, 3, 3) + 4 * torch.eye(3)
    found = [
        fpipe.hvp(fpipe.per_example_grads(pipe)).step(params, x, vector),
        fpipe.per_example_grads(fpipe.hvp(pipe)).step(params, x, vector),
    ]
    by_row = fpipe.hvp(pipe.with_schedule(schedules.zb_h1(ranks=2, microbatches=1)))
    for row in range(4):
        alone = by_row.step(params, x[row : row + 1], vector)
        for several in found:
            assert_same(member(list(several), row), list(alone), 1e-9)
    at_once = fpipe.pipeline([stages[0], solved_at_once], loss, schedule, compile=False)
    rows = fpipe.per_example_grads(at_once).step(params, x)
    assert_same(list(rows), list(found[0][:2]), 1e-9)


def test_lstm_cell_and_group_norm_in_channels_last() -> None:
    """torch has no batching rule for the one, and none for the other as it lies."""
    cell, norm = nn.LSTMCell(4, 3).double(), nn.GroupNorm(2, 4).double()

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        normed = functional_call(norm, params["norm"], fpipe.cut(x))
        return functional_call(cell, params["cell"], normed.mean((2, 3)))[0].square().mean()

    pipe = fpipe.pipeline(loss_fn, schedule=schedules.gpipe(ranks=2, microbatches=1), compile=False)
    params = {
        name: {key: leaf.detach() for key, leaf in own.named_parameters()}
        for name, own in (("cell", cell), ("norm", norm))
    }
    members = stacked(params, MEMBERS)
    x = rand(3, 4, 2, 2).to(memory_format=torch.channels_last)
    several = fpipe.vmap(pipe).step(members, x).grads
    rows = fpipe.per_example_grads(pipe).step(params, x).grads
    for number in range(MEMBERS):
        alone = torch.func.grad(loss_fn)(member(members, number), x)
        assert_same(member(several, number), alone)
        assert_same(member(rows, number), torch.func.grad(loss_fn)(params, x[number, None]))


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.LSTM(2, 3, num_layers=2, bidirectional=True),
        torch.nn.GRU(2, 3, batch_first=True),
        torch.nn.RNN(2, 3, batch_first=True),
        torch.nn.RNN(2, 3, batch_first=True, nonlinearity="relu"),
    ],
    ids=repr,
)
def test_vmap_of_recurrent_layers(layer: torch.nn.Module) -> None:
    """torch has no batching rules for them."""
    layer = layer.double()

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        output, *_ = torch.func.functional_call(layer, params, (x,))
        return fpipe.cut(output).square().mean()

    schedule = schedules.one_f_one_b(ranks=2, microbatches=1)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False)
    params = {name: leaf.detach() for name, leaf in layer.named_parameters()}
    members, x = stacked(params, MEMBERS), torch.randn(2, 3, 2, dtype=torch.float64)
    found = fpipe.vmap(pipe).step(members, x)
    rows = fpipe.per_example_grads(pipe).step(params, x)
    for number in range(MEMBERS):
        alone = torch.func.grad(loss_fn)(member(members, number), x)
        assert_same(member(found.grads, number), alone)
    for number in range(len(x)):
        alone = torch.func.grad(loss_fn)(params, x[number : number + 1])
        assert_same(member(rows.grads, number), alone)


def test_members_draw_as_randomness_says() -> None:
    def noisy(_: Any, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = fpipe.pipeline([noisy, lambda w, x: x * w], lambda y, _: y.mean(), schedule,
                          compile=False)  # fmt: skip
    params, x = [None, torch.ones(2, 8)], torch.ones(4, 8)
    same = fpipe.vmap(pipe, randomness="same").step(params, x)
    assert same.loss[0] == same.loss[1]
    different = fpipe.vmap(pipe, randomness="different").step(params, x)
    assert not torch.equal(different.grads[1][0], different.grads[1][1])
    with pytest.raises(StageError, match=r"stage 0 .*randomness"):
        fpipe.vmap(pipe).step(params, x)


def test_vmap_keeps_the_options_of_the_pipeline() -> None:
    """A transformed pipeline is a pipeline: another schedule, its programs, `fpipe.use`."""
    model = mlp(4, 6)
    ensemble = fpipe.vmap(pipe_of(model, schedules.interleaved_1f1b(ranks=2, microbatches=2)))
    other = ensemble.with_schedule(schedules.zbv(ranks=2, microbatches=3))
    params = stacked(model.params, MEMBERS)
    with fpipe.use(other):
        assert_same(fpipe.step(params, model.batch), ensemble.step(params, model.batch))
    assert len(other.programs(params, model.batch)) == 2


def test_compiled_vmap_equals_each_member() -> None:
    """Kernels of a smaller ensemble are in test_every_schedule.py."""
    model = short_gpt(6, torch.float32)
    schedule = schedules.one_f_one_b(ranks=2, microbatches=1)
    params = stacked(model.params, MEMBERS)
    loss, grads = fpipe.vmap(pipe_of(model, schedule, compile=laid_out)).step(params, model.batch)
    for number in range(MEMBERS):
        alone = unpipelined(*model._replace(params=member(params, number)))
        assert_same(fpipe.Step(loss[number], member(grads, number)), alone, 2e-5)


# ── refusals ────────────────────────────────────────────────────────────────────────────────────

MODEL = mlp(2, 4)
PIPE = pipe_of(MODEL, schedules.one_f_one_b(ranks=2, microbatches=2))


@pytest.mark.parametrize(
    ("in_dims", "text"),
    [
        (0, r"in_dims=0 must be a tuple of 2, one entry for each of \(params, batch\)"),
        ((0, None, 0), r"in_dims=\(0, None, 0\) must be a tuple of 2"),
    ],
)
def test_in_dims_name_every_argument(in_dims: Any, text: str) -> None:
    with pytest.raises(StageError, match=text):
        fpipe.vmap(PIPE, in_dims)


def test_refuses_what_is_no_pipeline_and_unknown_randomness() -> None:
    with pytest.raises(StageError, match=r"is a function: fpipe\.vmap takes a pipeline"):
        fpipe.vmap(mlp)  # type: ignore[type-var]
    with pytest.raises(StageError, match=r"randomness='both' must be one of 'error'"):
        fpipe.vmap(PIPE, randomness="both")


def test_in_dims_must_fit_those_of_the_pipeline() -> None:
    pipe = fpipe.pipeline(
        MODEL.stages, MODEL.loss, PIPE.schedule, in_dims={"x": 0, "y": 0}, compile=False
    )
    with pytest.raises(BatchError, match=r"in_dims\[1\]=\{'x': 0\} and the pipeline's in_dims"):
        fpipe.vmap(pipe, (0, {"x": 0}))


@pytest.mark.parametrize(
    ("in_dims", "text"),
    [
        ((2, None), r"in_dims is 2 for params\[0\]\['b'\] of shape \(3, 3\)"),
        ((0, 5), r"in_dims is 5 for batch\['x'\] of shape \(4, 3\)"),
        ((None, None), "in_dims maps no leaf of the arguments, so the number of members"),
        ((0, 0), r"batch\['x'\] has 4 members .* but params\[0\]\['b'\] has 3"),
        (({"w": 0}, None), r"in_dims\[0\]=\{'w': 0\} must be an int, None, or a list with one"),
        (([0, {"w": 0}], None), r"in_dims must be a pytree prefix of params\[1\]"),
    ],
)
def test_in_dims_must_fit_the_arguments(in_dims: Any, text: str) -> None:
    with pytest.raises(BatchError, match=text):
        fpipe.vmap(PIPE, in_dims).step(stacked(MODEL.params, MEMBERS), MODEL.batch)


def test_members_are_counted_alike() -> None:
    members = stacked(MODEL.params, MEMBERS)
    found = fpipe.vmap(PIPE, axis_size=3).step(members, MODEL.batch)
    assert torch.equal(found.loss, fpipe.vmap(PIPE).step(members, MODEL.batch).loss)
    with pytest.raises(BatchError, match=r"params.* has 3 members .*, but axis_size has 2: all"):
        fpipe.vmap(PIPE, axis_size=2).step(members, MODEL.batch)
    # Members that share all of their arguments.
    shared = fpipe.vmap(PIPE, (None, None), axis_size=2).step(MODEL.params, MODEL.batch)
    assert_same(shared.loss, PIPE.step(MODEL.params, MODEL.batch).loss.expand(2))
    for size in (0, 2.5, "3", True):
        with pytest.raises(StageError, match=r"axis_size=.* must be a number of members"):
            fpipe.vmap(PIPE, axis_size=size)  # type: ignore[arg-type]


def test_ensemble_without_members_is_refused() -> None:
    none = pytree.tree_map(lambda p: p[:0], stacked(MODEL.params, MEMBERS))
    with pytest.raises(BatchError, match="has 0 members along its mapped dimension"):
        fpipe.vmap(PIPE).step(none, MODEL.batch)


def test_params_are_one_part_per_stage() -> None:
    with pytest.raises(BatchError, match="params is a list of 1: it must be a list or tuple of 2"):
        fpipe.vmap(PIPE).step(MODEL.params[:1], MODEL.batch)
