"""One function, or a module, on several devices of one process: its parts are moved there.

An operation on tensors of two devices fails, on real devices as on those that are made of the CPU.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpipe
from fpipe import pytree, schedules
from tests.models import assert_same
from tests.state_model import make_batch, make_params, make_state, stateful_model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices"),
]

DEVICES = ["cuda:0", "cuda:1"]
FAMILIES = ["gpipe", "one_f_one_b", "zb_h1", "interleaved_1f1b", "zbv"]
CUTS = ["layers.0", "layers.1", "layers.2"]


class Layer(nn.Module):
    """A buffer, and tensors that it makes itself."""

    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.register_buffer("scale", torch.linspace(1, 2, width))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        place = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None]
        half = torch.tensor(0.5, device=x.device)
        return torch.tanh(self.linear(self.norm(x)) * self.scale + place) * half


class Net(nn.Module):
    """Tied weights, and a value that every layer reads."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.table = nn.Embedding(10, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(4))
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        """Logits."""
        first = x = self.table(words)
        for layer in self.layers:
            x = self.dropout(layer(x)) + first
        return self.head(x)


def cross_entropy(output: Tensor, batch: Any) -> Tensor:
    """Of the words themselves."""
    return F.cross_entropy(output.flatten(0, 1), batch["words"].flatten())


def net() -> tuple[Net, dict[str, Tensor], dict[str, Tensor]]:
    """A module, its parameters and a batch, on the CPU."""
    torch.manual_seed(0)
    module = Net().double()
    params = {name: p.detach().clone() for name, p in module.named_parameters()}
    return module, params, {"words": torch.randint(10, (8, 5))}


def on(values: Any, device: Any) -> Any:
    """A tree on a device."""
    return pytree.tree_map(lambda leaf: leaf.to(device), values)


def devices_of(values: Any) -> list[str]:
    """Those of the leaves."""
    return [str(leaf.device) for leaf in pytree.flatten(values)[0]]


def piped(module: nn.Module, family: str = "zbv", **options: Any) -> fpipe.ModulePipeline:
    """A pipeline of `net`."""
    schedule = schedules.get(family, ranks=2, microbatches=4)
    chosen: dict[str, Any] = {"loss": cross_entropy, "compile": False, **options}
    cuts = CUTS[: schedule.num_stages - 1]
    return fpipe.from_module(module, schedule=schedule, cuts=cuts, **chosen)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_module(family: str, remat: str) -> None:
    """Wherever its parameters lie, and bit for bit."""
    module, params, batch = net()
    expected = piped(module, family, remat=remat).step(params, batch)
    module.to(DEVICES[0])
    pipe = piped(module, family, remat=remat, devices=DEVICES)
    for origin in ("cpu", *DEVICES):
        own = on(params, origin)
        step = pipe.step(own, on(batch, origin))
        assert devices_of(step.grads) == devices_of(own)
        assert_same(on(step, "cpu"), expected, 0)


def test_parameters_are_placed(caplog: pytest.LogCaptureFixture) -> None:
    """By the first rank that reads each."""
    module, params, batch = net()
    expected = piped(module).step(params, batch)
    module.to(DEVICES[0])
    for pipe in (piped(module, devices=DEVICES) for _ in range(2)):
        with pytest.raises(fpipe.StageError, match=r"pipe\.place\(params, batch\)"):
            pipe.place(params)
        placed = pipe.place({n: p.clone().requires_grad_() for n, p in params.items()}, batch)
        where = {name: str(p.device) for name, p in placed.items()}
        assert where["table.weight"] == where["layers.3.linear.weight"] == DEVICES[0]
        assert where["layers.1.linear.bias"] == DEVICES[1]
        assert all(p.requires_grad and p.is_leaf for p in placed.values())
        again = pipe.place(placed)
        assert all(again[name] is p for name, p in placed.items())
        drawn = pipe.init(lambda key, name, like: params[name], fpipe.random.key(0))
        assert {name: str(p.device) for name, p in drawn.items()} == where
    with caplog.at_level(logging.WARNING, "fpipe"):
        assert_same(on(pipe.step(placed, batch), "cpu"), expected, 0)
        assert not caplog.messages
        pipe.with_schedule(schedules.zbv(ranks=2, microbatches=2)).step(params, batch)
    assert "pipe.place(params) puts them where they are read" in caplog.messages[0]


def test_programs_of_shapes_alone_are_those_of_a_step(caplog: pytest.LogCaptureFixture) -> None:
    module, params, batch = net()
    module.to(DEVICES[0])
    pipe = piped(module, devices=DEVICES)
    programs = pipe.programs(on(params, "meta"), on(batch, "meta"))
    with caplog.at_level(logging.INFO, "fpipe"):
        pipe.step(params, batch)
    assert not [text for text in caplog.messages if text.startswith("tracing")]
    assert pipe.programs(params, batch) is programs


def test_buffers_are_those_of_the_call() -> None:
    module, params, batch = net()
    plain = piped(module)
    module.to(DEVICES[0])
    pipe = piped(module, devices=DEVICES)
    for _ in range(2):
        for buffer in module.buffers():
            buffer.mul_(1.5)
        step = pipe.step(params, batch)
        module.to("cpu")
        assert_same(on(step, "cpu"), plain.step(params, batch), 0)
        module.to(DEVICES[0])


def test_what_is_no_copy_of_itself() -> None:
    """Leaves with gaps, and those whose rows are one, lie otherwise when they have been copied."""

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x = fpipe.cut(torch.tanh(batch["x"] @ params["w"]))
        return ((x @ params["w"].t() + batch["shift"]) * params["s"]).square().mean()

    torch.manual_seed(0)
    params = {"w": torch.randn(6, 9).double()[:, ::2][:, :3], "s": torch.randn(1, 1).double()}
    params["s"] = params["s"].expand(1, 6)
    batch = {
        "x": torch.randn(16, 12).double()[:8, ::2],
        "shift": torch.randn(1).double().expand(6),
    }
    schedule = schedules.zb_h1(ranks=2, microbatches=3)
    options: dict[str, Any] = {"in_dims": {"x": 0, "shift": None}, "compile": False}
    expected = fpipe.pipeline(loss_fn, schedule=schedule, **options).step(params, batch)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, devices=DEVICES, **options)
    for origin in ("cpu", *DEVICES):
        gaps = pytree.tree_map(
            lambda leaf, device=origin: torch.empty_strided(
                leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device
            ),
            {"w": params["w"], "x": batch["x"]},
        )
        own = {"w": gaps["w"].copy_(params["w"]), "s": on(params["s"][:, :1], origin).expand(1, 6)}
        rows = {"x": gaps["x"].copy_(batch["x"]), "shift": on(batch["shift"][:1], origin).expand(6)}
        assert own["w"].stride() == params["w"].stride() and rows["shift"].stride() == (0,)
        # Not to the bit: BLAS may take another kernel for what lies otherwise.
        assert_same(on(pipe.step(own, rows), "cpu"), expected)


@pytest.mark.parametrize("batch_norm", ["microbatch", "deferred"])
def test_state(batch_norm: Any) -> None:
    """It comes back where it came from."""
    options: dict[str, Any] = {
        "schedule": schedules.zbv(ranks=2, microbatches=4),
        "has_state": True,
        "has_aux": True,
        "batch_norm": batch_norm,
        "compile": False,
    }
    arguments = make_params(), make_state(), make_batch()
    expected = fpipe.pipeline(stateful_model, **options).step(*arguments)
    pipe = fpipe.pipeline(stateful_model, devices=DEVICES, **options)
    for origin in ("cpu", *DEVICES):
        own = on(arguments, origin)
        found = pipe.step(*own)
        assert devices_of(found.state) == devices_of(own[1])
        assert_same(on(tuple(found), "cpu"), tuple(expected), 0)


def test_what_is_drawn() -> None:
    """By keys, the same numbers as on one device."""
    module, params, batch = net()
    module.dropout.p = 0.5
    key = fpipe.random.key(3)
    expected = piped(module, has_key=True).step(params, batch, key)
    module.to(DEVICES[0])
    pipe = piped(module, has_key=True, devices=DEVICES)
    assert_same(on(pipe.step(params, batch, key), "cpu"), expected, 0)


class Doubled(torch.autograd.Function):
    """It is told on which device it makes something."""

    @staticmethod
    def forward(x: Tensor, device: torch.device) -> Tensor:
        """Twice."""
        return x * torch.full((), 2.0, dtype=x.dtype, device=device)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """Thrice, to be told apart."""
        return 3 * cotangent, None


def test_functions_with_a_backward_of_their_own() -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        x = fpipe.cut(Doubled.apply(x @ params["first"], x.device))
        return Doubled.apply(x @ params["last"], x.device).square().mean()

    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    params = {"first": torch.randn(3, 3).double(), "last": torch.randn(3, 3).double()}
    x = torch.randn(4, 3).double()
    expected = fpipe.pipeline(loss_fn, schedule=schedule, compile=False).step(params, x)
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False, devices=DEVICES)
    assert_same(on(pipe.step(params, x), "cpu"), expected, 0)


TRANSFORMED: dict[str, Any] = {
    "forward": lambda pipe, own: pipe.forward(own["params"], own["batch"]),
    "grad": lambda pipe, own: fpipe.grad(pipe, ("params", "batch")).step(
        own["params"], own["batch"]
    ),
    "rows": lambda pipe, own: fpipe.per_example_grads(pipe).step(own["params"], own["batch"]),
    "norms": lambda pipe, own: fpipe.per_example_norms(pipe).step(own["params"], own["batch"]),
    "norms of vmap": lambda pipe, own: fpipe.per_example_norms(fpipe.vmap(pipe)).step(
        own["members"], own["batch"]
    ),
    "vmap": lambda pipe, own: fpipe.vmap(pipe).step(own["members"], own["batch"]),
    "torch.func.vmap": lambda pipe, own: torch.func.vmap(pipe.step, (0, None))(
        own["members"], own["batch"]
    ),
    "jvp": lambda pipe, own: fpipe.jvp(pipe).step(own["params"], own["batch"], own["vector"]),
    "hvp": lambda pipe, own: fpipe.hvp(fpipe.grad(pipe, ("batch", "params"))).step(
        own["params"], own["batch"], (own["batch"], own["vector"])
    ),
    "global_norm": lambda pipe, own: fpipe.global_norm(
        pipe.step(own["params"], own["batch"]).grads
    ),
}


def tied(params: Any, batch: Any) -> Any:
    """A parameter that three stages read, a weight, and aux of two stages."""
    x = fpipe.cut(torch.tanh(batch["x"] @ params["w"]))
    middle = x = fpipe.cut(torch.tanh(x @ params["v"] + batch["shift"]))
    x = fpipe.cut(torch.tanh(x @ params["w"]))
    y = torch.tanh(x @ params["w"] + batch["x"])
    total = (y - middle).square().sum()
    return (total, y.new_full((), len(y))), {"y": y, "middle": middle}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms(name: str) -> None:
    torch.manual_seed(0)
    params = {"w": torch.randn(3, 3).double(), "v": torch.randn(3, 3).double()}
    arguments = {
        "params": params,
        "members": pytree.tree_map(lambda w: torch.stack([w, 1.1 * w]), params),
        "vector": pytree.tree_map(torch.cos, params),
        "batch": {"x": torch.randn(5, 3).double(), "shift": torch.randn(3).double()},
    }
    options: dict[str, Any] = {
        "schedule": schedules.zbv(ranks=2, microbatches=2),
        "in_dims": {"x": 0, "shift": None},
        "reduction": "weighted",
        "has_aux": True,
        "compile": False,
    }
    expected = TRANSFORMED[name](fpipe.pipeline(tied, **options), arguments)
    pipe = fpipe.pipeline(tied, devices=DEVICES, **options)
    for origin in ("cpu", *DEVICES):
        found = TRANSFORMED[name](pipe, on(arguments, origin))
        assert_same(pytree.flatten(on(found, "cpu"))[0], pytree.flatten(expected)[0], 0)


def test_derivatives_of_a_call() -> None:
    """The gradients of leaves lie with them."""
    module, params, batch = net()
    plain = {name: p.clone().requires_grad_() for name, p in params.items()}
    piped(module).value(plain, batch).backward()
    module.to(DEVICES[0])
    pipe = piped(module, devices=DEVICES)
    placed = pipe.place({n: p.clone().requires_grad_() for n, p in params.items()}, batch)
    pipe.value(placed, batch).backward()
    for name, own in placed.items():
        assert own.grad is not None and own.grad.device == own.device
        assert_same(own.grad.cpu(), plain[name].grad, 0)


def test_buffers_that_lie_elsewhere() -> None:
    module, params, batch = net()
    expected = piped(module).step(params, batch)
    with pytest.raises(fpipe.StageError, match=r"buffer 'layers.0.scale' of Net lies on cpu, but"):
        piped(module, devices=DEVICES)
    buffers = on(dict(module.named_buffers()), DEVICES[0])
    pipe = piped(module, devices=DEVICES, buffers=buffers)
    assert_same(on(pipe.step(params, batch), "cpu"), expected, 0)


def test_a_device_without_a_number_is_that_of_the_stage() -> None:
    """Also of stages that are functions of their own, and where a name stands for it."""

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        x = fpipe.cut(x @ params["first"] * torch.ones(3, device="cuda").double())
        here = Doubled.apply(x @ params["last"], str(x.device))
        return (here * torch.ones(3, device="cuda").double()).square().mean()

    def scaled(w: Tensor, x: Tensor) -> Tensor:
        return x @ w * torch.full((3,), 0.5, device="cuda").double()

    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    params = {"first": torch.randn(3, 3).double(), "last": torch.randn(3, 3).double()}
    x = torch.randn(4, 3).double()
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False, devices=DEVICES)
    expected = (2 * (x @ params["first"] @ params["last"])).square().mean()
    assert_same(pipe.step(params, x).loss.cpu(), expected)
    weights = [params["first"], params["last"]]
    listed = fpipe.pipeline(
        [scaled] * 2, lambda y, _: y.square().mean(), schedule, compile=False, devices=DEVICES
    )
    expected = (x @ weights[0] @ weights[1] / 4).square().mean()
    assert_same(listed.step(listed.place(weights), x).loss.cpu(), expected)


def test_gradients_of_a_batch_lie_with_it() -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return (fpipe.cut(x @ params["first"]) @ params["last"]).square().mean()

    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    params = {"first": torch.randn(3, 3).double(), "last": torch.randn(3, 3).double()}
    pipe = fpipe.pipeline(loss_fn, schedule=schedule, compile=False, devices=DEVICES)
    x = torch.randn(4, 3).double()
    expected = torch.func.grad(lambda x: loss_fn(params, x))(x)
    for origin in ("cpu", *DEVICES):
        own = x.clone().to(origin).requires_grad_()
        pipe.value(params, own).backward()
        assert own.grad is not None
        assert_same(own.grad.cpu(), expected)
        assert fpipe.grad(pipe, "batch").step(params, own.detach()).grads.device == own.device


@pytest.mark.parametrize("measure", [False, True])
def test_cuts_are_chosen_for_devices(measure: bool) -> None:
    """Wherever the example lies; it is measured where the module does."""
    module, params, batch = net()
    module.to(DEVICES[0])
    schedule = schedules.zb_h1(ranks=2, microbatches=2)
    options: dict[str, Any] = {"schedule": schedule, "loss": cross_entropy, "compile": False}
    for origin in [DEVICES[0]] if measure else ["cpu", "meta", *DEVICES]:
        example = on(batch, origin)
        pipe = fpipe.from_module(
            module, example=example, measure=measure, devices=DEVICES, **options
        )
        assert pipe.cuts is not None and len(pipe.cuts) == 1
    assert set(devices_of(pipe.place(params, batch))) == set(DEVICES)


def test_what_lies_elsewhere_is_said() -> None:
    class Scaled(torch.autograd.Function):
        """It closes over what a trace does not see."""

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            """By a constant."""
            return x * constant

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Nothing."""

        @staticmethod
        def backward(ctx: Any, cotangent: Tensor) -> Any:
            """By the same."""
            return cotangent * constant

    constant = torch.arange(3.0, device=DEVICES[0]).double()
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    params = {"first": torch.randn(3, 3).double(), "last": torch.randn(3, 3).double()}
    pipe = fpipe.pipeline(
        lambda p, x: Scaled.apply(fpipe.cut(x @ p["first"]) @ p["last"]).square().mean(),
        schedule=schedule,
        compile=False,
        devices=DEVICES,
    )
    match = r"stage 1 .* computes with tensors on several devices .* takes tensors as arguments of"
    with pytest.raises(fpipe.StageError, match=match):
        pipe.step(params, torch.randn(4, 3).double())


def test_devices_of_two_kinds() -> None:
    module, _, _ = net()
    with pytest.raises(fpipe.StageError, match="devices has those of cpu and cuda, but one"):
        piped(module, devices=["cuda:0", "cpu"])
