"""Make graphs callable: boxed, cheap to call, and shared between stages that have the same graph.

A boxed callable takes its inputs in a list that it empties, so that an input can be freed before
the call ends; it returns a sequence. Inductor makes such a callable inside, and `compile_fx` with a
captured inner compile hands it over without the wrappers that cost 10 to 30 microseconds a call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.graph import _BoxedCodeGen

from fpipe.errors import StageError, error_text, label_of
from fpipe.graph.inlining import with_draws_written_out
from fpipe.graph.layouts import Layout, lay_out, layouts_of, unlike
from fpipe.graph.nodes import value_of
from fpipe.graph.rewrites import copy_of, free_views_of_layout, with_uniform_draws
from fpipe.inputs.ambient import kernels, without_autocast
from fpipe.live_line import advance
from fpipe.pieces import inductor_lowerings
from fpipe.pieces.onednn_products import blas_is_slow, with_onednn
from fpipe.pieces.piece import Piece
from fpipe.pieces.wgrad_sums import OPTION, choose_measured, with_wgrad_kernel
from fpipe.torch_internals import make_shape_env

log = logging.getLogger("fpipe")

Boxed = Callable[[list[Tensor]], Sequence[Tensor]]
Compile = bool | str | Mapping[str, Any] | Callable[[fx.GraphModule, Sequence[Tensor]], Boxed]

# Checks of sizes cost a microsecond an input; strides are settled at each stage boundary instead.
# They stay on in debug runs: TORCH_LOGS=output_code or compile={"options": {"size_asserts": True}}.
_OPTIONS = {
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


_CUT_SHORT: Final = ("file too short", "invalid ELF header")
"""The loader's messages for a library that was not written to its end."""


class Compiler:
    """Compiles graphs by one set of options, each distinct graph once.

    Args:
        compile: True for Inductor; False to run the graphs uncompiled; a mapping with what
            `torch.compile` accepts (``backend``, ``mode``, ``options``, among which
            ``fpipe.wgrad_kernel`` may be False; see `wgrad_sums`); the name of a backend;
            or a callable from a `GraphModule` and its example inputs (fake tensors) to a boxed
            callable: one that takes a list, which it may empty, and returns a sequence.

    Attributes:
        fuses: elementwise operations are taken to run where their results are read.

    Raises:
        StageError: `compile` is none of these.
    """

    def __init__(self, compile: Compile) -> None:
        self._make = _maker(compile)
        self._name = label_of(compile) if callable(compile) else repr(compile)
        self.fuses = compile is not False
        self._artefacts: dict[Hashable, Boxed] = {}

    def key(self, piece: Piece) -> Hashable:
        """The same for pieces that share a callable."""
        # Inductor writes the number of threads into its loops, and takes the kernels it is told to.
        return piece.fingerprint, piece.places, torch.get_num_threads(), kernels()

    def __contains__(self, key: Hashable) -> bool:
        """Whether a callable was made by this key."""
        return key in self._artefacts

    def __call__(self, piece: Piece, label: str) -> Boxed:
        """The boxed callable of `piece`; `label` names it in the log and in errors.

        Raises:
            StageError: it cannot be compiled; the cause is what the compiler raised.
        """
        key = self.key(piece)
        if key not in self._artefacts:
            advance(label)
            examples = [value_of(n) for n in piece.graph.nodes if n.op == "placeholder"]
            log.info("%s %s", "compiling" if self.fuses else "making", label)
            try:
                with without_autocast():  # the casts are in the graph
                    made = self._make(piece.graph, examples)
            except Exception as error:
                says = error_text(error)
                way = "compile=False runs it uncompiled"
                if any(words in says for words in _CUT_SHORT):
                    way = "a compilation that was interrupted has left that file: delete it"
                raise StageError(f"{label} cannot be compiled: {says} ({way})") from error
            if not callable(made):
                raise StageError(
                    f"compile={self._name} made {made!r:.60} of {label}: it must return a boxed "
                    "callable, which takes a list of inputs and returns a sequence of outputs"
                )
            self._artefacts[key] = made
        return self._artefacts[key]


def _maker(compile: Compile) -> Callable[[fx.Graph, list[Tensor]], Boxed]:
    """Makes the callable of a graph.

    Some kernels lay their result out otherwise than the abstract ones with which the graph was
    traced, and so do some operations as a compiler writes them by means of others: a view of it
    would fail where a reshape copies.
    """
    of_modules = None if compile is False else _maker_of_modules(compile)

    def make(graph: fx.Graph, examples: list[Tensor]) -> Boxed:
        free_views_of_layout(graph)
        return _uncompiled(graph) if of_modules is None else of_modules(_module(graph), examples)

    return make


def _maker_of_modules(compile: Compile) -> Callable[[fx.GraphModule, list[Tensor]], Boxed]:
    if compile is True:
        return lambda module, examples: _inductor(module, examples, {}, True)
    if isinstance(compile, str):
        return _maker_of_modules({"backend": compile})
    if isinstance(compile, Mapping):
        return _maker_from_options(dict(compile))
    if callable(compile):
        return _of_plain(partial(_by_callers, compile))
    raise StageError(
        f"compile={compile!r} must be True (Inductor), False, a mapping of torch.compile's options "
        "(backend, mode, options), a backend's name, or a callable from graph and example inputs "
        "to a boxed callable"
    )


def _maker_from_options(options: dict[str, Any]) -> Callable[[fx.GraphModule, list[Tensor]], Boxed]:
    unknown = set(options) - {"backend", "mode", "options"}
    if unknown:
        raise StageError(
            f"compile={options!r} has {sorted(unknown)}: it takes what torch.compile takes for a "
            "static graph, that is backend, mode and options"
        )
    backend = options.get("backend", "inductor")
    if isinstance(backend, str) and backend not in torch._dynamo.list_backends(exclude_tags=()):
        raise StageError(
            f"compile={options!r:.200} names no backend: torch._dynamo.list_backends(None) lists "
            "them"
        )
    if backend != "inductor":
        return _of_plain(lambda module, examples: _by_torch_compile(module, options))
    options, takes_kernel = _without_own(options)
    patches = _patches(options)
    if patches.get("triton.cudagraphs"):
        raise StageError(
            f"compile={options!r} asks for CUDA graphs, whose outputs are overwritten by the next "
            "call, while a pipeline holds the outputs of many calls: choose another mode, such as "
            "'max-autotune-no-cudagraphs'"
        )
    return lambda module, examples: _inductor(module, examples, patches, takes_kernel)


def _without_own(options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The options of Inductor's own, and whether sums of weight gradients may have a kernel.

    Raises:
        StageError: it is said by something else than True or False.
    """
    others = options.get("options")
    if not isinstance(others, Mapping) or OPTION not in others:
        return options, True
    takes_kernel = others[OPTION]
    if not isinstance(takes_kernel, bool):
        raise StageError(
            f"compile={options!r:.200} says {takes_kernel!r:.40} of {OPTION!r}: it is True, for "
            "the kernel where it is measured to be faster, or False"
        )
    rest = {name: value for name, value in others.items() if name != OPTION}
    return options | {"options": rest or None}, takes_kernel


def _patches(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of Inductor that a mode and options come to, as torch.compile checks them."""
    try:
        wanted = torch._TorchCompileInductorWrapper(
            options.get("mode"), options.get("options"), dynamic=False
        )
    except Exception as error:
        # Some hundred options are known.
        what = str(error).partition(", known options")[0]
        raise StageError(f"compile={options!r:.200} is not what Inductor takes: {what}") from error
    config: dict[str, Any] = wanted.config
    return config


def _of_plain(
    make: Callable[[fx.GraphModule, list[Tensor]], Boxed],
) -> Callable[[fx.GraphModule, list[Tensor]], Boxed]:
    """The same of graphs in torch's own operations, for those that know no others."""
    return lambda module, examples: make(_module(with_draws_written_out(module.graph)), examples)


def _by_callers(
    make: Callable[[fx.GraphModule, list[Tensor]], Boxed],
    module: fx.GraphModule,
    examples: list[Tensor],
) -> Boxed:
    """What a caller's own function makes, which is told where it seems not to be boxed."""
    made = make(module, examples)
    if not callable(made):
        return made

    def call(inputs: list[Tensor]) -> Sequence[Tensor]:
        try:
            return made(inputs)
        except (TypeError, ValueError, StopIteration) as error:
            words = ("positional argument", "values to unpack")
            if not isinstance(error, StopIteration) and not any(w in str(error) for w in words):
                raise
            raise StageError(
                f"compile={label_of(make)} made what raised {error_text(error)} (it "
                "must be a boxed callable, which takes its inputs in one list; of a backend of "
                'torch.compile say compile={"backend": …})'
            ) from error

    return call


def _module(graph: fx.Graph) -> fx.GraphModule:
    return fx.GraphModule(torch.nn.Module(), graph)


def _uncompiled(graph: fx.Graph) -> Boxed:
    """The graph as Python, taking its inputs from a list and dropping each after its last use.

    Not as a `GraphModule`: each is a class of its own, which all modules of the process pay for
    whenever torch traces, and its text is kept by torch for good.
    """
    graph.set_codegen(_BoxedCodeGen())
    written = graph.python_code("self")
    names = dict(written.globals)
    exec(compile(written.src, "<fpipe, uncompiled>", "exec"), names)
    call: Boxed = partial(names["forward"], None)  # a graph of stages has no attributes
    return call


def _by_torch_compile(module: fx.GraphModule, options: dict[str, Any]) -> Boxed:
    compiled = torch.compile(module, fullgraph=True, dynamic=False, **options)

    def call(inputs: list[Tensor]) -> Sequence[Tensor]:
        taken = tuple(inputs)
        inputs.clear()
        outputs: Sequence[Tensor] = compiled(*taken)
        return outputs

    return _relaid(call, layouts_of(module.graph))


def _inductor(
    module: fx.GraphModule, examples: list[Tensor], patches: dict[str, Any], takes_kernel: bool
) -> Boxed:
    """Inductor's own boxed callable, without the wrappers around it where they do nothing.

    What comes out lies as it did in the trace, for which the pieces that read it are compiled.
    """
    layouts = layouts_of(module.graph)
    if takes_kernel:
        module = _module(with_wgrad_kernel(module.graph, choose_measured, _OPTIONS | patches))
    call, others = _by_inductor(module, examples, patches, layouts)
    if others:
        laid = copy_of(module.graph)
        lay_out(laid, {n: own for n in others if (own := layouts[n]) is not None})
        call, others = _by_inductor(_module(laid), examples, patches, layouts)
        assert not others, f"outputs {others} lie otherwise than in the trace"
    return call


def _by_inductor(
    module: fx.GraphModule,
    examples: list[Tensor],
    patches: dict[str, Any],
    layouts: Sequence[Layout | None],
) -> tuple[Boxed, list[int]]:
    """What Inductor makes of a graph; or the outputs that would not lie as they should.

    It writes some operations by means of others that lay out their results otherwise.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    inductor_lowerings.register()
    captured: list[Any] = []
    others: list[int] = []
    misplaced: list[int] = []
    if not patches.get("fallback_random", inductor_config.fallback_random):
        module = _module(with_uniform_draws(module.graph))
    # Where Inductor tunes products it must see them.
    tuning = ("max_autotune", "max_autotune_gemm")
    tunes = any(patches.get(name, getattr(inductor_config, name)) for name in tuning)
    if blas_is_slow() and not tunes:
        module = _module(with_onednn(module.graph))

    def capture(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        found = layouts_of(graph.graph)
        if len(found) == len(layouts):
            others.extend(unlike(layouts, found))
        if others:
            return _nothing
        artefact = compile_fx_inner(graph, inputs, **options)
        if len(found) == len(layouts):
            misplaced.extend(unlike(layouts, _laid_by(artefact, found)))
        inner = [n for n in graph.graph.nodes if n.op == "placeholder"]
        captured.append((artefact, len(inner), len(found)))
        return artefact

    # What is compiled for a number of threads is kept under it, by every version of torch.
    threads = {"cpp.threads": torch.get_num_threads()}
    # The other cache, of autograd's, would bring back the wrappers and pass over `capture`.
    with torch.no_grad(), functorch_config.patch(enable_autograd_cache=False):
        wrapped: Any = compile_fx(
            module,
            _kept(examples),
            inner_compile=capture,
            config_patches=_OPTIONS | threads | patches,
        )
    if len(captured) == 1 and captured[0][1:] == (len(examples), len(layouts)):
        artefact = captured[0][0]
        # Where nothing is left to compute it is the graph itself.
        call: Boxed = getattr(artefact, "current_callable", artefact)
        return (_relaid(call, layouts) if misplaced else call), others

    def call_wrapped(inputs: list[Tensor]) -> Sequence[Tensor]:
        taken = list(inputs)
        inputs.clear()
        outputs: Sequence[Tensor] = (
            wrapped(taken) if getattr(wrapped, "_boxed_call", False) else wrapped(*taken)
        )
        return outputs

    return _relaid(call_wrapped, layouts), others


def _laid_by(artefact: Any, found: Sequence[Layout | None]) -> list[Layout | None]:
    """The outputs as Inductor lays them out, where it says so.

    It may lay one out otherwise than the graph that it was given: where a pass over that, such as
    the one that puts products and sums together, has left a value with other strides, and a product
    reads it too. A copy in the graph does not help, for another pass takes it away.
    """
    told: Any = getattr(artefact, "output_strides", None)
    if told is None or len(told) != len(found):
        return list(found)
    return [
        own if own is None or stride is None else Layout(own.shape, tuple(map(int, stride)))
        for own, stride in zip(found, told, strict=True)
    ]


def _relaid(call: Boxed, layouts: Sequence[Layout | None]) -> Boxed:
    """The same with copies, which lie as they should, of outputs that do not."""

    def call_and_copy(inputs: list[Tensor]) -> Sequence[Tensor]:
        outputs = list(call(inputs))
        found = [
            None if layout is None else Layout(layout.shape, value.stride())
            for value, layout in zip(outputs, layouts, strict=True)
        ]
        for number in unlike(layouts, found):
            value, layout = outputs[number], layouts[number]
            assert layout is not None  # of what has none nothing is expected
            outputs[number] = value.new_empty_strided(*layout).copy_(value)
        return outputs

    return call_and_copy


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
