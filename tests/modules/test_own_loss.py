"""The loss that a module computes itself is that of the whole batch, however labels are spread."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpipe
from fpipe import losses
from tests.modules.helpers import assert_equal_steps, detached, module_pipe, unpipelined
from tests.modules.hugging_face import ARCHITECTURES, LIBRARY, batch_of, build

ROWS, LENGTH, CLASSES = 9, 6, 5


def uneven(labels: Tensor) -> Tensor:
    """Labels of which each row has fewer; those of the last rows are all ignored."""
    present = torch.arange(labels.shape[1]) < labels.shape[1] - torch.arange(len(labels))[:, None]
    return labels.where(present, -100)


def own(output: Any, batch: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


# Microbatches of one size, of two, and of a row each, some of which have no labels that count.
@pytest.mark.parametrize(
    ("name", "microbatches"),
    [("llama", 3), ("gpt2", 4), ("bert", ROWS), ("t5", 3)],
)
def test_a_hugging_face_model_whose_labels_are_ignored_unevenly(
    name: str, microbatches: int
) -> None:
    module, batch = build(name, 2), batch_of(name, ROWS)
    batch["labels"] = uneven(batch["labels"])
    schedule = fpipe.schedules.one_f_one_b(ranks=2, microbatches=microbatches)
    pipe = module_pipe(module, ARCHITECTURES[name].cuts(2), schedule=schedule, loss=None)
    expected = unpipelined(module, detached(module), batch, own)
    # Some of these models compute their loss in float32.
    assert_equal_steps(pipe.step(detached(module), batch), expected, 1e-6, 1e-6)
    torch.testing.assert_close(pipe.value(detached(module), batch), expected.loss)


class Tagger(nn.Module):
    """A model that computes its loss as `measure` says."""

    def __init__(self, measure: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, CLASSES)
        self.measure = measure

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.last(torch.tanh(self.first(x)))
        return {"loss": self.measure(logits.flatten(0, 1), labels.flatten())}


def tagged() -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(0)
    labels = uneven(torch.randint(CLASSES, (ROWS, LENGTH)))
    return {"x": torch.randn(ROWS, LENGTH, 3), "labels": labels}, Tagger


WEIGHTS = torch.rand(CLASSES) + 0.5
EXACT = {
    "cross_entropy": F.cross_entropy,
    "class weights": lambda x, y: F.cross_entropy(x, y, WEIGHTS),
    "smoothed": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "smoothed class weights": lambda x, y: F.cross_entropy(x, y, WEIGHTS, label_smoothing=0.1),
    "nll": lambda x, y: F.nll_loss(x.log_softmax(-1), y),
    "module": nn.CrossEntropyLoss(),
    "another label ignored": lambda x, y: F.cross_entropy(x, y.clamp(min=2), ignore_index=2),
    "written to": lambda x, y: F.cross_entropy(x, y).mul_(3.0),
    "a factor": lambda x, y: 2.0 * F.cross_entropy(x, y),
    "images": lambda x, y: F.cross_entropy(x.view(-1, LENGTH, CLASSES).mT, y.view(-1, LENGTH)),
}


# Losses take turns with microbatches of two sizes, and of a row each.
@pytest.mark.parametrize(("kind", "microbatches"), list(zip(EXACT, itertools.cycle([4, ROWS]))))
def test_means_over_labels_that_count(kind: str, microbatches: int) -> None:
    batch, make = tagged()
    module = make(EXACT[kind])
    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=microbatches)
    pipe = module_pipe(module, "first", schedule=schedule, loss=None)
    expected = unpipelined(module, detached(module), batch)
    assert_equal_steps(pipe.step(detached(module), batch), expected, 1e-5, 1e-6)


@pytest.mark.parametrize(
    "measure",
    [
        lambda x, y: x.square().mean(),
        lambda x, y: F.mse_loss(x, x.flip(0)),
        lambda x, y: F.cross_entropy(x, x.detach().softmax(-1)),  # of probabilities
    ],
)
def test_other_means_are_over_rows(measure: Any) -> None:
    batch, make = tagged()
    module = make(measure)
    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=4)  # of 3, 2, 2 and 2 rows
    pipe = module_pipe(module, "first", schedule=schedule, loss=None)
    explicit = module_pipe(module, "first", schedule=schedule, loss=lambda out, _: out["loss"])
    expected = explicit.step(detached(module), batch)
    assert_equal_steps(pipe.step(detached(module), batch), expected, 1e-5, 1e-6)


def test_rows_that_lie_along_another_dimension_weigh_too() -> None:
    batch, make = tagged()
    module = make(lambda x, y: x.square().mean())
    turned = {"x": batch["x"].transpose(0, 1), "labels": batch["labels"].T}
    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=4)
    pipe = module_pipe(module, "first", schedule=schedule, loss=None, in_dims=1)
    expected = unpipelined(module, detached(module), batch)
    assert_equal_steps(pipe.step(detached(module), turned), expected, 1e-5, 1e-6)


def test_half_precision_adds_up_in_float32() -> None:
    batch, make = tagged()
    module = make(F.cross_entropy).to(torch.float16)
    batch["x"] = batch["x"].half()
    batch["labels"] = torch.zeros_like(batch["labels"])
    module.last.bias.data[0] = -30000  # torch's own mean of them is infinite
    pipe = module_pipe(module, "first", loss=None)
    loss = pipe.value(detached(module), batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(30000, rel=1e-3)


def test_a_sum_is_refused_and_taken_as_one() -> None:
    batch, make = tagged()
    for measure in (
        lambda x, y: F.cross_entropy(x, y, reduction="sum"),
        lambda x, y: F.mse_loss(x, x.flip(0).detach(), reduction="sum"),
    ):
        module = make(measure)
        with pytest.raises(fpipe.StageError, match=r'of Tagger is a sum.*reduction="sum"'):
            module_pipe(module, "first", loss=None).step(detached(module), batch)
    module = make(lambda x, y: F.cross_entropy(x, y, reduction="sum"))
    pipe = module_pipe(module, "first", loss=None, reduction="sum")
    expected = unpipelined(module, detached(module), batch)
    assert_equal_steps(pipe.step(detached(module), batch), expected, 1e-5, 1e-6)


def test_several_means_are_refused_with_what_to_write() -> None:
    batch, make = tagged()
    module = make(lambda x, y: F.cross_entropy(x, y) + F.cross_entropy(-x, y.flip(0)))
    with pytest.raises(
        fpipe.StageError,
        match=r"made of 2 means over labels.*output\.loss.*fpipe\.losses\.causal_lm",
    ):
        module_pipe(module, "first", loss=None).step(detached(module), batch)


def test_the_number_of_items_is_refused_and_taken_with_sums() -> None:
    module, batch = build("llama", 2), batch_of("llama", 4)
    batch["labels"] = uneven(batch["labels"])
    count = (batch["labels"][:, 1:] != -100).sum()
    counted = batch | {"num_items_in_batch": count}
    dims = dict.fromkeys(batch, 0) | {"num_items_in_batch": None}
    pipe = module_pipe(module, "model.layers.0", loss=None, in_dims=dims)
    with pytest.raises(fpipe.StageError, match=r"'num_items_in_batch'.*leave it out"):
        pipe.step(detached(module), counted)
    summed = module_pipe(module, "model.layers.0", loss=None, in_dims=dims, reduction="sum")
    expected = unpipelined(module, detached(module), batch, own)
    assert_equal_steps(summed.step(detached(module), counted), expected, 1e-6, 1e-6)


@pytest.mark.parametrize(
    ("name", "loss"), [("llama", losses.causal_lm), ("bert", losses.masked_lm)]
)
def test_losses_are_those_of_hugging_face(name: str, loss: Any) -> None:
    module, batch = build(name, 2), batch_of(name, ROWS)
    batch["labels"] = uneven(batch["labels"])
    total, weight = loss(output := module(**batch), batch)
    torch.testing.assert_close((total / weight).float(), output.loss.float())
    torch.testing.assert_close(loss(output.logits, batch)[0], total)
    pipe = module_pipe(module, ARCHITECTURES[name].cuts(2), loss=loss, reduction="weighted")
    expected = unpipelined(module, detached(module), batch, own)
    expected = expected._replace(loss=expected.loss.to(total.dtype))
    assert_equal_steps(pipe.step(detached(module), batch), expected, 1e-6, 1e-6)


def test_losses_read_any_output_with_logits() -> None:
    logits, batch = torch.randn(2, 4, CLASSES), {"labels": torch.randint(CLASSES, (2, 4))}
    outputs: list[Mapping[str, Tensor] | Any] = [logits, {"logits": logits}]
    totals = [losses.causal_lm(output, batch)[0] for output in outputs]
    totals.append(losses.causal_lm(SimpleNamespace(logits=logits), batch)[0])
    assert totals[0] == totals[1] == totals[2]


def test_a_question_answered_by_two_places() -> None:
    config = LIBRARY.BertConfig(
        hidden_size=16, num_attention_heads=2, intermediate_size=24, num_hidden_layers=2,
        vocab_size=31,
    )  # fmt: skip
    module = LIBRARY.BertForQuestionAnswering(config).eval()
    places = torch.randint(LENGTH, (4,))
    batch = {
        "input_ids": torch.randint(31, (4, LENGTH)),
        "start_positions": places,
        "end_positions": places,
    }
    with pytest.raises(fpipe.StageError, match="made of 2 means over labels"):
        module_pipe(module, "bert.encoder.layer.0", loss=None).step(detached(module), batch)
    pipe = module_pipe(module, "bert.encoder.layer.0", loss=own)
    expected = unpipelined(module, detached(module), batch, own)
    assert_equal_steps(pipe.step(detached(module), batch), expected, 1e-5, 1e-6)
