"""Outputs of a graph that are laid out as they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fpipe import StageError
from fpipe.graph.nodes import Layout, lay_out, layouts_of, unlike

X = torch.arange(24.0).view(2, 3, 4)


def graph_of(function: Any) -> fx.Graph:
    return make_fx(function, tracing_mode="fake")(X).graph


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (0, 2, 1)])
def test_outputs_lie_as_they_should(order: Any) -> None:
    graph = graph_of(lambda x: (x.sin(), x.transpose(0, 1).exp()))
    strides = torch.empty_permuted((3, 2, 4), order).stride()
    lay_out(graph, {1: Layout((3, 2, 4), strides)})
    sine, power = fx.GraphModule(torch.nn.Module(), graph)(X)
    assert torch.equal(sine, X.sin()) and torch.equal(power, X.transpose(0, 1).exp())
    assert sine.is_contiguous() and power.stride() == strides


def test_outputs_that_lie_otherwise() -> None:
    found = layouts_of(graph_of(lambda x: (x.sin(), x.transpose(0, 1), x[:1].exp(), None)))
    assert found[3] is None
    assert unlike(found, found) == []
    other = [Layout((2, 3, 4), (12, 1, 3)), Layout((3, 2, 4), (8, 4, 1)), None, None]
    assert unlike(other, found) == [0, 1]
    # A stride along a single element tells nothing, nor does any of what is empty.
    assert unlike([None, None, Layout((1, 3, 4), (99, 4, 1)), None], found) == []
    assert unlike([Layout((0, 3), (3, 1))], [Layout((0, 3), (1, 1))]) == []


@pytest.mark.parametrize("strides", [(0, 4, 1), (24, 4, 1)], ids=["folded", "gaps"])
def test_layouts_that_no_copy_has(strides: Any) -> None:
    graph = graph_of(lambda x: (x.sin(),))
    with pytest.raises(StageError, match=r"which the compiler does not keep: take x.contiguous"):
        lay_out(graph, {0: Layout((2, 3, 4), strides)})
