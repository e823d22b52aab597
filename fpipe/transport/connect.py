"""Connections between ranks: what carries a group's tensors, and groups of fpipe's own.

`torch.distributed.new_group` names a group by how many the process has made before, so ranks with
different histories wait for each other under different names (pytorch #173608). Groups made here
are named by their purpose, are known to their members alone, and are shared by all pipelines over
the group that they were made beside: one communicator of NCCL holds many megabytes of a device.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fpipe.errors import StageError
from fpipe.spec.placing import carriers
from fpipe.transport.waiting import look_now_and_then

# Tags, so that a bell is never taken for a message.
MESSAGE, BELL = 0, 1

# The variables that torch reads when an NCCL group is made. The watch of the ranks aborts it after
# a fault, on which torch would end the process, as it would after an error of a kernel, which a
# step tells; and that messages of a channel follow each other is meant.
_NCCL: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}

ABORTED: Final = 2.0
"""Seconds that are waited for communicators to be aborted; ranks may not be silent for longer."""


def connect(
    backend: str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    interfaces: Sequence[Any] = (),
    device: torch.device | None = None,
    given_up: Callable[[float], bool] = lambda seconds: False,
) -> dist.ProcessGroup:
    """A group that nobody else knows of. It returns when all `size` ranks have called it.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        store: with a prefix that is this group's alone.
        rank: of this process in the group.
        size: number of ranks.
        timeout: of its operations, and of the wait for all ranks.
        interfaces: of gloo's to the network, each with a thread that listens to it; none for one
            of its own.
        device: for NCCL that of the tensors that it moves.
        given_up: whether to wait no longer for the others, after so many seconds.

    Raises:
        RuntimeError: one of them does not come.
    """
    _meet(store, rank, size, timeout, given_up)
    group = dist.ProcessGroup(store, rank, size)
    if backend == "nccl":
        # Streams of other priorities are never those of the caller, who may compute on them behind
        # a message that waits.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
        with _environment(_NCCL):
            carrier = dist.ProcessGroupNCCL(store, rank, size, options)
        kind = dist.ProcessGroup.BackendType.NCCL
        group._set_default_backend(kind)
        group._register_backend(torch.device("cuda"), kind, carrier)
        # All ranks wait in here for each other. Left to itself the first send would make a
        # communicator, and wait until its receiver comes to the very same message.
        carrier.eager_connect_single_device(device)
    else:
        kind = dist.ProcessGroup.BackendType.GLOO
        gloo: Any = dist.ProcessGroupGloo
        gloo_options = gloo._Options()
        gloo_options._timeout, gloo_options._threads = timeout, 1
        gloo_options._devices = list(interfaces) or _interfaces()
        group._set_default_backend(kind)
        group._register_backend(torch.device("cpu"), kind, gloo(store, rank, size, gloo_options))
    return group


def _interfaces() -> list[Any]:
    """The network interfaces that gloo takes by itself, connected to at once."""
    gloo: Any = dist.ProcessGroupGloo
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    chosen = [gloo.create_device(interface=name, lazy_init=False) for name in names if name]
    return chosen or [gloo.create_default_device(lazy_init=False)]


_ASKED: Final[WeakKeyDictionary[dist.Store, dist.Store]] = WeakKeyDictionary()


def store_to_ask() -> dist.Store:
    """The store of the default group by a connection that nobody waits on.

    A wait on the caller's own, such as that of ranks that make a group, locks it until it is over.
    """
    store = dist.distributed_c10d._get_default_store()
    if store not in _ASKED:
        _ASKED[store] = store.clone()  # type: ignore[attr-defined]
    return _ASKED[store]


class Lines:
    """The groups that the pipelines over a group use: the caller's, and those made beside it.

    They last as long as the caller's: `lines_of` returns the same ones to each pipeline.

    Args:
        group: the caller's, of the ranks of the pipelines.
        name: theirs alone in the store.
        store: which all ranks ask.
        device: where values lie.

    Attributes:
        name: theirs alone in the store.
        device: where values lie.
        busy: held while a call of any pipeline over `group` is under way.
        lost: why they were given up, if they were.
        begun: how many calls have begun.
        timeout: of the operations of the caller's group.
        owed: tell the other ranks of calls that this one has refused before it told them.
    """

    def __init__(
        self, group: dist.ProcessGroup, name: str, store: dist.Store, device: torch.device
    ) -> None:
        self.name = name
        self.device = device
        self.busy = threading.Lock()
        self.lost: str | None = None
        self.begun = 0
        self.owed: list[Callable[[], None]] = []
        self._caller = weakref.ref(group)
        self._made: dict[str, dist.ProcessGroup] = {}
        self._rank = group.rank()
        self._store = dist.PrefixStore(name, store)
        self._interfaces: Sequence[Any] = ()
        self.timeout = dist.default_pg_timeout
        if (nccl := _nccl_of(group)) is not None:
            self.timeout = nccl.options._timeout
        if carriers(group).get("cpu") == "gloo":
            options: Any = group._get_backend(torch.device("cpu")).options
            self.timeout = options._timeout
            # Groups that share a lazy device wait for each other for ever.
            lazy = os.environ.get("TORCH_GLOO_LAZY_INIT") == "1"
            self._interfaces = _interfaces() if lazy else options._devices

    def make(
        self,
        backend: str,
        name: str,
        ranks: Sequence[int],
        given_up: Callable[[float], bool] = lambda seconds: False,
    ) -> dist.ProcessGroup:
        """The group of some of the ranks under a name of its own; each of them calls it.

        Args:
            backend: ``"gloo"`` or ``"nccl"``.
            name: the same on all of them.
            ranks: its members.
            given_up: whether to wait no longer for the others, after so many seconds.

        Raises:
            RuntimeError: one of them does not come, for as long as a wait of the caller's group.
        """
        if name not in self._made:
            store = dist.PrefixStore(name, self._store)
            rank, size = ranks.index(self._rank), len(ranks)
            if backend == "gloo" and not self._interfaces:
                self._interfaces = _interfaces()
            self._made[name] = connect(
                *(backend, store, rank, size, self.timeout),
                self._interfaces,
                self.device,
                given_up,
            )
        return self._made[name]

    def ring(self) -> None:
        """Wake every operation that waits, here and on other ranks, by breaking the groups."""
        wake([group for group in (self._caller(), *self._made.values()) if group is not None])


_LINES: Final[WeakKeyDictionary[dist.ProcessGroup, Lines]] = WeakKeyDictionary()


def lines_of(group: dist.ProcessGroup, name: str, store: dist.Store, device: torch.device) -> Lines:
    """The connections that pipelines over `group` share; every rank calls this when it makes one.

    Args:
        group: the caller's.
        name: that nobody has used in the store; it is theirs if this is the first pipeline.
        store: which all ranks ask.
        device: where values lie.

    Raises:
        StageError: `device` is not that of the pipelines before.
    """
    lines = _LINES.get(group) or _LINES.setdefault(group, Lines(group, name, store, device))
    if lines.device != device:
        raise StageError(
            f"the current device is {device}, and the pipelines before this one over the same "
            f"process group move their values on {lines.device}: make this one with "
            f"torch.cuda.set_device({lines.device.index}), or over a group of its own "
            "(torch.distributed.new_group)"
        )
    return lines


def _meet(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    given_up: Callable[[float], bool],
) -> None:
    """Wait until all ranks are about to connect.

    A group that is made waits for its members in the store, and nothing wakes it: not a signal, nor
    the watch.
    """
    store.set(f"here/{rank}", "")
    everyone = [f"here/{other}" for other in range(size)]
    start = time.monotonic()
    lost = False

    def over() -> bool:
        nonlocal lost
        waited = time.monotonic() - start
        lost = waited > timeout.total_seconds() or given_up(waited)
        return lost or store.check(everyone)

    look_now_and_then(over)
    if lost:
        raise RuntimeError("a rank did not come to connect")


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the time of a block, after which they are as before."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def wake(groups: Sequence[dist.ProcessGroup]) -> None:
    """Wake every operation of these groups that waits, on all of their ranks, by breaking them."""
    for group in groups:
        if carriers(group).get("cpu") == "gloo":
            _ring(group)
    _abort([nccl for group in groups if (nccl := _nccl_of(group)) is not None])


def _ring(group: dist.ProcessGroup) -> None:
    """Wake every operation of gloo that waits, here and on peers.

    gloo closes a connection when a wait on it runs out of time, so on each connection a receive
    that nobody answers is the bell.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                bell = group.recv([torch.empty(1, device="cpu")], peer, BELL)
                bell.wait(timedelta(milliseconds=1))


def _nccl_of(group: dist.ProcessGroup) -> Any:
    """The backend that moves a group's tensors on CUDA, if it is NCCL; else None."""
    is_nccl = carriers(group).get("cuda") == "nccl"
    return group._get_backend(torch.device("cuda")) if is_nccl else None


def _abort(communicators: Sequence[Any]) -> None:
    """Abort communicators of NCCL, all at once.

    To free the memory of one CUDA waits for the device, and so for the messages of the others,
    which end when those are aborted.
    """

    def abort(communicator: Any) -> None:
        with suppress(RuntimeError):  # such as after an error of a kernel, which is told already
            communicator.abort()

    threads = [threading.Thread(target=abort, args=(c,), daemon=True) for c in communicators]
    for thread in threads:
        thread.start()
    give_up = time.monotonic() + ABORTED
    for thread in threads:
        thread.join(max(0.0, give_up - time.monotonic()))
