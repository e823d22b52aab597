"""Parameters and the state of an optimizer in one directory, read again by name.

    params, state ──► names ──► torch.distributed.checkpoint ──► path
                   └► their tree, steps, step, extra ──► path/training.pt

A directory is written under another name, and gets its own when it is whole.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe import pytree
from fpipe.dtensors import is_dtensor, placements_of
from fpipe.engine import Pipeline
from fpipe.errors import BatchError, FpipeError, told
from fpipe.holding import names_of
from fpipe.modules.module_pipeline import ModulePipeline
from fpipe.training.train_step import TrainState

Kinds = dict[str, tuple[tuple[int, ...], torch.dtype]]

FILE: Final = "training.pt"
"""What is no tensor of a parameter, in a file of `torch.save`."""


class Saved(NamedTuple):
    """What `Trainer.load` returns.

    Attributes:
        params: the parameters that this process needs.
        state: the state of the optimizer.
        step: what was saved as ``step``.
        extra: what was saved as ``extra``.
    """

    params: Any
    state: TrainState
    step: Any
    extra: Any


def save(
    pipe: Pipeline,
    path: str | PathLike[str],
    params: Any,
    state: TrainState,
    step: Any,
    extra: Any,
    keep: int | None,
) -> None:
    """Write them; arguments and errors are those of `Trainer.save`."""
    import torch.distributed.checkpoint as dcp

    target = Path(path)
    own = pipe.own(params)
    moments = _moments_by_name(params, state)
    data = {f"params.{name}": leaf for name, leaf in own.items()}
    data |= {
        f"state.{name}.{moment}": value
        for name in own
        for moment, value in (moments.get(name) or {}).items()
    }
    group = pipe.definition.group
    if any(map(is_dtensor, own.values())):
        group = dist.group.WORLD  # each process of their mesh has a part
    kinds = {name: _kinds(moments.get(name)) for name in own}
    gathered = _gathered((_described(params), kinds), group)
    facts = {
        "tree": _joined([tree for tree, _ in gathered]),
        "moments": {name: own for _, part in gathered for name, own in part.items()},
        "steps": int(state.steps),
        "step": step,
        "extra": extra,
    }
    partial = target.with_name(target.name + ".partial")
    first = group is None or group.rank() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
    _wait(group)
    with warnings.catch_warnings():
        # That one process saves alone is what is meant.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save(data, checkpoint_id=partial, process_group=group, no_dist=group is None)
    if first:
        torch.save(facts, partial / FILE)
        _put_in_place(partial, target)
        if keep is not None:
            _keep_last(target, keep)
    _wait(group)


def load(pipe: Pipeline, path: str | PathLike[str], example: tuple[Any, ...], like: Any) -> Saved:
    """Read them; arguments and errors are those of `Trainer.load`."""
    from fpipe.checkpoint.checkpoint_files import DistributedDirectory

    source = Path(path)
    if not source.exists():
        before = source.with_name(source.name + ".old")
        source = before if before.exists() else source
    try:
        facts = torch.load(source / FILE, weights_only=True)
    except Exception as error:
        raise BatchError(
            f"{source / FILE} cannot be read ({told(error)}): give a directory that trainer.save "
            "has written to its end"
        ) from error
    shapes = like
    if shapes is None and not isinstance(pipe, ModulePipeline):
        shapes = _tree_of(facts["tree"])
    params = pipe.load(
        source, *example, shapes=shapes, rename=lambda name: f"params.{name}", strict=False
    )
    spec = pytree.structure(params)
    places = dict(zip(names_of(spec), placements_of(spec), strict=True))
    own = {name: leaf for name, leaf in pipe.own(params).items() if not leaf.is_meta}
    wanted = {
        f"state.{name}.{moment}": torch.empty(shape, dtype=dtype, device="meta")
        for name in own
        for moment, (shape, dtype) in (facts["moments"].get(name) or {}).items()
    }
    read = DistributedDirectory(source).read(wanted)

    def moments_of(name: str) -> dict[str, Tensor] | None:
        kinds = facts["moments"].get(name)
        if name not in own or kinds is None:
            return None
        leaf, place = own[name], places[name]
        found = {}
        for moment in kinds:
            value = read[f"state.{name}.{moment}"]
            if place is not None and tuple(value.shape) == place.shape:
                found[moment] = place.made_of(place.part_of(value).to(leaf.device))
            else:
                # One without dimensions is a number, which is read on the CPU.
                found[moment] = value.to(leaf.device) if value.dim() else value
        return found

    moments = pytree.unflatten(
        pytree.structure_of_wholes(spec), [moments_of(name) for name in names_of(spec)]
    )
    steps = torch.tensor(facts["steps"], dtype=torch.int64, device="cpu")
    return Saved(params, TrainState(steps, moments), facts["step"], facts["extra"])


def _moments_by_name(params: Any, state: TrainState) -> dict[str, dict[str, Tensor] | None]:
    spec = pytree.structure(params)
    try:
        entries = pytree.entries(spec, state.moments)
    except ValueError as error:
        raise FpipeError(f"state.moments has another structure than params: {error}") from error
    return dict(zip(names_of(spec), entries, strict=True))


def _kinds(moments: Mapping[str, Tensor] | None) -> Kinds | None:
    """Their shapes and dtypes; None of a parameter that is not trained."""
    if moments is None:
        return None
    return {name: (tuple(value.shape), value.dtype) for name, value in moments.items()}


def _described(tree: Any) -> Any:
    """A tree of dicts, lists and tuples, with the shape and the dtype of each leaf.

    Other nodes are None, and so are those of other processes.
    """
    if isinstance(tree, Tensor):
        return "leaf", tuple(tree.shape), tree.dtype
    if type(tree) is dict:
        return "dict", [(key, _described(value)) for key, value in tree.items()]
    if type(tree) in (list, tuple):
        return type(tree).__name__, [_described(value) for value in tree]
    return None


def _joined(trees: list[Any]) -> Any:
    """One description of those of all processes, of which each has some parts."""
    known = [tree for tree in trees if tree is not None]
    if not known or known[0][0] not in ("list", "tuple"):
        return known[0] if known else None
    kind, first = known[0][:2]
    return kind, [_joined([tree[1][i] for tree in known]) for i in range(len(first))]


def _tree_of(described: Any) -> Any:
    """Meta tensors in the structure of what was saved."""
    if described is None:
        return None
    kind, *content = described
    if kind == "leaf":
        return torch.empty(content[0], dtype=content[1], device="meta")
    if kind == "dict":
        return {key: _tree_of(value) for key, value in content[0]}
    made = [_tree_of(value) for value in content[0]]
    return made if kind == "list" else tuple(made)


def _gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if group is None:
        return [value]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def _wait(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.barrier(group)


def _put_in_place(partial: Path, target: Path) -> None:
    """Give a whole checkpoint its name; at every moment there is a whole one."""
    old = target.with_name(target.name + ".old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
    os.replace(partial, target)
    shutil.rmtree(old, ignore_errors=True)


def _keep_last(target: Path, keep: int) -> None:
    """Delete all but the last checkpoints beside this one."""
    whole = [place for place in target.parent.iterdir() if (place / FILE).is_file()]
    whole = [place for place in whole if place.suffix not in (".partial", ".old")]
    for place in sorted(whole, key=lambda place: (place / FILE).stat().st_mtime)[:-keep]:
        shutil.rmtree(place)
