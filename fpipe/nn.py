"""Layers with running statistics as pure functions: the statistics come in and go out as a state.

    y, stats = batch_norm(x, stats, weight, bias)            one layer
    y, state = call(module, params, state, x)                any module with buffers
    with keyed(key): y = module(x)                           any module that draws

A step with the statistics of the whole batch (``batch_norm="deferred"``) opens every `BatchStats`
of the state before the first microbatch, and closes it after the last:

    BatchStats ── opened ──► Deferred ── each microbatch ──► Deferred ── closed ──► BatchStats
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from fpipe import pytree
from fpipe.errors import StageError
from fpipe.random.keyed_mode import keyed as keyed
from fpipe.torch_internals import functorch

__all__ = ["BatchStats", "batch_norm", "buffers_of", "call", "keyed", "state_of", "with_buffers"]


def __dir__() -> list[str]:
    return __all__


class BatchStats(NamedTuple):
    """Running statistics of a batch normalisation, in a state.

    Attributes:
        mean: of each channel, shape ``(channels,)``.
        var: unbiased variance of each channel.
    """

    mean: Tensor
    var: Tensor


class Deferred(NamedTuple):
    """Running statistics, and beside them the statistics of the batch so far.

    Attributes:
        mean: as in `BatchStats`.
        var: as in `BatchStats`.
        elements: the number of elements per channel in the microbatches so far.
        batch_mean: the mean of these elements.
        squares: the sum of their squared distances from their mean.
        momentum: the weight of the batch in the running statistics.
    """

    mean: Tensor
    var: Tensor
    elements: Tensor
    batch_mean: Tensor
    squares: Tensor
    momentum: Tensor


def batch_norm(
    x: Tensor,
    stats: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Tensor, Any]:
    """Batch normalisation that returns its running statistics instead of writing to them.

    In training `x` is normalised by the mean and variance of the microbatch (Ioffe and Szegedy,
    arXiv 1502.03167; torchgpipe's deferred batch normalisation, arXiv 2004.09910, does the same),
    and the running statistics move towards them by `momentum`. In evaluation `x` is normalised by
    the running statistics, which stay.

    Args:
        x: shape ``(rows, channels, ...)``, floating-point.
        stats: `BatchStats`, as a state holds them.
        weight: scale of each channel, shape ``(channels,)``, None for 1.
        bias: shift of each channel, shape ``(channels,)``, None for 0.
        training: True for training, False for evaluation.
        momentum: the weight of the microbatch in the new statistics, as in `torch.nn.BatchNorm2d`.
        eps: added to the variance.

    Returns:
        The normalised `x`, of its shape and dtype, and the new statistics, of the type of `stats`.

    Example:
        >>> stats = BatchStats(torch.zeros(1), torch.ones(1))
        >>> y, stats = batch_norm(torch.tensor([[1.0], [3.0]]), stats, momentum=0.5)
        >>> y.round().tolist(), stats.mean.item(), stats.var.item()
        ([[-1.0], [1.0]], 1.0, 1.5)
    """
    if not training:
        return F.batch_norm(x, stats.mean, stats.var, weight, bias, False, momentum, eps), stats
    if isinstance(stats, Deferred):
        y = F.batch_norm(x, None, None, weight, bias, True, momentum, eps)
        return y, _joined(stats, x.detach(), momentum)
    if functorch.is_batchedtensor(stats.mean):
        # Under vmap the kernel would write to views of statistics that all members share.
        y = F.batch_norm(x, None, None, weight, bias, True, momentum, eps)
        var, mean = torch.var_mean(x.detach().to(stats.mean.dtype), [0, *range(2, x.dim())])
        return y, stats._replace(
            mean=stats.mean.lerp(mean, momentum), var=stats.var.lerp(var, momentum)
        )
    mean, var = stats.mean.clone(), stats.var.clone()
    y = F.batch_norm(x, mean, var, weight, bias, True, momentum, eps)
    return y, stats._replace(mean=mean, var=var)


def call(
    module: nn.Module,
    params: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *arguments: Any,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """Call a module with its parameters and buffers as arguments, and get its buffers back.

    Args:
        module: it is not changed. Its batch normalisations must have a momentum.
        params: as ``dict(module.named_parameters())``.
        state: as `state_of` returns it.
        arguments: positional arguments of the module's forward.
        options: keyword arguments of the module's forward.

    Returns:
        The output of the forward, and the new state.

    Raises:
        StageError: the forward assigns to a buffer that is not in `state`.

    Example:
        >>> module = nn.BatchNorm1d(1)
        >>> params = {name: p.detach() for name, p in module.named_parameters()}
        >>> y, state = call(module, params, state_of(module), torch.tensor([[1.0], [3.0]]))
        >>> state[""].mean, state["num_batches_tracked"]
        (tensor([0.2000]), tensor(1))
    """
    return call_and_note(module, params, state, arguments, options)[:2]


def call_and_note(
    module: nn.Module,
    params: Mapping[str, Tensor],
    state: Mapping[str, Any],
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
) -> tuple[Any, dict[str, Any], list[str]]:
    """Call a module as `call` does, and note the names of the buffers that the forward wrote to.

    Within `torch.func.functionalize`, which hides writes, only buffers count that it assigned to.
    """
    stats = {name: entry for name, entry in state.items() if not isinstance(entry, Tensor)}
    clones = {name: entry.clone() for name, entry in state.items() if isinstance(entry, Tensor)}
    buffers = dict(clones)
    tensors = {**params, **buffers_of(stats)}
    with _Statistics(stats):
        output = called_with(module, tensors, buffers, arguments, options)
    written = [n for n, clone in clones.items() if buffers.get(n) is not clone or clone._version]
    written += buffers_of({n: entry for n, entry in stats.items() if entry is not state[n]})
    for name, entry in state.items():
        count = _joined_name(name, "num_batches_tracked")
        if isinstance(entry, Deferred) and count in buffers:
            # A batch counts once, however it is split.
            first = entry.elements == 0
            buffers[count] = torch.where(first, buffers[count], state[count])
    return output, {name: stats.get(name, buffers.get(name)) for name in state}, written


def called_with(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    buffers: dict[str, Tensor],
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
) -> Any:
    """Call a module with other tensors; afterwards it holds its own again.

    `torch.func.functional_call` alone leaves the tensors that were passed in submodules with two
    names, and the new values of buffers that the forward assigns to.

    Args:
        module: called with the arguments and options.
        tensors: parameters and buffers by their names, in place of the module's own.
        buffers: more of these; those that the forward assigns to get their new values here.

    Raises:
        StageError: the forward assigns to another buffer.
    """
    held_buffers = dict(module.named_buffers())
    held = {**dict(module.named_parameters()), **held_buffers}
    chosen = {**held_buffers, **tensors, **buffers}
    values = {id(tensor): (name, chosen[name]) for name, tensor in held.items() if name in chosen}
    places = {
        _joined_name(prefix, name): values[id(tensor)]
        for prefix, submodule in module.named_modules()  # each once, by its first name
        for name, tensor in (*submodule._parameters.items(), *submodule._buffers.items())
        if id(tensor) in values
    }
    passed = {place: value for place, (_, value) in places.items()}
    passed |= {name: chosen[name] for name in chosen.keys() - held.keys()}
    output = functional_call(module, passed, arguments, dict(options), tie_weights=False)
    for place, (name, value) in places.items():
        if passed[place] is value:  # torch puts the tensors of the end of the call there
            continue
        if name not in buffers:
            raise StageError(
                f"{type(module).__name__} assigns to its buffer {name!r} in its forward: a stage "
                "is a pure function; call module.eval(), or take the buffer into the state of a "
                "step, has_state=True"
            )
        buffers[name] = passed[place]
    return output


def state_of(module: nn.Module) -> dict[str, Any]:
    """The buffers of a module as a state, with `BatchStats` for each batch normalisation.

    Returns:
        `BatchStats` by the name of each submodule with running statistics, and the other buffers by
        their own names. They are the module's own tensors, not copies.

    Example:
        >>> module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> sorted(state_of(module))
        ['1', '1.num_batches_tracked']
    """
    state: dict[str, Any] = {
        name: BatchStats(submodule.running_mean, submodule.running_var)
        for name, submodule in module.named_modules()
        if isinstance(submodule, nn.modules.batchnorm._BatchNorm)
        and submodule.running_mean is not None
        and submodule.running_var is not None
    }
    taken = {_joined_name(name, buffer) for name in state for buffer in _FIELDS.values()}
    state |= {name: leaf for name, leaf in module.named_buffers() if name not in taken}
    return state


def buffers_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The buffers of a state, by their names in the module: the inverse of `state_of`.

    Example:
        >>> sorted(buffers_of(state_of(nn.BatchNorm1d(1))))
        ['num_batches_tracked', 'running_mean', 'running_var']
    """
    buffers: dict[str, Tensor] = {}
    for name, entry in state.items():
        if isinstance(entry, Tensor):
            buffers[name] = entry
        else:
            buffers |= {_joined_name(name, b): getattr(entry, f) for f, b in _FIELDS.items()}
    return buffers


def with_buffers(state: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> dict[str, Any]:
    """A state with other buffers.

    Args:
        state: as `state_of` returns it.
        buffers: by their names in the module; the others stay.

    Example:
        >>> state = state_of(nn.BatchNorm1d(1))
        >>> with_buffers(state, {"running_mean": torch.ones(1)})[""].mean
        tensor([1.])
    """
    values = {**buffers_of(state), **buffers}
    return {
        name: values[name]
        if isinstance(entry, Tensor)
        else entry._replace(**{f: values[_joined_name(name, b)] for f, b in _FIELDS.items()})
        for name, entry in state.items()
    }


_FIELDS = {"mean": "running_mean", "var": "running_var"}


def _joined_name(module: str, buffer: str) -> str:
    return f"{module}.{buffer}" if module else buffer


class _Statistics(TorchFunctionMode):
    """Sends batch normalisations whose statistics are in a state to `batch_norm`.

    Args:
        stats: by name; replaced by the new ones.
    """

    def __init__(self, stats: dict[str, Any]) -> None:
        super().__init__()
        self._stats = stats
        self._names = {id(entry.mean): name for name, entry in stats.items()}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        name = self._names.get(id(running_mean))
        if name is None or not training:
            return F.batch_norm(
                input, running_mean, running_var, weight, bias, training, momentum, eps
            )
        y, self._stats[name] = batch_norm(
            input, self._stats[name], weight, bias, momentum=momentum, eps=eps
        )
        return y


# ── statistics of the whole batch ───────────────────────────────────────────────────────────────


def opened(state: Any) -> Any:
    """A state whose `BatchStats` can take the statistics of a batch, one microbatch at a time."""
    return pytree.map_nodes(_opened, state, BatchStats)


def closed(state: Any) -> Any:
    """The inverse of `opened`: the running statistics take in those of the batch."""
    return pytree.map_nodes(_closed, state, Deferred)


def _opened(stats: BatchStats) -> Deferred:
    zeros = torch.zeros_like(stats.mean)
    one = stats.mean.new_zeros(())
    return Deferred(stats.mean, stats.var, one, zeros, zeros, one)


def _joined(stats: Deferred, x: Tensor, momentum: float) -> Deferred:
    """Add the statistics of one more microbatch (Chan, Golub and LeVeque, 1979)."""
    x = x.to(stats.mean.dtype)
    count = x.numel() // x.shape[1]
    var, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
    total = stats.elements + count
    delta = mean - stats.batch_mean
    return Deferred(
        stats.mean,
        stats.var,
        total,
        stats.batch_mean + delta * (count / total),
        stats.squares + var * count + delta.square() * (stats.elements * count / total),
        torch.full_like(stats.momentum, momentum),
    )


def _closed(stats: Deferred) -> BatchStats:
    var = stats.squares / (stats.elements - 1)
    moved = (stats.mean.lerp(stats.batch_mean, stats.momentum), stats.var.lerp(var, stats.momentum))
    # A layer that no microbatch has run through keeps what it had.
    used = stats.elements > 0
    return BatchStats(
        torch.where(used, moved[0], stats.mean), torch.where(used, moved[1], stats.var)
    )
