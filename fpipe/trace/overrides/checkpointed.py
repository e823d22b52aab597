"""`torch.utils.checkpoint` in what is traced: what a model chose to compute again in its backward.

    checkpoint(block, x) ──► block(x), its nodes marked ──► the partition keeps none of them

The function is called plainly, and what it does is marked: which values are kept is decided later,
for the whole stage. Values that selective checkpointing saves
(``create_selective_checkpoint_contexts``) are saved.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from inspect import signature
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import checkpoint
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    _CachingTorchDispatchMode,
)

from fpipe.graph.nodes import CHECKPOINT, Checkpointed
from fpipe.trace.overrides.standin import StandIn

Save = Callable[..., CheckpointPolicy | bool]
"""A user's policy: ``(context, op, *args, **kwargs)``."""


class Marks:
    """Which nodes of a graph that is being recorded belong to which call of checkpoint."""

    def __init__(self) -> None:
        self._inside = False
        self._numbers = 0
        self._policies: dict[int, Save] = {}
        # For each graph, from which number of nodes on there is another call, or none.
        self._changes: dict[fx.Graph, list[tuple[int, Checkpointed | None]]] = defaultdict(list)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it this notes what is recorded."""
        token = _MARKS.set(self)
        try:
            yield
        finally:
            _MARKS.reset(token)

    def change(self, call: Checkpointed | None) -> None:
        """Let all that is recorded from here on belong to this call."""
        mode = get_proxy_mode()
        if mode is not None:
            graph = mode.tracer.graph
            self._changes[graph].append((len(graph.nodes), call))

    @contextmanager
    def call(self, policy: Save | None) -> Iterator[None]:
        """Within it is a call; one within another belongs to that."""
        if self._inside:
            yield
            return
        self._inside = True
        self._numbers += 1
        if policy is not None:
            self._policies[self._numbers] = policy
        self.change(Checkpointed(self._numbers))
        try:
            yield
        finally:
            self.change(None)
            self._inside = False

    def mark(self, graph: fx.Graph) -> None:
        """Mark the nodes of a graph that has just been recorded."""
        changes = iter(self._changes.pop(graph, ()))
        following = next(changes, None)
        call: Checkpointed | None = None
        for number, node in enumerate(graph.nodes):
            while following is not None and following[0] <= number:
                call, following = following[1], next(changes, None)
            if call is not None and node.op == "call_function":
                policy = self._policies.get(call.number)
                saved = call.saved or (policy is not None and _saves(policy, node))
                if node.target is operator.getitem:  # goes with what it is an element of
                    saved = node.all_input_nodes[0].meta.get(CHECKPOINT, call).saved
                node.meta[CHECKPOINT] = call._replace(saved=saved)
        self._policies.clear()  # they may count: each op is asked about once


_MARKS: ContextVar[Marks | None] = ContextVar("fpipe.checkpoint", default=None)


def _saves(policy: Save, node: fx.Node) -> bool:
    """Whether a user's policy saves what an op returns."""
    if node.target in SAC_IGNORED_OPS or not isinstance(node.target, torch._ops.OpOverload):
        return False
    context: Any = SelectiveCheckpointContext(is_recompute=False)
    context.op_output = node.meta.get("val")
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    answer = policy(context, node.target, *args, **kwargs)
    return answer if isinstance(answer, bool) else not answer.name.endswith("RECOMPUTE")


@contextmanager
def called_plainly() -> Iterator[None]:
    """Within it checkpoint calls its function plainly, and what that does is marked."""
    with _GENERATORS.active(), _REENTRANT.active():
        yield


class _Plainly:
    """Stands for the Function of a reentrant checkpoint."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Call the function."""
        if not _REENTRANT.is_active:
            return _REENTRANT.original(checkpoint).apply(function, preserve, *args)
        with _marked(None):
            return function(*args)


def _generator(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Runs before and after the function of a checkpoint that is not reentrant."""
    original = _GENERATORS.original(checkpoint)
    if not _GENERATORS.is_active:
        yield from original(*args, **kwargs)
        return
    arguments = signature(original).bind(*args, **kwargs).arguments
    within, _ = arguments.get("context_fn", checkpoint.noop_context_fn)()
    policy = None
    if isinstance(within, _CachingTorchDispatchMode):
        policy, within = within.policy_fn, nullcontext()
    with within, _marked(policy):
        yield


def _marked(policy: Save | None) -> AbstractContextManager[None]:
    marks = _MARKS.get()
    return nullcontext() if marks is None else marks.call(policy)


_NAME = "_checkpoint_without_reentrant_generator"
_INNER = f"{_NAME}_impl"  # what torch 2.14 calls
_GENERATORS = StandIn(_INNER if hasattr(checkpoint, _INNER) else _NAME, {checkpoint: _generator})
_REENTRANT = StandIn("CheckpointFunction", {checkpoint: _Plainly})
