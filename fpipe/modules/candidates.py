"""Where a module may be cut: behind submodules that its forward calls once.

The forward is run on abstract tensors, with hooks that note after how many operations each
submodule has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe import pytree
from fpipe.checks.purity import WriteGuard
from fpipe.errors import StageError, shown
from fpipe.inputs.signature import TreeShape
from fpipe.modules.module_loss import ModuleLoss
from fpipe.trace.abstract import Abstract
from fpipe.trace.constant_propagation import Known


def candidates_of(
    loss: ModuleLoss,
    named: Sequence[str] | None,
    fewest: int,
    given: TreeShape,
    microbatch: TreeShape,
    *,
    has_state: bool,
) -> list[str]:
    """Submodules behind which the module may be cut, in the order in which they end.

    Args:
        loss: of the module, which is not cut.
        named: submodules to choose from. None takes the children of the outermost `ModuleList`s and
            `Sequential`s; where these make fewer than `fewest` places for a cut, those of the lists
            within them too, and then submodules of any kind, the outer ones first.
        fewest: places that are wanted.
        given: shapes of the parameters, and of the state where the module has one.
        microbatch: shapes of the keyword arguments of its forward.
        has_state: `given` is the pair of both.

    Returns:
        Those that are called once; of several that end at the same place, the outermost.

    Raises:
        StageError: there is none.
    """
    given_names = None if named is None else list(named)
    if isinstance(named, str) or not all(isinstance(name, str) for name in given_names or ()):
        raise StageError(
            f"candidates={shown(named)} must be a list of names of submodules, as those of "
            "module.named_modules()"
        )
    order: list[str] = []
    for names in _choices(loss.module) if given_names is None else [given_names]:
        order, places = _called_once(loss, names, given, microbatch, has_state=has_state)
        if places >= fewest:
            break
    if not order:
        raise StageError(
            f"{type(loss.module).__name__} has no submodule, of those that may be candidates, that "
            "its forward calls once (a layer that is called again and again is no place for a "
            "cut): name others with candidates=, or call fpipe.cut, in a function for "
            "fpipe.pipeline"
        )
    return order


def _choices(module: nn.Module) -> Iterator[list[str]]:
    """Names to choose from, ever more of them."""
    listed: list[str] = []
    for depth in count(1):
        deeper = _in_lists(module, depth)
        if len(deeper) == len(listed):
            break
        yield (listed := deeper)
    names = [name for name, _ in module.named_modules() if name]
    for depth in sorted({name.count(".") for name in names}):
        yield [name for name in names if name in listed or name.count(".") <= depth]


def _in_lists(module: nn.Module, depth: int) -> list[str]:
    """The children of `ModuleList`s and `Sequential`s that lie in fewer than `depth` others."""
    found: list[str] = []
    lists: list[str] = []
    for name, submodule in module.named_modules():
        around = sum(not outer or name.startswith(f"{outer}.") for outer in lists)
        if isinstance(submodule, nn.ModuleList | nn.Sequential) and around < depth:
            lists.append(name)
            prefix = f"{name}." if name else ""
            found += [prefix + child for child, _ in submodule.named_children()]
    return found


class _Operations(TorchDispatchMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _called_once(
    loss: ModuleLoss,
    names: Sequence[str],
    given: TreeShape,
    microbatch: TreeShape,
    *,
    has_state: bool,
) -> tuple[list[str], int]:
    """Those of `names` that are called once, and how many of them end before the module does."""
    loss.with_cuts(names)  # names the one that does not exist
    operations = _Operations()
    ended: list[tuple[str, int]] = []
    handles = [
        loss.module.get_submodule(name).register_forward_hook(
            lambda _, __, ___, name=name: ended.append((name, operations.count))
        )
        for name in ("", *names)
    ]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        own, batch = Abstract.of(given, mode), Abstract.of(microbatch, mode)
        params = pytree.unflatten(own.spec, own.values)
        # Without the guard a buffer on the CPU would really be written to.
        with mode, torch.no_grad(), WriteGuard({}, loss), Known(), operations:
            loss(
                *(params if has_state else (params,)),
                pytree.unflatten(batch.spec, batch.values),
            )
    except Exception:
        # It is said, with its place, when the module is recorded.
        return list(names), len(names)
    finally:
        for handle in handles:
            handle.remove()
    times = Counter(name for name, _ in ended)
    last = {place: name for name, place in ended if name and place and times[name] == 1}
    end = max((place for name, place in ended if not name), default=operations.count)
    return [last[place] for place in sorted(last)], sum(place < end for place in last)
