"""Parameters and the states of optimizer and model in one directory, read again by name.

params, state, model_state ──► names ──► torch.distributed.checkpoint ──► path
                           └► their trees, steps, step, extra ──► path/training.pt
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fpipe import pytree
from fpipe.checkpoint.checkpoint_files import DistributedDirectory
from fpipe.checkpoint.checkpoint_reader import source_of
from fpipe.checkpoint.checkpoint_writer import FACTS, Content, absolute, beside
from fpipe.dtensors import placements_of
from fpipe.errors import BatchError, FpipeError, error_text, few
from fpipe.modules.module_pipeline import ModulePipeline
from fpipe.nn import BatchStats, buffers_of, state_of
from fpipe.parameters.holding import names_of, saved
from fpipe.pipelines import Pipeline, engine_of
from fpipe.training.loss_scaling import LossScale, LossScaling
from fpipe.training.train_step import TrainState
from fpipe.training.trees import entries_of

Kinds = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Saved(NamedTuple):
    """The result of `Trainer.load`.

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


class SavedState(NamedTuple):
    """The result of `Trainer.load` for a pipeline with ``has_state=True``.

    Attributes:
        params: as in `Saved`.
        state: as in `Saved`.
        step: as in `Saved`.
        extra: as in `Saved`.
        model_state: all of it, on each process.
    """

    params: Any
    state: TrainState
    step: Any
    extra: Any
    model_state: Any


def content_of(
    pipe: Pipeline, params: Any, state: TrainState, model_state: Any, step: Any, extra: Any
) -> Content:
    """The content that `Trainer.save` writes; arguments and errors are those of it."""
    leaves = saved(engine_of(pipe), params)
    spec = pytree.structure(params)
    entries = entries_of(spec, state.moments, "state.moments")
    moments: dict[str, Any] = dict(zip(names_of(spec), entries, strict=True))
    buffers, described_state = _named_state(pipe, model_state)
    tensors = {f"params.{name}": leaf for name, leaf in leaves.items()}
    tensors |= {
        f"state.{name}.{moment}": value
        for name in leaves
        for moment, value in (moments.get(name) or {}).items()
    }
    tensors |= {f"model_state.{name}": value for name, value in buffers.items()}
    kinds = {name: _kinds(moments.get(name)) for name in leaves}

    def join(marks: list[int], facts: list[Any]) -> dict[str, Any]:
        return {
            "marks": marks,
            "tree": joined([tree for tree, _ in facts]),
            "moments": {name: kind for _, kinds in facts for name, kind in kinds.items()},
            "model_state": described_state,
            "steps": state.steps,
            "scale": None if state.scale is None else tuple(state.scale),
            "step": step,
            "extra": extra,
        }

    return Content(tensors, (described(params), kinds), join)


def load(
    pipe: Pipeline,
    rule: Any,
    path: str | PathLike[str],
    example: tuple[Any, ...],
    like: Any,
    like_state: Any,
    scaling: LossScaling | None,
) -> Saved | SavedState:
    """Read them; arguments and errors are those of `Trainer.load`.

    The scale of a loss that was not scaled when they were saved begins anew.
    """
    source = absolute(path)
    if not source.exists() and beside(source).exists():
        source = beside(source)
    facts = engine_of(pipe).each("read its checkpoint", lambda: _read_facts(source))
    has_state = engine_of(pipe).definition.has_state
    if has_state:
        model_state = _load_state(pipe, source, facts, like_state)
        example = (model_state, *example) if example else ()
    shapes = like
    if shapes is None and not isinstance(pipe, ModulePipeline):
        shapes = tree_of(facts["tree"])
    params = pipe.load(
        source, *example, shapes=shapes, rename=lambda name: f"params.{name}", strict=False
    )
    moments = engine_of(pipe).each(
        "read its checkpoint", lambda: _moments(pipe, rule, source, facts, params)
    )
    scale = None
    if scaling is not None:
        stored = facts.get("scale")
        scale = scaling.init() if stored is None else LossScale(*stored)
    common = (params, TrainState(facts["steps"], moments, scale), facts["step"], facts["extra"])
    return SavedState(*common, model_state) if has_state else Saved(*common)


def _read_facts(source: Path) -> dict[str, Any]:
    """The facts that are saved beside the tensors.

    Raises:
        BatchError: the directory is not one that `save` has written to its end.
    """
    place = source / FACTS
    if source.is_dir() and not place.exists():
        source_of(source)  # refuses what is no checkpoint
        raise BatchError(
            f"{source} is a checkpoint without {FACTS}, of parameters alone or of another program: "
            "pipe.load reads its parameters, trainer.init(params) makes a new state"
        )
    try:
        facts: dict[str, Any] = torch.load(place, weights_only=True)
        marks = set(facts["marks"])
    except Exception as error:
        raise BatchError(
            f"{place} cannot be read ({error_text(error)}): give a directory that trainer.save "
            "has written to its end"
        ) from error
    if marks != DistributedDirectory(source).marks:
        raise BatchError(
            f"{place} belongs to another checkpoint than the files beside it: files of several "
            "were mixed"
        )
    return facts


def _moments(pipe: Pipeline, rule: Any, source: Path, facts: Any, params: Any) -> Any:
    """The state of the optimizer for the parameters of this process.

    Raises:
        BatchError: it is of another optimizer, or of other parameters.
    """
    spec = pytree.structure(params)
    places = dict(zip(names_of(spec), placements_of(spec), strict=True))
    leaves = {name: leaf for name, leaf in pipe.own(params).items() if not leaf.is_meta}
    stored: dict[str, Kinds] = {}
    for name, names in rule.state_names(params).items():
        if name not in leaves:
            continue
        kinds = facts["moments"].get(name)
        if kinds is None:
            raise BatchError(
                f"{source} has no state of the parameter {name!r}, which was not trained then: "
                "freeze it, groups={...: None}, or begin with trainer.init(params)"
            )
        if set(kinds) != set(names):
            raise BatchError(
                f"{source} was saved with another optimizer: its state of {name!r} has "
                f"{few(list(kinds)) or 'nothing'}, and this one's has {few(names) or 'nothing'}"
            )
        stored[name] = kinds
    wanted = {
        f"state.{name}.{moment}": torch.empty(shape, dtype=dtype, device="meta")
        for name, kinds in stored.items()
        for moment, (shape, dtype) in kinds.items()
    }
    directory = DistributedDirectory(source)
    missing = sorted(wanted.keys() - directory.names)
    if missing:
        raise BatchError(f"{source} lacks {few(missing)}, of which its {FACTS} speaks")
    read = directory.read(wanted)

    def moments_of(name: str) -> dict[str, Tensor] | None:
        if name not in stored:
            return None
        leaf, place = leaves[name], places[name]
        moments = {}
        for moment in stored[name]:
            value = read[f"state.{name}.{moment}"]
            if place is not None and tuple(value.shape) == place.shape:
                moments[moment] = place.made_of(rule.held(place.part_of(value), leaf.device))
            else:
                moments[moment] = rule.held(value, leaf.device)
        return moments

    return pytree.of_entries(spec, [moments_of(name) for name in names_of(spec)])


def _kinds(moments: Mapping[str, Tensor] | None) -> Kinds | None:
    """Their shapes and dtypes; None of a parameter that is not trained."""
    if moments is None:
        return None
    return {name: (tuple(value.shape), value.dtype) for name, value in moments.items()}


def _named_state(pipe: Pipeline, state: Any) -> tuple[dict[str, Tensor], Any]:
    """The leaves of a model's state by name, and its structure: of a module, the entries' names.

    Raises:
        FpipeError: the pipeline declares none, and there is one, or the other way round.
    """
    if engine_of(pipe).definition.has_state != (state is not None):
        raise FpipeError(
            "model_state is missing: pass the one that the last step has returned, for the "
            "pipeline has has_state=True"
            if state is None
            else "model_state is given, and the pipeline has none: has_state=True declares one"
        )
    if state is None:
        return {}, None
    if isinstance(pipe, ModulePipeline):
        return buffers_of(state), list(state)
    leaves, spec = pytree.tensors("model_state", state, "save other values as extra=")
    return dict(zip(names_of(spec), leaves, strict=True)), described(state)


def _load_state(pipe: Pipeline, source: Path, facts: Any, like: Any) -> Any:
    """The model's state, all of it."""

    def shapes() -> Any:
        stored = facts["model_state"]
        if stored is None and like is None:
            raise BatchError(
                f"{source} has no state of the model, or one in other nodes than dicts, lists, "
                "tuples and BatchStats, which like_state= describes: a state of its shapes"
            )
        if like is not None:
            return like
        if not isinstance(pipe, ModulePipeline):
            return tree_of(stored)
        state = state_of(pipe.module)
        return {name: state[name] for name in stored if name in state}

    wanted = engine_of(pipe).each("read its checkpoint", shapes)
    return pipe.load_state(source, shapes=wanted, rename=lambda name: f"model_state.{name}")


NODES: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "list": list,
    "tuple": tuple,
    "BatchStats": lambda parts: BatchStats(*parts),
}


def described(tree: Any) -> Any:
    """A tree with the shape and the dtype of each leaf.

    Other nodes are None, and so are those of other processes.

    Example:
        >>> described([{"w": torch.ones(2)}, None])
        ('list', [('dict', [('w', ('leaf', (2,), torch.float32))]), None])
    """
    if isinstance(tree, Tensor):
        return "leaf", tuple(tree.shape), tree.dtype
    if type(tree) is dict:
        return "dict", [(key, described(value)) for key, value in tree.items()]
    if type(tree) in (list, tuple, BatchStats):
        return type(tree).__name__, [described(value) for value in tree]
    return None


def joined(trees: list[Any]) -> Any:
    """One description of those of all processes, of which each has some parts."""
    known = [tree for tree in trees if tree is not None]
    if not known or known[0][0] not in ("list", "tuple"):
        return known[0] if known else None
    kind, first = known[0][:2]
    return kind, [joined([tree[1][i] for tree in known]) for i in range(len(first))]


def tree_of(description: Any) -> Any:
    """Meta tensors in the structure that was described.

    Example:
        >>> tree_of(described((torch.ones(2),)))[0].shape
        torch.Size([2])
    """
    if description is None:
        return None
    kind, *content = description
    if kind == "leaf":
        return torch.empty(content[0], dtype=content[1], device="meta")
    if kind == "dict":
        return {key: tree_of(value) for key, value in content[0]}
    return NODES[kind]([tree_of(value) for value in content[0]])
