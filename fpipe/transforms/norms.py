"""The norm of all gradients together, and clipping by it, also where ranks hold parts of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isclose, isnan
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fpipe import pytree
from fpipe.current import in_use
from fpipe.dtensors import add_over_meshes, placements_of
from fpipe.engine import Pipeline, check_is_pipeline
from fpipe.errors import FpipeError, a_type
from fpipe.execute.header import NORMS, Addend
from fpipe.transforms.wrapped_pipelines import Wrapping


class Clipped(NamedTuple):
    """What `clip_by_global_norm` returns.

    Attributes:
        grads: the gradients, scaled.
        norm: their norm before.
    """

    grads: Any
    norm: Tensor


def global_norm(grads: Any, *, pipe: Pipeline | Wrapping | None = None) -> Tensor:
    """The Euclidean norm of all elements of all gradients, of all ranks.

    Squares are added up in float32 within a leaf (float64 if it is float64), and in float64 from
    leaf to leaf and rank to rank; on all ranks the result has the same bits. A norm that is not
    finite says so: nothing is left out but None. Of a parameter that stages on several ranks read
    each of those has the whole gradient; it counts once.

    Args:
        grads: pytree of tensors; None has no elements. Over a process group those of the own
            stages, and every rank must call this. Of a module, or of one function with cuts, the
            keys and indices of a leaf's path say which parameter it is of: the same on all ranks.
        pipe: that the gradients, or products of `fpipe.hvp`, come from, by default the one that
            `fpipe.use` names. Without one, the gradients are taken to be whole.

    Returns:
        A scalar: float64 if a leaf of any rank is (or is complex128), else float32; on the device
        of the first leaf.

    Raises:
        FpipeError: a leaf is not a floating-point tensor; or no pipeline is given or in use, though
            `grads` has None, as one rank's part has it, in one of several processes; or what ranks
            hold under the same path differs.
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

    The scale is that of `torch.nn.utils.clip_grad_norm_`, ``max_norm / (norm + 1e-6)`` and 1 at
    most.

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

    def check() -> None:
        if not _is_bound(max_norm):
            raise FpipeError(
                f"max_norm={max_norm!r:.60} must be a positive number, or 0, at which every "
                "gradient becomes 0"
            )

    norm = _norm(grads, pipe, check)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)

    def scaled(leaf: Tensor) -> Tensor:
        # A product with a tensor of no dimensions has the dtype of the other factor.
        return (leaf * scale.to(leaf.device)).to(leaf.dtype)

    return Clipped(pytree.tree_map(scaled, grads), norm)


def _norm(grads: Any, pipe: Pipeline | Wrapping | None, check: Callable[[], None]) -> Tensor:
    """The norm, where `check` raises nothing: a rank on which it does tells the others."""
    chosen = pipe or in_use()
    if isinstance(chosen, Wrapping):
        chosen = chosen.pipeline
    if chosen is not None:
        check_is_pipeline("pipe", chosen, "fpipe.global_norm")

    def read() -> tuple[Tensor, bool]:
        check()
        leaves, spec = _leaves(grads)
        wide = any(leaf.dtype in (torch.float64, torch.complex128) for leaf in leaves)
        return add_over_meshes(_squares(leaves), placements_of(spec)), wide

    own: list[Tensor] = []

    def number() -> Addend:
        squares, wide = read()
        own.append(squares)
        return Addend(squares.sum().item(), wide)

    if chosen is None or chosen.rank is None:
        if chosen is None:
            _refuse_a_part(grads)
        squares, wide = read()
    else:
        of_all, wide = chosen.add_up_marked(
            number, deed="take the norm of its gradients", call=NORMS
        )
        [squares] = own
        if chosen.definition.function:
            mine = dict(zip(pytree.paths(pytree.structure(grads)), squares.tolist(), strict=True))
            parts = chosen.together(NORMS, lambda gather: gather(mine))
            each = _each_once(parts)
            # In the order of one process, which adds them up like this: to the same bits.
            squares = squares.new_tensor([each[path] for path in sorted(each)])
        else:
            squares = squares.new_tensor([of_all])
    return squares.sum().sqrt().to(torch.float64 if wide else torch.float32)


def _is_bound(number: Any) -> bool:
    try:
        return bool(number >= 0)
    except (TypeError, RuntimeError, ValueError):
        return False


def _leaves(grads: Any) -> tuple[list[Tensor], optree.PyTreeSpec]:
    if isinstance(grads, tuple) and type(grads).__module__.startswith("fpipe."):
        # What a call has returned, whose loss would be counted, and scaled.
        fields: tuple[str, ...] = getattr(grads, "_fields", ())
        parts = [f".{field}" for field in fields if field in ("grads", "hvp", "norms", "jvp")]
        raise FpipeError(f"grads is {a_type(grads)}: pass its {' or '.join(parts)}")
    leaves, spec = pytree.flatten(grads)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            raise FpipeError(
                f"grads{pytree.paths(spec)[index]}={leaf!r:.60} is not a floating-point tensor: "
                "what has no gradient must be None"
            )
    return leaves, spec


def _squares(leaves: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of each leaf, on the device of the first."""
    device = leaves[0].device if leaves else None
    norms = [torch.zeros(0, dtype=torch.float64, device=device)]
    for leaf in leaves:
        real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
        wide = torch.float64 if real.dtype == torch.float64 else torch.float32
        norm = torch.linalg.vector_norm(real.detach(), dtype=wide)
        norms.append(norm.to(device, torch.float64)[None])
    return torch.cat(norms).square()


def _each_once(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The squares of every leaf that a rank has, by path.

    Raises:
        FpipeError: on every rank, if two have different ones, which cannot be the gradient of one
            parameter.
    """
    found: dict[str, tuple[int, float]] = {}
    for rank, part in enumerate(parts):
        for path, square in part.items():
            first, other = found.setdefault(path, (rank, square))
            # The gradients have the same bits, but on another number of threads not their squares.
            if not (isclose(other, square, rel_tol=1e-3) or isnan(other) or isnan(square)):
                raise FpipeError(
                    f"grads{path} is another gradient on rank {rank} than on rank {first}, with a "
                    f"norm of {square**0.5:.6g} and not {other**0.5:.6g}: pass the gradients under "
                    "the names that pipe.step gives them, so that what several ranks hold counts "
                    "once"
                )
    return {path: square for path, (_, square) in found.items()}


def _refuse_a_part(grads: Any) -> None:
    """A norm of one rank's part alone would be wrong without a word."""
    whole = all(leaf is not None for leaf in pytree.flatten_prefix(grads))
    if whole or not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    raise FpipeError(
        "grads has None, as one rank of a pipeline has for what other ranks hold, but no pipeline "
        "is named: pass pipe=pipe, or call this within `with fpipe.use(pipe):`"
    )
