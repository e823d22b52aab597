"""Parameters from files: which tensors are read, by which names, and what is refused."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

import fpipe
from fpipe.checkpoint import checkpoint_files
from fpipe.checkpoint.checkpoint_files import DistributedDirectory, SafetensorsFiles, Source
from tests.modules.helpers import ONE, detached, module_pipe, unpipelined, write_distributed
from tests.modules.hugging_face import build
from tests.modules.models import LanguageModel, language_model, token_batch

SCHEDULE = fpipe.schedules.zb_h1(ranks=2, microbatches=2)


def write_params(module: nn.Module, folder: Path) -> Path:
    save_file(detached(module), folder / "one.safetensors")
    return folder / "one.safetensors"


def write_listed(module: nn.Module, folder: Path) -> Path:
    """Two files and no index."""
    parts: list[dict[str, Tensor]] = [{}, {}]
    for number, (name, value) in enumerate(detached(module).items()):
        parts[number % 2][name] = value
    for number, part in enumerate(parts):
        save_file(part, folder / f"{number}.safetensors")
    return folder


def write_indexed(module: nn.Module, folder: Path) -> Path:
    """As `write_listed`, with an index, and a file beside it that it does not name."""
    write_listed(module, folder)
    names = detached(module)
    index = {"weight_map": {n: f"{i % 2}.safetensors" for i, n in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    save_file({"of.another": torch.ones(1)}, folder / "optimizer.safetensors")
    return folder


WRITERS = [write_params, write_listed, write_indexed, write_distributed]


def language_pipe(module: nn.Module) -> fpipe.ModulePipeline:
    """A pipeline of a language model, with its own loss."""
    return module_pipe(module, "blocks.1", loss=None)


def without_weights() -> nn.Module:
    """The shapes of `language_model`; its mask has numbers."""
    with torch.device("meta"):  # module.to("meta") would untie the table
        module = LanguageModel().double()
    module.mask = language_model().mask
    return module


@pytest.mark.parametrize("write", WRITERS)
def test_step_from_a_checkpoint(write: Callable[[nn.Module, Path], Path], tmp_path: Path) -> None:
    module, batch = language_model(), token_batch()
    pipe = language_pipe(without_weights())
    params = pipe.load(write(module, tmp_path))
    saved = detached(module)
    assert params.keys() == saved.keys()
    assert all(torch.equal(params[name], value) for name, value in saved.items())
    got, expected = pipe.step(params, batch), unpipelined(module, saved, batch)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got.grads, expected.grads, rtol=1e-10, atol=1e-12)


def test_tied_weights_of_hugging_face_come_by_either_name(tmp_path: Path) -> None:
    module: Any = build("gpt2", 2)
    assert module.lm_head.weight is module.transformer.wte.weight
    module.save_pretrained(tmp_path, max_shard_size="8KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text("utf-8"))
    stored = index["weight_map"]
    assert len(set(stored.values())) > 1
    saved = detached(module)
    assert len(stored.keys() & {"lm_head.weight", "transformer.wte.weight"}) == 1
    pipe = module_pipe(module, "transformer.h.0", loss=None)
    loaded = pipe.load(tmp_path)
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    # The other one.
    head = saved.pop("transformer.wte.weight")
    save_file(saved | {"lm_head.weight": head}, tmp_path / "other.safetensors")
    loaded = pipe.load(tmp_path / "other.safetensors")
    assert torch.equal(loaded["transformer.wte.weight"], head)


class Recorded:
    """A file of safetensors that notes which tensors are read."""

    def __init__(self, opened: Any, read: list[str]) -> None:
        self._opened, self._read = opened, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def get_tensor(self, name: str) -> Tensor:
        """Note it."""
        self._read.append(name)
        value: Tensor = self._opened.get_tensor(name)
        return value


def test_only_wanted_tensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = language_model()
    write_indexed(module, tmp_path)
    wanted = {"blocks.1.norm.bias": torch.empty(8, dtype=torch.float32, device="meta")}
    read: list[str] = []
    files: list[Path] = []
    really = checkpoint_files._opened

    def opened(file: Path) -> Any:
        files.append(file)
        return Recorded(really(file), read)

    monkeypatch.setattr(checkpoint_files, "_opened", opened)
    source: Source = SafetensorsFiles.indexed(tmp_path / "model.safetensors.index.json")
    assert files == []
    values = source.read(wanted)
    assert read == list(wanted) and len(files) == 1
    assert values["blocks.1.norm.bias"].dtype == torch.float32  # the file has float64
    source = DistributedDirectory(write_distributed(module, tmp_path))
    really_read = dcp.FileSystemReader.read_data

    def read_data(reader: Any, plan: Any, planner: Any) -> Any:
        read.extend(item.dest_index.fqn for item in plan.items)
        return really_read(reader, plan, planner)

    read.clear()
    monkeypatch.setattr(dcp.FileSystemReader, "read_data", read_data)
    values = source.read(wanted)
    assert read == list(wanted) and values["blocks.1.norm.bias"].dtype == torch.float32
    torch.testing.assert_close(values["blocks.1.norm.bias"], detached(module)[read[0]].float())
    assert source.read({}) == {} and read == list(wanted)


@pytest.mark.parametrize("write", [write_params, write_distributed])
def test_tensors_of_other_shapes_are_refused_by_name(
    write: Callable[[nn.Module, Path], Path], tmp_path: Path
) -> None:
    module = language_model()
    module.blocks[1].qkv = nn.Linear(8, 3).double()
    pipe = language_pipe(without_weights())
    with pytest.raises(
        fpipe.BatchError,
        match=r"the checkpoint's 'blocks.1.qkv.bias' has shape \(3,\), but the .* has \(24,\)",
    ):
        pipe.load(write(module, tmp_path))


def test_missing_and_further_tensors_are_refused_by_name(tmp_path: Path) -> None:
    module, path = language_model(), tmp_path / "one.safetensors"
    pipe, saved = language_pipe(without_weights()), detached(language_model())
    table = saved.pop("embedding.weight")
    save_file(saved | {"mask": module.mask}, path)
    with pytest.raises(fpipe.BatchError, match=r"the checkpoint lacks 'embedding.weight': .*renam"):
        pipe.load(path)
    save_file(saved | {name: table.clone() for name in ("embed", "b", "c", "d")}, path)
    with pytest.raises(
        fpipe.BatchError, match=r"lacks 'embedding.weight'; it has 'b', 'c', 'd' an"
    ):
        pipe.load(path)
    rename = {"embedding.weight": "embed"}
    with pytest.raises(
        fpipe.BatchError, match=r"has 'b', 'c', 'd', which are no par.*strict=False"
    ):
        pipe.load(path, rename=lambda name: rename.get(name, name))
    loaded = pipe.load(path, rename=lambda name: rename.get(name, name), strict=False)
    assert torch.equal(loaded["embedding.weight"], table)


def test_buffers_in_a_checkpoint_of_parameters_are_passed_over(tmp_path: Path) -> None:
    """state_dict has the buffers of a submodule with two names under both."""
    shared = nn.BatchNorm1d(4)
    module = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared).eval()
    pipe = module_pipe(module, [], schedule=ONE)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    assert pipe.load(tmp_path).keys() == dict(module.named_parameters()).keys()


def test_paths_without_a_checkpoint_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = language_pipe(language_model())
    with pytest.raises(fpipe.BatchError, match=r"holds neither: give a file of safetensors"):
        pipe.load(tmp_path)
    with pytest.raises(fpipe.BatchError, match=r"nowhere holds nothing: give"):
        pipe.load(tmp_path / "nowhere")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]", "utf-8")
    with pytest.raises(fpipe.BatchError, match=r"index.json has no weight_map"):
        pipe.load(tmp_path)
    (tmp_path / "other.safetensors.index.json").write_text("[]", "utf-8")
    with pytest.raises(fpipe.BatchError, match=r"holds 2 indices"):
        pipe.load(tmp_path)
    path = write_params(language_model(), tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(fpipe.BatchError, match=r"takes the package safetensors: pip install"):
        pipe.load(path)


def test_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    pipe, path = language_pipe(language_model()), write_indexed(language_model(), tmp_path)
    index = path / "model.safetensors.index.json"
    stored = json.loads(index.read_text("utf-8"))["weight_map"]
    for content, rule in (
        ("{", r"index\.json is no JSON: Expecting"),
        (
            {**stored, "embedding.weight": "gone.safetensors"},
            r"gone\.safetensors cannot be read",
        ),
        ("[" * 100_000, r"index\.json is no JSON: maximum recursion"),
        ({**stored, "embedding.weight": 1}, r"index\.json has no weight_map of names to files"),
        (dict.fromkeys(stored, "1.safetensors"), r"1\.safetensors lacks .*, which its index says"),
    ):
        text = content if isinstance(content, str) else json.dumps({"weight_map": content})
        index.write_text(text, "utf-8")
        with pytest.raises(fpipe.BatchError, match=rule):
            pipe.load(path)
    (path / "0.safetensors").write_bytes(b"none")
    with pytest.raises(fpipe.BatchError, match=r"0\.safetensors cannot be read: Error while des"):
        pipe.load(path / "0.safetensors")
    torch.save({}, path / "model.pt")
    with pytest.raises(fpipe.BatchError, match=r"model\.pt has another suffix than \.safetensors"):
        pipe.load(path / "model.pt")


def test_index_that_is_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").mkdir()
    with pytest.raises(fpipe.BatchError, match=r"index\.json cannot be read: Is a directory"):
        language_pipe(language_model()).load(tmp_path)


@pytest.mark.parametrize("head", [b"", b"garbage", pickle.dumps({"a": 1})])
def test_broken_head_of_a_distributed_checkpoint_is_refused(head: bytes, tmp_path: Path) -> None:
    """An interrupted save leaves such a file; loading once raised the error of unpickling."""
    (tmp_path / ".metadata").write_bytes(head)
    with pytest.raises(fpipe.BatchError, match=r"\.metadata cannot be read \(\w+: .*must be that"):
        language_pipe(language_model()).load(tmp_path)


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """Loading once took the tensor of the last file."""
    write_listed(language_model(), tmp_path)
    save_file({"embedding.weight": torch.ones(3)}, tmp_path / "optimizer.safetensors")
    with pytest.raises(fpipe.BatchError, match=r"'embedding.weight' is in two files, .*optimi"):
        language_pipe(language_model()).load(tmp_path)


@pytest.mark.parametrize("write", [write_params, write_distributed])
def test_numbers_that_would_lose_a_part_are_refused(
    write: Callable[[nn.Module, Path], Path], tmp_path: Path
) -> None:
    """Loading once took the real part of complex numbers."""
    module = language_model()
    norm: Any = module.blocks[1].norm
    norm.bias = nn.Parameter(norm.bias.detach().to(torch.complex64))
    with pytest.raises(fpipe.BatchError, match=r"norm.bias' has dtype torch.complex64, but the"):
        language_pipe(without_weights()).load(write(module, tmp_path))


@pytest.mark.parametrize(
    ("stored", "wanted", "fits"),
    [
        (torch.int64, torch.int32, False),
        (torch.uint8, torch.int8, False),
        (torch.int8, torch.uint8, False),
        (torch.int16, torch.int64, True),
        (torch.uint8, torch.int16, True),
        (torch.bool, torch.uint8, True),
        (torch.int64, torch.float32, True),
    ],
)
def test_integers_that_may_not_fit_are_refused(
    stored: torch.dtype, wanted: torch.dtype, fits: bool, tmp_path: Path
) -> None:
    """Loading once wrapped integers around."""

    def stage(params: Tensor, x: Tensor) -> Tensor:
        return x * params

    schedule = fpipe.schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline([stage], lambda y, _: y.sum(), schedule, compile=False)
    save_file({"0": torch.ones(2, dtype=stored)}, tmp_path / "one.safetensors")
    shapes = [torch.empty(2, dtype=wanted, device="meta")]
    if fits:
        assert torch.equal(pipe.load(tmp_path, shapes=shapes)[0], torch.ones(2, dtype=wanted))
    else:
        with pytest.raises(fpipe.BatchError, match=rf"has dtype {stored}, but the model's has"):
            pipe.load(tmp_path, shapes=shapes)


def test_tied_parameter_that_the_checkpoint_has_untied_is_refused(tmp_path: Path) -> None:
    """Loading once took the first name without a word, and so changed the model."""
    module: Any = build("gpt2", 2)
    saved = detached(module)
    table = saved["transformer.wte.weight"]
    path = tmp_path / "model.safetensors"
    pipe = module_pipe(module, "transformer.h.0", loss=None)
    save_file(saved | {"lm_head.weight": table.clone()}, path)
    assert torch.equal(pipe.load(path)["transformer.wte.weight"], table)
    broken = table.clone()
    broken[0] = torch.nan  # no number equals itself, and the file is to be looked into
    save_file(
        saved
        | dict.fromkeys(["transformer.wte.weight"], broken)
        | {"lm_head.weight": broken.clone()},
        path,
    )
    torch.testing.assert_close(pipe.load(path)["transformer.wte.weight"], broken, equal_nan=True)
    save_file(saved | {"lm_head.weight": table + 1}, path)
    with pytest.raises(fpipe.BatchError, match=r"'transformer.wte.weight' and 'lm_head.wei"):
        pipe.load(path)
    assert torch.equal(pipe.load(path, strict=False)["transformer.wte.weight"], table)


def test_stages_of_functions_load_by_the_paths_of_their_leaves(tmp_path: Path) -> None:
    def stage(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return x @ params["w"]

    pipe = fpipe.pipeline([stage, stage], lambda y, _: y.sum(), SCHEDULE, compile=False)
    saved = {"0.w": torch.randn(3, 3), "1.w": torch.randn(3, 3)}
    save_file(saved, tmp_path / "one.safetensors")
    shapes = [{"w": torch.empty(3, 3, device="meta")} for _ in range(2)]
    params = pipe.load(tmp_path, shapes=shapes)
    assert torch.equal(params[0]["w"], saved["0.w"]) and torch.equal(params[1]["w"], saved["1.w"])


class Adapted(nn.Linear):
    """A layer with an adapter of rank 2."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.down = nn.Parameter(torch.empty(2, width))
        self.up = nn.Parameter(torch.zeros(width, 2))

    def forward(self, input: Tensor) -> Tensor:
        """The layer and its adapter."""
        return super().forward(input) + input @ self.down.T @ self.up.T


def init_adapter(key: Tensor, name: str, like: Tensor) -> Tensor:
    if name.endswith("up"):
        return torch.zeros(like.shape, dtype=like.dtype)
    assert name.endswith("down"), name
    return fpipe.random.normal(key, like.shape, like.dtype)


def init_normal(key: Tensor, _: str, like: Tensor) -> Tensor:
    return fpipe.random.normal(key, like.shape, like.dtype)


def test_init_fn_makes_what_a_checkpoint_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that was trained without adapters, and adapters without the model."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    save_file(detached(base), tmp_path / "base.safetensors")
    with torch.device("meta"):
        module = nn.Sequential(Adapted(4), Adapted(4))
    pipe = module_pipe(module, "0", schedule=SCHEDULE)
    with pytest.raises(fpipe.BatchError, match=r"lacks '0.down', .*such as adapters, init_fn="):
        pipe.load(tmp_path / "base.safetensors")
    with caplog.at_level("INFO", "fpipe"):
        params = pipe.load(tmp_path / "base.safetensors", init_fn=init_adapter)
    assert "the checkpoint lacks '0.down', '0.up', '1.down'" in caplog.text
    other = pipe.load(tmp_path / "base.safetensors", init_fn=init_adapter, key=fpipe.random.key(1))
    drawn = pipe.init(init_normal, fpipe.random.key(0))
    for name, value in base.named_parameters():
        assert torch.equal(params[name], value) and torch.equal(other[name], value)
    assert torch.equal(params["0.down"], drawn["0.down"])
    assert not torch.equal(params["0.down"], other["0.down"]) and not params["1.up"].any()
    trained = {name: 2 * value for name, value in other.items() if "down" in name or "up" in name}
    save_file(trained, tmp_path / "adapters.safetensors")
    again = pipe.load(tmp_path / "adapters.safetensors", init_fn=lambda _, name, __: params[name])
    assert all(torch.equal(again[name], {**params, **trained}[name]) for name in params)
    with pytest.raises(fpipe.BatchError, match=r"lacks '0.bias', '0.down'.*rename="):
        pipe.load(
            tmp_path / "base.safetensors",
            init_fn=init_adapter,
            rename=lambda name: f"none.{name}",
            strict=False,
        )
