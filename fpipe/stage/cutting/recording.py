"""Record a whole loss function as one graph, and divide it at its cuts.

    loss_fn(params, batch) ── make_fx ──► forward graph ── cuts ──► segments

It is recorded once, forward only. What has no gradient is recorded so, and so are the ops that keep
something for a backward, for each segment is differentiated by itself later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from inspect import isfunction
from typing import Any, NamedTuple

import optree
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize, vjp
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fpipe import tree
from fpipe.arguments.shapes import Goal, is_differentiable
from fpipe.draws import OpenAttention
from fpipe.errors import FpipeError, StageError, label_of
from fpipe.stage.cutting.alike import merge_constants
from fpipe.stage.cutting.cut import noting
from fpipe.stage.cutting.keyed import draw_from_keys
from fpipe.stage.cutting.segments import Segment, mark, segments
from fpipe.stage.cutting.updates import keep_changed
from fpipe.stage.declared.objective import Objective
from fpipe.stage.declared.returns import Numbering, Returns, check_state
from fpipe.stage.foreign.custom import Calls
from fpipe.stage.foreign.scripted import as_written
from fpipe.stage.graphs.rewrites import (
    free_views_of_layout,
    make_draws_differentiable,
    return_statistics,
)
from fpipe.stage.graphs.sources import BatchLeaf, Key, Param, Source, StateLeaf, Upstream
from fpipe.stage.graphs.strided import number_elements
from fpipe.stage.graphs.writes import make_writes_differentiable
from fpipe.stage.refusing.drawing import undrawn
from fpipe.stage.refusing.explain import ImpureError, Untraceable, describe, explain
from fpipe.stage.refusing.factors import OneDtype
from fpipe.stage.refusing.purity import WriteGuard
from fpipe.stage.refusing.seeding import unseeded
from fpipe.stage.tracing.abstract import Abstract, abstract_key
from fpipe.stage.tracing.apart import apart
from fpipe.stage.tracing.functional import marked
from fpipe.stage.tracing.known import Known
from fpipe.stage.tracing.nograd import keeping_detached, undifferentiated, with_gradients
from fpipe.stage.tracing.setting import tracing
from fpipe.stage.tracing.unseen import UnseenWrites


class Recorded(NamedTuple):
    """A function, divided.

    Attributes:
        parts: what is between the cuts.
        results: where each value that the caller gets of a microbatch comes from; then the new
            values of the leaves of the state that change.
        numbering: how the former are numbered.
        changed: the leaves of the state that change, by their numbers after the parameters.
    """

    parts: tuple[Segment, ...]
    results: tuple[Upstream, ...]
    numbering: Numbering
    changed: list[int]


@dataclass(frozen=True)
class Recorder:
    """Records a loss function for one shape of its arguments.

    Parameters and state come as one tree, the pair of both where there is a state.

    Attributes:
        loss_fn: ``(params, batch) -> scalar``, with a `fpipe.cut` between stages; with a state
            ``(params, state, batch) -> (scalar, state)``.
        num_stages: one more than the cuts that it must execute.
        objective: what it is differentiated for.
        has_key: it is called with the key of the microbatch, as the keyword argument ``key``.
        keyed: what it draws, it draws from the key of the microbatch, which it is not called with.
        mode: in which everything is fake.
    """

    loss_fn: Callable[..., Any]
    num_stages: int
    objective: Objective
    has_key: bool
    keyed: bool
    mode: FakeTensorMode

    @property
    def name(self) -> str:
        """The function in messages."""
        return label_of(self.loss_fn)

    @property
    def returns(self) -> Returns:
        """What the function returns."""
        return self.objective.returns

    def num_states(self, spec: optree.PyTreeSpec) -> int:
        """How many of the last leaves of what comes in as parameters are the state's."""
        return spec.children()[1].num_leaves if self.returns.state else 0

    def paths(self, params: Abstract) -> list[str]:
        """How a user would write each leaf of parameters and state."""
        if not self.returns.state:
            return ["params" + path for path in tree.paths(params.spec)]
        specs = params.spec.children()
        named = zip(("params", "state"), specs, strict=True)
        return [name + path for name, spec in named for path in tree.paths(spec)]

    def __call__(self, params: Abstract, batch: Abstract, goal: Goal, rows: int) -> Recorded:
        """Record the function, and divide it.

        Args:
            params: the whole parameters.
            batch: one microbatch.
            goal: aux is left out of a ``"value"``.
            rows: of the microbatch.

        Raises:
            StageError: the function cannot be traced or executes another number of cuts.
        """
        params = self._lifted(params, rows)
        key = abstract_key(batch, self.mode)
        keys = [key] if self.has_key else []
        moving = self._moving(params, batch)
        self._refuse_writes(params, batch, keys, moving)
        module, marks, numbering, calls = self._graph(params, batch, keys, moving, goal)
        graph = module.graph
        mark(graph, marks)
        calls.put_into(graph)
        make_writes_differentiable(graph)
        make_draws_differentiable(graph)
        number_elements(self.name, graph)
        free_views_of_layout(graph)
        return_statistics(self.name, graph)
        draws: list[fx.Node] = []
        if self.keyed:
            draws = draw_from_keys(self.name, graph, key, self.mode)
        merge_constants(module)
        count = len(params.values)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        changed = keep_changed(graph, placeholders[:count], self.num_states(params.spec))
        # What never changes is read like a parameter, in any stage.
        origins: list[Source] = [
            *(StateLeaf(leaf) if leaf in changed else Param(leaf) for leaf in range(count)),
            *(BatchLeaf(number) for number in range(len(batch.values))),
            *(Key(of_stage=False) for _ in keys),
            *(Key(of_stage=False, draw=number) for number in range(len(draws))),
        ]
        sources = {node.name: source for node, source in zip(placeholders, origins, strict=True)}
        parts, results = segments(graph, len(marks), sources, numbering.heads)
        for part in parts:
            part.graph.owning_module = module
        return Recorded(parts, results, numbering, changed)

    def _lifted(self, params: Abstract, rows: int) -> Abstract:
        """The parameters as the function takes them, which gradients are taken by."""
        sink = self.objective.sink
        if sink.lift is None:
            return params
        with self.mode:
            values = [
                sink.lifted(leaf, rows) if is_differentiable(leaf) else leaf
                for leaf in params.values
            ]
        return replace(params, values=tuple(values))

    def _moving(self, params: Abstract, batch: Abstract) -> list[int]:
        """The arguments by which it is recorded as if differentiated.

        Some ops record what a backward needs only where an input requires a gradient.
        """
        count, states = len(params.values), self.num_states(params.spec)
        end = len(batch.values) if "batch" in self.objective.argnums else 0
        return [
            index
            for index, leaf in enumerate((*params.values, *batch.values[:end]))
            if is_differentiable(leaf) and not count - states <= index < count
        ]

    def _refuse_writes(
        self, params: Abstract, batch: Abstract, keys: Sequence[Tensor], moving: Collection[int]
    ) -> None:
        """Run the function once under guard, before anything could be written to.

        Raises:
            StageError: it writes to a parameter, to the batch or to what it closes over, or unseen
                by autograd to what depends on the leaves that are `moving`; or it draws from a
                generator of its own, or of Python or numpy, or seeds torch's.
        """
        paths = [
            *self.paths(params),
            *("batch" + path for path in tree.paths(batch.spec)),
            *("key" for _ in keys),
        ]
        with apart(), self.mode, with_gradients():  # not in `tracing`, which hides what is set here
            inputs = [
                value.clone().requires_grad_(index in moving).view_as(value)
                for index, value in enumerate((*params.values, *batch.values, *keys))
            ]
        guard = WriteGuard(dict(zip(paths, inputs, strict=True)), self.loss_fn)
        try:
            within = tracing(self.mode, with_gradients())
            with unseeded(), undrawn(), within, guard, UnseenWrites(), Known():
                self._called(params, batch, inputs)
        except (ImpureError, Untraceable) as error:
            raise explain(self.name, error, "") from error
        except Exception:
            # Whatever else is wrong is found again, and said, when it is traced.
            return

    def _graph(
        self,
        params: Abstract,
        batch: Abstract,
        keys: Sequence[Tensor],
        moving: Sequence[int],
        goal: Goal,
    ) -> tuple[fx.GraphModule, list[int], Numbering, Calls]:
        """The graph of the function, how many nodes were before each cut, what it returns, and what
        stands in it for calls."""
        marks: list[int] = []
        numberings: list[tuple[Numbering, Calls]] = []

        def note() -> None:
            mode = get_proxy_mode()
            if mode is not None:
                marks.append(len(mode.tracer.graph.nodes))

        def flat(*leaves: Tensor) -> list[Tensor]:
            def loss(*own: Tensor) -> tuple[Tensor, list[Tensor]]:
                full = list(leaves)
                for index, leaf in zip(moving, own, strict=True):
                    full[index] = leaf
                calls = Calls()
                with ExitStack() as stack:
                    stack.enter_context(noting(note))
                    stack.enter_context(keeping_detached(calls))
                    stack.enter_context(UnseenWrites())
                    stack.enter_context(as_written())
                    stack.enter_context(OneDtype())
                    stack.enter_context(Known())
                    if self.keyed:
                        stack.enter_context(OpenAttention())
                    value = self._called(params, batch, full)
                (first, *others), numbering = self._taken(value, params, goal)
                numberings.append((numbering, calls))
                return first, others

            if not moving:
                first, others = undifferentiated(loss)
            else:
                result: Any = vjp(loss, *(leaves[index] for index in moving), has_aux=True)
                first, _, others = result
            return [first, *others]

        try:
            with tracing(self.mode, with_gradients()):
                module = marked(functionalize(flat), (*params.values, *batch.values, *keys))
        except FpipeError:
            raise
        except Exception as error:
            given = describe("batch", tree.unflatten(batch.spec, batch.values))
            raise explain(self.name, error, given, self._call) from error
        if len(marks) != self.num_stages - 1:
            raise StageError(
                f"{self.name} executes {len(marks)} cuts, which make {len(marks) + 1} stages, but "
                f"the schedule has {self.num_stages}: place fpipe.cut(x) once between each two "
                "stages, or choose a schedule with that many stages"
            )
        return module, marks, *numberings[-1]

    @property
    def _call(self) -> str:
        """How the function is called, where it is the user's own."""
        if not isfunction(self.loss_fn):
            return ""
        return self.returns.call.replace("batch)", "batch, key=key)" if self.has_key else "batch)")

    def _called(self, params: Abstract, batch: Abstract, leaves: Sequence[Tensor]) -> Any:
        """What the function returns for flat arguments."""
        count = len(params.values)
        end = count + len(batch.values)
        given = tree.unflatten(params.spec, leaves[:count])
        return self.loss_fn(
            *(given if self.returns.state else (given,)),
            tree.unflatten(batch.spec, leaves[count:end]),
            **({"key": leaves[end]} if self.has_key else {}),
        )

    def _taken(self, value: Any, params: Abstract, goal: Goal) -> tuple[list[Tensor], Numbering]:
        """What it returned as flat tensors, the new state last, and how the others are numbered."""
        subject = f"{self.name} returns"
        taken = self.returns.take(subject, self.returns.call, value, self.objective.loss_shape)
        if goal == "value":
            taken = taken._replace(aux=None)
        flat, numbering = taken.flat()
        states = self.num_states(params.spec)
        if states:
            spec = params.spec.children()[1]
            flat += check_state(subject, params.values[-states:], spec, taken.state)
        return flat, numbering
