"""The global norm of gradients, and clipping by it, also where each rank holds some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isclose, isnan
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fpipe import pytree
from fpipe.dtensors import add_over_meshes, placements_of
from fpipe.engine import Engine
from fpipe.errors import FpipeError, a_type
from fpipe.execute.header import NORMS, Addend
from fpipe.inputs.signature import is_differentiable
from fpipe.pipelines import Pipeline, check_is_pipeline, engine_of, in_use
from fpipe.spec.convention import scaled
from fpipe.transforms.wrapped_pipelines import Wrapping


class Clipped(NamedTuple):
    """Gradients that `clip_by_global_norm` has scaled.

    Attributes:
        grads: the gradients, in the structure, shapes and dtypes in which they came.
        norm: their global norm before.
    """

    grads: Any
    norm: Tensor


def global_norm(grads: Any, *, pipe: Pipeline | Wrapping | None = None) -> Tensor:
    """The Euclidean norm of all elements of all gradients, of all ranks.

    Squares are added up in float32 within a leaf (float64 if it is float64), and in float64 from
    leaf to leaf and rank to rank; on all ranks the result has the same bits. Only None is left out,
    so a norm may be infinite or NaN. If stages on several ranks read a parameter, each of these
    ranks has the whole gradient; it counts once.

    Args:
        grads: pytree of floating-point or complex tensors; None has no elements. Over a process
            group each rank passes the gradients of its stages, and every rank must call this. In
            the gradients of a module, or of one function with cuts, the path of a leaf says which
            parameter it belongs to: paths must be the same on all ranks.
        pipe: the pipeline that has made the gradients, or products of `fpipe.hvp`; by default the
            one that `fpipe.use` names. Without a pipeline, the gradients are taken to be whole.

    Returns:
        A scalar: float64 if a leaf of any rank is (or is complex128), else float32; on the device
        of the first leaf.

    Raises:
        FpipeError: a leaf is not a floating-point tensor; or no pipeline is given or in use, though
            `grads` has None in one of several processes, as the gradients of one rank have it; or
            ranks hold other gradients under the same path.
        PipelineError: over a process group, as in `Pipeline.step`.

    Example:
        >>> import torch, fpipe
        >>> fpipe.global_norm([{"w": torch.tensor([3.0]), "frozen": None}, torch.tensor([4.0])])
        tensor(5.)
    """
    return _norm(grads, pipe, lambda: None)


def clip_by_global_norm(
    grads: Any, max_norm: float, *, pipe: Pipeline | Wrapping | None = None
) -> Clipped:
    """Scale all gradients so that their global norm is at most `max_norm`.

    The scale is ``max_norm / (norm + 1e-6)`` and 1 at most, as in
    `torch.nn.utils.clip_grad_norm_` (Pascanu, Mikolov and Bengio, 2013, "On the difficulty of
    training recurrent neural networks").

    Args:
        grads: as for `global_norm`; they stay as they are.
        max_norm: a positive number, or 0, at which every gradient becomes 0.
        pipe: as for `global_norm`.

    Returns:
        ``(grads, norm)``: new gradients in the structure and dtypes of `grads`, and the norm before
        clipping. Where that is infinite, the scale is 0, so finite numbers become 0 and infinite
        ones NaN; where it is NaN, every gradient is.

    Raises:
        FpipeError: as for `global_norm`, or `max_norm` is negative or no number.
        PipelineError: as for `global_norm`.

    Example:
        >>> import torch, fpipe
        >>> grads, norm = fpipe.clip_by_global_norm([torch.tensor([3.0, 4.0])], 1.0)
        >>> grads, norm
        ([tensor([0.6000, 0.8000])], tensor(5.))
    """

    def check_max_norm() -> None:
        if not _is_bound(max_norm):
            raise FpipeError(
                f"max_norm={max_norm!r:.60} must be a positive number, or 0, at which every "
                "gradient becomes 0"
            )

    norm = _norm(grads, pipe, check_max_norm)
    return Clipped(scaled(grads, scale_of(norm, max_norm)), norm)


def scale_of(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that clips gradients of this norm; 1 for those that stay."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _norm(grads: Any, pipe: Pipeline | Wrapping | None, check: Callable[[], None]) -> Tensor:
    """The norm, as `global_norm` returns it.

    If another argument is wrong, `check` raises, and the rank on which it does tells the others.
    """
    pipeline = pipe or in_use()
    if pipeline is not None and not isinstance(pipeline, Wrapping):
        check_is_pipeline("pipe", pipeline, "fpipe.global_norm")

    def read() -> tuple[Tensor, bool]:
        check()
        leaves, spec = _leaves(grads)
        is_wide = any(leaf.dtype in (torch.float64, torch.complex128) for leaf in leaves)
        return add_over_meshes(_squares(leaves), placements_of(spec)), is_wide

    if pipeline is None:
        _refuse_some_of_several_ranks(grads)
    if pipeline is None or pipeline.rank is None:
        squares, is_wide = read()
    else:
        squares, is_wide = _over_ranks(engine_of(pipeline), grads, read)
    return squares.sum().sqrt().to(torch.float64 if is_wide else torch.float32)


def _over_ranks(
    engine: Engine, grads: Any, read: Callable[[], tuple[Tensor, bool]]
) -> tuple[Tensor, bool]:
    """Squares whose sum is that of all ranks, and whether any rank has a leaf of double precision.

    Those of the leaves of this rank, and whether any of them is so, are read by `read`.
    """
    squares_here: list[Tensor] = []

    def addend() -> Addend:
        squares, is_wide = read()
        squares_here.append(squares)
        return Addend(squares.sum().item(), is_wide)

    total, is_wide = engine.add_up(addend, deed="take the norm of its gradients", call=NORMS)
    [squares] = squares_here
    if not engine.definition.function:
        return squares.new_tensor([total]), is_wide
    paths = pytree.paths(pytree.structure(grads))
    by_path = dict(zip(paths, squares.tolist(), strict=True))
    each = _each_once(engine.together(NORMS, lambda gather: gather(by_path)))
    # In the order in which one process adds them up, so that the bits are the same.
    return squares.new_tensor([each[path] for path in sorted(each)]), is_wide


def _is_bound(number: Any) -> bool:
    try:
        return bool(number >= 0)
    except (TypeError, RuntimeError, ValueError):
        return False


def _leaves(grads: Any) -> tuple[list[Tensor], optree.PyTreeSpec]:
    if isinstance(grads, tuple) and type(grads).__module__.startswith("fpipe."):
        # The result of a call: its loss would be counted, and scaled.
        fields: tuple[str, ...] = getattr(grads, "_fields", ())
        names = [f".{field}" for field in fields if field in ("grads", "hvp", "norms", "jvp")]
        raise FpipeError(f"grads is {a_type(grads)}: pass its {' or '.join(names)}")
    leaves, spec = pytree.flatten(grads)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not is_differentiable(leaf):
            raise FpipeError(
                f"grads{pytree.paths(spec)[index]}={leaf!r:.60} is not a floating-point tensor: "
                "what has no gradient must be None"
            )
    return leaves, spec


def _squares(leaves: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of each leaf, on the device of the first."""
    device = leaves[0].device if leaves else None
    none = torch.zeros(0, dtype=torch.float64, device=device)
    return torch.cat([none, *(square_of(leaf).to(device)[None] for leaf in leaves)])


def square_of(leaf: Tensor) -> Tensor:
    """The sum of the squares of a leaf's elements, float64, without dimensions."""
    real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
    dtype = torch.float64 if real.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(real.detach(), dtype=dtype).double().square()


def _each_once(squares_of: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The squares of every leaf, by path, of which several ranks may hold one.

    Raises:
        FpipeError: on every rank, if two ranks have different squares, which cannot belong to the
            gradient of one parameter.
    """
    first_of: dict[str, tuple[int, float]] = {}
    for rank, squares in enumerate(squares_of):
        for path, square in squares.items():
            first, other = first_of.setdefault(path, (rank, square))
            # The gradients have the same bits, but on another number of threads not their squares.
            if not (isclose(other, square, rel_tol=1e-3) or isnan(other) or isnan(square)):
                raise FpipeError(
                    f"grads{path} is another gradient on rank {rank} than on rank {first}, with a "
                    f"norm of {square**0.5:.6g} and not {other**0.5:.6g}: pass the gradients under "
                    "the names that pipe.step gives them, so that what several ranks hold counts "
                    "once"
                )
    return {path: square for path, (_, square) in first_of.items()}


def _refuse_some_of_several_ranks(grads: Any) -> None:
    """Refuse gradients of one rank alone, whose norm would be wrong."""
    is_whole = all(leaf is not None for leaf in pytree.flatten_prefix(grads))
    is_alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
    if is_whole or is_alone:
        return
    raise FpipeError(
        "grads has None, as one rank of a pipeline has for what other ranks hold, but no pipeline "
        "is named: pass pipe=pipe, or call this within `with fpipe.use(pipe):`"
    )
