"""Cut a joint graph into the pieces that a schedule runs: F, B, I and W, and what they stand on.

    P   parameters                 -> what no microbatch goes into; an input of all others
    F   inputs                     -> outputs, residuals
    B   residuals, cotangents      -> input gradients, sums of parameter gradients
    I   residuals, cotangents      -> input gradients, handover
    W   residuals, handover        -> sums of parameter gradients

Each is a backward slice that stops at values which some earlier piece has made available. Which
forward values are available to the backward is the remat policy's choice, and the only thing it
chooses.

Values that no microbatch goes into are computed once a step, before the first piece that reads
them.

    params ──► cast, merged, normalised weights ──► every F, B, I and W of the stage

A stage that casts its weights (autocast does), adds an adapter to them or normalises them would
otherwise do so for each microbatch, and keep the result of each until its backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx

from fpipe.errors import StageError, check_choice, label_of
from fpipe.graph.joint import Constant, Cotangent, Joint, Param, Source, Upstream
from fpipe.graph.nodes import (
    CHECKPOINT,
    Checkpointed,
    ancestors,
    base_of,
    is_product,
    is_random,
    is_view,
    is_zero,
    nbytes_of,
)
from fpipe.pieces.piece import PREPARE, Piece, piece_of, reads_of, sliced

Policy = Callable[[fx.Node], bool]
"""Whether the backward may read the value of a forward node, or computes it again."""

Policies: TypeAlias = tuple[Policy, ...]
"""One for each stage."""

Remat: TypeAlias = str | Policy | Sequence[str | Policy]
"""A policy by its name or as a function, of all stages or of each."""


def save_all(node: fx.Node) -> bool:
    """Keep every forward value that the backward reads."""
    return True


def save_nothing(node: fx.Node) -> bool:
    """Keep the stage's inputs (and random values) only; compute the rest again."""
    return False


NAMES: Final = ("none", "full", "except_last")


def policies(remat: Remat, stages: int) -> tuple[Policies, Policies]:
    """For each stage the policy of every microbatch, and that of its last.

    Args:
        remat: ``"none"`` keeps all residuals; ``"full"`` keeps none and runs the forward again in
            the backward; ``"except_last"`` is full but for the last microbatch that a stage runs
            forward, whose backward comes first or soon (torchgpipe, arXiv 2004.09910);
            a callable gets an `fx.Node` of the traced forward (aten ops; ``node.meta["val"]`` has
            shape and dtype) and returns whether its value may be kept. Or a list of these, one for
            each stage.
        stages: how many there are.

    Raises:
        StageError: `remat` is none of these, or has not one for each stage.
    """
    if isinstance(remat, list | tuple):
        if len(remat) != stages:
            raise StageError(
                f"remat has {len(remat)} entries, but the schedule has {stages} stages: give one "
                "for each stage, or one alone for all"
            )
        pairs = [_pair(f"remat[{stage}]", choice) for stage, choice in enumerate(remat)]
    else:
        pairs = [_pair("remat", remat)] * stages
    return tuple(usual for usual, _ in pairs), tuple(last for _, last in pairs)


def named(remat: Remat) -> str:
    """A text that is the same in every process."""
    if isinstance(remat, list | tuple):
        return ", ".join(map(named, remat))
    return remat if isinstance(remat, str) else label_of(remat)


def _pair(name: str, remat: object) -> tuple[Policy, Policy]:
    if callable(remat):
        return remat, remat
    other = ", or a callable that takes a traced node and returns whether to save its value"
    check_choice(name, remat, NAMES, other)
    usual = save_all if remat == "none" else save_nothing
    return usual, save_nothing if remat == "full" else save_all


def live_gradients(joint: Joint) -> frozenset[Source]:
    """Sources whose gradient is not zero.

    It need not depend on a cotangent: a backward of a user's own may return what it likes.
    """
    nodes = joint.nodes
    return frozenset(s for s, name in joint.gradients.items() if not is_zero(nodes[name]))


def live_cotangents(joint: Joint, wanted: Iterable[Source]) -> tuple[tuple[Cotangent, ...], ...]:
    """The cotangents that the gradients of the `wanted` sources depend on."""
    nodes = joint.nodes
    reached = ancestors(nodes[joint.gradients[source]] for source in wanted)
    return tuple(tuple(c for c in group if nodes[c.name] in reached) for group in joint.cotangents)


def partition(
    joint: Joint,
    *,
    inputs: Iterable[Upstream],
    params: Iterable[Source],
    policy: Policy,
) -> dict[str, Piece]:
    """Cut `joint` into its pieces.

    Args:
        joint: the traced stage.
        inputs: the upstream values whose gradient anyone reads.
        params: the caller's leaves whose gradient is wanted and not zero. With neither, as in a
            stage that runs forward only, nothing is kept for a backward.
        policy: whether the backward may read a forward value (True), or computes it again from
            the stage's inputs (False). Random values are always kept, what no microbatch goes into
            is there anyway, and what is made of nothing is always made again; so is what is inside
            a call of `torch.utils.checkpoint`.

    Returns:
        Pieces by op: ``F``, ``B``, ``I``, ``W``, and ``B+``, ``W+``, which take and return sums
        over microbatches; and `PREPARE`. An op that has nothing to compute has no entry.
    """
    nodes = joint.nodes
    placeholders = {n for n in nodes.values() if n.op == "placeholder"}
    backward = _backward_nodes(joint)
    results = [nodes[name] for name in joint.outputs]
    input_grads = [nodes[joint.gradients[source]] for source in inputs]
    sums = [joint.sums[source] for source in params]
    starts = [nodes[entry.start] for entry in sums]
    totals = [nodes[entry.total] for entry in sums]
    checks = _checks(joint)
    in_f = [n for n in checks if n not in backward]
    # One on a cotangent that nobody hands back, for no gradient depends on it, would wait for it.
    unasked = (placeholders & backward) - ancestors([*input_grads, *starts])
    in_b = [n for n in checks if n in backward and unasked.isdisjoint(ancestors([n]))]
    live = ancestors([*results, *input_grads, *totals, *in_f, *in_b])
    prepared, cheap = unchanging(joint, live)
    inputs_of_all = placeholders.union(prepared)
    forward = ancestors(results)
    # With every element of an op that returns several.
    forward |= {u for n in forward for u in n.users if u.target is operator.getitem}
    again = _checkpointed(forward, results)
    kept = inputs_of_all | {
        n
        for n in forward - backward - cheap
        if _can_hold(n) and (is_random(n) or (n not in again and policy(n)))
    }

    whole = sliced([*input_grads, *starts], kept)
    early = _choose_input_grad(whole, input_grads, starts, backward)
    available = kept | {n for n in early - cheap if _can_hold(n)}
    deferred = set(whole) - early
    in_w = [n for n in in_b if not deferred.isdisjoint(sliced([n], kept)) or not early]
    in_i = [n for n in in_b if n not in in_w]
    weight = sliced([*starts, *in_w], available)
    handover = [n for n in (*reads_of(weight), *starts) if n in available - kept]
    first = [*input_grads, *handover]
    residuals = [
        n
        for nodes_run in (whole, sliced([*first, *in_b], kept), weight)
        for n in reads_of(nodes_run)
        if n in kept
    ]
    pieces = {
        PREPARE: piece_of(prepared, placeholders, ()),
        "F": piece_of([*results, *residuals], inputs_of_all, in_f),
        "B": piece_of([*input_grads, *starts], kept, in_b, again),
        "B+": piece_of([*input_grads, *totals], kept, in_b, again),
        "I": piece_of(first, kept, in_i, again),
        "W": piece_of(starts, available, in_w, again),
        "W+": piece_of(totals, available, in_w, again),
    }
    return {op: piece for op, piece in pieces.items() if piece is not None}


def _choose_input_grad(
    whole: Collection[fx.Node],
    input_grads: Collection[fx.Node],
    param_grads: Collection[fx.Node],
    backward: Collection[fx.Node],
) -> set[fx.Node]:
    """The nodes of a backward that belong to I; the others belong to W.

    I is what the input gradients need. A stage without input gradients (the first) still has a
    chain of cotangents from which several parameters take their gradients: that chain is its I, so
    that its W, as everywhere, is the work that serves one parameter alone and may wait.
    """
    inside = set(whole)
    if input_grads:
        chosen = ancestors(input_grads) & inside
    else:
        served: dict[fx.Node, set[fx.Node]] = {n: {n} for n in param_grads}
        for node in reversed(list(whole)):
            for user in node.users:
                served.setdefault(node, set()).update(served.get(user, ()))
        chosen = {n for n in whole if n in backward and len(served.get(n, ())) > 1}
        chosen |= ancestors(chosen) & inside
    # JaxPP's rule: what is no matrix product, waits for nothing deferred and returns no more than
    # it reads costs less memory when it is done at once than when its inputs are kept.
    for node in whole:
        if node in chosen or node not in backward or is_product(node) or is_view(node):
            continue
        waits = any(n in inside and n not in chosen for n in node.all_input_nodes)
        if not waits and nbytes_of(node) <= sum(map(nbytes_of, node.all_input_nodes)):
            chosen.add(node)
    return chosen


def _checks(joint: Joint) -> list[fx.Node]:
    """Ops that return nothing and raise if something is wrong, such as a singular matrix."""
    return [
        node
        for node in joint.graph.nodes
        if node.op == "call_function"
        and not node.users
        and node.is_impure()
        and not is_random(node)
    ]


def _backward_nodes(joint: Joint) -> set[fx.Node]:
    """Nodes that depend on a cotangent."""
    names = {cotangent.name for group in joint.cotangents for cotangent in group}
    backward = {node for node in joint.graph.nodes if node.name in names}
    for node in joint.graph.nodes:
        if node.op == "call_function" and any(n in backward for n in node.all_input_nodes):
            backward.add(node)
    return backward


def _checkpointed(forward: Collection[fx.Node], results: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes inside calls of checkpoint: not what the rest of the forward reads of them."""
    calls: dict[fx.Node, Checkpointed] = {
        n: n.meta[CHECKPOINT] for n in forward if CHECKPOINT in n.meta
    }

    def leaves(node: fx.Node, call: int) -> bool:
        readers = (u for u in node.users if u in forward)
        return node in results or any(u not in calls or calls[u].number != call for u in readers)

    read = {base_of(n) for n, call in calls.items() if call.saved or leaves(n, call.number)}
    return {n for n in calls if n not in read}


def _can_hold(node: fx.Node) -> bool:
    """Whether a value is worth a slot: a dense tensor, and no view (its base is held instead).

    Compiled code takes no sparse ones, and their bytes are data.
    """
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.layout is torch.strided and not is_view(node)


class Unchanging(NamedTuple):
    """The values of a stage that no microbatch goes into.

    Attributes:
        prepared: depend on parameters and constants, and are read by what does not; none is an
            output or a gradient, since what leaves a stage leaves its F, B or W.
        cheap: are made of nothing, such as masks and positions, which cost less to make than to
            keep.
    """

    prepared: list[fx.Node]
    cheap: set[fx.Node]


def unchanging(joint: Joint, live: Collection[fx.Node]) -> Unchanging:
    """Find what no microbatch goes into, where pieces may run the `live` nodes."""
    leaving = {joint.nodes[name] for name in (*joint.outputs, *joint.gradients.values())}
    # An op with several results, one of which leaves, runs where that one leaves from.
    leaving |= {node.all_input_nodes[0] for node in leaving if node.target is operator.getitem}
    fixed: set[fx.Node] = set()
    cheap: set[fx.Node] = set()
    for node in joint.graph.nodes:
        inputs = node.all_input_nodes
        if isinstance(joint.sources.get(node.name), Param | Constant):
            fixed.add(node)
        elif node.op != "call_function" or not all(n in fixed or n in cheap for n in inputs):
            continue
        elif node not in leaving and not is_random(node) and not node.is_impure():
            (cheap if cheap.issuperset(inputs) and not is_product(node) else fixed).add(node)
    read = {
        base_of(value)
        for node in live
        if node not in fixed and node not in cheap
        for value in node.all_input_nodes
        if value in fixed
    }
    prepared = [n for n in joint.graph.nodes if n in read and n.op != "placeholder" and n in fixed]
    return Unchanging(prepared, cheap)
