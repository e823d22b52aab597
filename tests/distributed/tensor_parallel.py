"""Modules that `parallelize_module` divides, pipelined over a mesh, against whole ones."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fpipe
from fpipe import Schedule, schedules
from tests.distributed.crew import mesh_of

WIDTH, HEADS, VOCABULARY = 16, 4, 32


class Attention(nn.Module):
    """Causal attention; a rank has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            f(x).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class GPT(nn.Module):
    """A transformer written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x))
        return y


def sequence_parallel(module: nn.Module, mesh: DeviceMesh) -> None:
    """Divide a `GPT` by heads and columns, and between them by positions."""
    by_position, whole = Shard(1), Replicate()
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=by_position),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=by_position, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    block = "blocks.0."
    plan |= {
        block + "norm1": SequenceParallel(),
        block + "norm2": SequenceParallel(),
        block + "attention": PrepareModuleInput(
            input_layouts=(by_position,), desired_input_layouts=(whole,)
        ),
        **{block + f"attention.{name}": ColwiseParallel() for name in "qkv"},
        block + "attention.o": RowwiseParallel(output_layouts=by_position),
        block + "up": ColwiseParallel(input_layouts=by_position),
        block + "down": RowwiseParallel(output_layouts=by_position),
    }
    parallelize_module(module, mesh, plan)


class Ends(nn.Module):
    """What stands around the layers, and takes the fewest kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.embed(tokens))
        return y


def at_both_ends(module: nn.Module, mesh: DeviceMesh) -> None:
    """Divide `Ends` by rows and columns, and between them by positions."""
    by_position, whole = Shard(1), Replicate()
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=by_position),
        "head": ColwiseParallel(input_layouts=by_position, output_layouts=whole),
    }
    parallelize_module(module, mesh, plan)


def llama() -> nn.Module:
    """A Llama of Hugging Face, as it comes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="eager",
    )
    module: nn.Module = LlamaForCausalLM(config)
    return module


def by_columns_and_rows(module: nn.Module, mesh: DeviceMesh) -> None:
    """Divide a Llama by heads and columns."""
    whole = Replicate()
    plan: dict[str, ParallelStyle] = {
        "lm_head": ColwiseParallel(output_layouts=whole),
        "model.embed_tokens": RowwiseParallel(input_layouts=whole),
    }
    layer = "model.layers.0."
    columns = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    plan |= {layer + name: ColwiseParallel() for name in columns}
    plan |= {layer + name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    parallelize_module(module, mesh, plan)


MODELS: dict[str, Any] = {
    "gpt": (GPT, sequence_parallel, ["embed", "blocks.0.attention", "blocks.0"]),
    "llama": (
        llama,
        by_columns_and_rows,
        ["model.embed_tokens", "model.layers.0.self_attn.o_proj", "model.layers.0"],
    ),
    "ends": (Ends, at_both_ends, ["embed"]),
}
"""How each is made and divided, and where it is cut into four stages, or into two."""


def surprise(output: Any, batch: Any) -> Tensor:
    """Cross entropy of the next token, of logits that may be divided by columns."""
    logits = output["logits"] if isinstance(output, dict) else output
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def make(kind: str, dims: tuple[str, ...]) -> tuple[nn.Module, nn.Module, DeviceMesh, Any]:
    """A whole module, one that is divided over ``"tp"``, the mesh, and a batch."""
    mesh = mesh_of((2, 2), dims)
    build, divide, _ = MODELS[kind]
    torch.manual_seed(0)
    whole, module = build().double(), build().double()
    module.load_state_dict(whole.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that the mesh is a slice
        divide(module, mesh["tp"])
    tokens = torch.randint(0, VOCABULARY, (4, 8))
    name = "input_ids" if kind == "llama" else "tokens"
    return whole, module, mesh, {name: tokens, "labels": tokens.roll(-1, 1)}


def pipeline(kind: str, module: nn.Module, schedule: Schedule, **options: Any) -> Any:
    """A pipeline of four stages, or of two, which meet in the layer if there is one."""
    cuts = MODELS[kind][2]
    chosen = cuts if schedule.num_stages == 4 else [cuts[len(cuts) // 2]]
    return fpipe.from_module(module, schedule=schedule, cuts=chosen, loss=surprise, **options)


@cache
def recorded(kind: str, dims: tuple[str, ...], stages: int, **options: Any) -> Any:
    """A pipeline whose recordings all schedules of so many stages share, from call to call."""
    _, module, mesh, _ = make(kind, dims)
    schedule = schedules.looped_bfs(ranks=2, microbatches=2, stages_per_rank=stages // 2)
    return pipeline(kind, module, schedule, mesh=mesh, **options)


def errors(
    group: Any,
    kind: str,
    dims: tuple[str, ...],
    families: Sequence[str],
    options: dict[str, Any],
) -> list[tuple[str, float, float, int, list[Any]]]:
    """How far loss and gradients are from those of the whole module, and how many there are.

    And the collectives of a step over this process's part of ``"tp"``, of each of its processes.
    Once for each of `families`; those of as many stages share what is traced.
    """
    whole, module, mesh, batch = make(kind, dims)
    params = dict(module.named_parameters())
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    expected = surprise(whole(**inputs), batch)
    expected.backward()
    results = []
    for family in families:
        # Waves of more microbatches are in each other's way.
        schedule = schedules.get(family, ranks=2, microbatches=4 if family == "zbv" else 2)
        first = recorded(kind, dims, schedule.num_stages, **{"compile": False} | options)
        pipe = first.with_schedule(schedule)
        with loss_parallel():
            loss, grads = pipe.step(params, batch)
            collectives = _Collectives()  # of compiled stages they cannot be seen
            if not options.get("compile"):
                with collectives:
                    pipe.step(params, batch)
        everyone: list[Any] = [None, None]
        ran = list(collectives.ran.items())
        dist.all_gather_object(everyone, ran, group=mesh["tp"].get_group())
        worst, count = 0.0, 0
        for name, parameter in whole.named_parameters():
            grad = grads[name]
            if grad is None:
                continue
            count += 1
            given: Any = params[name]
            if isinstance(given, DTensor):
                assert isinstance(grad, DTensor)
                assert grad.placements == given.placements
                assert grad.device_mesh == given.device_mesh
                grad = grad.full_tensor()
            assert parameter.grad is not None
            worst = max(worst, (grad - parameter.grad).abs().max().item())
        results.append((family, (loss - expected).abs().item(), worst, count, everyone))
    return results


def trained(group: Any, dims: tuple[str, ...], steps: int = 2) -> dict[str, Any]:
    """Norms and parameters after clipped steps, beside those of the whole module in one process."""
    whole, module, _, batch = make("gpt", dims)
    pipe = recorded("gpt", dims, 2, compile=False).with_schedule(
        schedules.zb_h1(ranks=2, microbatches=2)
    )
    trainer = fpipe.train(pipe, torch.optim.AdamW, lr=0.1, max_norm=0.1)
    params: dict[str, Any] = dict(module.named_parameters())
    state = trainer.init(params)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
    norms = []
    with loss_parallel():
        for _ in range(steps):
            _, params, state, norm = trainer.step(params, state, batch)
            optimizer.zero_grad()
            surprise(whole(batch["tokens"]), batch).backward()
            expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
            optimizer.step()
            norms.append((norm - expected).abs().item())
    own, worst = pipe.own(params), 0.0
    expected_params = dict(whole.named_parameters())
    for name, value in own.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        worst = max(worst, (full - expected_params[name]).abs().max().item())
    moments = pipe.own({name: (own or {}).get("exp_avg") for name, own in state.moments.items()})
    placed = all(moments[name].placements == value.placements for name, value in own.items())
    pipe.load_into(module, params)
    target = GPT().double()
    pipe.load_into(target, params)
    loaded = max(
        (value - expected_params[name]).abs().max().item()
        for name, value in target.named_parameters()
    )
    parallel = dict(module.named_parameters())
    same = max(
        (value.full_tensor() - expected_params[name]).abs().max().item()  # type: ignore[attr-defined]
        for name, value in parallel.items()
    )
    return {"norms": norms, "params": worst, "placed": placed, "loaded": loaded, "same": same}


def saved(group: Any, path: str) -> list[Any]:
    """Parameters that were drawn over the mesh, saved, and read again."""
    import torch.distributed.checkpoint as dcp

    whole, _, _, batch = make("gpt", ("pp", "tp"))
    schedule = schedules.zb_h1(ranks=2, microbatches=2)
    pipe = recorded("gpt", ("pp", "tp"), 2, compile=False).with_schedule(schedule)

    def normal(key: Tensor, name: str, like: Tensor) -> Tensor:
        return fpipe.random.normal(key, tuple(like.shape), like.dtype)

    example = {name: value.to("meta") for name, value in batch.items()}
    with loss_parallel():
        params = pipe.init(normal, fpipe.random.key(0), example)
    dcp.save(dict(pipe.own(params)), checkpoint_id=path)
    again = pipe.load(path, example)
    alone = pipeline("gpt", whole, schedule, compile=False)
    drawn = alone.init(normal, fpipe.random.key(0))
    read = alone.load(path)
    results = []
    for name, value in pipe.own(params).items():
        results.append((value.full_tensor() - drawn[name]).abs().max().item())
        results.append((again[name].full_tensor() - drawn[name]).abs().max().item())
        results.append((read[name] - drawn[name]).abs().max().item())
    return results


def refused(group: Any) -> list[Any]:
    """Errors of parameters and optimizers that do not fit."""
    from tests.distributed.crew import attempt

    mesh = mesh_of((2, 2), ("pp", "tp"))
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    stages = [lambda w, x: x @ (w.full_tensor() if isinstance(w, DTensor) else w)] * 2
    pipe = fpipe.pipeline(
        stages, lambda y, _: y.square().mean(), schedule, mesh=mesh, compile=False
    )
    x, eye = torch.ones(4, 4), torch.eye(4)

    def over(dim: str, placement: Any) -> Any:
        value = DTensor.from_local(eye, mesh[dim], [placement], run_check=False)
        return pipe.local([value, value])

    divided = over("tp", Replicate())
    foreign = mesh_of((4,), ("all",))
    abroad = DTensor.from_local(eye, foreign, [Replicate()], run_check=False)
    other = torch.ones(4 + 4 * mesh.get_local_rank("tp"), 4)
    muon = fpipe.train(pipe, torch.optim.Muon, lr=0.1)
    return [
        attempt(pipe.step, over("tp", Partial()), x),
        attempt(pipe.step, over("pp", Replicate()), x),
        attempt(pipe.step, divided, DTensor.from_local(x, mesh["tp"], [Replicate()])),
        attempt(muon.init, divided),
        attempt(pipe.step, pipe.local([abroad, abroad]), x),
        attempt(pipe.step, divided, other),
        attempt(pipe.step, divided, x),
    ]


def gathered(p: Any, x: Tensor) -> Tensor:
    """A stage whose parameter lies in rows on several processes, or whole on one."""
    weight = p["w"]
    if isinstance(weight, DTensor):
        weight = weight.full_tensor(grad_placements=[Partial()])
    return x + torch.tanh(x @ weight)


def sharded_over_replicas(group: Any) -> float:
    """How far gradients of parameters in rows are from those of one process on all of the batch."""
    mesh = mesh_of((2, 2), ("dp", "pp"))
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(4, 4, dtype=torch.double, generator=generator) for _ in range(2)]
    batch = torch.randn(8, 4, dtype=torch.double, generator=generator)
    schedule = schedules.zb_h1(ranks=2, microbatches=2)

    def piped(mesh: DeviceMesh | None) -> fpipe.Pipeline:
        return fpipe.pipeline(
            [gathered] * 2, lambda y, _: y.square().mean(), schedule, mesh=mesh, compile=False
        )

    rows = [{"w": distribute_tensor(w, mesh["dp"], [Shard(0)])} for w in params]
    pipe = piped(mesh)
    own = batch.chunk(2)[mesh.get_local_rank("dp")]
    grads = pipe.step(pipe.local(rows), own).grads
    whole = piped(None).step([{"w": w} for w in params], batch).grads
    stage = mesh.get_local_rank("pp")
    mean = grads[stage]["w"].full_tensor() / 2
    return (mean - whole[stage]["w"]).abs().max().item()


def running(params: Any, state: Any, batch: Any) -> Any:
    """A linear layer whose outputs have a running mean; both may be divided by columns."""
    x = batch["x"]
    if isinstance(params, DTensor):
        x = DTensor.from_local(x, params.device_mesh, [Replicate()], run_check=False)
    y = x @ params
    return (y - state).square().mean(), 0.9 * state + 0.1 * y.detach().mean(0)


def with_state(group: Any) -> tuple[float, float, float, bool]:
    """How far a step with a divided state is from that of one process, and how the state lies."""
    mesh = mesh_of((2, 2), ("tp", "pp"))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 6, dtype=torch.double, generator=generator)
    batch = {"x": torch.randn(8, 4, dtype=torch.double, generator=generator)}
    mean = torch.zeros(6, dtype=torch.double)
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)

    def cut(params: Any, state: Any, batch: Any) -> Any:
        fpipe.cut(batch["x"])
        return running(params, state, batch)

    def piped(mesh: DeviceMesh | None) -> fpipe.Pipeline:
        return fpipe.pipeline(cut, schedule=schedule, has_state=True, mesh=mesh, compile=False)

    tp = mesh["tp"]
    divided = distribute_tensor(weight, tp, [Shard(1)]), distribute_tensor(mean, tp, [Shard(0)])
    loss, grads, state = piped(mesh).step(*divided, batch)
    expected = piped(None).step(weight, mean, batch)
    off = 0.0 if grads is None else (grads.full_tensor() - expected.grads).abs().max().item()
    return (
        (loss - expected.loss).abs().item(),
        off,
        (state.full_tensor() - expected.state).abs().max().item(),
        state.placements == (Shard(0),),
    )


def transformed(group: Any) -> list[Any]:
    """Errors of transforms."""
    from tests.distributed.crew import attempt

    mesh = mesh_of((2, 2), ("pp", "tp"))
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    stages = [lambda w, x: x @ (w.full_tensor() if isinstance(w, DTensor) else w)] * 2
    pipe = fpipe.pipeline(
        stages, lambda y, _: y.square().mean(), schedule, mesh=mesh, compile=False
    )
    value = DTensor.from_local(torch.eye(4), mesh["tp"], [Replicate()], run_check=False)
    members = DTensor.from_local(torch.ones(2, 4, 4), mesh["tp"], [Replicate()], run_check=False)
    params, x = pipe.local([value, value]), torch.ones(4, 4)
    many = pipe.local([members, members])

    def mapped() -> Any:
        return torch.func.vmap(lambda x: pipe.step(params, x).loss)(torch.ones(2, 4, 4))

    return [
        attempt(fpipe.vmap(pipe).step, many, x),
        attempt(fpipe.hvp(pipe).step, params, x, params),
        attempt(mapped),
        attempt(pipe.step, params, x),
    ]


class Adapted(nn.Module):
    """A frozen layer with an adapter, and a table that both ends read; 3 does not divide by 2."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.base = nn.Linear(6, 3)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.back = nn.Linear(3, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        h = torch.tanh(self.base(x) + self.up(self.down(x)))
        y: Tensor = self.head(x + self.back(h))
        return y


def adapted(group: Any) -> tuple[float, float, int]:
    """How far gradients of adapters, of a tied table and of uneven parts are from one process's."""
    mesh = mesh_of((2, 2), ("pp", "tp"))
    torch.manual_seed(0)
    whole, module = Adapted().double(), Adapted().double()
    module.load_state_dict(whole.state_dict())
    module.base.requires_grad_(False)
    plan: dict[str, ParallelStyle] = {
        # As DTensors, for 2 and 1 columns are not taken for 2 and 2.
        "base": ColwiseParallel(use_local_output=False),
        "up": ColwiseParallel(use_local_output=False),
        "back": RowwiseParallel(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallelize_module(module, mesh["tp"], plan)
    pipe = fpipe.from_module(
        module,
        schedule=schedules.zb_h1(ranks=2, microbatches=2),
        cuts=["base"],
        loss=surprise,
        mesh=mesh,
        compile=False,
    )
    tokens = torch.randint(0, 7, (4, 5))
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
    params: dict[str, Any] = dict(module.named_parameters())
    loss, grads = pipe.step(params, batch)
    expected = surprise(whole(tokens), batch)
    expected.backward()
    own = {name: grad for name, grad in pipe.own(grads).items() if grad is not None}
    assert not any("base" in name for name in own)
    worst = 0.0
    for name, parameter in whole.named_parameters():
        if name in own:
            grad = own[name]
            full = grad.full_tensor() if isinstance(grad, DTensor) else grad
            assert parameter.grad is not None
            worst = max(worst, (full - parameter.grad).abs().max().item())
    return (loss - expected).abs().item(), worst, len(own)


def reductions(group: Any, microbatches: int) -> tuple[int, float]:
    """All-reduces of a step of which a parameter's gradient is a sum over processes; its error."""
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = mesh_of((2, 2), ("pp", "tp"))
    schedule = schedules.zb_h1(ranks=2, microbatches=microbatches)

    def stage(scale: Any, x: Tensor) -> Tensor:
        if not isinstance(scale, DTensor):
            return torch.tanh(x * scale)
        whole: Any = DTensor.from_local(x, mesh["tp"], [Replicate()])
        rows = whole.redistribute(None, [Shard(0)])
        y: Any = torch.tanh(rows * scale)
        whole_again: Tensor = y.full_tensor()
        return whole_again

    def piped(mesh: DeviceMesh | None) -> fpipe.Pipeline:
        return fpipe.pipeline(
            [stage] * 2, lambda y, _: y.square().mean(), schedule, mesh=mesh, compile=False
        )

    generator = torch.Generator().manual_seed(0)
    scales = [torch.randn(3, dtype=torch.double, generator=generator) for _ in range(2)]
    batch = torch.randn(16, 3, dtype=torch.double, generator=generator)
    pipe = piped(mesh)
    params = pipe.local([distribute_tensor(s, mesh["tp"], [Replicate()]) for s in scales])
    pipe.step(params, batch)
    counter = CommDebugMode()
    with counter:
        grads = pipe.step(params, batch).grads
    counts = counter.get_comm_counts()
    number = sum(n for op, n in counts.items() if "all_reduce" in str(op) or "allreduce" in str(op))
    place = mesh.get_local_rank("pp")
    expected = piped(None).step(scales, batch).grads[place]
    return number, (grads[place].full_tensor() - expected).abs().max().item()


class Gathered(nn.Module):
    """A perceptron whose output is divided by columns, until `PrepareModuleOutput` gathers it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.up(x))
        return y


def crossing(group: Any, family: str) -> tuple[bool, float]:
    """Whether a DTensor arrives as one between stages; how far gradients are from whole ones."""
    mesh = mesh_of((2, 2), ("pp", "tp"))
    schedule = schedules.get(family, ranks=2, microbatches=2)
    torch.manual_seed(0)
    whole, divided = Gathered().double(), Gathered().double()
    divided.load_state_dict(whole.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that the mesh is a slice
        parallelize_module(divided.up, mesh["tp"], ColwiseParallel(use_local_output=False))
        prepare = PrepareModuleOutput(
            output_layouts=(Shard(-1),), desired_output_layouts=(Shard(0),), use_local_output=False
        )
        parallelize_module(divided, mesh["tp"], prepare)
    arrived = []

    def first(params: Any, x: Tensor) -> Any:
        module = divided if isinstance(params["up.weight"], DTensor) else whole
        return {"rows": torch.func.functional_call(module, params, (x,)), "plain": x}

    def second(w: Any, values: Any) -> Tensor:
        rows, plain = values["rows"], values["plain"]
        if not isinstance(w, DTensor):
            return torch.tanh(rows @ w) + plain
        arrived.append(isinstance(rows, DTensor) and rows.placements == (Shard(0),))
        columns = rows.redistribute(mesh["tp"], [Replicate()]) @ w  # w is divided by columns
        whole: Any = torch.tanh(columns.redistribute(mesh["tp"], [Shard(0)]))
        whole = DTensor.from_local(whole.to_local(), mesh["tp"], [Shard(0)])
        y: Tensor = whole.full_tensor() + plain
        return y

    x = torch.randn(8, WIDTH, dtype=torch.double)
    w = torch.randn(2 * WIDTH, WIDTH, dtype=torch.double)
    plain: list[Any] = [dict(whole.named_parameters()), w]
    own: list[Any] = [
        dict(divided.named_parameters()),
        distribute_tensor(w, mesh["tp"], [Shard(1)], src_data_rank=None),
    ]

    def step(params: Any, mesh: DeviceMesh | None) -> Any:
        pipe = fpipe.pipeline(
            [first, second],
            lambda y, _: y.square().mean(),
            schedule,
            mesh=mesh,
            compile=False,
        )
        return pipe.step(params if mesh is None else pipe.local(params), x)

    expected, found = step(plain, None), step(own, mesh)
    place = mesh.get_local_rank("pp")
    wholes, grads = expected.grads[place], found.grads[place]
    if place == 1:
        wholes, grads = {"w": wholes}, {"w": grads}
    worst = max((grads[n].full_tensor() - wholes[n]).abs().max().item() for n in wholes)
    return all(arrived), max(worst, (found.loss - expected.loss).abs().item())


class _Collectives(TorchDispatchMode):
    """Writes down which collectives run, in which order, and over which group."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: dict[str, list[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and func is not _WAIT:
            (name,) = [value for value in args if isinstance(value, str) and value.isdigit()]
            self.ran.setdefault(name, []).append(f"{func} {tuple(args[0].shape)}")
        return func(*args, **(kwargs or {}))


_WAIT: Any = torch.ops._c10d_functional.wait_tensor.default
