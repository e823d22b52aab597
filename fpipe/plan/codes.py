"""A traced chain, cut into pieces: what connects them, and which gradients they owe.

Demand travels once along the chain: a stage computes the gradient of an input only if an earlier
stage needs it, so the gradient of a batch leaf or of an integer is never computed or sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from fpipe.graph.joint import BatchLeaf, Param, Seed, Source, Upstream
from fpipe.inputs.signature import Spec
from fpipe.pieces.compiler import Compiler
from fpipe.pieces.partition import forward_pieces, live_cotangents, live_gradients, partition
from fpipe.pieces.piece import Piece
from fpipe.pieces.remat import Policy
from fpipe.pieces.stage_code import StageCode
from fpipe.trace.chain import Chain


def live_leaves(chains: Collection[Chain]) -> tuple[frozenset[Source], ...]:
    """For each stage, the caller's leaves whose gradient is not zero in every one of `chains`.

    A stage may read a parameter for some sizes of microbatch only; its gradient is then summed over
    all of them, zeros included.
    """
    return tuple(
        frozenset(
            source
            for traced in stages
            for source in live_gradients(traced.joint)
            if isinstance(source, Param | BatchLeaf)
        )
        for stages in zip(*(chain.stages for chain in chains), strict=True)
    )


def codes_of_stages(
    chain: Chain,
    trained: Sequence[Collection[Source]],
    policies: Sequence[Policy],
    compiler: Compiler,
) -> tuple[StageCode, ...]:
    """Cut every stage of `chain` under its policy and name what connects them.

    Args:
        chain: the traced stages.
        trained: for each stage, the caller's leaves whose gradients are collected.
        policies: the remat policy of each stage.
        compiler: makes pieces callable.
    """
    codes: list[StageCode] = []
    # Stages that share a trace share its pieces where the same gradients are wanted of them, under
    # the same policy.
    cut: dict[Any, Mapping[str, Piece]] = {}
    for index, (traced, label) in enumerate(zip(chain.stages, chain.labels, strict=True)):
        joint = traced.joint
        last = index == len(chain.stages) - 1
        inputs: list[Upstream] = []
        params: list[Source] = []
        if chain.goal == "step":
            params = [s for s in joint.gradients if s in trained[index]]
            inputs = [
                s
                for s in joint.gradients
                if isinstance(s, Upstream)
                and any(c.reader == index for c in codes[s.stage].cotangents[s.leaf])
            ]
        wanted = [[joint.gradients[source] for source in part] for part in (inputs, params)]
        policy = policies[index]
        key = (joint.graph, id(policy), *map(tuple, wanted))
        if key not in cut:
            cut[key] = (
                partition(joint, outputs=joint.outputs, inputs=inputs, params=params, policy=policy)
                if chain.goal == "step"
                else forward_pieces(joint, joint.outputs)
            )
        cotangents = live_cotangents(joint, [*params, *inputs])
        sources = dict(joint.sources)
        if last and chain.goal == "step":
            sources |= {c.name: Seed() for group in cotangents for c in group}
        codes.append(
            StageCode(
                label=label,
                pieces=cut[key],
                sources=sources,
                constants=joint.constants,
                outputs=joint.outputs,
                cotangents=cotangents,
                input_grads={s: joint.gradients[s] for s in inputs},
                sums={source: joint.sums[source] for source in params},
                specs={
                    node.name: Spec(tuple(node.meta["val"].shape), node.meta["val"].dtype)
                    for node in joint.graph.nodes
                    if isinstance(node.meta.get("val"), Tensor)
                },
                compiler=compiler,
                returned=tuple(
                    (number, joint.outputs[source.leaf])
                    for number, source in enumerate(chain.results)
                    if source.stage == index
                ),
                updates={
                    leaf: joint.outputs[source.leaf]
                    for leaf, source in chain.updates.items()
                    if source.stage == index
                },
            )
        )
    return tuple(codes)
