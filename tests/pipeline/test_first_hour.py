"""What is told of mistakes that are easily made in the first hour, and before anything runs."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe

SCHEDULE = fpipe.schedules.one_f_one_b(ranks=2, microbatches=3)
PARAMS = [{"w": torch.ones(4, 4)}, {"w": torch.ones(4, 4)}]
X = torch.ones(3, 4)


def first(params: Any, batch: Any) -> Tensor:
    value: Tensor = batch["x"] @ params["w"]
    return value


def second(params: Any, x: Tensor) -> Tensor:
    return x @ params["w"]


def classes(y: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(y, batch["y"])


def classifier(loss: Any = classes, **options: Any) -> fpipe.Pipeline:
    return fpipe.pipeline([first, second], loss, SCHEDULE, compile=False, **options)


def test_a_missing_key_of_the_batch() -> None:
    rule = r"the loss after stage 1 .*microbatch\['x'\].*KeyError: 'y'.*all of the microbatch"
    with pytest.raises(fpipe.StageError, match=rule):
        classifier().step(PARAMS, {"x": X})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.bool])
def test_labels_of_a_dtype_that_only_the_kernel_refuses(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    rule = rf"the loss .*labels of a cross entropy are {name}: .* int64, as labels\.long\(\)"
    for shape in ((3,), (3, 2)):
        loss = (
            classes if len(shape) == 1 else lambda y, b: F.cross_entropy(y.view(-1, 2, 2), b["y"])
        )
        with pytest.raises(fpipe.StageError, match=rule):
            classifier(loss).step(PARAMS, {"x": X, "y": torch.zeros(shape, dtype=dtype)})


def test_labels_as_numbers_of_classes_and_as_probabilities() -> None:
    for labels in (torch.zeros(3, dtype=torch.int64), torch.ones(3, 4) / 4):
        loss = classifier().value(PARAMS, {"x": X, "y": labels})
        torch.testing.assert_close(
            loss, classes(X @ PARAMS[0]["w"] @ PARAMS[1]["w"], {"y": labels})
        )


def test_an_optimizer_over_nothing() -> None:
    whole = fpipe.train(classifier(), torch.optim.SGD, lr=0.1)
    frozen = fpipe.train(classifier(trainable=[False, False]), torch.optim.SGD, lr=0.1)
    grouped = fpipe.train(classifier(), torch.optim.SGD, lr=0.1, groups={"*": None})
    for trainer, params in ((whole, [{}, {}]), (frozen, PARAMS), (grouped, PARAMS)):
        with pytest.raises(fpipe.FpipeError, match="nothing that the optimizer changes"):
            trainer.init(params)
    whole.init(PARAMS)


def test_saving_a_pipeline_says_what_to_save() -> None:
    with pytest.raises(fpipe.FpipeError, match=r"save parameters and state, .*schedule\.to_json"):
        torch.save({"pipe": classifier()}, io.BytesIO())


POSITIONS = torch.zeros(3, 3, 4)


@pytest.mark.parametrize(
    ("batch", "in_dims", "warns"),
    [
        ({"x": X, "positions": POSITIONS}, 0, True),
        ({"x": X, "positions": POSITIONS}, {"x": 0, "positions": 0}, False),
        ({"x": X, "positions": POSITIONS}, {"x": 0, "positions": 1}, False),
        ({"x": X, "positions": POSITIONS}, {"x": 0, "positions": None}, False),
        ({"x": X, "images": torch.zeros(3, 3, 5)}, 0, False),  # like no other leaf
        ({"x": torch.ones(6, 4), "images": torch.zeros(6, 3, 4)}, 0, False),
        ({"x": torch.ones(4, 4), "mask": torch.zeros(4, 4, 4)}, 0, False),  # of tokens by tokens
    ],
)
def test_rows_that_seem_to_lie_along_another_dimension(
    batch: Any, in_dims: Any, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = classifier(lambda y, _: y.mean(), in_dims=in_dims)
    with caplog.at_level(logging.WARNING, "fpipe"):
        for _ in range(2):  # told once
            pipe.step(PARAMS, batch)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == warns
    assert all("batch['positions']" in text and "in_dims" in text for text in told)


def test_a_search_says_that_it_keeps_the_placement(caplog: pytest.LogCaptureFixture) -> None:
    cost = fpipe.Cost(f=1, i=1, w=1)
    with caplog.at_level(logging.WARNING, "fpipe"):
        fpipe.search(start=SCHEDULE, cost=cost, iterations=1, placement=SCHEDULE.placement)
        assert not caplog.records  # who names it knows
        fpipe.search(start=SCHEDULE, cost=cost, iterations=1)
    (record,) = caplog.records
    assert "keeps the placement of start, (0, 1): leave start out" in record.getMessage()
