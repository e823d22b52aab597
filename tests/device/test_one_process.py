"""A pipeline in one process on CUDA: where everything lies, and that nobody waits.

``make emulate`` runs these tests on a device that is made of the CPU, but for those that compile.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config

import fpipe
from fpipe import Op, pytree, schedules
from fpipe.program import interpreter
from fpipe.program.instrument import instrument
from tests.models import assert_same, conv, gpt, mean_square, mlp, unpipelined
from tests.state_model import make_batch, make_params, make_state, without_aux

pytestmark = pytest.mark.cuda

compiles = pytest.mark.real_device


def moved(values: Any, device: Any) -> Any:
    """A tree on a device."""
    return pytree.tree_map(lambda leaf: leaf.to(device), values)


def pairs() -> list[Sequence[str]]:
    """Devices for two ranks: one of them the CPU, and two of CUDA where there are two."""
    several = [("cuda:0", "cuda:1")] if torch.cuda.device_count() > 1 else []
    return [("cuda", "cpu"), ("cpu", "cuda"), *several]


@contextmanager
def without_waiting() -> Iterator[None]:
    """Refuse to wait for the device."""
    try:
        with warnings.catch_warnings(action="ignore"):  # it is a prototype, and says so
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("family", ["gpipe", "one_f_one_b", "interleaved_1f1b", "zb_h1", "zbv"])
def test_equal_to_the_cpu(family: str, remat: str) -> None:
    schedule = schedules.get(family, ranks=2, microbatches=4)
    model = gpt(schedule.num_stages, 7)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=False, remat=remat)
    params, batch = moved(model.params, "cuda"), moved(model.batch, "cuda")
    step, value = pipe.step(params, batch), pipe.value(params, batch)
    assert all(leaf.is_cuda for leaf in pytree.flatten((step, value))[0])
    assert_same(moved(step, "cpu"), unpipelined(*model))
    assert_same(value, step.loss)


@pytest.mark.parametrize("devices", pairs())
def test_a_value_of_the_cpu_goes_to_the_next_device(devices: Sequence[str]) -> None:
    def stage(w: Tensor, x: Tensor) -> list[Tensor]:
        return [x * w, torch.tensor(3.0)]

    def last(w: Tensor, xs: list[Tensor]) -> Tensor:
        return xs[0] * w * xs[1]

    schedule = schedules.gpipe(ranks=2, microbatches=2)
    pipe = fpipe.pipeline(
        [stage, last], lambda y, _: y.mean(), schedule, compile=False, devices=devices
    )
    params = [torch.full((), 2.0, device=device) for device in devices]
    step = pipe.step(params, torch.ones(4, device=devices[0]))
    assert step.loss.item() == 12 and [grad.item() for grad in step.grads] == [6, 6]


@compiles
@pytest.mark.parametrize("name", ["gpt", "conv"])
def test_compiled(name: str) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    model = (gpt if name == "gpt" else conv)(schedule.num_stages, 8, torch.float32)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule)
    with torch.backends.cudnn.flags(allow_tf32=False):
        step = pipe.step(moved(model.params, "cuda"), moved(model.batch, "cuda"))
    assert_same(moved(step, "cpu"), unpipelined(*model), 1e-4)


def test_a_device_for_each_rank() -> None:
    """Copies go both ways; the batch comes from either device."""
    schedule = schedules.zbv(ranks=2, microbatches=4)
    model = mlp(schedule.num_stages, 9)
    for devices in pairs():
        where = [devices[rank] for rank in schedule.placement]
        params = [moved(part, device) for part, device in zip(model.params, where, strict=True)]
        pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=False, devices=devices)
        for origin in ("cpu", "cuda"):
            step = pipe.step(params, moved(model.batch, origin))
            for part, own in zip(step.grads, params, strict=True):
                assert part["w"].device == own["w"].device
            assert_same(moved(step, "cpu"), unpipelined(*model))


def test_stages_of_one_kind_on_two_devices() -> None:
    """What a stage makes itself lies on its own device."""

    def layer(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ w + torch.arange(3, device=x.device))

    def loss(y: Tensor, x: Tensor) -> Tensor:
        return (y - x).square().mean()

    schedule = schedules.interleaved_1f1b(ranks=2, microbatches=4)
    weights = [torch.randn(3, 3, dtype=torch.float64) for _ in range(4)]
    x = torch.randn(8, 3, dtype=torch.float64)
    for devices in pairs():
        pipe = fpipe.pipeline([layer] * 4, loss, schedule, compile=False, devices=devices)
        where = [devices[rank] for rank in schedule.placement]
        params = [w.to(device) for w, device in zip(weights, where, strict=True)]
        expected = unpipelined([layer] * 4, loss, weights, x)
        assert_same(moved(pipe.step(params, x), "cpu"), expected)


def test_a_step_waits_for_nothing() -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    model = gpt(schedule.num_stages, 8)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=False)
    params, batch = moved(model.params, "cuda"), moved(model.batch, "cuda")
    calls = (pipe.step, pipe.value, pipe.forward)
    for call in calls:  # a plan has numbers of its own, which are copied once
        call(params, batch)
    with without_waiting():
        for call in calls:
            call(params, batch)


@compiles
def test_a_compiled_step_synchronizes_no_device() -> None:
    schedule = schedules.zb_h1(ranks=2, microbatches=4)
    model = gpt(schedule.num_stages, 8, torch.float32)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule)
    params, batch = moved(model.params, "cuda"), moved(model.batch, "cuda")
    pipe.step(params, batch)
    step = torch.profiler.record_function("the step")
    profiling = torch.profiler.profile(acc_events=True)  # it warns that others are lost
    with without_waiting(), profiling as profile, step:
        pipe.step(params, batch)
    # The profiler waits for the device itself, after the step.
    events = profile.events()
    assert events is not None
    end = next(event.time_range.end for event in events if event.name == "the step")
    waits = [event for event in events if event.name == "cudaDeviceSynchronize"]
    assert not [event for event in waits if event.time_range.start < end]


@compiles
def test_cuda_graphs_that_torch_was_told_to_take() -> None:
    """Each would write over what the one before it returned."""
    schedule = schedules.gpipe(ranks=2, microbatches=4)
    model = gpt(schedule.num_stages, 8, torch.float32)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule)
    params, batch = moved(model.params, "cuda"), moved(model.batch, "cuda")
    with inductor_config.patch({"triton.cudagraphs": True}):
        for _ in range(3):
            step = pipe.step(params, batch)
    assert_same(moved(step, "cpu"), unpipelined(*model), 1e-4)


@pytest.mark.real_device
def test_pinned_memory_may_be_written_to_after_a_step() -> None:
    schedule = schedules.gpipe(ranks=2, microbatches=2)
    weights = [torch.eye(1024, device="cuda")] * 2
    pipe = fpipe.pipeline(
        [lambda w, x: x @ w] * 2,
        lambda y, _: y.mean(),
        schedule,
        compile=False,
        devices=["cuda"] * 2,
    )
    x = torch.ones(4096, 1024).pin_memory()
    for _ in range(3):
        x.fill_(1)
        loss = pipe.step(weights, x).loss
        x.zero_()
        assert loss.item() == 1.0


def test_a_leaf_that_all_read_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Any] = []
    plain = Tensor.to

    def to(self: Tensor, *arguments: Any, **named: Any) -> Tensor:
        found = plain(self, *arguments, **named)
        if not self.is_cuda and found.is_cuda and self.shape == (3,):
            copied.append(self)
        return found

    schedule = schedules.zb_h1(ranks=2, microbatches=4)
    stages: list[Any] = [entry, fpipe.Stage(shifted, reads_batch=True)]
    devices = [torch.device("cuda", 0)] * 2
    dims = {"x": 0, "shift": None}
    pipe = fpipe.pipeline(
        stages, lambda y, _: y.mean(), schedule, in_dims=dims, compile=False, devices=devices
    )
    params = [torch.ones(3, 3, device="cuda")] * 2
    batch = {"x": torch.ones(8, 3), "shift": torch.ones(3)}
    pipe.step(params, batch)
    monkeypatch.setattr(Tensor, "to", to)
    pipe.step(params, batch)
    assert len(copied) == 1


@pytest.mark.skipif("tests.device.emulated" not in sys.modules, reason="counts times of its own")
@pytest.mark.parametrize("family", ["gpipe", "one_f_one_b", "zb_h1", "interleaved_1f1b", "zbv"])
def test_two_devices_compute_at_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message is waited for, and none of those that come after it."""
    schedule = schedules.get(family, ranks=2, microbatches=8)
    model = mlp(schedule.num_stages, 16)
    devices = [torch.device("cuda", rank) for rank in range(2)]
    where = [devices[rank] for rank in schedule.placement]
    params = [moved(part, device) for part, device in zip(model.params, where, strict=True)]
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=False, devices=devices)
    pipe.step(params, model.batch)
    took = {Op.F: 1.0, Op.I: 1.0, Op.W: 1.0, Op.B: 2.0}

    def load(program: Any, *arguments: Any, **options: Any) -> Any:
        stream: Any = torch.cuda.current_stream(devices[program.rank])

        def wrap(call: Any, action: Any) -> Any:
            def timed(inputs: Any) -> Any:
                stream.time += took[action.op]
                return call(inputs)

            return timed

        return interpreter.load(instrument(program, wrap), *arguments, **options)

    monkeypatch.setattr("fpipe.execute.single.load", load)
    streams: Any = [torch.cuda.current_stream(device) for device in devices]
    start = max(stream.time for stream in streams)
    for stream in streams:
        stream.time = start
    pipe.step(params, model.batch)
    ones, twos = ([size] * schedule.num_stages for size in (1.0, 2.0))
    allowed = fpipe.simulate(schedule, fpipe.Cost(f=ones, i=ones, w=ones, b=twos)).makespan
    assert max(stream.time for stream in streams) - start == pytest.approx(allowed)


def test_default_device_is_that_of_the_stages() -> None:
    def scaled(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ w) * torch.arange(1, 4)

    def loss(y: Tensor, _: Any) -> Tensor:
        return y.square().mean()

    schedule = schedules.zb_h1(ranks=2, microbatches=2)
    weights = [torch.randn(3, 3, dtype=torch.float64) for _ in range(2)]
    x = torch.randn(6, 3, dtype=torch.float64)
    expected = unpipelined([scaled] * 2, loss, weights, x)
    params = [w.cuda().requires_grad_() for w in weights]
    stacked = [torch.stack([w, w]) for w in weights]
    with torch.device("cuda"):
        pipes = [fpipe.pipeline([scaled] * 2, loss, schedule, compile=False) for _ in range(3)]
        assert_same(moved(pipes[0].step(params, x.cuda()), "cpu"), expected)
        pipes[1].value(params, x.cuda()).backward()
        step = torch.func.vmap(pipes[2].step, in_dims=(0, None))(moved(stacked, "cuda"), x.cuda())
    assert_same([w.grad.cpu() for w in params if w.grad is not None], expected.grads)
    assert_same(moved(pytree.tree_map(lambda leaf: leaf[1], step), "cpu"), expected)


def test_keys_may_lie_anywhere() -> None:
    def dropped(w: Tensor, x: Tensor, key: Tensor) -> Tensor:
        return fpipe.random.dropout(key, x @ w, 0.5)

    schedule = schedules.zb_h1(ranks=2, microbatches=3)
    stages = [fpipe.Stage(dropped, reads_key=True)] * 2
    weights = [torch.randn(3, 3, dtype=torch.float64) for _ in range(2)]
    x = torch.randn(6, 3, dtype=torch.float64)
    pipe = fpipe.pipeline(stages, lambda y, _: y.square().mean(), schedule, compile=False)
    key = fpipe.random.key(5)
    expected = pipe.step(weights, x, key)
    params, batch = moved(weights, "cuda"), x.cuda()
    for own in (key, key.cuda()):
        assert_same(moved(pipe.step(params, batch, own), "cpu"), expected)
    with without_waiting():
        pipe.step(params, batch, key)


class Attending(nn.Module):
    """Attention that drops, of heads of a width that the kernels of CUDA take."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        query, key, value = self.first(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5, is_causal=True)
        return self.second(heads.transpose(1, 2).flatten(2))


def test_attention_that_drops_draws_from_keys() -> None:
    """In float32, in which it is a kernel of its own that draws, the numbers are the CPU's."""
    torch.manual_seed(0)
    module, x, key = Attending(), torch.randn(4, 5, 16), fpipe.random.key(3)
    schedule = schedules.zb_h1(ranks=2, microbatches=2)
    found = []
    for device in ("cpu", "cuda"):
        module.to(device)
        pipe = fpipe.from_module(
            module,
            loss=lambda y, _: (y.square().mean(), y),
            has_aux=True,
            cuts=["first"],
            schedule=schedule,
            has_key=True,
            compile=False,
        )
        params = {name: p.detach() for name, p in module.named_parameters()}
        step = pipe.step(params, {"x": x.to(device)}, key)
        with fpipe.nn.keyed(fpipe.random.fold_in(key, 0)):
            plain = module(x[:2].to(device)).detach()
        assert_same(step.aux[:2], plain, 1e-5)
        found.append(moved(tuple(step), "cpu"))
    assert_same(found[1], found[0], 1e-5)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lstm": (lambda: nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True), (4, 5, 3)),
    "gru": (lambda: nn.GRU(3, 4, batch_first=True), (4, 5, 3)),
    "rnn": (lambda: nn.RNN(3, 4, batch_first=True), (4, 5, 3)),
    "lstm cell": (lambda: nn.LSTMCell(3, 4), (4, 3)),
    "gru cell": (lambda: nn.GRUCell(3, 4), (4, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 4, 3)),
}


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN:UserWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_cuda_has_kernels_of_its_own_for(name: str) -> None:
    """What goes through no trace, or no transform, is recorded operation by operation."""
    make, shape = LAYERS[name]
    module, x = make().double(), torch.randn(shape).double()

    def layer(params: Any, x: Tensor) -> Tensor:
        found = torch.func.functional_call(module, params, (x,))
        return found[0] if isinstance(found, tuple) else found

    schedule = schedules.zb_h1(ranks=2, microbatches=2)
    stages: list[Any] = [layer, lambda _, y: 1.5 * y]
    params = [{name: p.detach() for name, p in module.named_parameters()}, None]
    vector = pytree.tree_map(torch.cos, params)
    found = []
    for device in ("cpu", "cuda"):
        module.to(device)
        own, along, batch = moved((params, vector, x), device)
        pipe = fpipe.pipeline(stages, lambda y, _: y.square().mean(), schedule, compile=False)
        several = pytree.tree_map(lambda leaf: torch.stack([leaf, 2 * leaf]), own)
        found.append(
            (
                tuple(pipe.step(own, batch)),
                tuple(fpipe.vmap(pipe).step(several, batch)),
                tuple(fpipe.hvp(pipe).step(own, batch, along)),
            )
        )
    assert_same(moved(found[1], "cpu"), found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_members(dtype: torch.dtype) -> None:
    """In each dtype CUDA takes other kernels, some of which vmap keeps from their backward."""

    def attend(w: Tensor, x: Tensor) -> Tensor:
        query, key, value = (x @ w).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return heads.transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    schedule = schedules.zb_h1(ranks=2, microbatches=2)
    w, x = torch.randn(16, 48), torch.randn(4, 5, 16)
    w = w / 4  # large scores would magnify the rounding of a product
    members, x = moved((torch.stack([w, -w]).to(dtype), x.to(dtype)), "cuda")
    pipe = fpipe.pipeline(
        [attend] * 2, lambda y, _: y.float().square().mean(), schedule, compile=False
    )
    found = fpipe.vmap(pipe).step([members] * 2, x)
    for number in range(2):
        alone = pipe.step([members[number]] * 2, x)
        own = (found.loss[number], [grad[number] for grad in found.grads])
        assert_same(own, tuple(alone), 1e-5 if dtype == torch.float32 else 5e-2)


def test_lengths_of_ctc_loss_may_lie_anywhere() -> None:
    """Its kernels want them on the CPU, where torch.full makes them."""
    schedule = schedules.gpipe(ranks=1, microbatches=2)
    w, x, symbols = torch.randn(3, 6), torch.randn(4, 5, 3), torch.randint(1, 6, (4, 2))

    def losses(y: Tensor, batch: Any) -> Tensor:
        rows = len(batch["x"])
        where = batch["x"].device
        steps, lengths = torch.full((rows,), 5), torch.full((rows,), 2, device=where)
        return F.ctc_loss(y.log_softmax(-1).transpose(0, 1), batch["symbols"], steps, lengths)

    pipe = fpipe.pipeline([lambda w, batch: batch["x"] @ w], losses, schedule, compile=False)
    expected = pipe.step([w], {"x": x, "symbols": symbols})
    found = pipe.step(*moved(([w], {"x": x, "symbols": symbols}), "cuda"))
    assert_same(moved(found, "cpu"), expected, 1e-5)


@pytest.mark.parametrize("batch_norm", ["microbatch", "deferred"])
def test_state(batch_norm: Any) -> None:
    schedule = schedules.zbv(ranks=2, microbatches=4)
    pipe = fpipe.pipeline(
        without_aux, schedule=schedule, has_state=True, batch_norm=batch_norm, compile=False
    )
    arguments = make_params(), make_state(), make_batch()
    expected = pipe.step(*arguments)
    found = pipe.step(*moved(arguments, "cuda"))
    assert all(leaf.is_cuda for leaf in pytree.flatten(found)[0])
    assert_same(moved(tuple(found), "cpu"), tuple(expected))


def test_transforms() -> None:
    schedule = schedules.zbv(ranks=2, microbatches=2)
    model = mlp(schedule.num_stages, 4)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=False)
    vector = pytree.tree_map(torch.ones_like, model.params)
    arguments: dict[str, Sequence[Any]] = {
        "per_example_grads": (model.params, model.batch),
        "per_example_norms": (model.params, model.batch),
        "jvp": (model.params, model.batch, vector),
        "hvp": (model.params, model.batch, vector),
    }
    for name, own in arguments.items():
        derived = getattr(fpipe, name)(pipe)
        expected = derived.step(*own)
        assert_same(tuple(moved(tuple(derived.step(*moved(own, "cuda"))), "cpu")), tuple(expected))


def entry(w: Tensor, batch: Any) -> Tensor:
    return torch.tanh(batch["x"] @ w)


def shifted(w: Tensor, x: Tensor, batch: Any) -> Tensor:
    return torch.tanh(x @ w + batch["shift"] + batch["x"])


def weighted(y: Tensor, batch: Any) -> Any:
    return ((y - batch["x"]).square().sum(), batch["x"].new_full((), len(y))), {"y": y}


BY_NAME: dict[str, Any] = {
    "step": lambda pipe, own: pipe.step(own["params"], own["batch"]),
    "forward": lambda pipe, own: pipe.forward(own["params"], own["batch"]),
    "grad": lambda pipe, own: fpipe.grad(pipe, ("params", "batch")).step(
        own["params"], own["batch"]
    ),
    "rows": lambda pipe, own: fpipe.per_example_grads(pipe).step(own["params"], own["batch"]),
    "norms of vmap": lambda pipe, own: fpipe.per_example_norms(fpipe.vmap(pipe)).step(
        own["members"], own["batch"]
    ),
    "vmap": lambda pipe, own: fpipe.vmap(pipe).step(own["members"], own["batch"]),
    "torch.func.vmap": lambda pipe, own: torch.func.vmap(pipe.step, (0, None))(
        own["members"], own["batch"]
    ),
    "jvp": lambda pipe, own: fpipe.jvp(pipe).forward(own["params"], own["batch"], own["vector"]),
    "hvp": lambda pipe, own: fpipe.hvp(fpipe.grad(pipe, ("batch", "params"))).step(
        own["params"], own["batch"], (own["batch"], own["vector"])
    ),
    "ggnvp": lambda pipe, own: fpipe.ggnvp(pipe).step(own["params"], own["batch"], own["vector"]),
    "global_norm": lambda pipe, own: fpipe.global_norm(
        pipe.step(own["params"], own["batch"]).grads
    ),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_everything_with_a_device_for_each_rank(name: str) -> None:
    """Leaves of the batch that stages on all devices read, a weight, and aux."""
    schedule = schedules.zbv(ranks=2, microbatches=2)
    stages: list[Any] = [entry, *[fpipe.Stage(shifted, reads_batch=True)] * 3]
    weights = [torch.randn(3, 3).double() for _ in stages]
    arguments = {
        "params": weights,
        "members": [torch.stack([w, 1.1 * w]) for w in weights],
        "vector": [w.cos() for w in weights],
        "batch": {"x": torch.randn(5, 3).double(), "shift": torch.randn(3).double()},
    }
    options: dict[str, Any] = {
        "in_dims": {"x": 0, "shift": None},
        "reduction": "weighted",
        "has_aux": True,
        "compile": False,
    }
    expected = BY_NAME[name](fpipe.pipeline(stages, weighted, schedule, **options), arguments)
    for devices in pairs():
        pipe = fpipe.pipeline(stages, weighted, schedule, devices=devices, **options)
        where = [devices[rank] for rank in schedule.placement]
        placed = {
            name: [moved(part, device) for part, device in zip(value, where, strict=True)]
            for name, value in arguments.items()
            if name != "batch"
        }
        for origin in ("cpu", "cuda"):
            own = {**placed, "batch": moved(arguments["batch"], origin)}
            found = moved(BY_NAME[name](pipe, own), "cpu")
            assert_same(pytree.flatten(found)[0], pytree.flatten(expected)[0])


@pytest.mark.parametrize("devices", [None, ("cuda", "cpu"), ("cpu", "cuda")])
def test_derivatives_of_a_pipeline(devices: Any) -> None:
    """Forward, in reverse, and twice; nobody waits for the device."""
    schedule = schedules.zbv(ranks=2, microbatches=2)
    model = mlp(schedule.num_stages, 4)
    where = ["cuda" if devices is None else devices[rank] for rank in schedule.placement]
    plain = fpipe.pipeline(model.stages, model.loss, schedule, compile=False)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=False, devices=devices)

    def to_their_places(params: Any) -> Any:
        return [moved(part, device) for part, device in zip(params, where, strict=True)]

    def squares(grads: Any) -> Tensor:
        found = [leaf.square().sum().to(where[-1]) for leaf in pytree.flatten(grads)[0]]
        return torch.stack(found).sum()

    def penalty(own: fpipe.Pipeline, batch: Any) -> Any:
        return lambda params: squares(torch.func.grad(own.value)(params, batch))

    def forward(own: fpipe.Pipeline, batch: Any) -> Any:
        return lambda params, vector: torch.func.jvp(
            lambda p: tuple(own.step(p, batch)), (params,), (vector,)
        )

    vector = pytree.tree_map(torch.cos, model.params)
    params, along = to_their_places(model.params), to_their_places(vector)
    batch = moved(model.batch, "cuda")
    twice = torch.func.grad(penalty(pipe, batch))(params)
    pushed = forward(pipe, batch)(params, along)
    if devices is None:
        with without_waiting():
            torch.func.grad(penalty(pipe, batch))(params)
            forward(pipe, batch)(params, along)
    assert [leaf.device.type for leaf in pytree.flatten(twice)[0]] == [
        leaf.device.type for leaf in pytree.flatten(params)[0]
    ]
    where = ["cpu"] * len(where)
    expected = torch.func.grad(penalty(plain, model.batch))(model.params)
    assert_same(moved(twice, "cpu"), expected)
    assert_same(moved(pushed, "cpu"), forward(plain, model.batch)(model.params, vector))


class Rotated(nn.Linear):
    """A buffer that no checkpoint has, which the module makes itself."""

    angles: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("angles", torch.empty(width), persistent=False)

    def reset_parameters(self) -> None:
        """As torch calls it when the module is made, before it has a buffer."""
        super().reset_parameters()
        if hasattr(self, "angles"):
            self.angles.copy_(torch.arange(self.in_features) / 10)

    def forward(self, input: Tensor) -> Tensor:
        """Turned a little."""
        return torch.tanh(super().forward(input)) * self.angles.cos()


def test_module_without_data_is_made_on_the_default_device(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.square().mean()

    schedule = schedules.zb_h1(ranks=2, microbatches=2)
    with torch.device("meta"):
        module = nn.Sequential(Rotated(3), Rotated(3))
    stored = {name: torch.rand(p.shape) for name, p in module.named_parameters()}
    save_file(stored, tmp_path / "model.safetensors")
    batch = {"input": torch.rand(4, 3)}
    steps = []
    for device in ("cpu", "cuda"):
        with torch.device(device):
            pipe = fpipe.from_module(
                module, loss=loss, cuts=["0"], schedule=schedule, compile=False
            )
            params = pipe.load(tmp_path / "model.safetensors")
            steps.append(pipe.step(params, moved(batch, device)))
        assert {p.device.type for p in params.values()} == {device}
    assert_same(moved(steps[1], "cpu"), steps[0], 1e-6)


class Net(nn.Module):
    """A buffer and a norm between two layers."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.linspace(1, 2, 4))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        """The loss."""
        h = self.norm(self.first(x)) * self.scale
        return {"loss": F.mse_loss(self.last(torch.tanh(h)), y)}


def test_module() -> None:
    torch.manual_seed(0)
    module = Net().double()
    batch = {"x": torch.randn(6, 3).double(), "y": torch.randn(6, 2).double()}
    schedule = schedules.zb_h1(ranks=2, microbatches=2)
    steps = []
    for device in ("cpu", "cuda"):
        module.to(device)
        pipe = fpipe.from_module(module, cuts=["norm"], schedule=schedule, compile=False)
        params = {name: p.detach().clone() for name, p in module.named_parameters()}
        steps.append(pipe.step(params, moved(batch, device)))
        pipe.load_into(module, pytree.tree_map(torch.zeros_like, params))
        assert all(p.device.type == device and not p.any() for p in module.parameters())
        module.load_state_dict(params, strict=False)
    assert_same(moved(steps[1], "cpu"), steps[0])


def test_parameters_are_made_and_read_where_they_belong(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    schedule = schedules.zb_h1(ranks=2, microbatches=2)
    model = mlp(2, 4)
    names = ("0.w", "0.b", "1.w", "1.b")
    leaves = [part[name] for part in model.params for name in ("w", "b")]
    save_file(dict(zip(names, leaves, strict=True)), tmp_path / "model.safetensors")
    for devices in pairs():
        pipe = fpipe.pipeline(model.stages, mean_square, schedule, compile=False, devices=devices)
        read = pipe.load(tmp_path / "model.safetensors", shapes=model.params)
        drawn = pipe.init(
            lambda key, _, like: fpipe.random.normal(key, like.shape, like.dtype),
            fpipe.random.key(0),
            shapes=model.params,
        )
        for params in (read, drawn):
            for part, device in zip(params, devices, strict=True):
                assert {leaf.device.type for leaf in pytree.flatten(part)[0]} == {
                    torch.device(device).type
                }
        assert_same(moved(pipe.step(read, model.batch), "cpu"), unpipelined(*model))


def test_costs_and_records() -> None:
    schedule = schedules.zb_h1(ranks=2, microbatches=3)
    model = mlp(2, 6)
    pipe = fpipe.pipeline(model.stages, model.loss, schedule, compile=False)
    params, batch = moved(model.params, "cuda"), moved(model.batch, "cuda")
    cost = fpipe.profile(pipe, params, batch)
    assert fpipe.simulate(schedule, cost).makespan > 0
    with fpipe.record() as recording:
        step = pipe.step(params, batch)
    assert_same(moved(step, "cpu"), unpipelined(*model))
    assert len(recording.timeline.events) == 2
