"""Random programs of tensor operations, and what autograd makes of them.

    python -m tests.programs --count 1000 --seed 0
    python -m tests.programs --count 50 --compiled
    python -m tests.programs --count 300 --twice

Views, writes in place, calls within ``torch.no_grad()`` and whatever else makes a trace differ from
what it is a trace of, in any order. Each program runs plainly under autograd, as one function with
cuts and as stages; the first whose gradients differ is printed, with the seed that draws it again.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fpipe
from tests.laid_out import laid_out

ROWS = (2, 1)
"""Of the two microbatches."""

PARAMS = 4
INPUTS = 7
"""The first values of a program: parameters, and the leaves of a microbatch."""

MOST = 200
"""Elements of a value."""


class Steeper(torch.autograd.Function):
    """Doubled, with another derivative, of which only its backward knows."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return cotangent * 3


class Sine(torch.autograd.Function):
    """A forward that takes ctx, and a derivative in a direction."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return cotangent * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx: Any, direction: Tensor) -> Any:
        return direction * ctx.saved_tensors[0].cos()


class Kept(torch.autograd.Function):
    """A forward that takes ctx, with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = 3.0
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return cotangent * ctx.saved_tensors[0].cos() * ctx.scale


def hooked(x: Tensor) -> Tensor:
    """A value whose gradient is clamped."""
    y = x * 1
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
    return y


def numbered(x: Tensor, other: Tensor) -> Tensor:
    """Numbers of elements along the last dimension of `x`, in the shape of `other`."""
    return other.detach().abs().long() % x.shape[-1]


def assign_column(x: Tensor, other: Tensor) -> None:
    x[..., :1] = other[..., :1]


def assign_row(x: Tensor, other: Tensor) -> None:
    x[0] = other.clone().reshape(-1)[0]


def assign_where(x: Tensor, other: Tensor) -> None:
    x[x > 0] = other.reshape(-1)[0].clone()


def write_to_a_view_of_a_view(x: Tensor, other: Tensor) -> None:
    x.unsqueeze(0)[..., :2].mul_(2).add_(other.sum())


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "square": torch.square,
    "relu": torch.relu,
    "softmax": lambda x: x.softmax(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "sort": lambda x: x.sort(-1).values,
    "max": lambda x: x.max(-1).values,
    "sum": lambda x: x.sum(-1),
    "mean": torch.mean,
    "norm": lambda x: x.norm(dim=-1, keepdim=True),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "clone": torch.clone,
    "zeros": torch.zeros_like,
    "detach": torch.detach,
    "transpose": lambda x: x.transpose(0, -1),
    "columns": lambda x: x[..., :2],
    "rows": lambda x: x[1:],
    "select": lambda x: x.select(-1, 0),
    "last": lambda x: x.unbind(0)[-1],
    "chunk": lambda x: x.chunk(2, -1)[-1],
    "diagonal": lambda x: x.diagonal(dim1=0, dim2=-1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": torch.squeeze,
    "flat": lambda x: x.reshape(-1),
    "expand": lambda x: x.expand(2, *x.shape),
    "unfold": lambda x: x.unfold(-1, 2, 1),
    "contiguous": lambda x: x.contiguous(),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x * 2)),
    "spectrum": lambda x: torch.fft.rfft(x).abs(),
    "steeper": Steeper.apply,
    "sine": Sine.apply,
    "kept": Kept.apply,
    "hooked": hooked,
    "checkpoint": lambda x: checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False),
    "reentrant": lambda x: checkpoint(lambda y: y.tanh() * y, x, use_reentrant=True),
}
"""From one value to another, some of them views of it."""

PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + 1),
    "matmul": torch.matmul,
    "where": lambda x, y: torch.where(x > y, x, y),
    "cat": lambda x, y: torch.cat([x, y], -1),
    "stack": lambda x, y: torch.stack([x, y]),
    "expand_as": lambda x, y: x.expand_as(y),
    "type_as": lambda x, y: x.type_as(y),
    "einsum": lambda x, y: torch.einsum("...i,...i->...", x, y),
    "gather": lambda x, y: x.gather(-1, numbered(x, y)),
    "scatter_add": lambda x, y: x.scatter_add(-1, numbered(x, y), y),
    "index": lambda x, y: x[..., numbered(x, y).reshape(-1)[:2]],
    "attention": lambda x, y: F.scaled_dot_product_attention(x, y, y),
    "cosine": lambda x, y: F.cosine_similarity(x, y, -1),
    "distance": torch.cdist,
}

WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda x, y: x.add_(y),
    "mul_": lambda x, y: x.mul_(y),
    "copy_": lambda x, y: x.copy_(y),
    "clamp_": lambda x, _: x.clamp_(-0.4, 0.6),
    "tanh_": lambda x, _: x.tanh_(),
    "zero_": lambda x, _: x.zero_(),
    "relu_": lambda x, _: torch.relu_(x),
    "detach_": lambda x, _: x.detach_(),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 0.2),
    "index_put_": lambda x, y: x.index_put_((torch.tensor([0]),), y[:1], accumulate=True),
    "data": lambda x, _: x.data.clamp_(-0.3, 0.7),
    "fill_diagonal_": lambda x, _: x.fill_diagonal_(0.1),
    "column": assign_column,
    "row": assign_row,
    "where": assign_where,
    "view of a view": write_to_a_view_of_a_view,
}
"""They write to the first value, which is then another."""

KINDS: tuple[dict[str, Callable[..., Any]], ...] = (VALUES, PAIRS, WRITES)


class Call(NamedTuple):
    """An operation on values, by their numbers.

    Attributes:
        kind: index in `KINDS`.
        name: of the operation.
        arguments: numbers of values.
        graded: it runs with gradients enabled.
    """

    kind: int
    name: str
    arguments: tuple[int, ...]
    graded: bool

    def __str__(self) -> str:
        arguments = ", ".join(f"v{number}" for number in self.arguments)
        return f"{self.name}({arguments}){'' if self.graded else ' within no_grad'}"

    def run(self, values: list[Any]) -> None:
        """Call it; what it returns is the next value."""
        with torch.set_grad_enabled(self.graded):
            made = KINDS[self.kind][self.name](*(values[number] for number in self.arguments))
        if self.kind < 2:
            values.append(made)


@dataclass(frozen=True)
class Program:
    """Calls one after the other.

    Attributes:
        parts: the calls of each stage.
        results: numbers of values, and how much each counts in the loss.
    """

    parts: tuple[tuple[Call, ...], ...]
    results: tuple[tuple[int, float], ...]

    def __str__(self) -> str:
        lines, number = [], INPUTS
        for part in self.parts:
            for call in part:
                lines.append(f"v{number} = {call}" if call.kind < 2 else str(call))
                number += call.kind < 2
            lines.append("cut")
        return "\n".join([*lines[:-1], f"results {self.results}"])

    def __call__(self, params: Sequence[Tensor], batch: Sequence[Tensor]) -> Tensor:
        """The loss, as one function; what is cut is the last value."""
        values = [*params, *batch]
        for number, part in enumerate(self.parts):
            if number:
                values[-1] = fpipe.cut(values[-1])
            for call in part:
                call.run(values)
        return self.loss(values)

    def loss(self, values: Sequence[Any]) -> Tensor:
        """The loss of all values."""
        return torch.stack([values[n].sum() * factor for n, factor in self.results]).sum()

    def stage_loss(self, y: Sequence[Any], batch: Any = None) -> Tensor:
        """The loss of what the last stage returns."""
        return self.loss([*(None for _ in range(PARAMS)), *y])

    def stages(self) -> list[Callable[[Any, Any], Any]]:
        """The parts as stages: from values to those of them, and of its own, that are read later.

        What they take and return has a place for each value but the parameters, which come apart.
        """
        read = {number for number, _ in self.results}
        made: list[Callable[[Any, Any], Any]] = []
        for part in reversed(self.parts):
            made.append(_stage(part, frozenset(read)))
            read |= {number for call in part for number in call.arguments}
        return made[::-1]


def _stage(part: Sequence[Call], returned: frozenset[int]) -> Callable[[Any, Any], Any]:
    def stage(params: Sequence[Tensor], x: Sequence[Any]) -> Any:
        # It may write to copies alone.
        values = [*params, *(v if v is None else v.clone() for v in x)]
        for call in part:
            call.run(values)
        kept = (v if number in returned else None for number, v in enumerate(values))
        return tuple(kept)[PARAMS:]

    return stage


# ── drawing them ────────────────────────────────────────────────────────────────────────────────


def inputs(rows: int) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and a batch."""
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    batch = [normal(rows, 4), normal(rows, 4), normal(rows, 4).round()]
    generator.manual_seed(0)
    return [normal(4, 4), normal(4), normal(4, 4), normal()], batch


def draw(seed: int) -> Program:
    """The program of this number; it runs under autograd."""
    source = random.Random(seed)
    count, cuts = source.randrange(6, 20), source.randrange(1, 4)
    calls: list[Call] = []
    values = _run(calls)
    for _ in range(30 * count):
        if len(calls) == count:
            break
        call = _drawn(source, len(values[0]))
        # Nothing may write to the inputs, or to what looks at their memory.
        memory = [{v.untyped_storage().data_ptr() for v in own[:INPUTS]} for own in values]
        written = [own[call.arguments[0]].untyped_storage().data_ptr() for own in values]
        if call.kind == 2 and any(map(lambda m, w: w in m, memory, written)):
            continue
        with suppress(RuntimeError, IndexError, TypeError):
            made = _run([*calls, call])
            if all(map(_is_tame, (v for own in made for v in own))):
                calls, values = [*calls, call], made
    ends = [0, *sorted(source.sample(range(1, len(calls)), cuts)), len(calls)]
    last = len(values[0]) - 1
    chosen = {last, source.randrange(PARAMS, last + 1), source.randrange(PARAMS, last + 1)}
    return Program(
        tuple(tuple(calls[start:end]) for start, end in pairwise(ends)),
        tuple((number, round(source.uniform(-1, 1), 2)) for number in sorted(chosen)),
    )


def _drawn(source: random.Random, count: int) -> Call:
    (kind,) = source.choices(range(3), [4, 5, 3])

    def number() -> int:
        recent = source.random() < 0.6
        return source.randrange(max(0, count - 6) if recent else 0, count)

    arguments = (number(),) if kind == 0 else (number(), number())
    return Call(kind, source.choice(list(KINDS[kind])), arguments, source.random() > 0.08)


def _run(calls: Sequence[Call]) -> list[list[Any]]:
    """All values, for microbatches of each size."""
    found = []
    for rows in ROWS:
        params, batch = inputs(rows)
        values: list[Any] = [*(leaf.requires_grad_() for leaf in params), *batch]
        for call in calls:
            call.run(values)
        found.append(values)
    return found


def _is_tame(value: Tensor) -> bool:
    numbers = value.detach()
    return 0 < value.numel() <= MOST and bool(
        numbers.isfinite().all() and numbers.abs().max() < 1e3
    )


# ── what they come to ───────────────────────────────────────────────────────────────────────────

Found = tuple[Tensor, list[Tensor]]
"""The loss and the gradient by each parameter, of all stages one after the other."""


def plainly(program: Program, *, stages: bool) -> Found | None:
    """By autograd alone; None if a backward is refused, or what comes of it is not finite."""
    params, batch = inputs(sum(ROWS))
    parts = len(program.parts) if stages else 1
    own = [[leaf.clone().requires_grad_() for leaf in params] for _ in range(parts)]
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in zip(*(leaf.split(ROWS) for leaf in batch), strict=True):
        x: Any = [leaf.clone() for leaf in microbatch]
        try:
            if stages:
                for stage, leaves in zip(program.stages(), own, strict=True):
                    x = stage(leaves, x)
            loss = program.stage_loss(x) if stages else program(own[0], x)
        except RuntimeError:  # autograd refuses to follow what it has written to
            return None
        total = total + loss * (len(microbatch[0]) / sum(ROWS))
    flat = [leaf for part in own for leaf in part]
    grads: Sequence[Tensor | None] = [None] * len(flat)
    if total.requires_grad:
        try:
            grads = torch.autograd.grad(total, flat, allow_unused=True)
        except RuntimeError:  # it writes to what a backward needs
            return None
    whole = [torch.zeros_like(v) if g is None else g for g, v in zip(grads, flat, strict=True)]
    return (total.detach(), whole) if all(map(_is_tame, whole)) else None


def plainly_twice(
    program: Program, vectors: Sequence[Tensor], *, stages: bool
) -> list[Tensor] | None:
    """The product of the second derivative and `vectors`, by autograd alone."""
    params, batch = inputs(sum(ROWS))
    parts = len(program.parts) if stages else 1
    own = [[leaf.clone().requires_grad_() for leaf in params] for _ in range(parts)]
    flat = [leaf for part in own for leaf in part]
    total = [torch.zeros_like(leaf) for leaf in flat]
    for microbatch in zip(*(leaf.split(ROWS) for leaf in batch), strict=True):
        x: Any = [leaf.clone() for leaf in microbatch]
        try:
            if stages:
                for stage, leaves in zip(program.stages(), own, strict=True):
                    x = stage(leaves, x)
            loss = program.stage_loss(x) if stages else program(own[0], x)
            grads = torch.autograd.grad(loss, flat, create_graph=True, allow_unused=True)
            pairs = [(g, v) for g, v in zip(grads, vectors, strict=True) if g is not None]
            slope = torch.stack([(g * v).sum() for g, v in pairs]).sum()
            found = torch.autograd.grad(slope, flat, allow_unused=True)
        except RuntimeError:  # autograd refuses to follow, or there is no second derivative
            return None
        weight = len(microbatch[0]) / sum(ROWS)
        total = [t if f is None else t + f * weight for t, f in zip(total, found, strict=True)]
    return total if all(map(_is_tame, total)) else None


def check_twice(program: Program, *, stages: bool) -> str:
    """Compare second derivatives: forward over reverse with autograd differentiated twice.

    Raises:
        AssertionError: they differ.
    """
    params, batch = inputs(sum(ROWS))
    parts = len(program.parts) if stages else 1
    generator = torch.Generator().manual_seed(1)
    vectors = [
        torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator)
        for _ in range(parts)
        for leaf in params
    ]
    expected = plainly_twice(program, vectors, stages=stages)
    if expected is None:
        return "no gradient"
    schedule = fpipe.schedules.gpipe(ranks=len(program.parts), microbatches=len(ROWS))
    try:
        if not stages:
            pipe = fpipe.pipeline(program, schedule=schedule, compile=False)
            found = list(fpipe.hvp(pipe).step(params, batch, vectors).hvp)
        else:
            pipe = fpipe.pipeline(program.stages(), program.stage_loss, schedule, compile=False)
            along = [vectors[n : n + PARAMS] for n in range(0, len(vectors), PARAMS)]
            step = fpipe.hvp(pipe).step([params] * parts, batch, along)
            found = [leaf for part in step.hvp for leaf in part]
    except fpipe.StageError:
        return "refused"
    torch.testing.assert_close(found, expected)
    return "equal"


def by_pipeline(program: Program, *, stages: bool, **options: Any) -> Found:
    """By a pipeline, of stages or of one function with cuts."""
    params, batch = inputs(sum(ROWS))
    schedule = fpipe.schedules.zb_h1(ranks=len(program.parts), microbatches=len(ROWS))
    options = {"compile": laid_out} | options
    if not stages:
        loss, grads = fpipe.pipeline(program, schedule=schedule, **options).step(params, batch)
        return loss, list(grads)
    pipe = fpipe.pipeline(program.stages(), program.stage_loss, schedule, **options)
    loss, grads = pipe.step([params] * len(program.parts), batch)
    return loss, [leaf for part in grads for leaf in part]


def check_program(program: Program, *, stages: bool, **options: Any) -> str:
    """Compare the two; returns what became of it.

    Raises:
        AssertionError: they differ.
    """
    expected = plainly(program, stages=stages)
    if expected is None:
        return "no gradient"
    try:
        found = by_pipeline(program, stages=stages, **options)
    except fpipe.StageError:
        return "refused"
    torch.testing.assert_close(found, expected)
    return "equal"


def main() -> None:
    """Check programs until one differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--twice", action="store_true", help="second derivatives")
    parser.add_argument("--compiled", action="store_true", help="by Inductor: seconds a program")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("fpipe").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    compiled = {"compile": True} if options.compiled else {}
    for seed in range(options.seed, options.seed + options.count):
        program = draw(seed)
        for stages in (False, True):
            try:
                if options.twice:
                    outcomes[check_twice(program, stages=stages)] += 1
                else:
                    outcomes[check_program(program, stages=stages, **compiled)] += 1
            except Exception as error:
                kind = "stages" if stages else "one function"
                sys.exit(f"seed {seed}, {kind}:\n{program}\n{type(error).__name__}: {error}")
    print(", ".join(f"{outcome}: {number}" for outcome, number in sorted(outcomes.items())))


if __name__ == "__main__":
    main()
