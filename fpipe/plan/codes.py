"""Code of stages: a traced chain cut into pieces, what connects them, which gradients they owe.

Demand travels once along the chain: a stage computes the gradient of an input only if an earlier
stage needs it, so the gradient of a batch leaf or of an integer is never computed or sent.

A `StageCode` is all that lowering knows of a stage. Its names are local to one stage and one
microbatch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from fpipe.graph.joint import BatchLeaf, Cotangent, Param, Seed, Source, Sum, Upstream
from fpipe.inputs.signature import Spec
from fpipe.pieces.boxed import Boxed
from fpipe.pieces.compiler import Compiler
from fpipe.pieces.partition import (
    Policy,
    live_cotangents,
    live_gradients,
    partition,
    save_nothing,
)
from fpipe.pieces.piece import PREPARE, Piece
from fpipe.trace.chain import Chain


@dataclass(frozen=True, eq=False)
class StageCode:
    """One stage for microbatches of one shape under one remat policy.

    Attributes:
        label: the stage in messages, such as ``"stage 2 (block)"``.
        pieces: by op ``F``, ``B``, ``I``, ``W``; those that continue a sum are ``B+`` and ``W+``.
            An op that has nothing to compute has no entry. `PREPARE` runs once a step.
        sources: where the value of each name that no piece returns comes from.
        constants: what `Constant` sources index.
        outputs: name of each output leaf.
        cotangents: what each output leaf gets back from its readers, where it is needed.
        input_grads: name of the gradient of each upstream value that needs one.
        sums: for each leaf of the caller's with a gradient, how it is collected.
        specs: shape and dtype of each named value.
        compiler: makes a piece callable, when lowering first asks for it.
        returned: number and name of each value that the caller gets.
        updates: number and name of each leaf of the state that this stage brings up to date.
    """

    label: str
    pieces: Mapping[str, Piece]
    sources: Mapping[str, Source]
    constants: tuple[Tensor, ...]
    outputs: tuple[str, ...]
    cotangents: tuple[tuple[Cotangent, ...], ...]
    input_grads: Mapping[Upstream, str]
    sums: Mapping[Source, Sum]
    specs: Mapping[str, Spec] = field(repr=False)
    compiler: Compiler = field(repr=False)
    returned: tuple[tuple[int, str], ...]
    updates: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def prepared(self) -> frozenset[str]:
        """Names of the values that no microbatch goes into."""
        return frozenset(self.pieces[PREPARE].outputs if PREPARE in self.pieces else ())

    @cached_property
    def by_cotangent(self) -> dict[str, tuple[int, int]]:
        """For the name of each cotangent the leaf that gets it back, and the reader it is from."""
        return {
            name: (leaf, reader)
            for leaf, group in enumerate(self.cotangents)
            for reader, name in group
        }

    def call(self, op: str) -> Boxed:
        """The compiled piece of `op`."""
        return self.compiler(self.pieces[op], f"{op} of {self.label}")

    def footprint(self, op: str, handed: frozenset[int]) -> int:
        """Bytes that the piece of `op` needs beyond what is held when it starts.

        `handed` are the numbers of its inputs that nothing else reads afterwards.
        """
        piece, compiler = self.pieces[op], self.compiler
        if not compiler.fuses:
            return piece.footprint(handed, fuses=False)
        return piece.footprint(handed, fuses=True, written=compiler.crossing(piece))


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

    The gradients of the caller's leaves that are `trained` are collected, stage by stage.
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
        wanted = [[joint.gradients[source] for source in group] for group in (inputs, params)]
        # Without a backward no policy is asked.
        policy = policies[index] if inputs or params else save_nothing
        key = (joint.graph, id(policy), *map(tuple, wanted))
        if key not in cut:
            cut[key] = partition(joint, inputs=inputs, params=params, policy=policy)
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
