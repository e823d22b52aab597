"""An unmodified module as a loss function that is cut after some of its submodules.

params, batch ── functional_call ──► output ── output.loss | loss(output, batch) ──► scalar
                      └── forward hooks on the named submodules execute fpipe.cut
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.func import functional_call

from fpipe.errors import BatchError, StageError
from fpipe.stage.cut import cut
from fpipe.stage.explain import place

Loss = Callable[[Any, Any], Any]


class ModuleLoss:
    """``(params, batch) -> scalar`` of a module, cut into stages.

    Args:
        module: its forward is called with the batch's entries as keyword arguments.
        cuts: names of submodules, as in ``module.get_submodule``: a stage ends after each.
        loss: ``(output, batch) -> scalar``; None takes the attribute ``loss`` of the output.

    Attributes:
        buffers: what takes the place of the module's own, by name.

    Raises:
        StageError: an argument is wrong, or names no submodule.
    """

    def __init__(self, module: nn.Module, cuts: Sequence[str], loss: Loss | None) -> None:
        self.module = module
        self.cuts = _checked_cuts(module, cuts)
        if loss is not None and not callable(loss):
            raise StageError(
                f"loss={loss!r:.60} is not callable: it is a function (output, batch) -> scalar, "
                "or None for the output's own loss"
            )
        self.__qualname__ = type(module).__name__
        self._loss = loss
        self.buffers: Mapping[str, Tensor] = {}
        # Tied parameters have several names; the first is the one that named_parameters() gives.
        self._names = frozenset(name for name, _ in module.named_parameters())

    def __call__(self, params: Mapping[str, Tensor], batch: Mapping[str, Any]) -> Any:
        """The loss of one microbatch.

        Raises:
            BatchError: `params` or `batch` is no dict with the right keys.
            StageError: the forward does not call each of the cuts' submodules once, or cannot be
                traced.
        """
        self._check(params, batch)
        try:
            with self._cutting():
                output = functional_call(self.module, {**self.buffers, **params}, (), dict(batch))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise StageError(
                f"{self.__qualname__} branches on data ({error}){place(error)}, which a pipeline "
                "that is traced once cannot: of a Hugging Face model this is most often the "
                "padding mask; pass the mask with four dimensions, bool[batch, 1, query, key], or "
                'load the model with attn_implementation="eager" (experts: '
                'experts_implementation="batched_mm")'
            ) from error
        return self._loss_of(output, batch)

    def _check(self, params: Any, batch: Any) -> None:
        if not isinstance(params, Mapping):
            raise BatchError(
                f"params is a {type(params).__name__}: the parameters of a module are a dict, "
                "dict(module.named_parameters())"
            )
        if not isinstance(batch, Mapping):
            raise BatchError(
                f"batch is a {type(batch).__name__}: the batch of a module is a dict of the "
                "keyword arguments of its forward"
            )
        if params.keys() != self._names:
            missing, extra = (
                sorted(self._names - params.keys()),
                sorted(params.keys() - self._names),
            )
            raise BatchError(
                f"params lacks {_few(missing)} and has {_few(extra)} beside the parameters of "
                f"{self.__qualname__}: pass dict(module.named_parameters()), in which tied "
                "parameters come once"
            )

    @contextmanager
    def _cutting(self) -> Iterator[None]:
        """Cut after the named submodules; see that each is called once."""
        called: Counter[str] = Counter()

        def hook(name: str) -> Callable[[nn.Module, Any, Any], Any]:
            def after(module: nn.Module, arguments: Any, output: Any) -> Any:
                called[name] += 1
                return cut(output)

            return after

        handles = [
            self.module.get_submodule(name).register_forward_hook(hook(name)) for name in self.cuts
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for name in self.cuts:
            if called[name] != 1:
                raise StageError(
                    f"cuts names {name!r}, which the forward of {self.__qualname__} calls "
                    f"{called[name]} times: a stage ends after a submodule that is called once"
                )

    def _loss_of(self, output: Any, batch: Mapping[str, Any]) -> Any:
        if self._loss is not None:
            return self._loss(output, batch)
        found = getattr(output, "loss", None)
        if found is None and isinstance(output, Mapping):
            found = output.get("loss")
        if found is None:
            raise StageError(
                f"{self.__qualname__} returns a {type(output).__name__} without a loss: give "
                "from_module a loss=(output, batch) -> scalar, or the batch what the module makes "
                "its loss of (labels, for Hugging Face models)"
            )
        return found


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """``dict(module.named_parameters())`` without autograd history: tied parameters come once."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def _checked_cuts(module: Any, cuts: Any) -> tuple[str, ...]:
    if not isinstance(module, nn.Module):
        raise StageError(
            f"module={module!r:.60} is a {type(module).__name__}: from_module takes a "
            "torch.nn.Module; fpipe.pipeline takes functions"
        )
    if isinstance(cuts, str) or not isinstance(cuts, Sequence):
        raise StageError(
            f"cuts={cuts!r:.60} is a {type(cuts).__name__}: it must be a list of names of "
            "submodules, one fewer than stages"
        )
    known = {name for name, _ in module.named_modules(remove_duplicate=False)}
    for name in cuts:
        if name not in known or not name:
            near = _nearest(str(name), known)
            raise StageError(
                f"cuts names {name!r}, which is no submodule of {type(module).__name__}; "
                f"module.named_modules() lists them{near}"
            )
    if len(set(cuts)) != len(cuts):
        raise StageError(f"cuts={list(cuts)!r} names a submodule twice: each cut ends one stage")
    return tuple(cuts)


def _nearest(name: str, known: set[str]) -> str:
    from difflib import get_close_matches

    found = get_close_matches(name, sorted(known), n=3)
    return f" (near it: {', '.join(map(repr, found))})" if found else ""


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3])) or "none"
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
