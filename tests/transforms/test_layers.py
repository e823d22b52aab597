"""Layers of torch whose batching rules are wrong or missing, mapped over members and examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe import schedules
from tests.models import assert_same

KEY = fpipe.random.key(3)


class Recurrent(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], width: int) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 4), make(), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, states = self.layer(self.first(x))
        states = states if isinstance(states, tuple) else (states,)
        out: Tensor = self.last(y.sum(1)) + sum(state.sum() for state in states)
        return out


RECURRENT: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "lstm": (lambda: nn.LSTM(4, 3, 3, dropout=0.5, batch_first=True), 3),
    "projected": (lambda: nn.LSTM(4, 3, 2, dropout=0.5, batch_first=True, proj_size=2), 2),
    "both ways": (lambda: nn.LSTM(4, 3, 2, dropout=0.5, batch_first=True, bidirectional=True), 6),
    "gru": (lambda: nn.GRU(4, 3, 2, dropout=0.5, bias=False, batch_first=True), 3),
    "tanh": (lambda: nn.RNN(4, 3, 2, dropout=0.5, batch_first=True, bidirectional=True), 6),
    "relu": (lambda: nn.RNN(4, 3, 2, "relu", dropout=0.5, batch_first=True), 3),
}


def recurrent(name: str) -> tuple[nn.Module, fpipe.ModulePipeline, Any, Any, Any]:
    """A module and its pipeline; parameters, those of two members, and a batch."""
    torch.manual_seed(0)
    module = Recurrent(*RECURRENT[name]).double()
    params = {key: value.detach() for key, value in module.named_parameters()}
    batch = {"x": torch.randn(4, 2, 4, dtype=torch.float64)}
    pipe = fpipe.from_module(
        module,
        schedule=schedules.gpipe(ranks=2, microbatches=1),
        cuts=["first"],
        loss=lambda output, batch: output.square().mean(),
        has_key=True,
        compile=False,
    )
    stacked = {key: torch.stack([value, value]) for key, value in params.items()}
    return module, pipe, params, stacked, batch


@pytest.mark.parametrize("name", RECURRENT)
def test_dropout_between_recurrent_layers_of_examples(name: str) -> None:
    """Dropout was once left out: the decomposition of torch has none."""
    _, pipe, params, stacked, batch = recurrent(name)
    alone = pipe.step(params, batch, KEY)
    several = fpipe.vmap(pipe, randomness="same").step(stacked, batch, KEY)
    for member in range(2):
        assert_same(several.loss[member], alone.loss)
        assert_same({key: g[member] for key, g in several.grads.items()}, alone.grads)


def test_dropout_between_recurrent_layers_of_members() -> None:
    module, pipe, _, stacked, batch = recurrent("lstm")
    first, second = fpipe.vmap(pipe, randomness="different").step(stacked, batch, KEY).loss
    assert first != second
    with pytest.raises(fpipe.StageError, match=r"randomness= of fpipe\.vmap"):
        fpipe.vmap(pipe).step(stacked, batch, KEY)
    module.eval()
    quiet = fpipe.vmap(pipe).step(stacked, batch, KEY)
    assert_same(quiet.loss[0], module(**batch).square().mean())


def test_lstm_of_onednn_is_taken_step_by_step() -> None:
    """In single precision, on the CPU, torch takes one operation that no transform goes through."""
    torch.manual_seed(0)
    module = Recurrent(lambda: nn.LSTM(4, 3, batch_first=True), 3)
    pipe = fpipe.from_module(
        module,
        schedule=schedules.gpipe(ranks=2, microbatches=1),
        cuts=["first"],
        loss=lambda output, batch: output.square().mean(),
        compile=False,
    )
    params = {key: value.detach() for key, value in module.named_parameters()}
    batch, vector = {"x": torch.randn(4, 2, 4)}, {k: torch.randn_like(v) for k, v in params.items()}
    double, along = ({k: v.double() for k, v in given.items()} for given in (params, vector))
    module = module.double()

    def plain(own: Any, x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(module, own, (x,))
        return out.square().mean()

    def assert_near(found: Any, expected: Any) -> None:
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6, check_dtype=False)

    x, gradient = batch["x"].double(), torch.func.grad(plain)
    stacked = {key: torch.stack([value, 2 * value]) for key, value in params.items()}
    found = fpipe.vmap(pipe).step(stacked, batch).grads
    for number in range(2):
        expected = gradient({key: (1 + number) * value for key, value in double.items()}, x)
        assert_near({key: value[number] for key, value in found.items()}, expected)
    rows = fpipe.per_example_grads(pipe).step(params, batch).grads
    for number in range(4):
        expected = gradient(double, x[number : number + 1])
        assert_near({key: value[number] for key, value in rows.items()}, expected)

    def product(own: Any) -> Tensor:
        found = gradient(own, x)
        return torch.stack([(found[key] * along[key]).sum() for key in found]).sum()

    second = torch.func.grad(product)(double)
    assert_near(fpipe.hvp(pipe).step(params, batch, vector)[2], second)


def in_two_stages(module: nn.Module) -> tuple[dict[str, Tensor], fpipe.ModulePipeline]:
    """The parameters of a module, and a pipeline of it that is cut after its first part."""
    pipe = fpipe.from_module(
        module,
        schedule=schedules.gpipe(ranks=2, microbatches=2),
        cuts=["0"],
        loss=lambda output, batch: output.square().mean(),
        compile=False,
    )
    return {key: value.detach() for key, value in module.named_parameters()}, pipe


class Embedding(nn.Module):
    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(3, 4, padding_idx=-2), nn.Linear(4, 2)
        self.direct = direct

    def forward(self, x: Tensor) -> Tensor:
        found = torch.embedding(self.table.weight, x, 1) if self.direct else self.table(x)
        y: Tensor = self.last(found)
        return y


PADDED = torch.tensor([[0, 1], [1, 2], [2, 1], [0, 1]])  # 1 is the padding


def padded(
    module: nn.Module,
) -> tuple[dict[str, Tensor], Callable[[Any, Tensor], Tensor], fpipe.Pipeline]:
    """Parameters of a module, its loss of them and of indices, and a pipeline of that loss."""
    torch.manual_seed(0)
    for parameter in module.double().parameters():
        nn.init.normal_(parameter)

    def plain(params: Any, x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(module, params, (x,))
        return out.square().mean()

    pipe = fpipe.pipeline(
        lambda p, batch: plain(p, batch["x"]),
        schedule=schedules.gpipe(ranks=1, microbatches=2),
        compile=False,
    )
    return {key: value.detach() for key, value in module.named_parameters()}, plain, pipe


@pytest.mark.parametrize("direct", [False, True])
def test_padding_of_an_embedding_has_no_gradient(direct: bool) -> None:
    """Only the first member or example once had no gradient of the padding row."""
    params, plain, pipe = padded(Embedding(direct))
    each = torch.func.vmap(torch.func.grad(plain), (None, 0))(params, PADDED[:, None])
    assert not each["table.weight"][:, 1].any() and each["table.weight"][:, 2].any()
    assert_same(fpipe.per_example_grads(pipe).step(params, {"x": PADDED}).grads, each)
    stacked = {key: torch.stack([value, value * 2]) for key, value in params.items()}
    several = torch.stack([PADDED, PADDED.flip(0)])
    expected = torch.func.vmap(torch.func.grad(plain))(stacked, several)
    found = fpipe.vmap(pipe, (0, {"x": 0})).step(stacked, {"x": several})
    assert_same(found.grads, expected)


class TiedEmbedding(Embedding):
    """Its table is read twice: the padding row has a gradient from the second."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(super().forward(x)) @ self.table.weight[:, :2].T
        return y


@pytest.mark.parametrize("direct", [False, True])
def test_padding_of_an_embedding_does_not_move(direct: bool) -> None:
    """The forward-mode rule of torch moves the padding, from which no gradient comes."""
    params, plain, pipe = padded(TiedEmbedding(direct))
    vector = {key: torch.randn_like(value) for key, value in params.items()}
    batch = {"x": PADDED}

    def slope(loss: Callable[[Any], Tensor], params: Any) -> Tensor:
        grads = torch.func.grad(loss)(params)
        return torch.stack([(grads[key] * vector[key]).sum() for key in grads]).sum()

    expected, product = torch.func.grad_and_value(lambda p: slope(lambda p: plain(p, PADDED), p))(
        params
    )[::-1]
    assert_same(fpipe.jvp(pipe).value(params, batch, vector).jvp, expected)
    assert_same(fpipe.hvp(pipe).step(params, batch, vector).hvp, product)
    twice = torch.func.grad(lambda p: slope(lambda p: pipe.value(p, batch), p))(params)
    assert_same(twice, product)
    one = {key: value[None] for key, value in vector.items()}
    several = fpipe.vmap(fpipe.hvp(pipe), (None, None, 0)).step(params, batch, one).hvp
    assert_same({key: value[0] for key, value in several.items()}, product)


@pytest.mark.parametrize("transform", [fpipe.per_example_grads, fpipe.hvp, fpipe.vmap])
def test_sparse_embedding_is_refused(transform: Callable[..., Any]) -> None:
    module = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    params, pipe = in_two_stages(module)
    given: list[Any] = [params, {"input": torch.zeros(4, dtype=torch.int64)}]
    if transform is fpipe.hvp:
        given.append(params)
    if transform is fpipe.vmap:
        given[0] = {key: torch.stack([value] * 2) for key, value in params.items()}
    with pytest.raises(fpipe.StageError, match=r"has a sparse gradient .* say sparse=False"):
        transform(pipe).step(*given)


def test_rrelu_in_evaluation_is_mapped() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.RReLU(0.1, 0.5), nn.Linear(4, 3)).double().eval()
    params, pipe = in_two_stages(module)
    batch = {"input": torch.randn(4, 4, dtype=torch.float64)}
    rows = fpipe.per_example_grads(pipe).step(params, batch).grads
    assert_same({key: value.mean(0) for key, value in rows.items()}, pipe.step(params, batch).grads)
