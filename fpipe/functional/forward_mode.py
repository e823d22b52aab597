"""The context in which stages are differentiated in a direction, and differentiated again.

Within it functions of torch are replaced by formulas whose derivatives are right
(`fpipe.functional.jvp_overrides`), kernels whose derivatives would be wrong are refused
(`fpipe.functional.jvp_overrides` names more of them), and constants of autograd are constants.

Autograd, differentiated twice, takes the results of ``torch.no_grad()`` for constants in both
derivatives. Forward mode does not look at the grad mode. Here it does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe.checks.explain import Untraceable
from fpipe.functional.batching import lu_solve
from fpipe.functional.jvp_overrides import REFUSED, SMOOTH_FORMULAS
from fpipe.torch_internals import beneath_forward_mode, is_within_vmap, transforms
from fpipe.trace.data_dependence import symbolic_zeros
from fpipe.trace.overrides.recurrent import RECURRENT
from fpipe.trace.overrides.standin import Instead

aten = torch.ops.aten


@contextmanager
def differentiable_twice() -> Iterator[None]:
    """The context in which `torch.func.jvp` runs a stage.

    Raises:
        Untraceable: the stage writes to ``x.data``.
    """
    kernels, constants = _KernelCheck(under_vmap=is_within_vmap()), _NoGradConstants()
    with beneath_forward_mode(), sdpa_kernel(SDPBackend.MATH), kernels, Instead(_RULES), constants:
        yield
    constants.check()


_RULES: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = {
    **SMOOTH_FORMULAS,
    **RECURRENT,
    torch.linalg.lu_solve: lu_solve,
    **REFUSED,
}


class _KernelCheck(TorchDispatchMode):
    """Refuses kernels whose second derivative would be wrong.

    Args:
        under_vmap: give memory to the zeros that stand for a missing tangent, as a tracer does.
    """

    def __init__(self, *, under_vmap: bool) -> None:
        super().__init__()
        self._under_vmap = under_vmap

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`.

        Raises:
            NotImplementedError: its derivative would be wrong.
        """
        if func.overloadpacket in _WRONG:
            raise NotImplementedError(
                f"the second derivative of {func} would be wrong; call torch.nn.functional.{{layer,"
                "batch,instance}_norm, which are written out here, or write the formula"
            )
        if func in _REDUCTIONS and "prod" in (*args, *(kwargs or {}).values()):
            raise NotImplementedError(
                f"the derivative of {func} with reduce='prod' would be wrong in forward mode; "
                "write the product of what does not come together, or the sum of logarithms"
            )
        if not self._under_vmap and func is aten._efficientzerotensor.default:
            with symbolic_zeros():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_WRONG: Final = frozenset(
    {
        aten.native_layer_norm,
        aten.native_batch_norm,
        aten._native_batch_norm_legit,
        aten._batch_norm_with_update,
        aten.cudnn_batch_norm,
        aten.miopen_batch_norm,
    }
)


# Their tangent of products is zero.
_REDUCTIONS: Final = frozenset({aten.scatter_reduce.two, aten.scatter_reduce_.two})

_DATA: Final = Tensor.data.__get__  # type: ignore[attr-defined]


class _NoGradConstants(TorchFunctionMode):
    """Within it the results of ``torch.no_grad()`` have no derivative in a direction."""

    def __init__(self) -> None:
        super().__init__()
        self._levels_outside = _jvp_levels()
        self._data: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`.

        Raises:
            Untraceable: the function takes a derivative in a direction itself, without gradients.
        """
        options = kwargs or {}
        if func == _DATA:
            self._data.append(func(*args, **options))
            return self._data[-1]
        with self._forward_mode():
            return func(*args, **options)

    def _forward_mode(self) -> AbstractContextManager[Any]:
        if torch.is_grad_enabled():
            return nullcontext()
        if _jvp_levels() > self._levels_outside + 1:
            raise Untraceable(
                "takes a derivative in a direction within torch.no_grad()",
                "in a derivative of the pipeline it would be a constant of one derivative and not "
                "of the other; take it outside of no_grad, and detach it",
            )
        return forward_ad._set_fwd_grad_enabled(False)

    def check(self) -> None:
        """Refuse writes that forward mode does not follow.

        Raises:
            Untraceable: the function has written to ``x.data``.
        """
        if any(data._version for data in self._data):
            raise Untraceable(
                "writes to x.data within a derivative in a direction or a second derivative",
                "forward mode does not follow it; write to a copy, x.detach().clone()",
            )


def _jvp_levels() -> int:
    """How many derivatives in a direction are being taken."""
    return transforms().count("Jvp")
