"""A stage ready to be scheduled: its pieces, and the names that connect them.

This is all that lowering knows of a stage. Names are local to one stage and one microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from fpipe.graph.joint import Cotangent, Source, Sum, Upstream
from fpipe.inputs.signature import Spec
from fpipe.pieces.boxed import Boxed
from fpipe.pieces.compiler import Compiler
from fpipe.pieces.piece import PREPARE, Piece


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
            own: (leaf, reader)
            for leaf, group in enumerate(self.cotangents)
            for reader, own in group
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
