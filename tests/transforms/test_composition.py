"""Transforms of transforms: each works, or is refused by name with the way round.

What the whole must return is said once, for any chain: an ensemble and rows stack what each member
and each row gives alone, and at the bottom stand the derivatives that torch.func takes of the
unpipelined function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp

import fpipe
from fpipe import StageError, pytree, schedules
from tests.models import Model, apply, assert_same, mlp, unpipelined
from tests.transforms.helpers import member

MEMBERS = 2
MODEL = mlp(2, 4)
# Microbatches of two sizes, which takes twice as long to trace, for one chain of each kind.
UNEVEN = mlp(2, 3)
PIPE = fpipe.pipeline(
    MODEL.stages, MODEL.loss, schedules.zb_h1(ranks=2, microbatches=2), compile=False
)
DERIVATIVES = ("hvp", "ggnvp")

BY_NAME: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda pipe: fpipe.vmap(pipe, (0, None, 0)[: 2 + vectors_of(pipe)]),
    "hvp": fpipe.hvp,
    "ggnvp": fpipe.ggnvp,
    "per_example_grads": fpipe.per_example_grads,
    "per_example_norms": fpipe.per_example_norms,
    "grad": lambda pipe: fpipe.grad(pipe, ("params", "batch")),
}


def vectors_of(pipe: Any) -> int:
    return len(pipe._engine.definition.convention.vectors)


def composed(chain: Sequence[str]) -> Any:
    """The transforms of `chain`, the first one outermost."""
    pipe: Any = PIPE
    for name in reversed(chain):
        pipe = BY_NAME[name](pipe)
    return pipe


def expected_of_chain(chain: Sequence[str], model: Model, vector: Any) -> Any:
    """The results that ``composed(chain).step`` must return."""
    if not chain:
        return tuple(unpipelined(*model))
    name, *rest = chain
    if name in DERIVATIVES:
        # The transform of several losses is that of each loss, so it may as well be taken last.
        return (
            expected_of_chain([*rest, name], model, vector)
            if rest
            else derivative(name, model, vector)
        )
    if name == "vmap":
        alone = [
            expected_of_chain(
                rest, model._replace(params=member(model.params, n)), member(vector, n)
            )
            for n in range(MEMBERS)
        ]
    else:
        rows = [
            pytree.tree_map(lambda v, k=n: v[k : k + 1], model.batch)
            for n in range(len(model.batch["x"]))
        ]
        alone = [expected_of_chain(rest, model._replace(batch=own), vector) for own in rows]
    return pytree.tree_map(together, *alone)


def together(*leaves: Tensor) -> Tensor:
    return torch.stack(leaves)


def derivative(name: str, model: Model, vector: Any) -> Any:
    leaves, spec = pytree.flatten(model.params)
    direction = pytree.flatten(vector)[0]

    def output(own: Sequence[Tensor]) -> Tensor:
        y: Tensor = apply(model.stages, pytree.unflatten(spec, own), model.batch)
        return y

    def of_output(y: Tensor) -> Tensor:
        return model.loss(y, model.batch)

    def whole(own: Sequence[Tensor]) -> Tensor:
        return of_output(output(own))

    if name == "hvp":
        found: Any = jvp(grad(whole), (leaves,), (direction,))
        product = found[1]
    else:
        pushed: Any = jvp(output, (leaves,), (direction,))
        bent: Any = jvp(grad(of_output), pushed[:1], pushed[1:])
        (product,) = vjp(output, leaves)[1](bent[1])
    return (*unpipelined(*model), pytree.unflatten(spec, product))


def nested_ensemble(value: Any, levels: int) -> Any:
    """Different members at each of several levels, along the first dimensions."""
    for level in range(levels):
        factors = [1 + 0.1 * (number + level) for number in range(MEMBERS)]
        value = pytree.tree_map(partial(copies, factors), value)
    return value


def copies(factors: Sequence[float], leaf: Tensor) -> Tensor:
    return torch.stack([leaf * factor for factor in factors])


ALSO_UNEVEN = {
    ("vmap", "ggnvp"),
    ("per_example_grads", "ggnvp"),
    ("hvp", "vmap"),
    ("hvp", "per_example_grads"),
    ("vmap", "per_example_grads", "vmap"),
}


@pytest.mark.parametrize(
    "chain",
    [
        ("vmap", "ggnvp"),
        ("per_example_grads", "ggnvp"),
        ("hvp", "vmap"),
        ("hvp", "per_example_grads"),
        ("vmap", "vmap", "hvp"),
        ("vmap", "hvp", "vmap"),
        ("hvp", "vmap", "vmap"),
        ("vmap", "per_example_grads", "hvp"),
        ("per_example_grads", "vmap", "hvp"),
        ("per_example_grads", "hvp", "vmap"),
        ("hvp", "per_example_grads", "vmap"),
        ("hvp", "vmap", "per_example_grads"),
        ("vmap", "per_example_grads", "ggnvp"),
        ("per_example_grads", "vmap", "ggnvp"),
        ("per_example_grads", "vmap", "vmap"),
        ("vmap", "per_example_grads", "vmap"),
    ],
    ids=" of ".join,
)
def test_chain_equals_its_transforms_one_by_one(chain: tuple[str, ...]) -> None:
    pipe = composed(chain)
    model = UNEVEN if chain in ALSO_UNEVEN else MODEL
    levels = chain.count("vmap")
    params = nested_ensemble(model.params, levels)
    vector = nested_ensemble(pytree.tree_map(torch.cos, model.params), levels)
    ours = pipe.step(params, model.batch, *[vector][: vectors_of(pipe)])
    theirs = expected_of_chain(chain, model._replace(params=params), vector)
    assert_same(tuple(ours), tuple(theirs), 1e-9)


# ── refusals, when the pipeline is made ─────────────────────────────────────────────────────────

REFUSED = {
    ("vmap", "per_example_norms"): r"as in fpipe\.per_example_norms\(fpipe\.vmap\(pipe\)\)",
    ("vmap", "grad"): r"choose .* last, as in fpipe\.grad\(fpipe\.vmap\(pipe\), argnums\)",
    ("hvp", "hvp"): r"a third derivative: take one .*, and fpipe\.vmap it for several",
    ("hvp", "ggnvp"): r"a third derivative: take one",
    ("ggnvp", "hvp"): r"a third derivative: take one",
    ("hvp", "per_example_norms"): r"fpipe\.hvp of a pipeline that returns norms",
    ("ggnvp", "grad"): r"whose argnums are .*fpipe\.hvp\(fpipe\.grad",
    ("ggnvp", "vmap"): r"as in fpipe\.vmap\(fpipe\.ggnvp\(pipe\)\)",
    ("ggnvp", "per_example_grads"): r"as in fpipe\.per_example_grads\(fpipe\.ggnvp\(pipe\)\)",
    ("per_example_grads", "per_example_grads"): "by rows already: apply it once",
    ("per_example_grads", "per_example_norms"): "by rows already: apply it once",
    ("per_example_norms", "per_example_grads"): "by rows already: apply it once",
    ("per_example_grads", "grad"): r"whose argnums are .*has the gradient by a row",
    ("per_example_norms", "hvp"): r"take fpipe\.per_example_grads of it",
    ("per_example_norms", "ggnvp"): r"take fpipe\.per_example_grads of it",
    ("grad", "hvp"): "takes a vector or goes by rows is not defined",
    ("grad", "per_example_grads"): "takes a vector or goes by rows is not defined",
    ("grad", "per_example_norms"): "takes a vector or goes by rows is not defined",
}


@pytest.mark.parametrize("chain", REFUSED, ids=" of ".join)
def test_chain_without_a_meaning_is_refused_when_made(chain: tuple[str, str]) -> None:
    inner = composed(chain[1:])
    with pytest.raises(StageError, match=REFUSED[chain]):
        BY_NAME[chain[0]](inner)
