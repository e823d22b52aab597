"""From shapes to code: traces all stages, cuts them into pieces, and keeps what it made.

    shapes ── trace ──► chains ── cut by the remat policies ──► code of every stage

Nothing here knows a schedule, so pipelines that differ in their schedule alone share one:
what one of them has traced and compiled serves the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fpipe.divide.function_tracer import FunctionTracer
from fpipe.errors import StageError
from fpipe.graph.joint import Source
from fpipe.graph.nodes import may_draw
from fpipe.inputs.signature import Signature, TreeShape, in_words
from fpipe.pieces.compiler import Compiler
from fpipe.pieces.partition import Policies, policies
from fpipe.pieces.piece import PREPARE, Piece
from fpipe.plan.codes import StageCode, codes_of_stages, live_leaves
from fpipe.spec.definition import Definition
from fpipe.trace.chain import Chain, ChainTracer
from fpipe.trace.isolation import once_more, uncompiled

Trained = tuple[frozenset[Source], ...]


class CompiledStages(NamedTuple):
    """The code of all stages for the microbatches of one batch, by their kind.

    Attributes:
        chains: the traces.
        usual: the code for all microbatches but a stage's last.
        last: the code for the microbatch that a stage runs forward last; often the same.
        frozen: stage and leaf of the parameters that are not trained.
    """

    chains: Sequence[Chain]
    usual: Sequence[tuple[StageCode, ...]]
    last: Sequence[tuple[StageCode, ...]]
    frozen: frozenset[tuple[int, int]]

    def pieces(self, stages: Iterable[int], ops: Collection[str]) -> Iterator[Piece]:
        """Those that stages run for actions of these ops, begun sums and continued ones alike."""
        for kind in (*self.usual, *self.last):
            for stage in stages:
                for op, piece in kind[stage].pieces.items():
                    if op == PREPARE or op.rstrip("+") in ops:
                        yield piece


class StageCompiler:
    """Makes the code of all stages for a kind of batch, once.

    Args:
        definition: of the pipeline. It depends on no more of the schedule than the number of stages
            and the device of each.
    """

    def __init__(self, definition: Definition) -> None:
        # For each stage the remat policy of every microbatch, and that of its last.
        self._policies = policies(definition.remat, definition.schedule.num_stages)
        self._tracer = _tracer(definition)
        self._compiler = Compiler(definition.compile)
        self._chains: dict[Any, Chain] = {}
        self._codes: dict[tuple[Chain, Trained, tuple[int, ...]], tuple[StageCode, ...]] = {}

    def __call__(self, signature: Signature) -> CompiledStages:
        """The code for arguments of these shapes.

        Raises:
            StageError: a stage cannot be traced on them, or the loss returns its weight before its
                sum.
        """
        chains: list[Chain] = []
        for size, shape in zip(signature.sizes(), signature.batch, strict=True):
            chain = self._known(signature, size, shape)
            if chain is None:
                trace = partial(self._tracer, signature.params, shape, signature.goal, size)
                with uncompiled():
                    chain = once_more(trace)
            self._chains[_key(signature, size, shape)] = chain
            chains.append(chain)
        _check_results(chains)
        if signature.goal == "step" and all(chain.is_swapped for chain in chains):
            raise StageError(
                "the loss is declared as (sum, weight), and of what it returns the first depends "
                "on no parameter, but the second does: return the sum first"
            )
        trained = live_leaves(chains)
        usual, last = (
            [self._cut(chain, trained, each) for chain in chains] for each in self._policies
        )
        return CompiledStages(chains, usual, last, self._tracer.frozen(signature.params))

    def __contains__(self, signature: Signature) -> bool:
        """Whether all of its microbatches were traced before."""
        return all(
            self._known(signature, size, shape) is not None
            for size, shape in zip(signature.sizes(), signature.batch, strict=True)
        )

    def count_to_compile(self, pieces: Iterable[Piece]) -> int:
        """How many distinct graphs of pieces are not callable yet."""
        return self._compiler.missing(pieces)

    def compiling(self) -> AbstractContextManager[None]:
        """Within it pieces are compiled side by side; they can be called afterwards."""
        return self._compiler.together()

    @property
    def may_draw(self) -> bool:
        """Whether anything that was traced so far may draw from torch's generator."""
        # A copy, to which another thread that traces adds nothing.
        stages = (stage for chain in list(self._chains.values()) for stage in chain.stages)
        return any(may_draw(node) for stage in stages for node in stage.joint.graph.nodes)

    def _known(self, signature: Signature, size: int, shape: TreeShape) -> Chain | None:
        """The trace of a microbatch, if it was made before, or that of a step which has it all."""
        chain = self._chains.get(_key(signature, size, shape))
        if chain is None and signature.goal == self._tracer.evaluation:
            step = self._chains.get(_key(signature._replace(goal="step"), size, shape))
            chain = step and replace(step, goal=signature.goal)
        return chain

    def _cut(self, chain: Chain, trained: Trained, policies: Policies) -> tuple[StageCode, ...]:
        key = (chain, trained, tuple(map(id, policies)))  # a policy need not be hashable
        if key not in self._codes:
            self._codes[key] = codes_of_stages(chain, trained, policies, self._compiler)
        return self._codes[key]


def _tracer(definition: Definition) -> ChainTracer | FunctionTracer:
    """The tracer that turns the user's functions into a chain of graphs."""
    if definition.function:
        return FunctionTracer(
            definition.loss,
            definition.schedule.num_stages,
            definition.objective,
            has_key=definition.has_key,
            keyed=definition.keyed,
            devices=definition.stage_devices,
        )
    return ChainTracer(
        definition.stages,
        definition.loss,
        definition.objective,
        devices=definition.stage_devices,
    )


def _check_results(chains: Sequence[Chain]) -> None:
    """Refuse microbatches whose outputs cannot be put together.

    Raises:
        StageError: they come in different structures, or of different dtypes.
    """
    for chain in chains[1:]:
        if chain.numbering != chains[0].numbering:
            raise StageError(
                f"{chain.labels[-1]} returns {chain.numbering.spec} for microbatches of one shape "
                f"and {chains[0].numbering.spec} for those of another: what comes out may not have "
                "another structure in other microbatches of one step"
            )
        updates = [{leaf: s.stage for leaf, s in c.updates.items()} for c in (chain, chains[0])]
        if updates[0] != updates[1]:
            raise StageError(
                f"{chain.labels[-1]} brings other leaves of the state up to date for microbatches "
                "of one shape than of another, or in another stage: each must be updated in all "
                "microbatches of a step, or in none (state + 0 for one that stays)"
            )
        results = ([c.value(source) for source in c.results] for c in (chain, chains[0]))
        for result, first in zip(*results, strict=True):
            if result.dtype != first.dtype:
                raise StageError(
                    f"{chain.labels[-1]} returns {in_words(result)} for microbatches of one shape "
                    f"and {in_words(first)} for those of another: what comes out must have "
                    "one dtype"
                )


def _key(signature: Signature, size: int, shape: TreeShape) -> tuple[Any, ...]:
    """All that the trace of a microbatch depends on."""
    return signature.goal, signature.params, size, shape, signature.ambient
