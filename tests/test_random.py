"""Keys: known answers, the same bits everywhere, and numbers that look random."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fpipe import FpipeError, random
from fpipe.functional.dual import load_rules
from fpipe.graph.inlining import with_draws_written_out
from fpipe.random.normal_quantile import normal_quantile
from fpipe.random.threefry import threefry2x32, written_out

KEY = random.key(0)
ONES = 0xFFFFFFFF
WHOLE = torch.ops.fpipe.threefry2x32.default

# From kat_vectors of Random123, threefry2x32 with 20 rounds: counter, key, result.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((ONES, ONES), (ONES, ONES), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


# ── known answers ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_published_answers(
    counter: tuple[int, int], key: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert threefry2x32(key, counter) == expected
    tensors = threefry2x32(
        (torch.tensor(key[0]), torch.tensor(key[1])),
        (torch.tensor(counter[0]), torch.tensor(counter[1])),
    )
    assert tuple(word.item() for word in tensors) == expected


def test_keys_and_bits_are_those_of_jax() -> None:
    """What jax.random gives with jax_threefry_partitionable."""
    assert random.split(random.key(0), 3).tolist() == [
        [1797259609, 2579123966],
        [928981903, 3453687069],
        [4146024105, 2718843009],
    ]
    assert random.split(random.key(1)).tolist() == [
        [507451445, 1853169794],
        [1948878966, 4237131848],
    ]
    first, second = random.uniform(random.key(0), (2,)).tolist()
    assert (first, second) == pytest.approx((0.9476670027, 0.9785798788), abs=1e-7)


def test_key_holds_64_bits() -> None:
    assert random.key(0x0123456789ABCDEF).tolist() == [0x01234567, 0x89ABCDEF]
    assert random.key(-1).tolist() == [ONES, ONES]
    assert random.key(ONES << 32).tolist() == [ONES, 0]


def test_split_is_fold_in_of_many() -> None:
    key = random.key(5)
    keys = random.split(key, 4)
    assert all(torch.equal(random.fold_in(key, i), keys[i]) for i in range(4))
    nested = random.split(keys, 3)
    assert nested.shape == (4, 3, 2)
    assert torch.equal(nested[2], random.split(keys[2], 3))
    assert torch.equal(random.fold_in(keys, torch.arange(4))[3], random.fold_in(keys[3], 3))
    wide = random.fold_in(key, 1 << 32)
    assert not torch.equal(wide, random.fold_in(key, 0))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint32]
)
def test_fold_in_takes_integers_of_any_width(dtype: torch.dtype) -> None:
    """Those of a tensor with dimensions made the words of the key as narrow as they are."""
    numbers = torch.tensor([0, 1, 77, 255], dtype=torch.int64).to(dtype)
    expected = random.fold_in(KEY, numbers.to(torch.int64))
    assert random.fold_in(KEY, numbers).equal(expected)
    one_by_one = torch.stack([random.fold_in(KEY, number) for number in numbers])
    assert one_by_one.equal(expected)
    if dtype is not torch.uint32:  # vmap has no rule for it
        mapped = torch.vmap(random.fold_in, in_dims=(None, 0))(KEY, numbers)
        assert mapped.equal(expected)


# ── the same everywhere ─────────────────────────────────────────────────────────────────────────

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "bits": lambda key: random.bits(key, (3, 5)),
    "split": lambda key: random.split(key, 3),
    "uniform": lambda key: random.uniform(key, (7,)),
    "uniform64": lambda key: random.uniform(key, (7,), torch.float64),
    "normal": lambda key: random.normal(key, (7,)),
    "normal64": lambda key: random.normal(key, (70,), torch.float64),
    "bernoulli": lambda key: random.bernoulli(key, 0.3, (40,)),
    "bernoulli_tensor": lambda key: random.bernoulli(
        key, torch.tensor([[0.0], [0.5]], device=key.device), (2, 9)
    ),
    "randint": lambda key: random.randint(key, -3, 1 << 40, (7,)),
    "permutation": lambda key: random.permutation(key, 20),
    "categorical": lambda key: random.categorical(
        key, torch.linspace(-1, 1, 24, device=key.device).view(6, 4)
    ),
    "dropout": lambda key: random.dropout(key, torch.linspace(-1, 1, 12, device=key.device), 0.4),
}


@pytest.mark.parametrize("name", DRAWS)
def test_under_vmap(name: str) -> None:
    draw, keys = DRAWS[name], random.split(random.key(1), 4)
    found = torch.vmap(draw)(keys)
    assert torch.equal(found, torch.stack([draw(key) for key in keys]))


@pytest.mark.parametrize("name", DRAWS)
def test_under_vmap_of_vmap(name: str) -> None:
    draw, keys = DRAWS[name], random.split(random.key(1), 6).view(2, 3, 2)
    expected = torch.stack([torch.stack([draw(key) for key in row]) for row in keys])
    mapped = torch.vmap(torch.vmap(draw, in_dims=1), in_dims=2)(keys.permute(2, 1, 0))
    assert torch.equal(mapped, expected)


@pytest.mark.parametrize("name", DRAWS)
def test_within_a_derivative(name: str) -> None:
    def product(x: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        drawn = DRAWS[name](key).detach()
        return x * drawn.double().sum(), drawn

    key, one = random.key(1), torch.ones((), dtype=torch.float64)
    slope, drawn = torch.func.grad(product, has_aux=True)(one, key)
    assert torch.equal(drawn, DRAWS[name](key))
    assert torch.equal(slope, drawn.double().sum())
    load_rules()
    assert torch.equal(torch.func.jvp(lambda x: product(x, key)[0], (one,), (one,))[1], slope)


@pytest.mark.parametrize(
    "shapes",
    [
        ((), (), (5,), (5,)),
        ((), (3, 1), (5,), ()),
        ((2,), (2,), (), ()),
        ((0,), (), (1,), ()),
        ((), (), (300, 300), (300, 300)),
        ((300, 1), (), (300,), (300, 300)),
        ((70_000,), (70_000,), (), ()),
    ],
)
def test_the_operation_gives_what_its_parts_give(shapes: Sequence[Sequence[int]]) -> None:
    words = [
        random.bits(key, shape)
        for key, shape in zip(random.split(random.key(19), 4), shapes, strict=True)
    ]
    before = [word.clone() for word in words]
    found, expected = WHOLE(*words), written_out(*words)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs) and ours.is_contiguous()
    assert all(map(torch.equal, words, before))
    assert found[0].untyped_storage()._cdata != found[1].untyped_storage()._cdata


def test_export_leaves_no_operation_of_fpipe() -> None:
    """But for the quantile, which a compiler is not to look into."""

    class Draws(torch.nn.Module):
        def forward(self, key: Tensor) -> list[Tensor]:
            return [DRAWS[name](key) for name in ("bits", "dropout", "normal")]

    for strict in (False, True):
        program = torch.export.export(Draws(), (random.key(1),), strict=strict)
        left = [str(n.target) for n in program.graph.nodes if "fpipe" in str(n.target)]
        assert left == ["fpipe.normal_quantile.default"]
        drawn = program.module()(random.key(2))
        assert all(map(torch.equal, drawn, Draws()(random.key(2))))


def test_a_trace_records_it_as_one_operation() -> None:
    graph = make_fx(DRAWS["dropout"], tracing_mode="fake")(random.key(1)).graph
    assert len(graph.find_nodes(op="call_function", target=WHOLE)) == 1
    assert len(graph.nodes) < 30
    plain = with_draws_written_out(graph)
    plain.lint()
    assert not plain.find_nodes(op="call_function", target=WHOLE)
    assert len(plain.nodes) > 100 and with_draws_written_out(plain) is plain
    written: Any = fx.GraphModule({}, plain)
    assert torch.equal(written(random.key(2)), DRAWS["dropout"](random.key(2)))


@pytest.mark.inductor
def test_compiled() -> None:
    def some(key: Tensor) -> list[Tensor]:
        # Normal numbers and dropout are compiled in modules/test_keys.py.
        names = ("uniform64", "randint", "permutation", "categorical")
        return [DRAWS[name](key) for name in names]

    key = random.key(2)
    compiled: Any = torch.compile(some)
    start = time.process_time()
    found = compiled(key)
    # Inductor wrote every word out at each of its uses, which took half a minute for each draw.
    assert time.process_time() - start < 60
    assert all(torch.equal(a, b) for a, b in zip(found, some(key), strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("name", DRAWS)
def test_on_cuda(name: str) -> None:
    key, draw = random.key(3), DRAWS[name]
    found = draw(key.cuda())
    assert found.is_cuda
    assert torch.equal(found.cpu(), draw(key))


@pytest.mark.cuda
@pytest.mark.real_device
@pytest.mark.parametrize("name", DRAWS)
def test_compiled_on_cuda(name: str) -> None:
    key, draw = random.key(3), DRAWS[name]
    compiled: Any = torch.compile(draw)
    assert torch.equal(compiled(key.cuda()).cpu(), draw(key))


@pytest.mark.parametrize("digits", [2, 10, 32, 52])
def test_quantiles_of_the_normal_distribution(digits: int) -> None:
    """Beside those of Python, of another algorithm; at both ends and about the median."""
    generator = torch.Generator().manual_seed(digits)
    lengths = torch.randint(digits, (300,), generator=generator)
    drawn = torch.randint(1 << digits, (300,), generator=generator) >> lengths
    ends = torch.tensor([0, 1, (1 << digits - 1) - 1])
    low = torch.cat([ends, drawn.clamp_max((1 << digits - 1) - 1)])
    numbers = torch.stack([low, (1 << digits) - 1 - low])
    # Of the upper half by way of the lower: their middles are closer to 1 than to another double.
    expected = [NormalDist().inv_cdf((number + 0.5) * 2.0**-digits) for number in low.tolist()]
    below = torch.tensor(expected, dtype=torch.float64)
    for exact, tolerance in ((True, 2e-15), (False, 2e-10))[: 2 if digits < 39 else 1]:
        found = normal_quantile(numbers, digits, exact=exact)
        assert torch.equal(found[0], -found[1])
        torch.testing.assert_close(found[0], below, rtol=tolerance, atol=0)


def test_normal_quantile_knows_its_operations() -> None:
    """It is one operation, of which a trace, vmap and an empty tensor know the shape."""
    numbers = torch.arange(24).view(2, 3, 4)
    found = normal_quantile(numbers, 32, exact=True)
    graph = make_fx(lambda n: normal_quantile(n, 32, exact=True), tracing_mode="fake")(numbers)
    assert torch.equal(graph(numbers), found)
    mapped = torch.vmap(lambda n: normal_quantile(n, 32, exact=True), in_dims=1, out_dims=1)
    assert torch.equal(mapped(numbers), found)
    assert torch.equal(normal_quantile(numbers.mT, 32, exact=True), found.mT)
    assert normal_quantile(numbers[:, :0], 32, exact=True).shape == (2, 0, 4)
    many = torch.randint(1 << 32, (100_000,))
    parts = [normal_quantile(part, 32, exact=False) for part in many.split(999)]
    assert torch.equal(normal_quantile(many, 32, exact=False), torch.cat(parts))


def test_dropout_differentiates_as_its_mask() -> None:
    key, x = random.key(4), torch.linspace(-1, 1, 30, dtype=torch.float64)
    result: Any = torch.func.vjp(lambda v: random.dropout(key, v, 0.25), x)
    out, pullback = result
    mask = (out != 0).double() / 0.75
    assert 0 < int((mask == 0).sum()) < 30
    torch.testing.assert_close(out, x * mask)
    torch.testing.assert_close(pullback(torch.ones_like(x))[0], mask)
    load_rules()
    pushed: Any = torch.func.jvp(lambda v: random.dropout(key, v, 0.25), (x,), (2 * x,))
    _, tangent = pushed
    torch.testing.assert_close(tangent, 2 * x * mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dropout_takes_no_quotient(dtype: torch.dtype) -> None:
    """CUDA divides by a number in other bits: it multiplies by the reciprocal."""
    key, x = random.key(4), torch.linspace(-1, 1, 30).to(dtype)
    graph = make_fx(lambda key, x: random.dropout(key, x, 0.1), tracing_mode="fake")(key, x).graph
    assert not [node for node in graph.nodes if "div" in str(node.target)]
    out = random.dropout(key, x, 0.1)
    assert torch.equal(out[out != 0], (x * (1 / 0.9))[out != 0])


def test_numbers_of_numpy_are_folded_in() -> None:
    key = random.key(4)
    assert torch.equal(random.fold_in(key, np.array(5)), random.fold_in(key, 5))  # type: ignore[arg-type]


def test_an_element_depends_on_its_place_alone() -> None:
    key = random.key(6)
    assert torch.equal(random.bits(key, (3, 4)).flatten(), random.bits(key, (50,))[:12])


# ── numbers that look random ────────────────────────────────────────────────────────────────────


def test_bits_are_fair_and_change_with_every_bit_of_the_key() -> None:
    count = 4096
    words = random.bits(random.key(7), (count,))
    assert int(words.min()) >= 0 and int(words.max()) <= ONES
    share = torch.stack([(words >> bit & 1).double().mean() for bit in range(32)])
    assert float((share - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(count)
    for flipped in range(64):
        other = random.bits(random.key(7 ^ 1 << flipped), (256,))
        differing = torch.stack([((words[:256] ^ other) >> bit & 1) for bit in range(32)])
        assert abs(float(differing.double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(256 * 32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform(dtype: torch.dtype) -> None:
    u = random.uniform(random.key(8), (20_000,), dtype)
    assert u.dtype == dtype and float(u.min()) >= 0 and float(u.max()) < 1
    # Each of 16 classes holds its share: chi squared of 15 degrees, whose 99.99 % is 44.3.
    counts = torch.bincount((u.double() * 16).long(), minlength=16).double()
    assert float(((counts - 1250) ** 2 / 1250).sum()) < 44.3


def test_uniform_fills_the_last_digit() -> None:
    for dtype, digits in ((torch.float32, 24), (torch.float64, 53), (torch.bfloat16, 8)):
        scaled = random.uniform(random.key(9), (4000,), dtype).double() * 2.0**digits
        assert torch.equal(scaled, scaled.round())
        assert 0.45 < float((scaled % 2).mean()) < 0.55


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_follows_its_distribution(dtype: torch.dtype) -> None:
    count = 20_000
    z = random.normal(random.key(10), (count,), dtype).double().sort().values
    assert z.isfinite().all()
    below = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    # Kolmogorov and Smirnov: 2.2 is passed once in 10⁴ draws.
    assert float((below - places).abs().max()) * math.sqrt(count) < 2.2


def test_bernoulli_and_dropout_keep_their_share() -> None:
    count = 20_000
    kept = random.bernoulli(random.key(11), 0.3, (count,)).double().mean()
    assert abs(float(kept) - 0.3) < 5 * math.sqrt(0.21 / count)
    out = random.dropout(random.key(12), torch.ones(count), 0.9)
    assert abs(float(out.mean()) - 1) < 5 * 3 / math.sqrt(count)
    chances = torch.tensor([0.0, 0.5, 1.0])
    shares = random.bernoulli(random.key(13), chances, (count, 3)).double().mean(0)
    assert shares[0] == 0 and shares[2] == 1 and abs(float(shares[1]) - 0.5) < 0.02


def test_integers_are_equally_likely() -> None:
    count = 60_000
    drawn = random.randint(random.key(15), -2, 4, (count,))
    assert drawn.dtype == torch.int64
    shares = torch.bincount(drawn + 2, minlength=6).double() / count
    assert len(shares) == 6 and float((shares - 1 / 6).abs().max()) < 5 * math.sqrt(5 / 36 / count)
    wide = random.randint(random.key(16), -(1 << 63), -1, (1000,))
    assert wide.min() < -(1 << 62) - (1 << 61) and -(1 << 61) < wide.max() < -1
    assert random.randint(random.key(17), 7, 8, (3,), torch.int32).tolist() == [7, 7, 7]


def test_permutations_are_equally_likely() -> None:
    count = 12_000
    orders = torch.vmap(lambda key: random.permutation(key, 3))(random.split(KEY, count))
    shares = torch.unique(orders, dim=0, return_counts=True)[1].double() / count
    assert len(shares) == 6 and float((shares - 1 / 6).abs().max()) < 5 * math.sqrt(5 / 36 / count)
    assert random.permutation(KEY, 1000).sort().values.equal(torch.arange(1000))
    assert random.permutation(KEY, 0).shape == (0,)


def test_categorical_keeps_its_shares() -> None:
    count, chances = 100_000, torch.tensor([0.1, 0.2, 0.0, 0.7])
    drawn = random.categorical(random.key(18), (chances.log() + 5).expand(count, 4))
    shares = torch.bincount(drawn, minlength=4).double() / count
    assert shares[2] == 0 and float((shares - chances).abs().max()) < 5 * 0.5 / math.sqrt(count)
    assert random.categorical(KEY, torch.zeros(2, 3, 1)).equal(torch.zeros(2, 3, dtype=torch.int64))


def test_ends_of_the_range() -> None:
    x, key = torch.tensor([1.0, math.inf, math.nan]), random.key(0)
    for function in (F.dropout, lambda v, p: random.dropout(key, v, p)):
        assert torch.equal(function(x[:1], 0.0), x[:1])
        assert torch.equal(function(x[:1], 1.0), torch.zeros(1))
    assert torch.equal(random.dropout(key, x, 1.0), torch.zeros(3))
    assert random.bernoulli(key, 1.0, (100,)).all() and not random.bernoulli(key, 0.0, (100,)).any()


def test_keys_of_one_key_draw_apart() -> None:
    keys = random.split(random.key(14), 40)
    assert len({tuple(key) for key in keys.tolist()}) == 40
    drawn = torch.stack([random.uniform(key, (500,)) for key in keys]).double()
    correlations = torch.corrcoef(drawn) - torch.eye(40)
    assert float(correlations.abs().max()) < 5.5 / math.sqrt(500)


# ── refusals ────────────────────────────────────────────────────────────────────────────────────


ODD: Any = "odd"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: random.key(1 << 64), "seed=18446744073709551616 must be an integer of at most 64"),
        (lambda: random.key(0.5), "seed=0.5 must be an integer"),  # type: ignore[arg-type]
        (lambda: random.bits(random.split(random.key(0))), r"key is a int64 tensor of shape \(2, "),
        (lambda: random.split(torch.zeros(2)), r"key is a float32 tensor of shape \(2,\): it must"),
        (lambda: random.uniform(7), "key is 7, an int: it must be"),  # type: ignore[arg-type]
        (lambda: random.normal(random.key(0), (), torch.int64), "dtype=torch.int64 must be one of"),
        (lambda: random.bernoulli(random.key(0), 1.5), "p=1.5 must be a probability"),
        (lambda: random.dropout(random.key(0), torch.ones(1), -1.0), "p=-1.0 must be a probabil"),
        (lambda: random.dropout(KEY, torch.ones(1), ODD), "p='odd' must be a probability"),
        (lambda: random.dropout(KEY, ODD), "x='odd' is a str: it must be a tensor"),
        (lambda: random.fold_in(KEY, 1.5), "data=1.5 must be an integer"),  # type: ignore[arg-type]
        (lambda: random.fold_in(KEY, 1 << 63), "must be an integer of at most 64 bits with its"),
        (lambda: random.fold_in(KEY, torch.ones(2)), "or a tensor of integers"),
        (lambda: random.split(KEY, -1), "num=-1 must be an integer, 0 or more"),
        (lambda: random.split(KEY, ODD), "num='odd' must be an integer"),
        (lambda: random.randint(KEY, 3, 3), "low=3 and high=3 must be integers of 64 bits with"),
        (lambda: random.randint(KEY, 0.5, 3), "low=0.5 and high=3 must be"),  # type: ignore[arg-type]
        (lambda: random.randint(KEY, -(1 << 62), 1 << 62), "high - low=.* must be less than 2"),
        (lambda: random.randint(KEY, 0, 300, (), torch.uint8), "do not lie between 0 and 256"),
        (lambda: random.permutation(KEY, -1), "num=-1 must be an integer, 0 or more"),
        (lambda: random.categorical(KEY, ODD), "logits='odd' must be a floating-point tensor"),
        (lambda: random.categorical(KEY, torch.ones(3).long()), "must be a floating-point tensor"),
        (
            lambda: random.categorical(KEY, torch.ones(())),
            "must be a floating-point tensor of shap",
        ),
        (lambda: random.categorical(KEY, torch.ones(2, 0)), "there is nothing to choose from"),
        (lambda: random.bits(KEY, (2, -1)), r"shape=\(2, -1\) must be a sequence of sizes"),
        (lambda: random.uniform(KEY, ODD), "shape='odd' must be a sequence of sizes"),
        (lambda: random.normal(KEY, 3), "shape=3 must be a sequence of sizes"),  # type: ignore[arg-type]
    ],
)
def test_refusals(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(FpipeError, match=message):
        call()
