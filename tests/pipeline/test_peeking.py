"""Functions of torch that look at their data, where a trace has none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fpipe
from tests.models import rand

PARAMS = {"a": rand(3, 4), "b": rand(4, 5) / 2}


def check_loss(
    last: Callable[[Tensor, Any], Tensor], batch: Any, *, cut: bool, **options: Any
) -> None:
    """Compare a loss of two stages with autograd."""

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return last(fpipe.cut((batch["x"] @ params["a"]).tanh()) @ params["b"], batch)

    schedule = fpipe.schedules.zb_h1(ranks=2, microbatches=1)
    options["in_dims"] = {name: 0 if name == "x" else None for name in batch}
    if cut:
        pipe = fpipe.pipeline(loss_fn, schedule=schedule, **options)
        loss, grads = pipe.step(PARAMS, batch)
    else:
        stages = [lambda p, b: (b["x"] @ p).tanh(), lambda p, x: x @ p]
        pipe = fpipe.pipeline(stages, last, schedule, **options)
        loss, (a, b) = pipe.step(list(PARAMS.values()), batch)
        grads = {"a": a, "b": b}
    own = {name: leaf.clone().requires_grad_() for name, leaf in PARAMS.items()}
    expected = loss_fn(own, batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grads, {name: leaf.grad for name, leaf in own.items()})


@pytest.mark.parametrize(
    ("cut", "options"),
    [
        (True, {}),
        (False, {"full": True, "reduction": "sum"}),
        (True, {"eps": 1.1, "reduction": "none"}),
        (False, {"var": 0.3}),
        (True, {"var": (4,)}),
        (False, {"var": (4, 1)}),
        (True, {"var": (1, 5)}),
    ],
)
def test_gaussian_likelihood(options: Any, cut: bool) -> None:
    options = dict(options)
    shape = options.pop("var", (4, 5))

    def loss(y: Tensor, batch: Any) -> Tensor:
        var: Any = shape
        if not isinstance(shape, float):
            summed = batch["v"].sum(1) if shape == (4,) else batch["v"].sum_to_size(shape)
            var = summed * y.exp().mean()
        return F.gaussian_nll_loss(y, batch["v"].cos(), var, **options).sum()

    check_loss(loss, {"x": rand(4, 3), "v": rand(4, 5).square()}, cut=cut, compile=False)


LENGTHS = {"input": torch.tensor([7, 5, 6]), "target": torch.tensor([2, 0, 3])}
TARGETS = torch.tensor([[1, 3, 0, 0], [0, 0, 0, 0], [2, 2, 4, 0]])


FORMS = ["padded", "in a row", "one sequence", "numbers", "torch's own"]
REDUCTIONS: dict[str, Any] = {
    "mean": {},
    "sum": {"reduction": "sum", "zero_infinity": True},
    "none": {"blank": 2, "reduction": "none"},
}


@pytest.mark.parametrize(
    ("reduction", "form", "cut"),  # with cuts and without in turns
    [(*pair, bool(number % 2)) for number, pair in enumerate(itertools.product(REDUCTIONS, FORMS))],
)
def test_ctc(reduction: str, form: str, cut: bool) -> None:
    options = dict(REDUCTIONS[reduction])
    if form == "torch's own":
        options["reduction"] = {"none": 0, "mean": 1, "sum": 2}[options.get("reduction", "mean")]

    def loss(y: Tensor, batch: Any) -> Tensor:
        log_probs = y.reshape(7, 3, 5).log_softmax(2)
        targets, lengths = batch["targets"], (batch["input"], batch["target"])
        if options.get("blank"):
            targets = (
                targets * 0 + 3
            )  # the same symbol again needs a blank between: some do not fit
        if form == "in a row":
            targets = targets[:, :2].reshape(-1)[:5]
        elif form == "one sequence":
            log_probs, targets = log_probs[:, 0], targets[0, :2]
            lengths = (lengths[0][0], lengths[1][0])
        elif form == "numbers":
            lengths = ((7, 5, 6), (2, 0, 3))
        function = torch.ctc_loss if form == "torch's own" else F.ctc_loss
        return function(log_probs, targets, *lengths, **options).sum()

    check_loss(loss, {"x": rand(21, 3), "targets": TARGETS} | LENGTHS, cut=cut, compile=False)


def test_ctc_of_what_does_not_fit() -> None:
    def loss(y: Tensor, batch: Any) -> Tensor:
        log_probs = y.reshape(3, 7, 5).log_softmax(2)
        return F.ctc_loss(
            log_probs, batch["targets"], batch["input"], batch["target"], zero_infinity=True
        )

    lengths = {"input": torch.tensor([3, 2, 1, 3, 3, 3, 3]), "target": torch.arange(7) % 5}
    targets = torch.randint(1, 5, (7, 4), generator=torch.Generator().manual_seed(0))
    check_loss(loss, {"x": rand(21, 3), "targets": targets} | lengths, cut=True, compile=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blank": 5}, "blank=5 is none of the 5 classes"),
        ({"reduction": "max"}, "reduction='max' is not mean, sum or none"),
        (
            {"input_lengths": torch.tensor([7, 5])},
            r"input_lengths has the shape \(2,\), for 3 seq",
        ),
    ],
)
def test_ctc_of_odd_arguments(change: Any, message: str) -> None:
    arguments = {"input_lengths": LENGTHS["input"], "target_lengths": LENGTHS["target"]} | change

    def stage(params: Tensor, batch: Tensor) -> Tensor:
        return F.ctc_loss((batch @ params).reshape(7, 3, 5), TARGETS, **arguments)

    schedule = fpipe.schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline([stage], lambda y, _: y, schedule, compile=False)
    with pytest.raises(fpipe.StageError, match=message):
        pipe.step([rand(3, 5)], rand(21, 3))


@pytest.mark.parametrize("cut", [True, False])
def test_inverse_of_a_spectrogram(cut: bool) -> None:
    window = torch.hann_window(8, dtype=torch.float64)

    def loss(y: Tensor, batch: Any) -> Tensor:
        options: dict[str, Any] = {"n_fft": 8, "hop_length": 2, "window": window}
        waves = y.reshape(2, 40)
        spectrum = torch.stft(waves, return_complex=True, **options)
        back = torch.istft(spectrum * torch.polar(waves[0, 0], waves[1, 1]), **options, length=40)
        return (back.square() * batch["x"].sum()).sum() + spectrum.istft(**options).cos().sum()

    check_loss(loss, {"x": rand(16, 3)}, cut=cut, compile=False)


def number(x: Tensor, old: Tensor, mask: Tensor) -> None:
    x[mask] = 0.5


def one(x: Tensor, old: Tensor, mask: Tensor) -> None:
    x[mask] = old.square().mean()


def one_in_a_list(x: Tensor, old: Tensor, mask: Tensor) -> None:
    x[mask] = old[:1, :1].exp().reshape(1)


def row(x: Tensor, old: Tensor, mask: Tensor) -> None:
    x[mask[:, 0]] = old[0] * old[1]


def row_in_a_list(x: Tensor, old: Tensor, mask: Tensor) -> None:
    x[mask[:, 0]] = (old[0] * old[1]).unsqueeze(0)


def in_a_view(x: Tensor, old: Tensor, mask: Tensor) -> None:
    x[1:, :4][mask[1:, :4]] = old.sum()


def twice(x: Tensor, old: Tensor, mask: Tensor) -> None:
    x[mask] = old.square().sum()
    x[~mask[:, 1]] = old[2]


def of_another_dtype(x: Tensor, old: Tensor, mask: Tensor) -> None:
    x[mask] = old.sum().float().reshape(1)


def all_or_nothing(x: Tensor, old: Tensor, mask: Tensor) -> None:
    x[mask[0, 0]] = old[1] * 2
    total = old.sum()
    total[mask[1, 1]] = old[0, 0]
    total[~mask[1, 1]] = 0.5
    x.mul_(total)


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize(
    "write",
    [
        *(number, one, one_in_a_list, row, row_in_a_list, in_a_view, twice),
        *(of_another_dtype, all_or_nothing),
    ],
)
def test_one_value_where_a_mask_says(write: Callable[..., None], cut: bool) -> None:
    def loss(y: Tensor, batch: Any) -> Tensor:
        x = y * batch["v"]
        write(x, x.clone(), batch["v"] > 0)
        return (x.square() * batch["v"]).sum() + y.sum()

    check_loss(loss, {"x": rand(4, 3), "v": rand(4, 5)}, cut=cut, compile=False)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.__setitem__(x[:2] > 0, x.sum()),
        lambda x: x.__setitem__(x > 0, x[:3, 0].float()),
    ],
    ids=["shape of the mask", "dtype"],
)
def test_wrong_masks_are_refused_as_torch_does(wrong: Callable[[Tensor], None]) -> None:
    def stage(params: Tensor, batch: Tensor) -> Tensor:
        x = batch @ params
        wrong(x)
        return x.sum()

    schedule = fpipe.schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline([stage], lambda y, _: y, schedule, compile=False)
    with pytest.raises(fpipe.StageError):
        pipe.step([rand(3, 5)], rand(4, 3))


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[:, 1:],
        lambda x: x.t()[::2],
        lambda x: x.unflatten(0, (2, 2))[..., :2],
    ],
    ids=["whole", "columns", "rows", "cube"],
)
def test_diagonal_of_a_view(view: Callable[[Tensor], Tensor], cut: bool) -> None:
    def loss(y: Tensor, batch: Any) -> Tensor:
        x = y * batch["v"]
        view(x).fill_diagonal_(0.3)
        return (x.square() * batch["v"]).sum()

    check_loss(loss, {"x": rand(4, 3), "v": rand(4, 5)}, cut=cut, compile=False)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x[:, :2].fill_diagonal_(0.3, wrap=True), "by way of as_strided.*clone"),
        (lambda x: x[0].fill_diagonal_(0.3), "dimensions must larger than 1"),
        (lambda x: x.unsqueeze(0).fill_diagonal_(0.3), "must be of equal length"),
    ],
)
def test_diagonals_that_are_refused(wrong: Callable[[Tensor], Tensor], message: str) -> None:
    def loss(y: Tensor, batch: Any) -> Tensor:
        wrong(y)
        return y.sum()

    with pytest.raises(fpipe.StageError, match=message):
        check_loss(loss, {"x": rand(4, 3)}, cut=False, compile=False)


def test_requiring_a_gradient_means_nothing() -> None:
    def loss(y: Tensor, batch: Any) -> Tensor:
        return y.tanh().requires_grad_().square().sum()

    for cut in (True, False):
        check_loss(loss, {"x": rand(4, 3)}, cut=cut, compile=False)


@pytest.mark.parametrize("cut", [True, False])
def test_hook_on_a_tensor(cut: bool) -> None:
    # A trace by torch.func has no hooks: it was refused.
    def loss(y: Tensor, batch: Any) -> Tensor:
        y.register_hook(torch.neg)
        return y.tanh().sum()

    check_loss(loss, {"x": rand(4, 3)}, cut=cut, compile=False)


@pytest.mark.parametrize(
    ("hook", "rule"),
    [
        (
            lambda y: y.register_post_accumulate_grad_hook(print),
            r"registers a hook for .* accumulated at .*test_peeking\.py:\d+: .*x\.register_hook",
        ),
        (lambda y: y.retain_grad(), r"calls .* retain_grad\(\), .* at .*test_peeking\.py:\d+"),
        (lambda y: y.sum().backward(), r"calls backward\(\) .* at .*test_peeking\.py:\d+"),
        (
            lambda y: y.requires_grad_(False),
            r"calls requires_grad_\(False\) at .*test_peeking\.py:\d+: use x\.detach\(\)",
        ),
    ],
    ids=["accumulated", "retain_grad", "backward", "requires_grad_(False)"],
)
@pytest.mark.parametrize("cut", [True, False])
def test_what_a_value_of_a_pure_function_has_not_is_refused(
    hook: Callable[[Tensor], Any], rule: str, cut: bool
) -> None:
    def loss(y: Tensor, batch: Any) -> Tensor:
        hook(y)
        return y.sum()

    with pytest.raises(fpipe.StageError, match=rule):
        check_loss(loss, {"x": rand(4, 3)}, cut=cut, compile=False)


@pytest.mark.inductor
def test_compiled() -> None:
    def loss(y: Tensor, batch: Any) -> Tensor:
        log_probs = y.reshape(7, 3, 5).log_softmax(2)
        floored = log_probs.clone()
        one(floored, log_probs, log_probs < -4)
        return F.ctc_loss(floored, batch["targets"], batch["input"], batch["target"])

    check_loss(loss, {"x": rand(21, 3), "targets": TARGETS} | LENGTHS, cut=True)


# ── places that depend on no argument ───────────────────────────────────────────────────────────


def odd(y: Tensor) -> Tensor:
    """A mask that a function makes itself."""
    return torch.arange(y.shape[-1], device=y.device) % 2 == 1


PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda y: y[:, odd(y)].tanh(),
    "mask of two dimensions": lambda y: y.T[odd(y)[:, None].expand(5, len(y))].tanh(),
    "nonzero": lambda y: y[:, odd(y).nonzero()[:, 0]].tanh(),
    "where": lambda y: y[:, torch.where(odd(y))[0]].tanh(),
    "masked_select": lambda y: y.tanh().masked_select(odd(y)),
    "unique": lambda y: y[:, torch.tensor([3, 1, 3]).unique()].tanh(),
    "put": lambda y: y.clone().index_put((torch.tensor(0), odd(y)), y.new_zeros(())).tanh(),
    "written": lambda y: torch.zeros_like(y).T.index_put_((odd(y),), y.T[1:3].tanh()),
    "nothing": lambda y: y[:, odd(y) & ~odd(y)].tanh() + y.mean(),
    "combinations": lambda y: torch.combinations(y.tanh().mean(0)).prod(1),
}


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("name", PLACES)
def test_places_that_depend_on_no_argument(name: str, cut: bool) -> None:
    """They were refused as if they did."""
    check_loss(
        lambda y, _: y.mean() + PLACES[name](y).sum(), {"x": rand(4, 3)}, cut=cut, compile=False
    )


@pytest.mark.parametrize("name", PLACES)
def test_places_in_transforms(name: str) -> None:
    schedule = fpipe.schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline(
        [lambda p, x: x @ p], lambda y, _: PLACES[name](y).sum(), schedule, compile=False
    )
    params, x, vector = rand(3, 5), rand(4, 3), rand(3, 5).sin()
    product = fpipe.hvp(pipe).step([params], x, [vector]).hvp[0]

    def loss(p: Tensor) -> Tensor:
        return PLACES[name](x @ p).sum()

    slopes = torch.func.grad(loss)
    torch.testing.assert_close(product, torch.func.jvp(slopes, (params,), (vector,))[1])
    members = torch.stack([params, params.cos()])
    found = fpipe.vmap(pipe).step([members], x)
    torch.testing.assert_close(found.grads[0], torch.stack(list(map(slopes, members))))
