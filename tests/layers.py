"""Layers and operations of torch under every transform: a device against the CPU.

    python -m tests.layers --device cuda
    python -m tests.layers --device cuda --compiled [lstm softmax …]
    python -m tests.layers --compiled

On a device torch has other kernels, of which some go through no trace or no transform. Each layer
is a stage of its own, uncompiled on the CPU, and on the device, compiled or not; what differs, or
runs on one of them alone, is printed.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import fpipe
from fpipe import pytree, schedules

linalg = torch.linalg

ROUNDING = 1e-7
"""Of float64: some kernels of CUDA have constants in float32."""


class Layer(NamedTuple):
    """A stage and what it takes: parameters, and a batch whose first dimension is its rows."""

    stage: Callable[[Any, Tensor], Tensor]
    params: dict[str, Tensor]
    batch: Tensor


def of_module(make: Callable[[], nn.Module], *shape: int) -> Callable[[], Layer]:
    """A module; of several outputs the first."""

    def built() -> Layer:
        modules: dict[str, nn.Module] = {}

        def stage(params: Any, x: Tensor) -> Tensor:
            kind = x.device.type
            if kind not in modules:
                modules[kind] = make().double().to(x.device)
            found = functional_call(modules[kind], params, (x,))
            return found[0] if isinstance(found, tuple) else found

        params = {name: p.detach().clone() for name, p in make().double().named_parameters()}
        return Layer(stage, params, torch.randn(shape, dtype=torch.float64))

    return built


def of_function(
    function: Callable[[Tensor, Tensor], Tensor], weight: Sequence[int], *shape: int
) -> Callable[[], Layer]:
    """A function of a weight and of a batch."""

    def built() -> Layer:
        params = {"w": torch.randn(*weight, dtype=torch.float64)}
        return Layer(lambda p, x: function(p["w"], x), params, torch.randn(shape).double())

    return built


def recurrent(kind: Callable[..., nn.Module], **options: Any) -> Callable[[], Layer]:
    return of_module(lambda: kind(3, 4, batch_first=True, **options), 4, 5, 3)


def attended(w: Tensor, x: Tensor, **options: Any) -> Tensor:
    query, key, value = (x @ w).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value, **options)


def masked(w: Tensor, x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    return attended(w, x, attn_mask=mask)


def definite(w: Tensor) -> Tensor:
    return w @ w.mT + 3 * torch.eye(w.shape[-1], device=w.device, dtype=w.dtype)


def ints(x: Tensor) -> Tensor:
    return (x * 3).long() % 5


def ctc(w: Tensor, x: Tensor) -> Tensor:
    steps, lengths = torch.full((len(x),), 5), torch.full((len(x),), 2)
    scores = (x @ w).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, ints(x)[:, :2, 0] + 1, steps, lengths, reduction="none")


def spectrum(w: Tensor, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(w), n=x.shape[-1])


def complex_product(w: Tensor, x: Tensor) -> Tensor:
    return torch.view_as_real(torch.complex(x, x) @ torch.complex(w, w)).flatten(1)


def of_norm(make: Callable[[], nn.Module]) -> Callable[[], Layer]:
    return of_module(make, 4, 4, 5, 5)


def of_rows(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Layer]:
    """Of rows of 7 numbers, and a weight for each of them."""
    return of_function(function, (7,), 4, 7)


def of_images(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Layer]:
    return of_function(function, (7,), 4, 2, 6, 7)


def of_scores(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Layer]:
    """Of a product with six columns, and the rows."""
    return of_function(lambda w, x: function(x @ w, x), (7, 6), 4, 7)


def of_matrices(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Layer]:
    return of_function(function, (5, 5), 4, 5)


LAYERS: dict[str, Callable[[], Layer]] = {
    "lstm": recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "lstm_projected": recurrent(nn.LSTM, proj_size=2),
    "gru": recurrent(nn.GRU),
    "rnn": recurrent(nn.RNN),
    "lstm_cell": of_module(lambda: nn.LSTMCell(3, 4), 4, 3),
    "gru_cell": of_module(lambda: nn.GRUCell(3, 4), 4, 3),
    "conv1d": of_module(lambda: nn.Conv1d(3, 4, 3), 4, 3, 7),
    "conv2d": of_module(lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), 4, 3, 7, 7),
    "conv2d_depthwise": of_module(lambda: nn.Conv2d(4, 4, 3, groups=4), 4, 4, 7, 7),
    "conv3d": of_module(lambda: nn.Conv3d(2, 3, 2), 4, 2, 4, 4, 4),
    "conv_transposed": of_module(lambda: nn.ConvTranspose2d(3, 2, 3, stride=2), 4, 3, 4, 4),
    "batch_norm": of_norm(lambda: nn.BatchNorm2d(4, track_running_stats=False)),
    "batch_norm_evaluated": of_norm(lambda: nn.BatchNorm2d(4).eval()),
    "group_norm": of_norm(lambda: nn.GroupNorm(2, 4)),
    "instance_norm": of_norm(lambda: nn.InstanceNorm2d(4, affine=True)),
    "layer_norm": of_norm(lambda: nn.LayerNorm(5)),
    "rms_norm": of_norm(lambda: nn.RMSNorm(5)),
    "encoder_layer": of_module(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 4, 5, 8
    ),
    "attention": of_function(lambda w, x: attended(w, x, is_causal=True), (16, 48), 4, 5, 16),
    "attention_masked": of_function(masked, (16, 48), 4, 5, 16),
    "embedding": of_function(lambda w, x: F.embedding(ints(x), w, padding_idx=1), (5, 3), 4, 7),
    "embedding_bag": of_function(lambda w, x: F.embedding_bag(ints(x), w), (5, 3), 4, 7),
    "max_pool": of_images(lambda w, x: F.max_pool2d(x * w, 2)),
    "average_pool": of_images(lambda w, x: F.avg_pool2d(x * w, 2)),
    "adaptive_pool": of_images(lambda w, x: F.adaptive_avg_pool2d(x * w, 3)),
    "bilinear": of_images(lambda w, x: F.interpolate(x * w, scale_factor=2, mode="bilinear")),
    "bicubic": of_images(lambda w, x: F.interpolate(x * w, size=(5, 9), mode="bicubic")),
    "unfold": of_images(lambda w, x: F.fold(F.unfold(x * w, 3), (6, 7), 3)),
    "pad": of_images(lambda w, x: F.pad(x * w, (1, 2), mode="replicate")),
    "gelu": of_scores(lambda y, _: F.gelu(y)),
    "silu": of_scores(lambda y, _: F.silu(y)),
    "glu": of_scores(lambda y, _: F.glu(y)),
    "softmax": of_scores(lambda y, _: F.log_softmax(y, -1)),
    "cross_entropy": of_scores(
        lambda y, x: F.cross_entropy(y, ints(x)[:, 0], reduction="none", label_smoothing=0.1)
    ),
    "huber": of_scores(lambda y, x: F.smooth_l1_loss(y, x[:, :6], reduction="none")),
    "cosine": of_scores(lambda y, x: F.cosine_similarity(y, x[:, :6])),
    "ctc": of_function(ctc, (7, 6), 4, 5, 7),
    "prelu": of_rows(lambda w, x: F.prelu(x, w)),
    "hardswish": of_rows(lambda w, x: F.leaky_relu(x * w) + F.elu(x) * F.hardswish(w)),
    "cumsum": of_rows(lambda w, x: (x * w).cumsum(-1)),
    "cumprod": of_rows(lambda w, x: (x * w).cumprod(-1)),
    "cummax": of_rows(lambda w, x: (x * w).cummax(-1)[0]),
    "logcumsumexp": of_rows(lambda w, x: (x * w).logcumsumexp(-1)),
    "sort": of_rows(lambda w, x: (x * w).sort(-1)[0]),
    "topk": of_rows(lambda w, x: (x * w).topk(3, -1)[0]),
    "median": of_rows(lambda w, x: (x * w).median(-1)[0]),
    "quantile": of_rows(lambda w, x: (x * w).quantile(0.3, -1)),
    "prod": of_rows(lambda w, x: (x * w).prod(-1)),
    "std": of_rows(lambda w, x: (x * w).std(-1)),
    "gather": of_rows(lambda w, x: (x * w).gather(-1, ints(x))),
    "scatter_add": of_rows(lambda w, x: torch.zeros_like(x).scatter_add(-1, ints(x), x * w)),
    "index_add": of_rows(
        lambda w, x: torch.zeros_like(x).index_add(1, torch.arange(7, device=x.device) // 2, x * w)
    ),
    "where": of_rows(lambda w, x: torch.where(x > 0, x * w, x.exp())),
    "special": of_rows(lambda w, x: torch.erf(x * w) + torch.lgamma(1 + w.square())),
    "fft": of_rows(spectrum),
    "complex": of_function(complex_product, (7, 6), 4, 7),
    "einsum": of_function(lambda w, x: torch.einsum("bi,ij,bk->bjk", x, w, x), (7, 6), 4, 7),
    "cholesky": of_matrices(lambda w, x: x @ linalg.cholesky(definite(w))),
    "cholesky_of_each": of_matrices(lambda w, x: linalg.cholesky(definite(w * x[:, None]))),
    "solve": of_matrices(lambda w, x: linalg.solve(definite(w), x.mT).mT),
    "inverse": of_matrices(lambda w, x: x @ linalg.inv(definite(w))),
    "determinant": of_matrices(lambda w, x: linalg.slogdet(definite(w))[1] * x),
    "singular_values": of_matrices(lambda w, x: x * linalg.svdvals(w)),
    "eigenvalues": of_matrices(lambda w, x: x * linalg.eigvalsh(definite(w))),
    "qr": of_matrices(lambda w, x: x @ linalg.qr(w)[1].abs()),
    "exponential": of_matrices(lambda w, x: x @ torch.matrix_exp(w / 5)),
}


def several(params: Any) -> Any:
    """Those of three members."""
    return pytree.tree_map(lambda leaf: torch.stack([leaf, 1.1 * leaf, 0.9 * leaf]), params)


def along(params: Any) -> Any:
    """A direction."""
    return pytree.tree_map(torch.cos, params)


CALLS: dict[str, Callable[[fpipe.Pipeline, Any, Tensor], Any]] = {
    "step": lambda pipe, p, x: pipe.step(p, x),
    "forward": lambda pipe, p, x: pipe.forward(p, x),
    "rows": lambda pipe, p, x: fpipe.per_example_grads(pipe).step(p, x),
    "norms": lambda pipe, p, x: fpipe.per_example_norms(pipe).step(p, x),
    "vmap": lambda pipe, p, x: fpipe.vmap(pipe).step(several(p), x),
    "jvp": lambda pipe, p, x: fpipe.jvp(pipe).step(p, x, along(p)),
    "hvp": lambda pipe, p, x: fpipe.hvp(pipe).step(p, x, along(p)),
    "ggnvp": lambda pipe, p, x: fpipe.ggnvp(pipe).step(p, x, along(p)),
}


def outcome(layer: Layer, call: str, device: str, compile: bool) -> list[Tensor] | str:
    """The leaves of what a call returns, or what it raises, up to the device's name."""
    stages: list[Any] = [layer.stage, lambda _, y: 1.5 * y]
    pipe = fpipe.pipeline(
        stages,
        lambda y, _: torch.tanh(y).square().mean(),
        schedules.zb_h1(ranks=2, microbatches=2),
        compile=compile,
    )
    params = [pytree.tree_map(lambda leaf: leaf.to(device), layer.params), None]
    try:
        found = CALLS[call](pipe, params, layer.batch.to(device))
    except fpipe.FpipeError as error:
        return str(error).replace("cuda:0", "cpu")
    return [leaf.cpu() for leaf in pytree.flatten(tuple(found))[0]]


def differences(name: str, device: str, compile: bool) -> Iterator[str]:
    """What a device gives otherwise than the CPU, uncompiled."""
    torch.manual_seed(0)
    layer = LAYERS[name]()
    for call in ("step",) if compile else CALLS:
        ours, theirs = outcome(layer, call, device, compile), outcome(layer, call, "cpu", False)
        if isinstance(ours, str) or isinstance(theirs, str):
            if isinstance(ours, str) != isinstance(theirs, str):
                yield f"{call} fails on one alone: {ours if isinstance(ours, str) else theirs}"
            continue
        for one, other in zip(ours, theirs, strict=True):
            distance = (one - other).abs().max().item()
            if not distance <= ROUNDING * (1 + other.abs().max().item()):
                yield f"{call} by {distance:.1e}"
                break


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare them all; 1 if one differs."""
    parser = argparse.ArgumentParser(description="Layers on a device against the CPU.")
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(LAYERS))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--compiled", action="store_true", help="steps alone, compiled")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(LAYERS):
        parser.error(f"{', '.join(sorted(unknown))}: choose of {', '.join(LAYERS)}")
    warnings.simplefilter("ignore")
    torch.backends.cudnn.allow_tf32 = False
    failed = 0
    for name in given.names or LAYERS:
        start = time.perf_counter()
        found = list(differences(name, given.device, given.compiled))
        failed += bool(found)
        says = "differs: " + "; ".join(found) if found else "equal"
        print(f"{name:22} {time.perf_counter() - start:5.1f} s  {says}", flush=True)
    print(f"{failed} differ")
    return int(failed > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
