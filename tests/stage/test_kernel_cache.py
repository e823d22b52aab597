"""What Inductor wrote for a graph is there for the next process, for that graph alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache, output_code_log
from torch.fx.experimental.proxy_tensor import make_fx

from fpipe.pieces import inductor, kernel_cache
from fpipe.pieces.inductor import by_inductor


def graph_of(function: Callable[..., Any], *arguments: Tensor) -> fx.GraphModule:
    return make_fx(lambda *values: [function(*values)], tracing_mode="fake")(*arguments)


def compiled(module: fx.GraphModule) -> Callable[[list[Tensor]], Any]:
    examples = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    return by_inductor(module, examples, {}, True)


def layer(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh() * 2


ROWS = torch.ones(4, 8), torch.ones(8, 8)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where things are kept in a test."""
    monkeypatch.setattr(kernel_cache, "_path", lambda key: tmp_path / f"{key}.py")
    yield tmp_path


@pytest.mark.inductor
def test_the_next_process_takes_what_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    values = [torch.randn(4, 8), torch.randn(8, 8)]
    (first,) = compiled(graph_of(layer, *ROWS))(list(values))
    (path,) = folder.iterdir()
    # It takes its products from torch, and imports none of Inductor's generators.
    text = path.read_text()
    assert "import torch as extern_kernels" in text and "select_algorithm" not in text
    caplog.set_level(logging.DEBUG, output_code_log.name)
    monkeypatch.setattr(output_code_log, "propagate", True)
    with monkeypatch.context() as patch:
        patch.delattr(inductor, "_by_inductor")
        (again,) = compiled(graph_of(layer, *ROWS))(list(values))
    assert text in caplog.text and str(path) in caplog.text
    assert torch.equal(first, again)
    torch.testing.assert_close(again, layer(*values))
    # What is broken is made again, in a process that has not loaded it before.
    path.write_text(text[:500])
    del PyCodeCache.modules_no_attr[str(path)]
    (anew,) = compiled(graph_of(layer, *ROWS))(list(values))
    assert torch.equal(first, anew) and path.read_text() == text


@pytest.mark.inductor
def test_a_folder_that_cannot_be_written_to_keeps_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    monkeypatch.setattr(kernel_cache, "_path", lambda key: folder / "file" / key)
    values = [torch.randn(4, 8), torch.randn(8, 8)]
    (result,) = compiled(graph_of(layer, *ROWS))(list(values))
    torch.testing.assert_close(result, layer(*values))


@pytest.mark.inductor
def test_what_needs_all_of_inductor_keeps_its_imports(folder: Path) -> None:
    source = "".join((kernel_cache._EXTERN, kernel_cache._ALIGN, "extern_kernels.{0}(x)\n"))
    assert "import torch as extern" in kernel_cache._light(source.format("mm"))
    for text in (
        source.format("bias_addmm"),
        source.format("mm") + "inductor_ops.resize(x)",
        source.format("mm") + "torch.ops.prims.inductor_seeds(x)",
        source.format("mm") + "align(x)",
    ):
        assert kernel_cache._light(text) == text


def test_a_key_is_that_of_a_graph_and_of_all_that_its_kernels_depend_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def key(function: Callable[..., Any] = layer, *arguments: Tensor) -> str | None:
        return kernel_cache.key_of(graph_of(function, *(arguments or ROWS)).graph)

    usual = key()
    assert usual is not None and key() == usual
    others = [
        key(lambda x, w: (x @ w).tanh() * 2.5),
        key(layer, torch.ones(5, 8), ROWS[1]),
        key(layer, torch.ones(8, 4).t(), ROWS[1]),
        key(layer, *(value.double() for value in ROWS)),
        key(lambda x, w: layer(x, w).t()),
    ]
    with config.patch(size_asserts=not config.size_asserts):
        others.append(key())
    with config.patch({"cpp.simdlen": 128}):
        others.append(key())
    tagged: Any = torch.compiler.config
    with tagged.patch(cache_key_tag="another"):
        others.append(key())
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", not torch.backends.mkldnn.enabled)
        others.append(key())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        others.append(key())
    with monkeypatch.context() as patch:
        patch.setattr(kernel_cache, "_versions", lambda: "another")
        others.append(key())
    with monkeypatch.context() as patch:
        patch.setattr(kernel_cache, "kernels", lambda: "deterministic")
        others.append(key())
    assert None not in others and len({usual, *others}) == len(others) + 1


def test_nothing_is_kept_where_it_would_not_be_the_same_again() -> None:
    @torch.library.custom_op("fpipe_kept::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    double.register_fake(torch.empty_like)
    graph = graph_of(layer, *ROWS).graph
    assert kernel_cache.key_of(graph_of(double, ROWS[0]).graph) is None
    with config.patch(force_disable_caches=True):
        assert kernel_cache.key_of(graph) is None
    with config.patch(fx_graph_cache=False):
        assert kernel_cache.key_of(graph) is None
    on_meta = graph_of(layer, *(value.to("meta") for value in ROWS)).graph
    assert kernel_cache.key_of(on_meta) is None
