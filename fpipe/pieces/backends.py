"""The choice of what makes a graph callable, as ``compile=`` says it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.errors import StageError, error_text, label_of
from fpipe.graph.inlining import with_draws_written_out
from fpipe.graph.nodes import layouts_of
from fpipe.pieces.boxed import Boxed, relaid
from fpipe.pieces.inductor import by_inductor, module_of
from fpipe.pieces.wgrad_sums import OPTION

Compile = bool | str | Mapping[str, Any] | Callable[[fx.GraphModule, Sequence[Tensor]], Boxed]


def without_regions(compile: Compile) -> tuple[Compile, bool]:
    """How graphs become callable, and whether pieces are divided into regions before.

    Raises:
        StageError: ``regions`` is something else than True or False.
    """
    if not isinstance(compile, Mapping):
        return compile, isinstance(compile, bool | str) and compile is not False
    divides = compile.get("regions", True)
    if not isinstance(divides, bool):
        raise StageError(
            f"compile={compile!r:.200} says {divides!r:.40} of 'regions': it is True, to compile "
            "layers that are alike once, or False, to compile each piece of a stage whole"
        )
    return {name: value for name, value in compile.items() if name != "regions"}, divides


def maker_of(compile: Compile) -> Callable[[fx.GraphModule, list[Tensor]], Boxed]:
    """Makes the callable of a graph; `compile` is anything but False.

    Raises:
        StageError: it is no choice.
    """
    if compile is True:
        return lambda module, examples: by_inductor(module, examples, {}, True)
    if isinstance(compile, str):
        return maker_of({"backend": compile})
    if isinstance(compile, Mapping):
        return _maker_from_options(dict(compile))
    if callable(compile):
        return _of_plain(partial(_by_callers, compile))
    raise StageError(
        f"compile={compile!r} must be True (Inductor), False, a mapping of torch.compile's options "
        "(backend, mode, options) and regions, a backend's name, or a callable from graph and "
        "example inputs to a boxed callable"
    )


def _maker_from_options(options: dict[str, Any]) -> Callable[[fx.GraphModule, list[Tensor]], Boxed]:
    unknown = set(options) - {"backend", "mode", "options"}
    if unknown:
        raise StageError(
            f"compile={options!r} has {sorted(unknown)}: it takes what torch.compile takes for a "
            "static graph, that is backend, mode and options, and regions"
        )
    backend = options.get("backend", "inductor")
    if isinstance(backend, str) and backend not in torch._dynamo.list_backends(exclude_tags=()):
        raise StageError(
            f"compile={options!r:.200} names no backend: torch._dynamo.list_backends(None) lists "
            "them"
        )
    if backend != "inductor":
        return _of_plain(lambda module, examples: _by_torch_compile(module, options))
    options, takes_kernel = without_own(options)
    patches = patches_of(options)
    if patches.get("triton.cudagraphs"):
        raise StageError(
            f"compile={options!r} asks for CUDA graphs, whose outputs are overwritten by the next "
            "call, while a pipeline holds the outputs of many calls: choose another mode, such as "
            "'max-autotune-no-cudagraphs'"
        )
    return lambda module, examples: by_inductor(module, examples, patches, takes_kernel)


def without_own(options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
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


def patches_of(options: Mapping[str, Any]) -> dict[str, Any]:
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
    return lambda module, examples: make(module_of(with_draws_written_out(module.graph)), examples)


def _by_callers(
    make: Callable[[fx.GraphModule, list[Tensor]], Boxed],
    module: fx.GraphModule,
    examples: list[Tensor],
) -> Boxed:
    """The result of a caller's own function, with a warning where it seems not to be boxed."""
    compiled = make(module, examples)
    if not callable(compiled):
        return compiled

    def call(inputs: list[Tensor]) -> Sequence[Tensor]:
        try:
            return compiled(inputs)
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


def _by_torch_compile(module: fx.GraphModule, options: dict[str, Any]) -> Boxed:
    compiled = torch.compile(module, fullgraph=True, dynamic=False, **options)

    def call(inputs: list[Tensor]) -> Sequence[Tensor]:
        taken = tuple(inputs)
        inputs.clear()
        outputs: Sequence[Tensor] = compiled(*taken)
        return outputs

    return relaid(call, layouts_of(module.graph))
