"""Products of two dtypes are refused where they are written, while a function is traced.

torch refuses them when they run, but not on abstract tensors: without this the trace would succeed
and the first action of the step would fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.stage.seeing import Seeing

aten = torch.ops.aten

_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.mv.default, aten.addmv.default})
"""Products whose dtypes torch does not compare on abstract tensors; it does for all others."""


class OneDtype(Seeing):
    """Raises `RuntimeError`, as torch does, at a product whose tensors are not of one dtype."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compare the dtypes of what `func` multiplies, then call it."""
        if func in _PRODUCTS:
            leaves = tree.flatten((args, kwargs or {}))[0]
            dtypes = dict.fromkeys(leaf.dtype for leaf in leaves if isinstance(leaf, Tensor))
            if len(dtypes) > 1:
                names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                raise RuntimeError(
                    f"{func} multiplies or adds {names}: give the parameters and the batch one "
                    "dtype, or convert one of them with .to()"
                )
        return func(*args, **(kwargs or {}))
