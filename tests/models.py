"""Small models in plain functions, each cut into as many stages as a test asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx
from torch.func import grad_and_value

from fpipe import Pipeline, Schedule, Stage, Step, pipeline, pytree, schedules


class Model(NamedTuple):
    """Everything that a step takes."""

    stages: list[Callable[..., Any]]
    loss: Callable[[Any, Any], Tensor]
    params: list[Any]
    batch: Any


def unpipelined(
    stages: Sequence[Callable[..., Any] | Stage],
    loss: Callable[[Any, Any], Tensor],
    params: Any,
    batch: Any,
) -> Step:
    """Loss and gradients of the plain function: what a pipeline must return.

    Leaves that cannot have a gradient are held fixed, and have None.
    """
    leaves, spec = pytree.flatten(params)
    trained = [i for i, v in enumerate(leaves) if v.is_floating_point() or v.is_complex()]

    def whole(chosen: Sequence[Tensor]) -> Tensor:
        full = list(leaves)
        for index, value in zip(trained, chosen, strict=True):
            full[index] = value
        return loss(apply(stages, pytree.unflatten(spec, full), batch), batch)

    found, value = grad_and_value(whole)([leaves[i].detach() for i in trained])
    grads: list[Tensor | None] = [None] * len(leaves)
    for index, gradient in zip(trained, found, strict=True):
        grads[index] = gradient
    return Step(value, pytree.unflatten(spec, grads))


def apply(stages: Sequence[Callable[..., Any] | Stage], params: Any, batch: Any) -> Any:
    """The output of the chain of stages on the whole batch."""
    x = batch
    for stage, own in zip(stages, params, strict=True):
        fn = stage.fn if isinstance(stage, Stage) else stage
        reads_batch = isinstance(stage, Stage) and stage.reads_batch
        x = fn(own, x, batch) if reads_batch else fn(own, x)
    return x


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-10) -> None:
    """Equal structures and, relative to the size of each leaf, equal values. None equals None."""
    assert pytree.structure(ours) == pytree.structure(theirs)
    for path, a, b in zip(
        pytree.paths(pytree.structure(ours)),
        pytree.flatten(ours)[0],
        pytree.flatten(theirs)[0],
        strict=True,
    ):
        b = b.detach()
        scale = float(b.abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(
            a,
            b,
            rtol=tolerance,
            atol=tolerance * scale,
            msg=partial("{}: {}".format, path),
        )


def assert_identical(ours: Any, theirs: Any) -> None:
    """Equal structures, dtypes and bits."""
    assert pytree.structure(ours) == pytree.structure(theirs)
    for a, b in zip(pytree.flatten(ours)[0], pytree.flatten(theirs)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


# ── the smallest model ──────────────────────────────────────────────────────────────────────────


def mlp_first(p: Any, batch: Any) -> Tensor:
    return mlp_layer(p, batch["x"])


def mlp_layer(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


def mean_square(y: Tensor, batch: Any) -> Tensor:
    return (y - batch["y"]).square().mean()


def mlp(num_stages: int, rows: int, dtype: torch.dtype = torch.float64, width: int = 3) -> Model:
    """Layers of tanh: quick to trace, so that a test may run many schedules of it."""
    make = _maker(dtype)
    params = [{"w": make(width, width), "b": make(width)} for _ in range(num_stages)]
    batch = {"x": make(rows, width), "y": make(rows, width)}
    return Model([mlp_first, *[mlp_layer] * (num_stages - 1)], mean_square, params, batch)


def adapted_first(p: Any, batch: Any) -> Tensor:
    return adapted_layer(p, batch["x"])


def adapted_layer(p: Any, x: Tensor) -> Tensor:
    merged = F.normalize(p["w"] + p["up"] @ p["down"])
    return torch.tanh(x @ merged * p["gain"].exp())


def adapted(num_stages: int, rows: int, dtype: torch.dtype = torch.float64) -> Model:
    """Layers whose weights are made of their parameters: what no microbatch goes into."""
    make = _maker(dtype)
    params = [
        {"w": make(3, 3), "up": make(3, 1), "down": make(1, 3), "gain": make(3)}
        for _ in range(num_stages)
    ]
    batch = {"x": make(rows, 3), "y": make(rows, 3)}
    chain = [adapted_first, *[adapted_layer] * (num_stages - 1)]
    return Model(chain, mean_square, params, batch)


# ── a stack of GPT blocks ───────────────────────────────────────────────────────────────────────

VOCABULARY, CONTEXT, WIDTH, HEADS = 11, 5, 8, 2


def embed(p: Any, tokens: Tensor) -> Tensor:
    return p["token"][tokens] + p["place"]


def block(p: Any, x: Tensor) -> Tensor:
    rows, context, width = x.shape
    q, k, v = (normed(p["norm1"], x) @ p["qkv"]).view(rows, context, 3, HEADS, -1).unbind(2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.transpose(1, 2).reshape(rows, context, width) @ p["out"]
    return x + F.gelu(normed(p["norm2"], x) @ p["up"] + p["up_bias"]) @ p["down"]


def normed(p: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], p["weight"], p["bias"])


def head(p: Any, x: Tensor) -> Tensor:
    return normed(p["norm"], x) @ p["weight"]


def gpt_first(p: Any, batch: Any) -> Tensor:
    return block(p["block"], embed(p["embed"], batch["tokens"]))


def gpt_last(p: Any, x: Tensor) -> Tensor:
    return head(p["head"], block(p["block"], x))


def gpt_only(p: Any, batch: Any) -> Tensor:
    return head(p["head"], gpt_first(p, batch))


def gpt_loss(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def gpt(num_stages: int, rows: int, dtype: torch.dtype = torch.float64) -> Model:
    """Integer tokens in, logits out; one block per stage."""
    make = _maker(dtype)

    def norm() -> Any:
        return {"weight": 1 + make(WIDTH), "bias": make(WIDTH)}

    def block_params() -> Any:
        return {
            "norm1": norm(),
            "qkv": make(WIDTH, 3 * WIDTH),
            "out": make(WIDTH, WIDTH),
            "norm2": norm(),
            "up": make(WIDTH, 2 * WIDTH),
            "up_bias": make(2 * WIDTH),
            "down": make(2 * WIDTH, WIDTH),
        }

    embed_params = {"token": make(VOCABULARY, WIDTH), "place": make(CONTEXT, WIDTH)}
    head_params = {"norm": norm(), "weight": make(WIDTH, VOCABULARY)}
    params = _ends([block_params() for _ in range(num_stages)], embed_params, head_params)
    tokens = torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=make.generator)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    return Model(_chain(num_stages, gpt_first, block, gpt_last, gpt_only), gpt_loss, params, batch)


def gpt_embed(p: Any, batch: Any) -> Tensor:
    return embed(p, batch["tokens"])


def short_gpt(rows: int, dtype: torch.dtype = torch.float64) -> Model:
    """Two stages, the embedding and then one block with the head: fewer kernels to compile."""
    model = gpt(1, rows, dtype)
    (own,) = model.params
    params = [own["embed"], {"block": own["block"], "head": own["head"]}]
    return model._replace(stages=[gpt_embed, gpt_last], params=params)


# ── a convolutional net ─────────────────────────────────────────────────────────────────────────

KINDS, CHANNELS, SIZE, LABELS = 3, 4, 6, 5


def pixels(p: Any, batch: Any) -> Any:
    """Integers to activations; the label and the kind of each image travel on, as integers."""
    image = batch["pixels"].to(p["stem"].dtype) / 255
    return {"image": F.conv2d(image, p["stem"]), "kind": batch["kind"], "label": batch["label"]}


def residual(p: Any, x: Any) -> Any:
    image = F.group_norm(x["image"], 2, p["scale"], p["shift"])
    image = F.conv2d(image.relu(), p["filter"], p["bias"], padding=1)
    image = image + F.embedding(x["kind"], p["kinds"])[:, :, None, None]
    return {**x, "image": x["image"] + F.max_pool2d(image, 3, stride=1, padding=1)}


def classify(p: Any, x: Any) -> Any:
    pooled = x["image"].mean((2, 3))
    return {"logits": pooled @ p["classes"], "label": x["label"]}


def conv_first(p: Any, batch: Any) -> Any:
    return residual(p["block"], pixels(p["embed"], batch))


def conv_last(p: Any, x: Any) -> Any:
    return classify(p["head"], residual(p["block"], x))


def conv_only(p: Any, batch: Any) -> Any:
    return classify(p["head"], conv_first(p, batch))


def conv_loss(y: Any, _: Any) -> Tensor:
    return F.cross_entropy(y["logits"], y["label"])


def conv(num_stages: int, rows: int, dtype: torch.dtype = torch.float64) -> Model:
    """Bytes in; dicts between the stages; the loss reads labels that all stages passed on."""
    make = _maker(dtype)

    def block_params() -> Any:
        return {
            "scale": 1 + make(CHANNELS),
            "shift": make(CHANNELS),
            "filter": make(CHANNELS, CHANNELS, 3, 3),
            "bias": make(CHANNELS),
            "kinds": make(KINDS, CHANNELS),
        }

    params = _ends(
        [block_params() for _ in range(num_stages)],
        {"stem": make(CHANNELS, 1, 2, 2)},
        {"classes": make(CHANNELS, LABELS)},
    )
    shape, generator = (rows, 1, SIZE, SIZE), make.generator
    batch = {
        "pixels": torch.randint(256, shape, dtype=torch.uint8, generator=generator),
        "kind": torch.randint(KINDS, (rows,), generator=generator),
        "label": torch.randint(LABELS, (rows,), generator=generator),
    }
    chain = _chain(num_stages, conv_first, residual, conv_last, conv_only)
    return Model(chain, conv_loss, params, batch)


MODELS = {"gpt": gpt, "conv": conv}


# ── shared ──────────────────────────────────────────────────────────────────────────────────────


class _maker:
    """Makes parameters, the same in every run."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, generator=self.generator) / 3


def _chain(
    num_stages: int,
    first: Callable[..., Any],
    middle: Callable[..., Any],
    last: Callable[..., Any],
    only: Callable[..., Any],
) -> list[Callable[..., Any]]:
    return [only] if num_stages == 1 else [first, *[middle] * (num_stages - 2), last]


def _ends(blocks: list[Any], embed: Any, head: Any) -> list[Any]:
    """Parameters of the blocks, with those of the embedding and the head on the end stages."""
    if len(blocks) == 1:
        return [{"block": blocks[0], "embed": embed, "head": head}]
    first, *middle, last = blocks
    return [{"block": first, "embed": embed}, *middle, {"block": last, "head": head}]


@cache
def _traced(make: Callable[..., Model], *kind: Any, **options: Any) -> tuple[Model, Pipeline]:
    model = make(*kind)
    schedule = schedules.gpipe(ranks=len(model.stages), microbatches=1)
    return model, pipeline(model.stages, model.loss, schedule, **options)


def piped(
    make: Callable[..., Model],
    schedule: Schedule,
    rows: int,
    dtype: torch.dtype = torch.float64,
    *,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> tuple[Model, Pipeline]:
    """A model and its pipeline; those of one model that have equal options share their traces."""
    options = {"compile": False} | options
    model, first = _traced(make, schedule.num_stages, rows, dtype, **options)
    definition = replace(first._engine.definition, schedule=schedule, group=group)
    return model, Pipeline(definition, first._engine)


def pipe_of(model: Model, schedule: Schedule | None = None, **options: Any) -> Pipeline:
    """The pipeline of a model, uncompiled and zero-bubble unless it is told otherwise."""
    schedule = schedule or schedules.zb_h1(ranks=len(model.stages), microbatches=4)
    arguments: dict[str, Any] = {"loss": model.loss, "compile": False, **options}
    return pipeline(model.stages, schedule=schedule, **arguments)


def plain_pipeline(
    stages: Sequence[Callable[..., Any] | Stage],
    loss: Callable[[Any, Any], Any] = mean_square,
    microbatches: int = 2,
    **options: Any,
) -> Pipeline:
    """An uncompiled pipeline with a rank for each stage, whose schedule splits the backward."""
    schedule = schedules.zb_h1(ranks=len(stages), microbatches=microbatches)
    return pipeline(stages, loss, schedule, **({"compile": False} | options))


def check(
    stages: Sequence[Callable[..., Any] | Stage],
    params: Any,
    batch: Any,
    loss: Callable[[Any, Any], Any] = mean_square,
    tolerance: float = 1e-10,
    **options: Any,
) -> Step:
    """A step of `plain_pipeline`, which must equal the unpipelined function."""
    step = plain_pipeline(stages, loss, **options).step(params, batch)
    assert_same(step, unpipelined(stages, loss, params, batch), tolerance)
    return step


def boxed(graph: fx.GraphModule, before: Callable[[], object] = lambda: None) -> Any:
    """What a ``compile=`` of one's own returns: the graph, boxed, after a call of `before`."""

    def run(values: list[Tensor]) -> Any:
        before()
        arguments = list(values)
        values.clear()
        return graph(*arguments)

    return run


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers for the same shape."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape)))
