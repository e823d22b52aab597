"""The processes that save together, and the thread in which they do.

They talk over connections of their own, which the first save makes: the messages of a step and
those of a save never meet, though both are under way. One checkpoint is written at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe.checkpoint.checkpoint_writer import ALONE, Content, PendingSave, Processes, write
from fpipe.dtensors import is_dtensor
from fpipe.execute.gathering import gather_objects
from fpipe.program.interpreter import ConnectionLost
from fpipe.spec.definition import Definition
from fpipe.transport.connect import connect, store_to_ask


class Savers:
    """Some processes that write checkpoints, one after the other.

    Args:
        processes: this one among them.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._pending: PendingSave | None = None

    def write(self, path: Path, content: Content, keep: int | None = None) -> None:
        """Write a checkpoint after the last one; arguments and errors are those of `write`."""
        self._wait()
        write(path, content, self._processes, keep)

    def start(self, path: Path, content: Content, keep: int | None = None) -> PendingSave:
        """Begin to write a checkpoint after the last one; arguments are those of `write`.

        Raises:
            PipelineError: the last one was not written, and nobody has waited for it.
        """
        self._wait()
        events = _events(content.tensors)

        def work() -> None:
            for event in events:
                event.synchronize()
            write(path, content, self._processes, keep)

        self._pending = PendingSave(path, work)
        return self._pending

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


_ALONE: Final = Savers(ALONE)
_SAVERS: Final[WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Savers]]] = (
    WeakKeyDictionary()
)
_MADE: Final[Counter[tuple[int, ...]]] = Counter()


def savers_of(definition: Definition, leaves: Mapping[str, Tensor]) -> Savers:
    """The processes of a pipeline, with all that have parts of its parameters; each calls this.

    Args:
        definition: of the pipeline. Replicas save together, and each leaf once.
        leaves: that this process saves.
    """
    if definition.data is not None:
        ranks = sorted(definition.data.mesh.mesh.flatten().tolist())
    elif any(map(is_dtensor, leaves.values())):
        ranks = list(range(dist.get_world_size()))
    elif definition.group is not None:
        ranks = dist.get_process_group_ranks(definition.group)
    else:
        return _ALONE
    world = dist.group.WORLD
    assert world is not None
    known = _SAVERS.setdefault(world, {})
    key = tuple(ranks)
    if key not in known:
        # All of them make it at once, so each has made as many before.
        name = f"fpipe.save/{'_'.join(map(str, key))}/{_MADE[key]}"
        _MADE[key] += 1
        store = dist.PrefixStore(name, store_to_ask())
        rank = key.index(dist.get_rank())
        group = connect("gloo", store, rank, len(key), dist.default_pg_timeout)
        known[key] = Savers(Processes(rank, partial(_gather, group=group)))
    return known[key]


def _gather(value: Any, *, group: dist.ProcessGroup) -> list[Any]:
    try:
        return gather_objects(value, group)
    except ConnectionLost as lost:
        raise RuntimeError(str(lost)) from lost


def _events(tensors: Mapping[str, Tensor]) -> list[torch.Event]:
    """Events of accelerators, after which the tensors have their numbers."""
    devices = {tensor.device for tensor in tensors.values()}
    return [
        torch.accelerator.current_stream(device).record_event()
        for device in devices
        if device.type not in ("cpu", "meta")
    ]
