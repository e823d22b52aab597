"""Small things done to graphs: simplification, sums, fingerprints, remat policies."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fpipe
from fpipe import StageError, schedules
from fpipe.functional.dual import load_rules
from fpipe.graph.joint import Param, add_sums
from fpipe.graph.nodes import fingerprint, lies_in_order, places_of
from fpipe.graph.rewrites import simplify
from fpipe.pieces.partition import policies, save_all, save_nothing
from tests.models import rand


def traced(function: Callable[..., Any], *arguments: Tensor) -> fx.Graph:
    return make_fx(function, tracing_mode="fake")(*arguments).graph


def targets(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def run(graph: fx.Graph, *arguments: Tensor) -> Any:
    return fx.GraphModule(torch.nn.Module(), graph)(*arguments)


# ── record ──────────────────────────────────────────────────────────────────────────────────────


def test_a_recording_is_no_module_that_torch_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compiles the text of a graph when it makes a module of it, and keeps it for good."""
    written: list[str] = []
    monkeypatch.setattr(fx.graph_module, "_exec_with_source", lambda src, *_: written.append(src))
    schedule = schedules.gpipe(ranks=2, microbatches=1)
    stages = fpipe.pipeline([lambda p, x: x * p] * 2, lambda y, _: y.sum(), schedule, compile=False)
    assert stages.step([rand(2), rand(2)], rand(3, 2)).loss.isfinite()
    whole = fpipe.pipeline(
        lambda p, x: (fpipe.cut(x * p) * p).sum(), schedule=schedule, compile=False
    )
    assert whole.step(rand(2), rand(3, 2)).loss.isfinite()
    assert not written


def test_what_forward_mode_asks_is_answered_without_a_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: set[Any] = set()
    dispatch = FakeTensorMode.dispatch

    def note(mode: FakeTensorMode, func: Any, *rest: Any, **options: Any) -> Any:
        asked.add(func)
        return dispatch(mode, func, *rest, **options)

    monkeypatch.setattr(FakeTensorMode, "dispatch", note)
    load_rules()
    schedule = schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline([lambda p, x: p.sin() * x], lambda y, _: y.sum(), schedule, compile=False)
    p, x, vector = rand(2), torch.ones(3, 2).double(), rand(1, 2)[0]
    found = fpipe.hvp(pipe).step([p], x, [vector]).hvp[0]
    torch.testing.assert_close(found, -3 * p.sin() * vector)
    aten = torch.ops.aten
    assert aten.sin.default in asked
    assert asked.isdisjoint(
        {aten.is_same_size.default, aten._has_same_storage_numel.default, aten.alias.default}
    )


# ── simplify ────────────────────────────────────────────────────────────────────────────────────


def test_ops_that_compute_nothing_go() -> None:
    graph = traced(lambda x: ([x.detach().t().t() * 2], []), rand(2, 3))
    simplify(graph, [])
    assert targets(graph) == ["aten.mul.Tensor"]


@pytest.mark.parametrize(
    "value",
    [
        rand(2, 3, 4),
        rand(4, 3, 2).permute(2, 0, 1),
        rand(2, 3, 4)[:, :, :2],
        rand(2, 1, 4)[:1],
        rand(2, 0, 3),
        rand(2, 1, 3).expand(2, 4, 3),
    ],
    ids=["usual", "permuted", "part", "ones", "empty", "expanded"],
)
def test_order_in_memory_is_that_of_a_contiguous_permutation(value: Tensor) -> None:
    for order in permutations(range(3)):
        assert lies_in_order(value, order) == value.permute(order).is_contiguous()


def simplified_gradients(function: Callable[..., Any], *arguments: Tensor) -> list[Tensor]:
    graph = traced(lambda *a: ([], function(*a)), *arguments)
    simplify(graph, list(run(graph, *arguments)[1]))
    graph.lint()
    gradients: list[Tensor] = run(graph, *arguments)[1]
    return gradients


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x],
        lambda x: [x.view(-1)],
        lambda x: [x * 2] * 2,
        lambda x: (lambda y: [y, y.t(), y[0]])(x * 2),
        lambda x: list((x * 2).split(1)),
        lambda x: [x.sum(0).expand(5, 3)],
    ],
)
def test_parameter_gradients_own_their_memory(function: Callable[..., Any]) -> None:
    x = rand(2, 3)
    gradients = simplified_gradients(function, x)
    storages = [gradient.untyped_storage() for gradient in gradients]
    assert len({s.data_ptr() for s in (*storages, x.untyped_storage())}) == len(storages) + 1
    assert all(s.nbytes() == g.nbytes for s, g in zip(storages, gradients, strict=True))
    for ours, theirs in zip(gradients, function(x), strict=True):
        assert ours.equal(theirs)


def test_views_that_look_the_same_go() -> None:
    graph = traced(lambda x: ([x.view(2, 3).expand(2, 3).reshape(2, 3) * 2], []), rand(2, 3))
    simplify(graph, [])
    assert targets(graph) == ["aten.mul.Tensor"]


def test_views_of_other_strides_stay() -> None:
    """Along a dimension of one element strides do not matter, but they are those of the trace."""
    graph = traced(lambda x: ([x.t().view(1, 3) * 2], []), rand(3, 1))
    simplify(graph, [])
    x = rand(3, 1)
    assert torch.equal(run(graph, x)[0][0], x.t() * 2)


def gradient_of_mapped_linear(weight: Tensor, x: Tensor, cotangent: Tensor) -> Tensor:
    """As `torch.func.vmap` maps it, over members of an ensemble."""
    pullback: Any = torch.func.vjp(lambda w: torch.bmm(x, w.transpose(1, 2)), weight)[1]
    gradient: Tensor = pullback(cotangent)[0]
    return gradient


def test_the_gradient_of_mapped_linear_layers_is_a_product_without_a_copy() -> None:
    weight, x, cotangent = rand(3, 5, 4), rand(3, 2, 4), rand(3, 2, 5)
    graph = traced(lambda *a: ([], [gradient_of_mapped_linear(*a)]), weight, x, cotangent)
    simplify(graph, [weight])
    assert "aten.clone.default" not in targets(graph)
    graph.lint()
    [gradient] = run(graph, weight, x, cotangent)[1]
    assert gradient.is_contiguous()
    expected = gradient_of_mapped_linear(weight, x, cotangent)
    assert not expected.is_contiguous()
    torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=1e-14)


def test_a_product_that_something_else_reads_is_copied_where_it_is_transposed() -> None:
    left, right = rand(3, 4, 2), rand(3, 2, 5)

    def both(a: Tensor, b: Tensor) -> Any:
        product = torch.bmm(a, b)
        return [], [product.transpose(1, 2), product.sum()]

    graph = traced(both, left, right)
    simplify(graph, [rand(3, 5, 4), rand()])
    assert targets(graph).count("aten.bmm.default") == 1
    for found, expected in zip(run(graph, left, right)[1], both(left, right)[1], strict=True):
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected)


def test_input_gradients_are_contiguous() -> None:
    x = rand(2, 3)
    graph = traced(lambda x: ([], [(x * 2).t(), x]), x)
    simplify(graph, [None, None])
    first, second = run(graph, x)[1]
    assert first.is_contiguous()
    assert second is x  # another stage reads it where it is


def test_convolution_backward_is_split_by_what_is_wanted() -> None:
    def backward(grad: Tensor, x: Tensor, w: Tensor) -> Any:
        found = torch.ops.aten.convolution_backward(
            grad, x, w, [2], [1], [0], [1], False, [0], 1, [True, True, True]
        )
        return [], list(found)

    x, w = rand(2, 2, 5), rand(2, 2, 3)
    arguments = (F.conv1d(x, w), x, w)
    graph = traced(backward, *arguments)
    expected = run(graph, *arguments)[1]
    simplify(graph, [None, w, w[:, 0, 0]])
    assert targets(graph).count("aten.convolution_backward.default") == 2
    for ours, theirs in zip(run(graph, *arguments)[1], expected, strict=True):
        torch.testing.assert_close(ours, theirs)


# ── sums ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_sums_start_and_go_on_in_their_dtype(dtype: torch.dtype | None) -> None:
    graph = traced(lambda x: ([], [x * 2]), torch.ones(2, dtype=torch.bfloat16))
    gradient: Any = graph.output_node().args[0]
    entry = add_sums(graph, {Param(0): gradient[1][0]}, dtype)[Param(0)]
    nodes = {node.name: node for node in graph.nodes}
    values = [nodes[name].meta["val"].dtype for name in (entry.start, entry.so_far, entry.total)]
    assert set(values) == {dtype or torch.bfloat16}
    casts = "aten._to_copy.default" in targets(graph)
    assert casts == (dtype == torch.float32)


# ── fingerprint ─────────────────────────────────────────────────────────────────────────────────

X = rand(2, 3)


def base(x: Tensor) -> Tensor:
    return torch.tanh(x * 2.0).sum(1)


def renamed(anything: Tensor) -> Tensor:
    temporary = anything * 2.0
    return temporary.tanh().sum(1)


def test_names_do_not_count() -> None:
    assert fingerprint(traced(base, X)) == fingerprint(traced(renamed, X))


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: torch.tanh(x * 3.0).sum(1), X),
        (lambda x: torch.tanh(x * 2).sum(1), X),
        (lambda x: torch.tanh(x * 2.0).sum(0), X),
        (lambda x: torch.sinh(x * 2.0).sum(1), X),
        (lambda x: torch.tanh(2.0 * x).sum(1, keepdim=True), X),
        (lambda x: (torch.tanh(x * 2.0).sum(1), x), X),
        (base, X[:1]),
        (base, X.t().contiguous().t()),
        (base, X.float()),
    ],
)
def test_what_is_computed_and_on_what_counts(function: Callable[..., Any], x: Tensor) -> None:
    assert fingerprint(traced(function, x)) != fingerprint(traced(base, X))


def test_which_value_is_read_counts() -> None:
    def one(x: Tensor) -> Tensor:
        return (x + 1) * (x + 2)

    def other(x: Tensor) -> Tensor:
        a, _ = x + 1, x + 2
        return a * a

    assert fingerprint(traced(one, X)) != fingerprint(traced(other, X))


def test_numbers_of_devices_do_not_count() -> None:
    """Ranks with a device each make the same graphs; what mixes devices is another one."""

    def on(*devices: str) -> fx.Graph:
        with FakeTensorMode():
            x = torch.empty(3, device=devices[0])
        places = devices[-1]
        return traced(lambda x: (x + 1, torch.ones(3, device=places)), x)

    assert fingerprint(on("cuda:0")) == fingerprint(on("cuda:1"))
    assert places_of(on("cuda:0", "cpu")) == (torch.device("cuda", 0), torch.device("cpu"))
    different = [on("cuda:0"), on("cpu"), on("cuda:0", "cuda:1"), on("cuda:0", "cpu")]
    assert len({fingerprint(graph) for graph in different}) == len(different)


def test_names_of_process_groups_do_not_count() -> None:
    """Each row of a mesh sums over a group of its own; code that sums over another is another."""

    def over(*names: str) -> fx.Graph:
        reduce = torch.ops._c10d_functional.all_reduce
        with FakeTensorMode():
            x = torch.empty(3)
        return traced(lambda x: [reduce(x, "sum", name) for name in names], x)

    assert fingerprint(over("3")) == fingerprint(over("5"))
    assert places_of(over("3", "5")) == (torch.device("cpu"), "3", "5")
    different = [over("3"), over("3", "3"), over("3", "5")]
    assert len({fingerprint(graph) for graph in different}) == len(different)


def test_strings_are_told_from_nodes() -> None:
    assert fingerprint(traced(lambda x: F.gelu(x, approximate="none"), X)) != fingerprint(
        traced(lambda x: F.gelu(x, approximate="tanh"), X)
    )


# ── remat ───────────────────────────────────────────────────────────────────────────────────────


def test_policies_by_name() -> None:
    assert policies("none", 1) == ((save_all,), (save_all,))
    assert policies("full", 2) == ((save_nothing,) * 2, (save_nothing,) * 2)
    assert policies("except_last", 1) == ((save_nothing,), (save_all,))
    each = policies(["none", "except_last"], 2)
    assert each == ((save_all, save_nothing), (save_all, save_all))


def test_policy_of_a_users_own() -> None:
    def own(node: fx.Node) -> bool:
        return True

    assert policies(own, 1) == ((own,), (own,))
    assert policies((own, "full"), 2) == ((own, save_nothing),) * 2


def test_unknown_policy() -> None:
    with pytest.raises(StageError, match="remat='all' must be one of 'none', 'full'"):
        policies("all", 1)
    with pytest.raises(StageError, match=r"remat\[1\]=None must be one of 'none', 'full'"):
        policies(["none", None], 2)  # type: ignore[list-item]
    with pytest.raises(StageError, match="remat has 2 entries, but the schedule has 3 stages"):
        policies(["none", "full"], 3)
