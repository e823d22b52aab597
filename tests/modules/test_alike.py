"""Layers of one kind are traced once, and still get gradients of their own."""

from __future__ import annotations

import torch

from fpipe.divide.function_tracer import FunctionTracer
from fpipe.graph.joint import Param
from fpipe.inputs.signature import TreeShape
from fpipe.modules.module_loss import ModuleLoss
from fpipe.pytree import flatten
from fpipe.spec.objective import Objective
from tests.modules.helpers import detached
from tests.modules.models import CUTS, language_model, token_batch


def test_middle_blocks_share_a_trace_under_their_own_names() -> None:
    module = language_model()
    params, spec = flatten(detached(module))
    batch, batch_spec = flatten(token_batch(2))
    tracer = FunctionTracer(ModuleLoss(module, CUTS, None), 4, Objective())
    shape = TreeShape.of(spec, params)
    chain = tracer([shape] * 4, TreeShape.of(batch_spec, batch), "step", 2)
    first, second, third, last = (stage.joint for stage in chain.stages)
    assert second.graph is third.graph
    assert first.graph is not second.graph and last.graph is not second.graph
    names = sorted(detached(module))
    for joint, number in ((second, 1), (third, 2)):
        read = {names[s.leaf] for s in joint.sums if isinstance(s, Param)}
        assert read == {name for name in names if name.startswith(f"blocks.{number}.")}
        assert joint.gradients.keys() > joint.sums.keys()


def test_constants_of_different_values_are_no_constants_of_one_name() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    from fpipe.divide.function_recorder import merge_constants

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor(1.0) + torch.tensor(2.0) + torch.tensor(1.0)

    graph = make_fx(function, tracing_mode="fake")(torch.zeros(2))
    merge_constants(graph)
    graph.recompile()
    targets = [node.target for node in graph.graph.find_nodes(op="get_attr")]
    assert len(targets) == 3 and len(set(targets)) == 2
    assert graph(torch.zeros(2)).tolist() == [4.0, 4.0]
