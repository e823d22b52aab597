"""A pipeline within Lightning, Hugging Face's Trainer and PEFT, as docs/how-to has it.

The programs of the pages run here, and what they define is held against the same without a
pipeline, in float64.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.documents import FRAMEWORKS, HOW_TO, run_document
from tests.modules.helpers import detached, unpipelined

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
"""The packages warn of their own code, and of loops as short as these."""


@pytest.fixture
def page(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the program of a page defines; skips where its package is not installed."""
    for package in FRAMEWORKS[request.param]:
        pytest.importorskip(package, reason="comes with: pip install fpipe-torch[frameworks]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return run_document(HOW_TO / request.param)


def values_of(module: nn.Module) -> list[Tensor]:
    """The parameters as they are now."""
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("page", ["lightning.md"], indirect=True)
@pytest.mark.parametrize("kind", ["Pipelined", "Manual"])
def test_lightning_trains_as_it_does_without_a_pipeline(page: Any, kind: str) -> None:
    automatic = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    options = page["options"] | {"max_epochs": 2} | (automatic if kind == "Pipelined" else {})

    base: Any = page["Pipelined"]

    class Plain(base):
        def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
            return page["loss"](self.module(batch["input"]), batch)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if kind == "Manual":
                nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)

    torch.manual_seed(0)
    rows: Any = [{"input": x, "y": x[:1] ** 2} for x in torch.randn(32, 8, dtype=torch.float64)]
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    results = []
    for make in (Plain, page[kind]):
        torch.manual_seed(0)
        module = make(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double())
        trainer = page["lightning"].Trainer(**options)
        trainer.fit(module, loader, loader)
        results.append((trainer.callback_metrics["validation"], values_of(module)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("page", ["hugging-face-trainer.md"], indirect=True)
def test_trainer_trains_as_it_does_without_a_pipeline(page: Any) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(32, (32, 16))
    padding = torch.arange(16) >= 8 + torch.arange(32)[:, None] % 8
    labels = tokens.masked_fill(padding, -100)
    rows = [{"input_ids": a, "labels": b} for a, b in zip(tokens, labels, strict=True)]

    def exact(output: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        """The model's own loss is in float32, whatever the model is in."""
        return page["summed"](output, {"labels": labels}) / num_items_in_batch

    results = []
    for make, options in (
        (page["Trainer"], {"compute_loss_func": exact}),
        (page["PipelineTrainer"], {"cuts": ["transformer.h.0"]}),
    ):
        torch.manual_seed(0)
        model = page["GPT2LMHeadModel"](page["config"]).double()
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0
        trainer = make(model, page["settings"], train_dataset=rows, eval_dataset=rows, **options)
        trainer.train()
        results.append((trainer.evaluate()["eval_loss"], values_of(model)))
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-12, atol=1e-13)
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-6)  # which Trainer has in float32


@pytest.mark.parametrize("page", ["peft.md"], indirect=True)
def test_adapters_have_the_gradients_that_they_have_without_a_pipeline(page: Any) -> None:
    model = page["model"].double()
    for layer in model.modules():  # so that those of the other half are not zero
        if hasattr(layer, "lora_B"):
            nn.init.normal_(layer.lora_B["default"].weight)
    trained = {name: p for name, p in detached(model).items() if name in page["trained"]}
    loss, grads = page["pipe"].step(detached(model), page["batch"])
    expected = unpipelined(model, trained, page["batch"], lambda output, _: output.loss)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-6, atol=1e-6)
    for name, grad in expected.grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-6)
    assert importlib.import_module("safetensors.torch").load_file(
        "adapters/adapter_model.safetensors"
    )
