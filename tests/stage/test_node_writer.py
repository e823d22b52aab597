"""A graph that the writer of nodes records is the one that torch's `make_fx` records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, make_fx

from fpipe.graph.node_writer import NodeWriter, write_graph
from fpipe.torch_internals import get_proxy_mode, make_shape_env, row_of_any_size

aten = torch.ops.aten
CLOSED_OVER = torch.arange(4.0)


def several_results(x: Tensor, w: Tensor) -> list[Any]:
    values, indices = aten.topk.default(x, 2)
    first, second = aten.split.Tensor(x, 2, 1)
    return [[values, indices], [first, second]]


def results_that_are_none(x: Tensor, w: Tensor) -> list[Any]:
    _, mean, rstd = aten.native_layer_norm.default(x, [4], None, None, 1e-5)
    mask = [True, False, False]
    backward = aten.native_layer_norm_backward.default(x, x, [4], mean, rstd, None, None, mask)
    return [[backward[0]]]


def results_that_are_numbers(x: Tensor, w: Tensor) -> list[Any]:
    q = x.reshape(1, 1, 4, 4)
    return [[torch.nn.functional.scaled_dot_product_attention(q, q, q)]]


def options(x: Tensor, w: Tensor) -> list[Any]:
    zeros = aten.zeros_like.default(x, memory_format=torch.preserve_format)
    return [[aten.add.Tensor(x, w, alpha=0.5), zeros, aten.to.dtype(x, torch.float64)]]


def lists_of_tensors(x: Tensor, w: Tensor) -> list[Any]:
    rows = aten.arange.default(2, dtype=torch.int64)
    return [[aten.cat.default([x, w, x], 1), aten.index.Tensor(x, [rows, None]), x[:, [0, 2]]]]


def literals(x: Tensor, w: Tensor) -> list[Any]:
    scale = torch.tensor(2.0)
    return [[x * scale, x * scale.item()]]


def values_that_it_closes_over(x: Tensor, w: Tensor) -> list[Any]:
    return [[x + CLOSED_OVER, CLOSED_OVER]]


def what_is_decomposed(x: Tensor, w: Tensor) -> list[Any]:
    return [[aten.linear.default(x, w), aten.mse_loss.default(x, w), aten.conj.default(x)]]


def arguments_that_it_returns(x: Tensor, w: Tensor) -> list[Any]:
    return [[w], [x, w]]


def devices(x: Tensor, w: Tensor) -> list[Any]:
    return [[aten.ones.default([2], device=x.device), x.to(w.device)]]


FUNCTIONS = [
    several_results,
    results_that_are_none,
    results_that_are_numbers,
    options,
    lists_of_tensors,
    literals,
    values_that_it_closes_over,
    what_is_decomposed,
    arguments_that_it_returns,
    devices,
]


def described(graph: fx.Graph) -> list[Any]:
    """The nodes with their arguments and values; a number for each node."""
    number = {node: f"%{place}" for place, node in enumerate(graph.nodes)}

    def told(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, tuple(map(str, value.shape)), tuple(map(str, value.stride()))
        return tuple(map(told, value)) if isinstance(value, list | tuple) else str(value)

    return [
        (
            node.op,
            str(node.target),
            str(fx.map_arg((node.args, node.kwargs), number.__getitem__)),
            told(node.meta.get("val")),
        )
        for node in graph.nodes
    ]


def fakes(mode: FakeTensorMode) -> tuple[Tensor, Tensor]:
    return mode.from_tensor(torch.ones(4, 4)), mode.from_tensor(torch.ones(4, 4).t())


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_nodes_are_those_of_make_fx(function: Callable[..., Any]) -> None:
    def called(*values: Tensor) -> Any:
        return tuple(function(*values))

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        expected = make_fx(called)(*fakes(mode))
        written = write_graph(called, fakes(mode))
    assert described(written.graph) == described(expected.graph)
    written.graph.lint()


def test_symbolic_sizes_are_those_of_make_fx() -> None:
    def grown(row: Tensor) -> tuple[list[Tensor]]:
        return ([torch.cat([row, row]), aten.ones.default([row.shape[0] * 2])],)

    mode = FakeTensorMode(shape_env=make_shape_env())
    row = row_of_any_size(mode, torch.ones(8))
    with mode:
        expected = make_fx(lambda *values: grown(*values))(row)
        written = write_graph(grown, [row])
    assert described(written.graph)[-1] == described(expected.graph)[-1]
    assert [node.target for node in written.graph.nodes] == [
        node.target for node in expected.graph.nodes
    ]


def test_most_operations_go_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Any] = []
    original = ProxyTorchDispatchMode.__torch_dispatch__

    def noted(mode: Any, func: Any, *call: Any) -> Any:
        left.append(func)
        return original(mode, func, *call)

    def block(x: Tensor, w: Tensor) -> list[list[Tensor]]:
        assert isinstance(get_proxy_mode(), NodeWriter)
        hidden = aten.gelu.default(aten.mm.default(x, w))
        return [[aten.native_layer_norm.default(hidden, [4], None, None, 1e-5)[0]]]

    monkeypatch.setattr(ProxyTorchDispatchMode, "__torch_dispatch__", noted)
    with FakeTensorMode() as mode:
        write_graph(block, fakes(mode))
        assert left == []
        write_graph(literals, fakes(mode))
    assert aten.lift_fresh.default in left


def test_what_an_interpreter_of_a_graph_returns_is_written() -> None:
    """It is a list of a class of fx's own, whose tensors were kept as constants."""
    with FakeTensorMode() as mode:
        graph = write_graph(lambda x: [x.sin(), x], [mode.from_tensor(torch.ones(3))])
        again = write_graph(fx.Interpreter(graph).run, [mode.from_tensor(torch.ones(3))])
    assert described(again.graph) == described(graph.graph)
