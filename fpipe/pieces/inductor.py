"""Inductor's own boxed callable of a graph, whose outputs lie as they did in the trace.

`compile_fx` with a captured inner compile hands it over without the wrappers that cost 10 to 30
microseconds a call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partialmethod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fpipe.graph.nodes import Layout, is_on_cpu, lay_out, layouts_of, unlike
from fpipe.graph.rewrites import copy_of, with_uniform_draws
from fpipe.pieces import kernel_cache
from fpipe.pieces.boxed import Boxed, relaid
from fpipe.pieces.onednn_products import blas_is_slow, with_onednn
from fpipe.pieces.side_by_side import deferred
from fpipe.pieces.wgrad_sums import choose_measured, with_wgrad_kernel
from fpipe.random.threefry import written_out
from fpipe.torch_internals import make_shape_env

# Checks of sizes cost a microsecond an input; strides are settled at each stage boundary instead.
# They stay on in debug runs: TORCH_LOGS=output_code or compile={"options": {"size_asserts": True}}.
OPTIONS: Final = {
    "size_asserts": False,
    "nan_asserts": False,
    "scalar_asserts": False,
    # It would compute the gradients of parameters at the end, and keep all that they read.
    "reorder_for_locality": False,
    # It would compute again what is computed again before it is read, for all blocks at once.
    "reorder_for_peak_memory": False,
    # The outputs of a CUDA graph are overwritten by the next call; a pipeline holds those of many.
    "triton.cudagraphs": False,
}


def by_inductor(
    module: fx.GraphModule, examples: list[Tensor], patches: dict[str, Any], takes_kernel: bool
) -> Boxed:
    """Inductor's own boxed callable, without the wrappers around it where they do nothing.

    Outputs lie as they did in the trace, for which the pieces that read it are compiled.
    """
    from torch._inductor import config as inductor_config

    # Code for a number of threads is kept under it, by every version of torch.
    processor: dict[str, Any] = {"cpp.threads": torch.get_num_threads()}
    if inductor_config.cpp.vec_isa_ok is None and _has_wide_vectors():
        processor["cpp.vec_isa_ok"] = True
    with inductor_config.patch(OPTIONS | processor | patches), _deferred(module.graph):
        layouts = layouts_of(module.graph)
        if takes_kernel:
            module = module_of(with_wgrad_kernel(module.graph, choose_measured, OPTIONS | patches))
        key = kernel_cache.key_of(module.graph)
        if key is not None and (call := kernel_cache.load(key)) is not None:
            return call
        compiled = _by_inductor(module, examples, layouts)
        if compiled.others:
            laid = copy_of(module.graph)
            wanted = {n: layout for n in compiled.others if (layout := layouts[n]) is not None}
            lay_out(laid, wanted)
            compiled = _by_inductor(module_of(laid), examples, layouts)
            others = compiled.others
            assert not others, f"outputs {others} lie otherwise than in the trace"
        if key is not None and compiled.artefact is not None:
            kernel_cache.keep(key, compiled.artefact)
        return compiled.call


def _deferred(graph: fx.Graph) -> AbstractContextManager[None]:
    """Lets the loops of a graph be waited for later, where nothing calls or keeps them before."""
    return deferred() if is_on_cpu(graph) and not _tunes() else nullcontext()


def _tunes() -> bool:
    """Whether Inductor measures which kernels are the best."""
    from torch._inductor import config as inductor_config

    return bool(inductor_config.max_autotune or inductor_config.max_autotune_gemm)


class _Compiled(NamedTuple):
    """The callable that Inductor makes of a graph.

    Attributes:
        call: the boxed callable.
        others: the outputs that would not lie as they should, for which it is not compiled.
        artefact: Inductor's, if it is all that is called.
    """

    call: Boxed
    others: list[int]
    artefact: Any = None


def _by_inductor(
    module: fx.GraphModule, examples: list[Tensor], layouts: Sequence[Layout | None]
) -> _Compiled:
    """Compile a graph, or name the outputs that would not lie as they should.

    It writes some operations by means of others that lay out their results otherwise.
    """
    from torch._inductor import config as inductor_config

    _register()
    others: list[int] = []
    lying: list[list[Layout | None]] = []
    counts: list[int] = []
    if not inductor_config.fallback_random:
        module = module_of(with_uniform_draws(module.graph))
    # Where Inductor tunes products it must see them.
    if blas_is_slow() and not _tunes():
        module = module_of(with_onednn(module.graph))

    def lies_well(graph: fx.Graph) -> bool:
        laid = layouts_of(graph)
        if len(laid) == len(layouts):
            others.extend(unlike(layouts, laid))
        lying.append(laid)
        counts.append(len(graph.find_nodes(op="placeholder")))
        return not others

    wrapped, artefacts = inner_artefacts(module, _kept(examples), lies_well)
    if others:
        return _Compiled(_nothing, others)
    if counts == [len(examples)] and len(lying[0]) == len(layouts):
        artefact = artefacts[0]
        # Where nothing is left to compute it is the graph itself.
        call: Boxed = getattr(artefact, "current_callable", artefact)
        if unlike(layouts, _laid_by(artefact, lying[0])):
            return _Compiled(relaid(call, layouts), [])
        return _Compiled(call, [], artefact)

    def call_wrapped(inputs: list[Tensor]) -> Sequence[Tensor]:
        taken = list(inputs)
        inputs.clear()
        outputs: Sequence[Tensor] = (
            wrapped(taken) if getattr(wrapped, "_boxed_call", False) else wrapped(*taken)
        )
        return outputs

    return _Compiled(relaid(call_wrapped, layouts), [])


def inner_artefacts(
    module: fx.GraphModule,
    examples: Sequence[Tensor],
    compiles: Callable[[fx.Graph], bool] = lambda graph: True,
) -> tuple[Any, list[Any]]:
    """Inductor's callable of a graph, and what it wraps, without the checks that it begins with.

    Args:
        module: the graph.
        examples: fake tensors like its inputs.
        compiles: whether to compile a graph, once it is written in simpler operations.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    artefacts: list[Any] = []

    def capture(simpler: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        if not compiles(simpler.graph):
            return _nothing
        artefacts.append(compile_fx_inner(simpler, inputs, **options))
        return artefacts[-1]

    # The other cache, of autograd's, would bring back the wrappers and pass over `capture`.
    with torch.no_grad(), functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(module, list(examples), inner_compile=capture), artefacts


def _has_wide_vectors() -> bool:
    """Whether torch's own kernels use AVX-512.

    Inductor need not find out then whether what it compiles for that, or for less, can be loaded:
    once for each set of instructions, with torch's libraries, in every process.
    """
    return sys.platform == "linux" and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _laid_by(artefact: Any, laid: Sequence[Layout | None]) -> list[Layout | None]:
    """The outputs as Inductor lays them out, where it says so.

    It may lay one out otherwise than the graph that it was given: where a pass over that, such as
    the one that puts products and sums together, has left a value with other strides, and a product
    reads it too. A copy in the graph does not help, for another pass takes it away.
    """
    strides: Any = getattr(artefact, "output_strides", None)
    if strides is None or len(strides) != len(laid):
        return list(laid)
    return [
        layout
        if layout is None or stride is None
        else Layout(layout.shape, tuple(map(int, stride)))
        for layout, stride in zip(laid, strides, strict=True)
    ]


def _nothing(inputs: list[Tensor]) -> Sequence[Tensor]:
    """Stands for a graph that is not compiled."""
    raise AssertionError("it is compiled once its outputs are laid out")


_nothing._boxed_call = True  # type: ignore[attr-defined]  # how Inductor knows one


def _kept(examples: Sequence[Tensor]) -> list[Tensor]:
    """The same examples, of a kind for which Inductor keeps what it makes from run to run.

    It looks into its cache on disk only where there is an environment of symbolic shapes; there are
    no symbols in it.
    """
    mode = FakeTensorMode(
        shape_env=make_shape_env(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    )
    with mode:
        return [
            torch.empty_strided(e.shape, e.stride(), dtype=e.dtype, device=e.device)
            for e in examples
        ]


def module_of(graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph that has no attributes."""
    return fx.GraphModule(torch.nn.Module(), graph)


# ── operations of fpipe's own ───────────────────────────────────────────────────────────────────


@cache
def _register() -> None:
    """Tell Inductor, once, how to write the operations of fpipe's own into its loops.

    An operation of a graph stays one until a loop is written: written out before, a draw from a key
    would be 160 operations, of which each takes Inductor longer than the machine a million.
    """
    from torch._inductor.lowering import make_pointwise, register_lowering

    first, second = (make_pointwise(_word(number)) for number in range(2))

    def lowered(*words: Any) -> tuple[Any, Any]:
        return first(*words), second(*words)

    register_lowering(
        torch.ops.fpipe.threefry2x32.default, broadcast=True, type_promotion_kind=None
    )(lowered)


def _word(number: int) -> Callable[..., Any]:
    """The function of four words that gives one of the two."""

    def word(*words: Any) -> Any:
        lanes: Any = map(_Lane, words)
        made: Any = written_out(*lanes)
        return made[number].value

    return word


class _Lane:
    """A word of 64 bits of a loop that is being written."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def _with(self, name: str, other: Any) -> _Lane:
        from torch._inductor.virtualized import ops

        value = other.value if isinstance(other, _Lane) else ops.constant(other, torch.int64)
        return _Lane(getattr(ops, name)(self.value, value))

    __add__ = partialmethod(_with, "add")
    __and__ = partialmethod(_with, "bitwise_and")
    __or__ = partialmethod(_with, "bitwise_or")
    __xor__ = partialmethod(_with, "bitwise_xor")
    __lshift__ = partialmethod(_with, "bitwise_left_shift")
    __rshift__ = partialmethod(_with, "bitwise_right_shift")
