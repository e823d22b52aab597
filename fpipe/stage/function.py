"""Trace a whole loss function with cuts into the same chain that stage functions make.

    loss_fn(params, batch) ── make_fx ──► forward graph ── cuts ──► segments ── trace each ──► Chain

Every stage sees all parameter leaves by their own number, so a parameter that several stages read
is one leaf with several contributors; a value may be read by any later stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize, vjp
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from fpipe import tree
from fpipe.errors import FpipeError, StageError
from fpipe.shapes import Goal, TreeShape
from fpipe.stage.abstract import Abstract, abstract_key
from fpipe.stage.alike import likeness, merge_constants, seen_from
from fpipe.stage.chain import Chain
from fpipe.stage.cut import Segment, mark, noting, segments
from fpipe.stage.explain import ImpureError, describe, explain
from fpipe.stage.joint import (
    BatchLeaf,
    Key,
    Param,
    Source,
    StateLeaf,
    Upstream,
    is_differentiable,
)
from fpipe.stage.keyed import draw_from_keys
from fpipe.stage.known import Known
from fpipe.stage.nograd import keeping_detached
from fpipe.stage.peeking import WithoutPeeking
from fpipe.stage.purity import WriteGuard
from fpipe.stage.returns import Layout, Returns, check_state
from fpipe.stage.rewrites import (
    free_views_of_layout,
    make_copies_differentiable,
    return_statistics,
)
from fpipe.stage.sink import SUM, Sink
from fpipe.stage.tracer import Leaves, Traced, trace
from fpipe.stage.trainable import ALL, Trainable
from fpipe.stage.updates import keep_changed, updates_of


class FunctionTracer:
    """Traces a loss function into a chain.

    Args:
        loss_fn: ``(params, batch) -> scalar``, with a `fpipe.cut` between stages; with a state
            ``(params, state, batch) -> (scalar, state)``.
        num_stages: of the schedule: one more than the cuts that it must execute.
        accum_dtype: dtype to sum parameter gradients in, None for their own.
        returns: what it returns.
        has_key: it is called with the key of the microbatch, as the keyword argument ``key``.
        trainable: which parameters get a gradient.
        keyed: what it draws, it draws from the key of the microbatch, which it is not called with.
        loss_shape: shape of the loss, with None for a size that the arguments tell.
        sink: how parameter gradients are collected.
        argnums: what gradients are taken by, ``"params"`` and ``"batch"``.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        num_stages: int,
        accum_dtype: torch.dtype | None,
        returns: Returns,
        has_key: bool = False,
        trainable: Trainable = ALL,
        *,
        keyed: bool = False,
        loss_shape: tuple[int | None, ...] = (),
        sink: Sink = SUM,
        argnums: Collection[str] = ("params",),
    ) -> None:
        self._loss_fn = loss_fn
        self._num_stages = num_stages
        self._accum_dtype = accum_dtype
        self._returns = returns
        self._has_key = has_key
        self._keyed = keyed
        self._loss_shape = loss_shape
        self._sink = sink
        self._argnums = frozenset(argnums)
        # The state comes with the parameters, after them.
        self._trainable = replace(trainable, within=(0,)) if returns.state else trainable
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __call__(
        self, shapes: Sequence[TreeShape], microbatch: TreeShape, goal: Goal, rows: int = 1
    ) -> Chain:
        """Trace the function for one shape of microbatch.

        Args:
            shapes: the whole parameters, once for each stage; or the pair of parameters and state.
            microbatch: one microbatch.
            goal: what the chain is for.
            rows: of the microbatch.

        Raises:
            StageError: the function cannot be traced or executes another number of cuts.
        """
        name = self._name
        if goal == "forward" and not self._returns.aux:
            raise StageError(
                f"{name} returns a loss and no output: pipe.value gives the loss without "
                "gradients, and with has_aux=True what else the function returns comes back"
            )
        params = Abstract.of(shapes[0], self._mode)
        batch = Abstract.of(microbatch, self._mode)
        key = abstract_key(batch, self._mode)
        keys = [key] if self._has_key else []
        parts, results, layout, changed = self._divide(name, params, batch, keys, goal, rows)
        updates = updates_of(name, self._paths(params), parts, results, changed)
        results = results[: len(results) - len(updates)]
        frozen = self.frozen(shapes)
        trained = [
            "params" in self._argnums and (0, leaf) not in frozen
            for leaf in range(len(params.values))
        ]
        tied = self._tied(parts)
        traced: list[Traced] = []
        labels = [f"stage {index} ({name})" for index in range(len(parts))]
        known: dict[Hashable, tuple[Traced, tuple[Source, ...]]] = {}
        for label, part in zip(labels, parts, strict=True):
            leaves = self._leaves(part, params, trained, batch, key, traced)
            kind = (likeness(part, leaves), tuple(source in tied for source in part.sources))
            if kind not in known:
                own = self._trace(
                    label, part, leaves, tied, differentiate=goal == "step", rows=rows
                )
                known[kind] = own, part.sources
            first, sources = known[kind]
            traced.append(seen_from(first, sources, part))
        return Chain(tuple(traced), tuple(labels), goal, results, layout, updates)

    def _num_states(self, spec: optree.PyTreeSpec) -> int:
        """How many of the last leaves of what comes in as parameters are the state's."""
        return spec.children()[1].num_leaves if self._returns.state else 0

    def _paths(self, params: Abstract) -> list[str]:
        """How a user would write each leaf of parameters and state."""
        if not self._returns.state:
            return ["params" + path for path in tree.paths(params.spec)]
        specs = params.spec.children()
        named = zip(("params", "state"), specs, strict=True)
        return [name + path for name, spec in named for path in tree.paths(spec)]

    def frozen(self, shapes: Sequence[TreeShape]) -> frozenset[tuple[int, int]]:
        """Stage and leaf of what is not trained, the state's included; the stage is 0."""
        frozen = self._trainable.frozen([shapes[0].spec], shared=True)
        count, states = len(shapes[0].leaves), self._num_states(shapes[0].spec)
        return frozen | {(0, leaf) for leaf in range(count - states, count)}

    def _tied(self, parts: Sequence[Segment]) -> frozenset[Source]:
        """The parameters that several parts read, where their gradients are not kept whole."""
        if self._sink.fold is None:
            return frozenset()
        counts = Counter(source for part in parts for source in part.sources)
        return frozenset(source for source, count in counts.items() if count > 1)

    def _trace(
        self,
        label: str,
        part: Segment,
        leaves: Leaves,
        tied: Collection[Source],
        *,
        differentiate: bool,
        rows: int,
    ) -> Traced:
        assert part.graph.owning_module is not None  # the recorded one, which has the constants
        module = fx.GraphModule(part.graph.owning_module, part.graph)
        return trace(
            label,
            partial(_call, module),
            leaves,
            self._mode,
            differentiate=differentiate,
            accum_dtype=self._accum_dtype,
            origin=self._loss_fn,
            readers=part.readers.__getitem__,
            sink=self._sink,
            rows=rows,
            tied=[source for source in part.sources if source in tied],
        )

    def _leaves(
        self,
        part: Segment,
        params: Abstract,
        trained: Sequence[bool],
        batch: Abstract,
        key: Tensor,
        before: Sequence[Traced],
    ) -> Leaves:
        """The abstract arguments of a segment."""
        values, paths, differentiable = [], [], []
        param_paths, batch_paths = self._paths(params), tree.paths(batch.spec)
        by_batch = "batch" in self._argnums
        for source in part.sources:
            match source:
                case Param(leaf):
                    values.append(params.values[leaf])
                    paths.append(param_paths[leaf])
                    differentiable.append(trained[leaf] and is_differentiable(params.values[leaf]))
                case StateLeaf(leaf):
                    values.append(params.values[leaf])
                    paths.append(param_paths[leaf])
                    differentiable.append(False)
                case BatchLeaf(leaf):
                    values.append(batch.values[leaf])
                    paths.append("batch" + batch_paths[leaf])
                    differentiable.append(by_batch and is_differentiable(batch.values[leaf]))
                case Key():
                    values.append(key.clone())  # each is an argument of its own
                    paths.append("key")
                    differentiable.append(False)
                case Upstream(stage, leaf):
                    values.append(before[stage].values[leaf])
                    paths.append(f"value {leaf} of stage {stage}")
                    differentiable.append(before[stage].carries_gradient[leaf])
                case _:
                    raise AssertionError(f"a segment reads {source}")
        return Leaves(
            tuple(values), part.sources, tuple(paths), tuple(differentiable), "what it reads"
        )

    def segments(self, params: TreeShape, microbatch: TreeShape) -> tuple[Segment, ...]:
        """The parts between the cuts, as they were recorded, to be measured."""
        batch = Abstract.of(microbatch, self._mode)
        keys = [abstract_key(batch, self._mode)] if self._has_key else []
        return self._divide(self._name, Abstract.of(params, self._mode), batch, keys, "step")[0]

    @property
    def _name(self) -> str:
        return getattr(self._loss_fn, "__qualname__", type(self._loss_fn).__name__)

    def _divide(
        self,
        name: str,
        params: Abstract,
        batch: Abstract,
        keys: Sequence[Tensor],
        goal: Goal,
        rows: int = 0,
    ) -> tuple[tuple[Segment, ...], tuple[Upstream, ...], Layout, list[int]]:
        """Record the forward graph, and divide it at its cuts.

        The results end with the new values of the leaves of the state that change, which come last.
        """
        count, states = len(params.values), self._num_states(params.spec)
        params = self._lifted(params, rows)
        # Some ops record what a backward needs only where an input requires a gradient.
        end = len(batch.values) if "batch" in self._argnums else 0
        moving = [
            index
            for index, leaf in enumerate((*params.values, *batch.values[:end]))
            if is_differentiable(leaf) and not count - states <= index < count
        ]
        self._refuse_writes(name, params, batch, keys, moving)
        marks: list[int] = []
        layouts: list[Layout] = []

        def note() -> None:
            mode = get_proxy_mode()
            if mode is not None:
                marks.append(len(mode.tracer.graph.nodes))

        def flat(*leaves: Tensor) -> list[Tensor]:
            def loss(*own: Tensor) -> tuple[Tensor, list[Tensor]]:
                full = list(leaves)
                for index, leaf in zip(moving, own, strict=True):
                    full[index] = leaf
                with noting(note), keeping_detached(), Known():
                    value = self._called(params, batch, full)
                subject = f"{name} returns"
                taken = self._returns.take(subject, self._returns.call, value, self._loss_shape)
                if goal == "value":
                    taken = taken._replace(aux=None)
                (first, *others), layout = taken.flat()
                layouts.append(layout)
                if states:
                    spec = params.spec.children()[1]
                    others += check_state(subject, params.values[-states:], spec, taken.state)
                return first, others

            if not moving:
                first, others = loss()
            else:
                result: Any = vjp(loss, *(leaves[index] for index in moving), has_aux=True)
                first, _, others = result
            return [first, *others]

        try:
            with self._mode, torch.enable_grad(), WithoutPeeking():
                graph = make_fx(functionalize(flat), tracing_mode="fake")(
                    *params.values, *batch.values, *keys
                )
        except FpipeError:
            raise
        except Exception as error:
            if "Functionalize rule" in str(error):
                raise StageError(
                    f"{name} uses a torch.autograd.Function, whose backward a cut function would "
                    "lose: write the stages as functions of their own, fpipe.pipeline([stage, …], "
                    "loss, schedule)"
                ) from error
            given = describe("batch", tree.unflatten(batch.spec, batch.values))
            raise explain(name, error, given) from error
        if len(marks) != self._num_stages - 1:
            raise StageError(
                f"{name} executes {len(marks)} cuts, which make {len(marks) + 1} stages, but the "
                f"schedule has {self._num_stages}: place fpipe.cut(x) once between each two "
                "stages, or choose a schedule with that many stages"
            )
        mark(graph.graph, marks)
        make_copies_differentiable(graph.graph)
        free_views_of_layout(graph.graph)
        return_statistics(name, graph.graph)
        draws: list[fx.Node] = []
        if self._keyed:
            key = abstract_key(batch, self._mode)
            draws = draw_from_keys(name, graph.graph, key, self._mode)
        merge_constants(graph)
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        changed = keep_changed(graph.graph, placeholders[:count], states)
        # What never changes is read like a parameter, in any stage.
        origins: list[Source] = [
            *(StateLeaf(leaf) if leaf in changed else Param(leaf) for leaf in range(count)),
            *(BatchLeaf(number) for number in range(len(batch.values))),
            *(Key(of_stage=False) for _ in keys),
            *(Key(of_stage=False, draw=number) for number in range(len(draws))),
        ]
        sources = {node.name: source for node, source in zip(placeholders, origins, strict=True)}
        layout = layouts[-1]
        parts, results = segments(graph.graph, len(marks), sources, layout.heads)
        for part in parts:
            part.graph.owning_module = graph
        return parts, results, layout, changed

    def _lifted(self, params: Abstract, rows: int) -> Abstract:
        """The parameters as the function takes them, which gradients are taken by."""
        if self._sink.lift is None:
            return params
        with self._mode:
            values = [
                self._sink.lifted(leaf, rows) if is_differentiable(leaf) else leaf
                for leaf in params.values
            ]
        return replace(params, values=tuple(values))

    def _called(self, params: Abstract, batch: Abstract, leaves: Sequence[Tensor]) -> Any:
        """What the function returns for flat arguments."""
        count = len(params.values)
        end = count + len(batch.values)
        given = tree.unflatten(params.spec, leaves[:count])
        return self._loss_fn(
            *(given if self._returns.state else (given,)),
            tree.unflatten(batch.spec, leaves[count:end]),
            **({"key": leaves[end]} if self._has_key else {}),
        )

    def _refuse_writes(
        self,
        name: str,
        params: Abstract,
        batch: Abstract,
        keys: Sequence[Tensor],
        moving: Collection[int],
    ) -> None:
        """Run the function once under guard, before anything could be written to.

        Raises:
            StageError: it writes to a parameter, to the batch or to what it closes over, or unseen
                by autograd to what depends on the leaves that are `moving`.
        """
        with self._mode, torch.enable_grad():
            inputs = [
                value.clone().requires_grad_(index in moving).view_as(value)
                for index, value in enumerate((*params.values, *batch.values, *keys))
            ]
            paths = [
                *self._paths(params),
                *("batch" + path for path in tree.paths(batch.spec)),
                *("key" for _ in keys),
            ]
            guard = WriteGuard(dict(zip(paths, inputs, strict=True)), self._loss_fn)
            try:
                with guard, Known():
                    self._called(params, batch, inputs)
            except ImpureError as error:
                raise explain(name, error, "") from error
            except Exception:
                # Whatever else is wrong is found again, and said, when it is traced.
                return


def _call(module: fx.GraphModule, values: Sequence[Any]) -> Any:
    return module(*values)
