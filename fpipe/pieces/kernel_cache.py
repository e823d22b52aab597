"""Keep what Inductor writes for a graph, so that the next process finds it by the graph alone.

    graph ──► key ──► a Python module that calls loops in C++ ──► callable

Inductor has a cache of its own, whose key is the graph that it lowers: a second process imports all
of Inductor and traces each graph again before it can look. The key here is the graph before that,
with all that the way from there to a module depends on. The loops stay in Inductor's cache, where
they are found by their text, and compiled again if they are gone.

Kept is what computes on the CPU in torch's own operations and fpipe's, if Inductor keeps it too.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import operator
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx
from torch._ops import OpOverload

from fpipe.graph.nodes import fingerprint, is_on_cpu, layouts_of
from fpipe.inputs.ambient import kernels
from fpipe.pieces.boxed import Boxed
from fpipe.pieces.onednn_products import blas_is_slow

log = logging.getLogger("fpipe")

_NAMESPACES: Final = ("aten", "fpipe", "prims")
"""Whose operations are as torch and fpipe have them, in every process of the same versions."""


def key_of(graph: fx.Graph) -> str | None:
    """The key of a graph under the present settings of Inductor; None if it is not to be kept."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    if config.force_disable_caches or not config.fx_graph_cache or not _is_ours(graph):
        return None
    parts = (
        fingerprint(graph),
        layouts_of(graph),
        config.get_hash(),
        functorch_config.get_hash(),
        torch.compiler.config.cache_key_tag,
        kernels(),
        getattr(torch.utils.deterministic, "fill_uninitialized_memory", None),
        _onednn(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        blas_is_slow(),
        torch.backends.cpu.get_cpu_capability(),
        _versions(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def load(key: str) -> Boxed | None:
    """The callable that was kept under a key; None if there is none, or it cannot be loaded."""
    from torch._inductor.codecache import PyCodeCache, output_code_log

    path = _path(key)
    if not path.exists():
        return None
    try:
        call: Boxed = PyCodeCache.load_by_key_path(f"fpipe_{key}", str(path)).call
        # For TORCH_LOGS=output_code, as Inductor says it of what is in its cache.
        if output_code_log.isEnabledFor(logging.DEBUG):
            output_code_log.debug("Output code:\n%s", path.read_text("utf-8"))
            output_code_log.debug("Output code written to: %s", path)
    except Exception as error:
        log.info("what was kept of a graph cannot be loaded and is compiled anew: %s", error)
        return None
    return call


def keep(key: str, artefact: Any) -> None:
    """Keep what Inductor made of a graph, if it is a module that stands alone."""
    from torch._inductor.codecache import write_atomic
    from torch._inductor.runtime import compile_tasks

    module = sys.modules.get(f"{compile_tasks.__name__}.{getattr(artefact, 'cache_key', None)}")
    # Some artefacts are more than their module: wrapped, or not to be kept.
    stands_alone = (
        module is not None
        and getattr(module, "call", None) == artefact.current_callable
        and artefact.device_types == {"cpu"}
        and getattr(artefact, "_fx_graph_cache_key", None) is not None
        and not any(getattr(artefact, name, None) for name in _ATTACHED)
    )
    if not stands_alone:
        return
    try:
        write_atomic(str(_path(key)), _light(artefact.source_code), make_dirs=True)
    except OSError as error:
        log.info("what Inductor wrote of a graph is not kept: %s", error)


_ATTACHED: Final = (
    "constants",
    "frozen_param_names",
    "torchbind_constants",
    "opaque_value_type_classes",
    "mutated_input_idxs",
)
"""Parts of an artefact beside its module."""


def _path(key: str) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir(), "fpipe", key[:2], f"{key}.py")


def _is_ours(graph: fx.Graph) -> bool:
    """Whether a graph computes on the CPU alone, in operations that no user defines."""
    return is_on_cpu(graph) and all(
        node.target is operator.getitem
        or (isinstance(node.target, OpOverload) and node.target.namespace in _NAMESPACES)
        for node in graph.nodes
        if node.op not in ("placeholder", "output")
    )


# ── imports of the module ───────────────────────────────────────────────────────────────────────

_EXTERN: Final = "from torch._inductor.select_algorithm import extern_kernels\n"
_ALIGN: Final = "from torch._inductor.codegen.memory_planning import _align as align\n"
_OF_INDUCTOR: Final = re.compile(
    r"\b(inductor_ops|_quantized)\.|\balign\(|torch\._inductor\.(?!hooks|utils|async_compile|wrapper_b)"
    r"|torch\.ops\.(?!(aten|fpipe|mkldnn)\b|(inductor|_quantized)\s|inductor\._alloc_from_pool\s)"
)
"""Names that a module may need, and which all of Inductor must be imported for."""


def _light(source: str) -> str:
    """The module without its imports of Inductor's code generators, where they bring it nothing.

    They take longer than the module does to load. The products that it calls are torch's own.
    """
    from torch._inductor.select_algorithm import extern_kernels

    rest = source.replace(_EXTERN, "import torch as extern_kernels\n").replace(_ALIGN, "")
    products = set(re.findall(r"\bextern_kernels\.(\w+)", rest))
    absent = object()
    are_torchs = all(
        getattr(torch, name, absent) is getattr(extern_kernels, name, None) for name in products
    )
    return rest if are_torchs and not _OF_INDUCTOR.search(rest) else source


def _onednn() -> tuple[object, ...]:
    """The settings of oneDNN that Inductor looks at when it lowers products."""
    backend = torch.backends.mkldnn
    products = getattr(backend, "matmul", None)
    precisions = (getattr(place, "fp32_precision", None) for place in (backend, products))
    return backend.enabled, *precisions


# ── versions ────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _versions() -> str:
    """The code that makes a module of a graph, and the processor."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    parts = (
        torch.__version__,
        torch.version.git_version,
        sys.version,
        sorted(capabilities.items()),
        *_sources(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _sources() -> Iterator[tuple[Any, ...]]:
    """The files of that code: fpipe's by their text, torch's, which are many, by size and date."""
    package = Path(__file__).parents[1]
    for room in ("graph", "pieces", "random"):
        for path in sorted((package / room).glob("*.py")):
            yield path.name, path.read_bytes()
    installed = Path(torch.__file__).parent
    for room in ("_inductor", "_decomp", "_refs", "_prims", "_prims_common"):
        for path in sorted((installed / room).rglob("*.py")):
            status = path.stat()
            yield str(path.relative_to(installed)), status.st_size, status.st_mtime_ns
