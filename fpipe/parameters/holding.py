"""Parameters that are made leaf by leaf, and only those that this process holds; states, whole.

    shapes ── which leaves are read here? ──► make(those)    others stay bare shapes

The value of a leaf depends on its name alone, so it is the same wherever that leaf lies.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Final, NamedTuple

import optree
import torch
from torch import Tensor

from fpipe import dtensors, pytree, random
from fpipe.engine import Engine
from fpipe.errors import BatchError, StageError, a_type
from fpipe.inputs.host_memory import CPU, Keep, MappedFolder
from fpipe.inputs.params import check_parts
from fpipe.inputs.signature import in_words
from fpipe.live_line import working
from fpipe.program.replica_layout import buckets
from fpipe.random.key_tensors import check_key
from fpipe.spec.definition import Definition
from fpipe.spec.placing import device_of

Make = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""From meta tensors of the shapes and dtypes of some leaves to the leaves, all by name."""

AT_ONCE: Final = 1 << 26
"""Bytes of leaves that are made before they are kept, unless one leaf has more."""

InitFn = Callable[[Tensor, str, Tensor], Tensor]
"""``(key, name, like) -> leaf``: `like` is a meta tensor of its shape and dtype."""


def names_of(spec: optree.PyTreeSpec) -> list[str]:
    """A name for each leaf: the keys and indices of its path, joined by dots.

    Raises:
        BatchError: two leaves have the same.

    Example:
        >>> from fpipe import pytree
        >>> names_of(pytree.structure([{"w": 1, "norm.bias": 2}, (3,)]))
        ['0.norm.bias', '0.w', '1.0']
    """
    names = [".".join(map(str, path)) for path in pytree.key_paths(spec)]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise BatchError(
            f"there are two leaves whose paths read {twice[0]!r} when they are joined by dots: "
            "rename one of their keys"
        )
    return names


def key_of(key: Tensor, name: str) -> Tensor:
    """The key of a leaf: the same for one name everywhere.

    Example:
        >>> from fpipe import random
        >>> key_of(random.key(0), "layers.0.weight").tolist()
        [1299223048, 814101155]
    """
    digest = hashlib.sha256(name.encode()).digest()
    return random.fold_in(key, int.from_bytes(digest[:8], "big", signed=True))


def drawn(init_fn: InitFn, key: Tensor) -> Make:
    """A maker that draws each leaf from a key of its own.

    Raises:
        FpipeError: `key` is no key.
    """
    check_key(key)

    def make(wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: _checked(name, init_fn(key_of(key, name), name, like), like)
            for name, like in wanted.items()
        }

    return make


def either(first: Make, second: Make) -> Make:
    """A maker that calls `second` for the leaves that `first` does not make."""

    def make(wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = dict(first(wanted))
        return {**tensors, **second({n: like for n, like in wanted.items() if n not in tensors})}

    return make


def taken(params: Any, names: Sequence[str]) -> Make:
    """A maker that takes the leaves of a tree, which have these names, as they are.

    Raises:
        BatchError: when a leaf is taken that has no data.
    """

    def make(wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        leaves, _ = pytree.flatten(params)
        chosen = {n: v for n, v in zip(names, leaves, strict=True) if n in wanted}
        for name, leaf in chosen.items():
            if leaf.is_meta:
                raise BatchError(
                    f"the parameter {name!r} lies on the meta device and has no data: pipe.init "
                    "makes it where it belongs, and pipe.load reads it there"
                )
        return chosen

    return make


def held(
    engine: Engine,
    maker: Callable[[Sequence[str]], Make],
    shapes: Any,
    example: Sequence[Any],
    *,
    home: torch.device | None,
    name: str = "shapes",
    key: Tensor | None = None,
    storage: str | PathLike[str] | None = None,
) -> Any:
    """Parameters of a pipeline, real where this process holds them.

    Args:
        engine: over a process group it is traced on `example`, if it is of one function.
        maker: from the names of all leaves to what makes those that are held.
        shapes: pytree of tensors on any device, as the pipeline's step takes them.
        example: what comes after the parameters, on any device; may be empty.
        home: where leaves are to lie, unless each rank has a device; None for where they are made.
        name: of `shapes` in messages.
        key: that `maker` draws from, if it does.
        storage: a directory in whose files they are to lie; None for memory.

    Returns:
        As `Pipeline.init`.

    Raises:
        BatchError: `shapes` is no such tree.
        PipelineError: another rank cannot make what it holds, or has another key.
        StageError: nothing is known yet of what a function reads, and there is no `example`; or
            `shapes` is missing.
    """
    definition = engine.definition
    group, schedule = definition.group, definition.schedule
    copies = definition.copies_params
    apart = group is not None or definition.devices is not None

    def read() -> tuple[Skeleton, Keep]:
        keep = keeping(definition, storage)
        skeleton = _skeleton("parameters", shapes, name)
        if not definition.function:
            check_parts(name, shapes, schedule.num_stages)
        elif apart and not example and not engine.readers():
            raise StageError(
                "which parameters each rank reads is not known before the function is traced: pass "
                "an example of the batch, as in pipe.init(init_fn, key, batch), pipe.load(path, "
                "batch) and pipe.place(params, batch); meta tensors of its shapes will do"
            )
        return skeleton, keep

    skeleton, keep = engine.each("make its parameters", read, key)
    _, names, spec = skeleton
    flags = [True] * len(names)
    devices: Sequence[torch.device | None] = [home] * len(names)
    if definition.function:
        if apart and example:
            engine.programs("step", shapes, *example)
        if group is not None:
            flags = _read_by(engine, group.rank(), len(names))
        if definition.devices is not None and not copies:
            devices = _homes(engine, definition.devices, len(names))
    else:
        sizes = [stage_spec.num_leaves for stage_spec in spec.children()]
        stages = [stage for stage, size in enumerate(sizes) for _ in range(size)]
        if group is not None:
            read_here = schedule.stages_of(group.rank())
            flags = [stage in read_here for stage in stages]
        if definition.stage_devices is not None and not copies:
            devices = [definition.stage_devices[stage] for stage in stages]
    devices = [CPU] * len(names) if copies else devices
    return engine.local(_filled(engine, maker, skeleton, flags, devices, "parameters", keep))


def whole(engine: Engine, maker: Callable[[Sequence[str]], Make], shapes: Any) -> Any:
    """A state, of which every process holds all, as a step returns it; all processes call this.

    Arguments are those of `held`.

    Raises:
        BatchError: `shapes` is no such tree.
        PipelineError: another rank cannot make it.
        StageError: the pipeline has no state, or `shapes` is missing.
    """

    def read() -> Skeleton:
        if not engine.definition.has_state:
            raise StageError(
                "the pipeline has no state, has_state=True is not declared: the buffers of a "
                "module are constants then, "
                "from_module(..., buffers=fpipe.load_buffers(module, path))"
            )
        return _skeleton("a state", shapes, "shapes")

    skeleton = engine.each("make its state", read)
    count = len(skeleton.names)
    flags, devices = [True] * count, [engine.definition.device] * count
    return _filled(engine, maker, skeleton, flags, devices, "state")


def leaves_read_here(engine: Engine, params: Any) -> dict[str, Tensor]:
    """The leaves that this process reads, by name; arguments and errors as of `Pipeline.own`."""
    definition = engine.definition
    if not definition.function or definition.group is None:
        if not definition.function:
            check_parts("params", params, definition.schedule.num_stages)
        held = engine.local(params)
        spec = pytree.structure(held)
        return dict(zip(names_of(spec), pytree.entries(spec, held), strict=True))
    structure = engine.structure()
    if structure is None:
        raise BatchError(
            "which parameters this process reads is not known before the function is traced: call "
            "pipe.programs(params, batch) on all ranks first, or take what pipe.init or pipe.load "
            "makes, which trace it"
        )
    try:
        entries = pytree.entries(structure, params)
    except ValueError as error:
        raise BatchError(
            f"params has another structure than the parameters that were traced: {error}"
        ) from error
    names = names_of(structure)
    flags = _read_by(engine, definition.group.rank(), len(names))
    # Gradients have None where there is none.
    pairs = zip(names, entries, flags, strict=True)
    return {name: leaf for name, leaf, flag in pairs if flag and leaf is not None}


class Skeleton(NamedTuple):
    """The skeleton of `shapes`: leaves whose shapes and dtypes count, their names, and the tree."""

    leaves: list[Tensor]
    names: list[str]
    spec: optree.PyTreeSpec


def _skeleton(what: str, shapes: Any, name: str) -> Skeleton:
    if name == "params":
        hint = "close over other values instead"
    elif shapes is None:
        raise StageError(
            f"shapes is missing: pass {what} as for step, of which only shapes and dtypes count, "
            "such as those that are made under torch.device('meta')"
        )
    else:
        hint = "torch.device('meta') makes them"
    leaves, spec = pytree.tensors(name, shapes, hint)
    return Skeleton(leaves, names_of(spec), spec)


def _filled(
    engine: Engine,
    maker: Callable[[Sequence[str]], Make],
    skeleton: Skeleton,
    flags: Sequence[bool],
    devices: Sequence[torch.device | None],
    what: str,
    keep: Keep = None,
) -> Any:
    """The tree with those leaves made that have a flag, and bare shapes in place of the others.

    Those that are kept are made a few at a time, so that no more of them lie beside it.
    """
    leaves, names, spec = skeleton
    places = dtensors.placements_of(spec)
    likes = [
        torch.empty_like(leaf, device="meta")
        if place is None
        else torch.empty(place.shape, dtype=leaf.dtype, device="meta")
        for leaf, place in zip(leaves, places, strict=True)
    ]
    wanted = {name: like for name, like, flag in zip(names, likes, flags, strict=True) if flag}

    targets = dict(zip(names, zip(devices, places, strict=True), strict=True))

    def finished(name: str, leaf: Tensor) -> Tensor:
        device, place = targets[name]
        leaf = leaf if place is None else place.part_of(leaf)
        leaf = leaf if device is None else _on(device, leaf)
        return leaf if keep is None else keep(leaf)

    def make() -> dict[str, Tensor]:
        make_some = maker(names)
        tensors: dict[str, Tensor] = {}
        sizes = [like.nbytes for like in wanted.values()]
        every = list(wanted)
        for run in buckets(sizes, None if keep is None else AT_ONCE):
            some = make_some({every[at]: wanted[every[at]] for at in run})
            tensors |= {name: finished(name, leaf) for name, leaf in some.items()}
            del some
        return tensors

    with working(f"making or reading {what}"):
        tensors = engine.each(f"make or read its {what}", make)
    bare = [torch.empty_like(leaf, device="meta") for leaf in leaves]
    filled = [tensors.get(name, like) for name, like in zip(names, bare, strict=True)]
    return pytree.unflatten(spec, filled)


def keeping(definition: Definition, storage: str | PathLike[str] | None) -> Keep:
    """A function that puts parameters where they are to live; None where they stay as made.

    Raises:
        StageError: stages compute elsewhere than on the CPU, and no policy says that parameters
            live there.
        FpipeError: the directory cannot be used.
    """
    if storage is None:
        return definition.offload.home if definition.copies_params and definition.offload else None
    computing = definition.devices or (device_of(definition.group),)
    if definition.offload is None and any(device.type != "cpu" for device in computing):
        raise StageError(
            f"storage={str(storage)!r:.60} keeps parameters in files that are mapped into the "
            f"CPU's memory, and stages compute on {computing[0]}: pass "
            "offload_policy=CPUOffloadPolicy(), which copies them there"
        )
    return MappedFolder(storage).hold


def _on(device: torch.device, leaf: Tensor) -> Tensor:
    """A leaf on a device, the same one if it lies there."""
    with torch.no_grad():
        moved = leaf.to(device)
    return moved.requires_grad_() if leaf.requires_grad else moved


def _homes(engine: Engine, devices: Sequence[torch.device], count: int) -> list[torch.device]:
    """The device of the first rank that reads each leaf of one function's parameters.

    One that no stage reads lies where the function is recorded.
    """
    readers, home = engine.readers(), engine.definition.device
    return [devices[readers[0, leaf][0]] if (0, leaf) in readers else home for leaf in range(count)]


def _read_by(engine: Engine, rank: int, count: int) -> list[bool]:
    """Whether a rank reads each leaf of one function's parameters."""
    readers = engine.readers()
    # One that no stage reads is held everywhere.
    return [rank in readers.get((0, leaf), (rank,)) for leaf in range(count)]


def _checked(name: str, value: Any, like: Tensor) -> Tensor:
    shown = a_type(value)
    if isinstance(value, Tensor):
        if not value.is_meta and (value.shape, value.dtype) == (like.shape, like.dtype):
            return value.detach()
        shown = f"{in_words(value)} on {value.device}"
    raise BatchError(
        f"init_fn made {shown} of {name!r}, which is {in_words(like)}: it must return a tensor "
        "with data, of that shape and dtype"
    )


def saved(engine: Engine, params: Any) -> dict[str, Tensor]:
    """The leaves that this process has to save, by name.

    Raises:
        BatchError: as of `leaves_read_here`; or a leaf has no data.
    """
    leaves = leaves_read_here(engine, params)
    for name, leaf in leaves.items():
        if leaf.is_meta:
            raise BatchError(
                f"the parameter {name!r} lies on the meta device and has no data to save: pass "
                "what pipe.init, pipe.load or a step has made"
            )
    return leaves
