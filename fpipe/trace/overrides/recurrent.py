"""Recurrent layers step by step, for what torch has for all of one goes through no transform.

They have no batching rules. oneDNN's LSTM, which torch takes in single precision on the CPU, and
the cells of CUDA have no forward-mode rules either; cuDNN's layers want the addresses of their
weights, which abstract tensors have not, so that on CUDA they are never recorded whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decomposition_table

aten = torch.ops.aten


def _taken_apart(func: Callable[..., Any], op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Recurrent layers in steps; those of packed sequences, whose weights come fourth, as they are.

    The operations that torch takes them apart to know no dropout between the layers, so each is one
    by itself.
    """

    def steps(*args: Any) -> Any:
        with _in_steps():
            return decomposition_table[op](*args)

    def layers(*args: Any) -> Any:
        if isinstance(args[3], list | tuple):
            return func(*args)
        x, start, weights, has_biases, count, dropout, train, bidirectional, batch_first = args
        if not train or not dropout or count == 1:
            return steps(*args)
        states, many = (start, True) if isinstance(start, list | tuple) else ((start,), False)
        parts = [state.chunk(count) for state in states]
        size = len(weights) // count
        ends: list[Sequence[Tensor]] = []
        x = x.transpose(0, 1) if batch_first else x
        for number in range(count):
            hidden = [state[number] for state in parts]
            held = weights[number * size : (number + 1) * size]
            inputs = (x, hidden if many else hidden[0], held, has_biases, 1, 0.0, train)
            x, *end = steps(*inputs, bidirectional, False)
            ends.append(end)
            if number < count - 1:
                x = torch.dropout(x, dropout, True)
        x = x.transpose(0, 1) if batch_first else x
        return x, *map(torch.cat, zip(*ends, strict=True))

    return layers


@contextmanager
def _in_steps() -> Iterator[None]:
    """Within it torch takes a layer apart to steps, on every device.

    oneDNN, in single precision, and cuDNN have one operation for all, which no transform goes
    through.
    """
    onednn, cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        torch._C._set_cudnn_enabled(cudnn)


def _lstm_cell(
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    hidden, cell = hx
    gates = F.linear(input, w_ih, b_ih) + F.linear(hidden, w_hh, b_hh)
    enter, forget, new, leave = gates.chunk(4, -1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _gru_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    reset, update, new = F.linear(input, w_ih, b_ih).chunk(3, -1)
    old_reset, old_update, old = F.linear(hx, w_hh, b_hh).chunk(3, -1)
    update = (update + old_update).sigmoid()
    new = (new + (reset + old_reset).sigmoid() * old).tanh()
    return new + update * (hx - new)


RECURRENT: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {
        torch.lstm: _taken_apart(torch.lstm, aten.lstm.input),
        torch.gru: _taken_apart(torch.gru, aten.gru.input),
        torch.rnn_tanh: _taken_apart(torch.rnn_tanh, aten.rnn_tanh.input),
        torch.rnn_relu: _taken_apart(torch.rnn_relu, aten.rnn_relu.input),
        torch.lstm_cell: _lstm_cell,
        torch.gru_cell: _gru_cell,
    }
)
"""Functions that compute the same, by the functions of torch that they replace."""


def _where_it_lies(func: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return RECURRENT[func](*args) if args[0].is_cuda else func(*args)

    return call


RECURRENT_ON_CUDA: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {func: _where_it_lies(func) for func in RECURRENT}
)
"""The same for what lies on CUDA alone."""
