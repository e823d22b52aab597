"""Parameters made leaf by leaf from a key: in one process all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe import pytree, random
from fpipe.parameters.holding import key_of, names_of
from tests import cut_model

SCHEDULE = fpipe.schedules.one_f_one_b(ranks=2, microbatches=2)


def normal(key: Tensor, name: str, like: Tensor) -> Tensor:
    """Numbers of a key, or ones where there is nothing to draw."""
    if not like.is_floating_point():
        return torch.ones(like.shape, dtype=like.dtype)
    return random.normal(key, like.shape, like.dtype)


def stages() -> fpipe.Pipeline:
    def stage(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.tanh(x @ params["w"] + params["b"])

    return fpipe.pipeline([stage, stage], lambda y, _: y.square().mean(), SCHEDULE, compile=False)


def shapes_of_stages() -> list[dict[str, Tensor]]:
    return [
        {"w": torch.empty(3, 3, device="meta"), "b": torch.empty(3, device="meta")}
        for _ in range(2)
    ]


def test_leaf_depends_on_key_and_name_alone() -> None:
    pipe, key = stages(), random.key(5)
    called: list[tuple[str, Tensor]] = []

    def init_fn(key: Tensor, name: str, like: Tensor) -> Tensor:
        called.append((name, like))
        return normal(key, name, like)

    params = pipe.init(init_fn, key, shapes=shapes_of_stages())
    assert [name for name, _ in called] == ["0.b", "0.w", "1.b", "1.w"]
    assert all(like.is_meta for _, like in called)
    assert torch.equal(params[1]["w"], random.normal(key_of(key, "1.w"), (3, 3)))
    assert not torch.equal(params[0]["w"], params[1]["w"])
    again = pipe.init(init_fn, key, shapes=pytree.tree_map(torch.zeros_like, params))
    other = pipe.init(init_fn, random.key(6), shapes=params)
    assert torch.equal(again[0]["b"], params[0]["b"])
    assert not torch.equal(other[0]["b"], params[0]["b"])
    assert pipe.step(params, torch.ones(4, 3)).grads[1]["w"].shape == (3, 3)


def test_many_names_have_keys_of_their_own() -> None:
    """Of 49152 experts two had one key while the keys were folded in by 32 bits of a digest."""
    first, second = "layers.33.experts.217.w3", "layers.58.experts.93.w1"
    assert not torch.equal(key_of(random.key(0), first), key_of(random.key(0), second))


def test_one_function_and_its_whole_tree() -> None:
    schedule = fpipe.schedules.one_f_one_b(ranks=4, microbatches=4)
    pipe = fpipe.pipeline(
        cut_model.language_model, schedule=schedule, in_dims=cut_model.IN_DIMS, compile=False
    )
    shapes = pytree.tree_map(lambda leaf: leaf.to("meta"), cut_model.make_params())
    params = pipe.init(normal, random.key(0), shapes=shapes)
    assert pytree.structure(params) == pytree.structure(shapes)
    assert params["blocks"][2]["qkv"].dtype == torch.float64 and params["count"] == 1
    names = names_of(pytree.structure(shapes))
    assert names[:2] == ["blocks.0.qkv", "blocks.0.scale"] and names[-1] == "unused"
    assert pipe.value(params, cut_model.make_batch()).isfinite()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (torch.ones(3), r"init_fn made float32\[3\] on cpu of '0.w', which is float32\[3, 3\]"),
        (torch.ones(3, 3).double(), r"made float64\[3, 3\] on cpu of '0.w'.*shape and dtype"),
        (torch.ones(3, 3, device="meta"), r"made float32\[3, 3\] on meta of '0.w'.*with data"),
        (1.0, r"init_fn made a float of '0.w'"),
    ],
)
def test_wrong_leaf_is_refused_by_name(made: Any, message: str) -> None:
    def init_fn(key: Tensor, name: str, like: Tensor) -> Tensor:
        wrong: Tensor = made
        return wrong if name == "0.w" else normal(key, name, like)

    with pytest.raises(fpipe.BatchError, match=message):
        stages().init(init_fn, random.key(0), shapes=shapes_of_stages())


def test_wrong_arguments_are_refused() -> None:
    pipe = stages()
    with pytest.raises(fpipe.FpipeError, match=r"key"):
        pipe.init(normal, torch.zeros(3), shapes=shapes_of_stages())
    with pytest.raises(fpipe.StageError, match=r"shapes is missing: pass parameters as for step"):
        pipe.init(normal, random.key(0))
    with pytest.raises(fpipe.BatchError, match=r"shapes\[0\]=3 is an int.*device\('meta'\)"):
        pipe.init(normal, random.key(0), shapes=[3, None])
    twice = [{"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, None]
    with pytest.raises(fpipe.BatchError, match=r"two leaves whose paths read '0.a.b'"):
        pipe.init(normal, random.key(0), shapes=twice)
