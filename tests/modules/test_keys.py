"""Modules draw with torch's own operations from the key of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fpipe
from fpipe import random, schedules
from fpipe.nn import keyed
from fpipe.pieces.boxed import Boxed
from fpipe.program.program import Compute
from fpipe.random.distributions import middles, normal_doubles, perturbed
from fpipe.random.torch_draws import KEYED
from tests.models import assert_identical, assert_same
from tests.modules.dropping import CUTS, dropping_batch, dropping_module
from tests.modules.helpers import by_microbatches, detached, module_pipe, squares, total

KEY = random.key(3)
FOUR = schedules.one_f_one_b(ranks=4, microbatches=4)


def test_same_numbers_on_every_schedule_and_remat_policy() -> None:
    module, batch = dropping_module(), dropping_batch()
    params = detached(module)
    expected = by_microbatches(module, batch, 4, key=KEY)
    two_ranks = schedules.zb_h1(ranks=2, microbatches=4)
    two = module_pipe(module, CUTS[1:2], schedule=two_ranks, has_key=True, remat="full")
    four = module_pipe(module, CUTS, schedule=FOUR, has_key=True)
    for pipe in (two, four, four.with_schedule(schedules.zbv(ranks=2, microbatches=4))):
        assert_same(tuple(pipe.step(params, batch, KEY)), tuple(expected))
    assert_identical(pipe.step(params, batch, KEY), pipe.step(params, batch, KEY))
    assert_same(pipe.value(params, batch, key=KEY), expected.loss)
    assert not torch.allclose(pipe.step(params, batch, random.key(4)).loss, expected.loss)
    with pytest.raises(fpipe.BatchError, match="key=None, but the stages read a key"):
        pipe.step(params, batch)


class Draws:
    """A ``compile=`` that counts the calls of kernels that draw."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: fx.GraphModule, examples: Sequence[Tensor]) -> Boxed:
        draws = any("bitwise_xor" in str(node.target) for node in module.graph.nodes)

        def call(inputs: list[Tensor]) -> Any:
            self.calls += draws
            return module(*inputs)

        return call


def small_module() -> nn.Module:
    """Two stages, of which the first draws."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double()


def test_numbers_are_drawn_again_by_those_microbatches_that_keep_nothing() -> None:
    module, batch = small_module(), {"input": torch.randn(8, 3).double()}
    expected = by_microbatches(module, batch, 4, key=KEY)
    calls = {}
    for remat in ("none", "full", "except_last"):
        draws = Draws()
        pipe = module_pipe(
            module,
            "1",
            schedule=schedules.one_f_one_b(ranks=2, microbatches=4),
            compile=draws,
            has_key=True,
            remat=remat,
        )
        assert_same(tuple(pipe.step(detached(module), batch, KEY)), tuple(expected))
        calls[remat] = draws.calls
    # Forward alone; forward and backward of all; of all but the last.
    assert calls == {"none": 4, "full": 8, "except_last": 7}


@pytest.mark.inductor
def test_compiled_module_draws_the_same_numbers() -> None:
    module, batch = small_module(), {"input": torch.randn(4, 3).double()}
    expected = by_microbatches(module, batch, 1, key=KEY)
    pipe = fpipe.from_module(
        module,
        schedule=schedules.one_f_one_b(ranks=2, microbatches=1),
        cuts=["1"],
        loss=squares,
        has_key=True,
    )
    assert_same(tuple(pipe.step(detached(module), batch, KEY)), tuple(expected))


def test_layers_that_draw_are_traced_once() -> None:
    """A number of the draw in the graph, instead of a key that comes in, would tell them apart."""
    pipe = module_pipe(dropping_module(), CUTS, schedule=FOUR, has_key=True)
    programs = pipe.programs(detached(pipe.module), dropping_batch())
    calls = [
        [i.call for i in p.instructions if isinstance(i, Compute) and i.action.op == fpipe.Op.F]
        for p in programs
    ]
    assert calls[1][0] is calls[2][0] and calls[0][0] is not calls[1][0]


def test_without_a_key_a_draw_is_kept_and_never_repeated() -> None:
    """The loss is linear in the weight, so its gradient tells which mask the backward used."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x * self.weight, 0.5)

    module = Masked()
    pipe = module_pipe(
        nn.Sequential(module, nn.Identity()),
        "0",
        schedule=schedules.zb_h1(ranks=2, microbatches=2),
        loss=total,
        reduction="sum",
        remat="full",
    )
    params = {"0.weight": module.weight.detach()}
    first, second = (pipe.step(params, {"input": torch.ones(2, 64)}) for _ in range(2))
    for step in (first, second):
        assert_same(step.grads["0.weight"].sum(), step.loss)
    assert not torch.equal(first.grads["0.weight"], second.grads["0.weight"])


def chosen(key: Tensor, chances: Tensor, num: int) -> Tensor:
    """Draws of several with replacement: where a uniform number falls among the sums."""
    sums = chances.double().cumsum(-1)
    drawn = random.randint(key, 0, 1 << 32, (*chances.shape[:-1], num)).double() / 2**32
    below = sums.unsqueeze(-2) <= (drawn * sums[..., -1:]).unsqueeze(-1)
    return below.sum(-1)


MORE_DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "randint": (lambda x: torch.randint(5, (9,)), lambda key, x: random.randint(key, 0, 5, (9,))),
    "randint from": (
        lambda x: torch.randint(2, 5, (9,), dtype=torch.int32),
        lambda key, x: random.randint(key, 2, 5, (9,), torch.int32),
    ),
    "randint_like": (
        lambda x: torch.randint_like(x, 5),
        lambda key, x: random.randint(key, 0, 5, x.shape, x.dtype),
    ),
    "randint_like from": (
        lambda x: torch.randint_like(x, 2, 5),
        lambda key, x: random.randint(key, 2, 5, x.shape, x.dtype),
    ),
    "randperm": (lambda x: torch.randperm(9), lambda key, x: random.permutation(key, 9)),
    "multinomial": (
        lambda x: torch.multinomial(x, 3),
        lambda key, x: perturbed(key, x.log()).topk(3).indices,
    ),
    "multinomial with replacement": (
        lambda x: torch.multinomial(x, 300, replacement=True),
        lambda key, x: chosen(key, x, 300),
    ),
    "Categorical": (
        lambda x: torch.distributions.Categorical(x.view(2, 100)).sample(),
        lambda key, x: chosen(key, x.view(2, 100) / 25, 1).view(2),
    ),
    "normal": (
        lambda x: torch.normal(1.0, 2.0, (3,)),
        lambda key, x: (normal_doubles(key, (3,), torch.float32) * 2 + 1).float(),
    ),
    "normal about": (
        lambda x: torch.normal(x, x[:1]),
        lambda key, x: random.normal(key, (200,), x.dtype) * x[:1] + x,
    ),
    "normal about a number": (
        lambda x: torch.normal(1.0, x),
        lambda key, x: random.normal(key, (200,), x.dtype) * x + 1,
    ),
    "log_normal_": (
        lambda x: x.clone().log_normal_(1.0, 0.5),
        lambda key, x: (random.normal(key, (200,), x.dtype) * 0.5 + 1).exp(),
    ),
    "cauchy_": (
        lambda x: x.clone().cauchy_(1.0, 0.5),
        lambda key, x: torch.tan(torch.pi * (middles(key, (200,), x.dtype) - 0.5)) * 0.5 + 1,
    ),
    "geometric_": (
        lambda x: x.clone().geometric_(0.3),
        lambda key, x: (middles(key, (200,), x.dtype).log() / math.log(0.7)).floor() + 1,
    ),
}


@pytest.mark.parametrize("name", MORE_DRAWS)
def test_more_of_torch_draws_from_keys(name: str) -> None:
    torch_draws, draws = MORE_DRAWS[name]
    x = torch.full((200,), 0.25, dtype=torch.float64)
    with keyed(KEY):
        drawn = torch_draws(x)
    assert_same(drawn, draws(random.fold_in(KEY, 0), x))


class Diffusion(nn.Module):
    """Draws a time for each row, noise, an order, and what overwrites a value of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        time = torch.randint(1, 5, (len(x), 1))
        h = self.first(x) * time + torch.normal(x, 0.5)
        noise = h.clone().bernoulli_(torch.full_like(h, 0.5)) + torch.randint_like(h, 3)
        h = self.second((h * noise)[torch.randperm(len(x))])
        return h * torch.multinomial(h.softmax(-1), 2)[:, :1]


class Leaky(nn.Module):
    """Units whose slopes are drawn, one of them within the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(self.last(F.rrelu(self.first(x), training=True)), 0.2, 0.4, training=True)


@pytest.mark.parametrize("kind", [Diffusion, Leaky])
@pytest.mark.parametrize("schedule", ["zb_h1", "gpipe"])
def test_module_that_draws_in_other_ways(schedule: str, kind: Any) -> None:
    """Integers, and slopes, which were refused."""
    module, batch = kind().double(), {"x": torch.randn(6, 4, dtype=torch.float64)}
    pipe = module_pipe(
        module,
        "first",
        schedule=schedules.get(schedule, ranks=2, microbatches=2),
        has_key=True,
        remat="full",
    )
    got = pipe.step(detached(module), batch, KEY)
    assert_same(tuple(got), tuple(by_microbatches(module, batch, key=KEY)))


@pytest.mark.inductor
def test_normal_numbers_of_a_deviation_are_rounded_once() -> None:
    """A compiler keeps more digits between products and sums than uncompiled operations do."""

    def drawn(key: Tensor, x: Tensor) -> Tensor:
        return KEYED[torch.ops.aten.normal_functional.default](key, x, 0.3, 0.7)

    x = torch.empty(500, dtype=torch.bfloat16)
    numbers = drawn(KEY, x)
    doubles = normal_doubles(KEY, (500,), torch.bfloat16) * 0.7 + 0.3
    assert torch.equal(numbers, doubles.bfloat16())
    assert torch.equal(torch.compile(drawn)(KEY, x), numbers)


def test_torch_draws_from_keys() -> None:
    x = torch.full((200,), 0.25, dtype=torch.float64)
    with keyed(KEY):
        drawn = [
            F.dropout(x.clone(), 0.5, inplace=True),
            torch.bernoulli(x),
            torch.empty(200).bernoulli_(x),
            torch.empty(200).uniform_(-1, 1),
            torch.empty(200).normal_(2, 0.5),
            torch.empty(200).exponential_(),
            torch.rand(200),
            torch.randn(200),
            torch.rand_like(x),
            torch.randn_like(x),
        ]
    keys = [random.fold_in(KEY, number) for number in range(len(drawn))]
    expected = [
        random.dropout(keys[0], x, 0.5),
        random.bernoulli(keys[1], x).double(),
        random.bernoulli(keys[2], x).float(),
        random.uniform(keys[3], (200,)) * 2 - 1,
        (normal_doubles(keys[4], (200,), torch.float32) * 0.5 + 2).float(),
        -torch.log(middles(keys[5], (200,), torch.float32)).float(),
        random.uniform(keys[6], (200,)),
        random.normal(keys[7], (200,)),
        random.uniform(keys[8], (200,), torch.float64),
        random.normal(keys[9], (200,), torch.float64),
    ]
    assert_same(drawn, expected)
    x.requires_grad_()
    with keyed(KEY):
        (dropped,) = torch.ops.aten.native_dropout(x, 0.5, True)[:1]
    assert_same(dropped, expected[0])


class Attending(nn.Module):
    """Attention that drops nothing, of whose arguments a tracer leaves out the defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.first(F.dropout(x, 0.5)).unflatten(-1, (2, 2)).transpose(0, 1)[None]
        mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril()
        plain = F.scaled_dot_product_attention(heads, heads, heads)
        masked = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        return self.second((plain + masked)[0].transpose(0, 1).flatten(1))


def test_attention_without_dropout_needs_no_key() -> None:
    module, batch = Attending(), {"x": torch.randn(6, 4)}
    pipe = module_pipe(
        module, "first", schedule=schedules.zb_h1(ranks=2, microbatches=1), has_key=True
    )
    loss, _ = pipe.step(detached(module), batch, KEY)
    with keyed(random.fold_in(KEY, 0)):
        assert_same(loss, squares(module(**batch), batch).detach(), 1e-5)


class Counting(nn.Module):
    """Draws what there is no function of a key for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.poisson(torch.ones(3))


def test_ops_without_a_key_are_refused() -> None:
    module, x = Counting(), torch.ones(4, 3)
    pipe = module_pipe(nn.Sequential(module, nn.Identity()), "0", has_key=True)
    params = {f"0.{name}": value for name, value in detached(module).items()}
    rule = r"draws with aten.poisson.default, for which there is no function of a key"
    with pytest.raises(fpipe.StageError, match="Sequential " + rule):
        pipe.step(params, {"input": x}, KEY)
    with pytest.raises(fpipe.FpipeError, match="the block " + rule), keyed(KEY):
        module(x)
    with pytest.raises(fpipe.FpipeError, match="key is 3, an int"), keyed(3):  # type: ignore[arg-type]
        module(x)

    def mapped(key: Tensor) -> Tensor:
        with keyed(key):
            return F.dropout(x)

    with pytest.raises(fpipe.FpipeError, match=r"key is mapped by torch\.func\.vmap"):
        torch.func.vmap(mapped)(random.split(KEY))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_blocks_that_are_computed_again_are_refused(use_reentrant: bool) -> None:
    """They would draw other numbers in the backward, so that the gradient would be wrong."""

    def block(x: Tensor) -> Tensor:
        return checkpoint(F.dropout, x, use_reentrant=use_reentrant)

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(fpipe.FpipeError, match=r"within torch\.utils\.checkpoint"), keyed(KEY):
        block(x)
    if not use_reentrant:
        with torch.no_grad(), keyed(KEY):
            output = block(x)
        with keyed(KEY):
            assert_identical(F.dropout(x.detach()), output)


# ── as torch draws ──────────────────────────────────────────────────────────────────────────────


def drawn_from_key(draw: Callable[[], Tensor]) -> Tensor:
    with keyed(KEY):
        return draw()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_draws_leave_out_the_ends_that_torch_leaves_out(dtype: torch.dtype) -> None:
    """The logarithm of an exponential number is taken by gumbel_softmax."""
    empty = torch.empty(200_000, dtype=dtype)
    exponential = drawn_from_key(lambda: empty.clone().exponential_())
    assert exponential.min() > 0 and exponential.max() > 9
    assert abs(float(exponential.double().mean()) - 1) < 0.02
    between = drawn_from_key(lambda: empty.clone().uniform_(3, 4))
    assert between.min() >= 3 and between.max() < 4
    tail = (drawn_from_key(lambda: empty.clone().cauchy_()).abs() > 300).double().mean()
    assert 0.0014 < tail < 0.0030  # 2 / (300 π) of them


def test_draws_have_the_strides_that_torch_gives() -> None:
    x = torch.ones(2, 3).t()
    for draw in (
        torch.rand_like,
        torch.randn_like,
        torch.bernoulli,
        lambda v: torch.randint_like(v, 5),
        lambda v: torch.rand_like(v, memory_format=torch.contiguous_format),
        lambda v: v.clone().normal_(),
    ):
        assert drawn_from_key(partial(draw, x)).stride() == draw(x).stride()


def test_dtype_of_normal_is_that_of_the_first() -> None:
    for first, second in ((torch.float16, torch.float32), (torch.float64, torch.float32)):
        mean, std = torch.zeros(3, dtype=first), torch.ones(3, dtype=second)
        assert drawn_from_key(lambda: torch.normal(mean, std)).dtype == first  # noqa: B023


ONE = torch.ones(3)


@pytest.mark.parametrize(
    ("draw", "rule"),
    [
        (lambda: ONE.clone().uniform_(2, 1), "low=2.* must not be greater than high=1"),
        (lambda: ONE.clone().normal_(0, -1), "std=-1.* must be 0 or more"),
        (lambda: torch.normal(0.0, -1.0, (3,)), "std=-1.* must be 0 or more"),
        (lambda: ONE.clone().exponential_(-1), "exponential_, -1.*, must be more than 0"),
        (lambda: ONE.clone().geometric_(1.5), "p=1.5 of geometric_ must lie between 0 and 1"),
        (lambda: ONE.clone().cauchy_(0, -1), "sigma=-1.* must be more than 0"),
        (lambda: ONE.clone().log_normal_(0, -1), "std=-1.* must be more than 0"),
        (lambda: torch.multinomial(ONE, 4), "num_samples=4 without replacement is more than 3"),
        (lambda: torch.multinomial(ONE, 0), "num_samples=0 must be more than 0"),
        (lambda: torch.multinomial(ONE.long(), 1), "are torch.int64: no floats"),
        (lambda: torch.randint(0, 300, (3,), dtype=torch.uint8), "do not lie between 0 and 256"),
        (lambda: torch.randperm(300, dtype=torch.int8), r"the last of randperm\(300\) is no torch"),
        (lambda: ONE.clone().bernoulli_(0.5, generator=torch.Generator()), "Generator of its own"),
    ],
)
def test_arguments_that_torch_refuses_are_refused(draw: Callable[[], Tensor], rule: str) -> None:
    with pytest.raises(fpipe.FpipeError, match=rule):
        drawn_from_key(draw)


def test_a_pipeline_within_keyed_draws_as_it_does_outside() -> None:
    """A trace once kept the numbers that the key around the call had drawn."""

    module, batch = small_module(), {"input": torch.ones(6, 3).double()}
    params = detached(module)
    pipe, other = (module_pipe(module, "1", has_key=True) for _ in range(2))
    for seed in (1, 2):
        key = random.key(seed)
        with keyed(KEY):
            step = pipe.step(params, batch, key)
        assert_identical(step, other.step(params, batch, key))
    pipe = module_pipe(module, "1")
    with pytest.raises(fpipe.FpipeError, match=r"called within fpipe\.nn\.keyed"), keyed(KEY):
        pipe.step(params, batch)
    first, second = (pipe.step(params, batch).loss for _ in range(2))
    assert first != second
