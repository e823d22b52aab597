"""A CUDA device made of the CPU: import this before torch, or give it to pytest with ``-p``.

The library of `emulated.cpp` must be there before torch asks for the first time whether there is
CUDA, so it is loaded between torch's own library and its Python part. What `torch.cuda` has in
builds for CUDA alone is replaced by what this module makes; NCCL is gloo, which takes the device's
memory for the CPU's, and whose messages keep the device busy until both ranks have come to them, as
NCCL's do. Compiled stages are out of reach: Triton needs a real device.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

assert "torch" not in sys.modules, "torch was imported before the device was made"


def _load() -> ctypes.CDLL:
    """Build the library if there is none of this source and torch, and load it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    torch_dir = Path(spec.submodule_search_locations[0])
    libraries, include = torch_dir / "lib", torch_dir / "include"
    source = Path(__file__).with_suffix(".cpp")
    version = (torch_dir / "version.py").read_bytes()
    name = hashlib.sha256(source.read_bytes() + version).hexdigest()[:16]
    built = Path(__file__).parents[2] / "build" / f"emulated-{name}.so"
    if not built.exists():
        built.parent.mkdir(exist_ok=True)
        includes = [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
        options = ["-O0", "-std=c++20", "-fPIC", "-shared"]
        partial = built.with_suffix(f".{os.getpid()}")  # several ranks may come to it at once
        # What it needs of torch's libraries is found when it is loaded: they are there by then.
        subprocess.run(["g++", *options, *includes, str(source), "-o", str(partial)], check=True)
        partial.rename(built)
    for path in [*libraries.glob("libgomp*"), libraries / "libtorch_cpu.so"]:
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(built))


_LIBRARY = _load()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402

COUNT: int = _LIBRARY.number_of_devices()


# ── torch.cuda ──────────────────────────────────────────────────────────────────────────────────


def _device(device: Any = None) -> torch.device:
    """With an index."""
    device = torch.device("cuda" if device is None else device)
    if device.index is not None:
        return device
    return torch.device("cuda", torch.accelerator.current_device_index())


class Event(float):
    """The time when something is done."""

    def query(self) -> bool:
        """Whether it is done."""
        return True


class Stream:
    """A stream. All runs at once; what would be waited for is told by times that a test counts.

    Attributes:
        time: when what it was asked for is done.
    """

    _current: ClassVar[dict[torch.device, Stream]] = {}

    def __init__(self, device: Any = None) -> None:
        self.device, self.time = _device(device), 0.0

    def wait_stream(self, other: Stream) -> None:
        """What is asked for later begins after all that `other` was asked for until now."""
        self.time = max(self.time, other.time)

    def record_event(self) -> Event:
        """An event is the time when it happens."""
        return Event(self.time)

    def wait_event(self, event: Event) -> None:
        """What is asked for later begins after it."""
        self.time = max(self.time, event)

    def synchronize(self) -> None:
        """All is done."""


def _current_stream(device: Any = None) -> Stream:
    own = _device(device)
    return Stream._current.setdefault(own, Stream(own))


@contextmanager
def _stream(stream: Stream) -> Iterator[None]:
    before = _current_stream(stream.device)
    Stream._current[stream.device] = stream
    with _Device(stream.device):
        try:
            yield
        finally:
            Stream._current[stream.device] = before


class _Device:
    """``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        self._device = _device(device)

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._device.index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


class _SyncDebug:
    """``torch.cuda.set_sync_debug_mode``: complains when it is left, of all that was waited for."""

    def __init__(self) -> None:
        self._before = 0

    def __call__(self, mode: str) -> None:
        waits = int(_LIBRARY.waits_for_numbers())
        if mode == "error":
            self._before = waits
        elif waits != self._before:
            raise RuntimeError(f"called {waits - self._before} synchronizing CUDA operations")


_LIBRARY.waits_for_numbers.restype = ctypes.c_long
_REPLACED = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: COUNT,
    "current_device": torch.accelerator.current_device_index,
    "set_device": lambda device: torch.accelerator.set_device_index(_device(device).index),
    "device": _Device,
    "Stream": Stream,
    "current_stream": _current_stream,
    "stream": _stream,
    "synchronize": lambda device=None: None,
    "set_sync_debug_mode": _SyncDebug(),
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: SimpleNamespace(major=9, minor=0, name="emulated"),
    "default_generators": tuple(torch.Generator() for _ in range(COUNT)),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: None,
}
_EMPTY_STRIDED = torch.empty_strided


def _empty_strided(*arguments: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
    """Page-locked memory is any memory, of which is known where it begins."""
    found = _EMPTY_STRIDED(*arguments, **named)
    if pin_memory:
        _page_locked.add(found.untyped_storage().data_ptr())
    return found


def _is_pinned(self: torch.Tensor) -> bool:
    return not self.is_cuda and self.untyped_storage().data_ptr() in _page_locked


_page_locked: set[int] = set()
torch.empty_strided = _empty_strided  # type: ignore[assignment]
torch.Tensor.is_pinned = _is_pinned  # type: ignore[method-assign, assignment]
for _name, _value in _REPLACED.items():
    setattr(torch.cuda, _name, _value)
_TO = torch.Tensor.to


def _to(self: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
    """A copy between devices takes the current streams of both."""
    found = _TO(self, *arguments, **named)
    if self.is_cuda and found.is_cuda and found.device != self.device:
        streams = [_current_stream(value.device) for value in (self, found)]
        for stream in streams:
            stream.time = max(own.time for own in streams)
    return found


torch.Tensor.to = _to  # type: ignore[method-assign, assignment]


def _record_stream(self: torch.Tensor, stream: Stream) -> None:
    """Memory is used at once; of the CPU's there is no such kernel."""
    assert self.is_cuda, self.device


torch.Tensor.record_stream = _record_stream  # type: ignore[method-assign, assignment]


# ── NCCL ────────────────────────────────────────────────────────────────────────────────────────


class _NCCL(dist.ProcessGroupGloo):
    """Gloo by the name of NCCL."""

    # A group holds the C++ half alone, and would give back an object without these methods.
    _kept: ClassVar[list[_NCCL]] = []

    store: dist.Store
    place: torch.device | None = None
    met: set[str]
    counts: Counter[str]
    aborted: bool

    class Options:
        """What is set of them is of no account here."""

        def __init__(self, *, is_high_priority_stream: bool = False) -> None: ...

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        timeout = getattr(options, "_timeout", timedelta(minutes=1))
        super().__init__(store, rank, size, timeout)
        _NCCL._kept.append(self)
        self.store, self.met, self.counts, self.aborted = store, set(), Counter(), False

    def name(self) -> str:
        """As torch asks for it."""
        return "nccl"

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Gloo has connected; the communicator is of this device."""
        self.place = device

    def before(self, value: torch.Tensor, source: int, target: int) -> None:
        """What NCCL does before it moves a value: it refuses what it cannot, and connects.

        At the first message from one rank to another each waits until the other is there.
        """
        if value.dtype not in _TYPES:
            raise TypeError(f"Unconvertible NCCL type {value.dtype}")
        assert self.place is None or value.device == self.place, (value.device, self.place)
        pair = f"{source}-{target}"
        own, other = ("sends", "receives")[:: 1 if self.rank() == source else -1]
        if pair not in self.met and source != target:
            self.met.add(pair)
            self.store.set(f"{pair}/{own}", "")
            self.store.wait([f"{pair}/{other}"], timedelta(seconds=20))
        if source != target:
            number = self.counts[f"{pair}/{own}"]
            self.counts[f"{pair}/{own}"] += 1
            self.store.set(f"{pair}/{own}/{number}", "")
            _under_way.append((self, f"{pair}/{other}/{number}"))
            if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1" and not _idle():
                raise RuntimeError("the host would wait for ever for a message")

    def abort(self) -> None:
        """A wait that runs out of time closes a connection of gloo's.

        Before that it frees memory, for which it waits for the messages of all others.
        """
        self.aborted = True
        give_up = time.monotonic() + 20
        while not all(one.aborted or one.store.check([key]) for one, key in list(_under_way)):
            if time.monotonic() > give_up:
                raise RuntimeError("communicators are aborted one after the other")
            time.sleep(0.001)
        for peer in set(range(self.size())) - {self.rank()}:
            with suppress(RuntimeError):
                bell = super().recv([torch.empty(1, device="cpu")], peer, 1)  # type: ignore[misc]
                bell.wait(timedelta(milliseconds=1))


# What keeps the device busy: until the other rank sets a key, here or there.
_under_way: list[tuple[_NCCL, str]] = []


@ctypes.CFUNCTYPE(ctypes.c_bool)
def _idle() -> bool:
    """Wait until the device has done all that it was asked for, and tell whether it has."""
    give_up = time.monotonic() + 5
    while _under_way:
        carrier, key = _under_way[0]
        while not carrier.store.check([key]):
            if time.monotonic() > give_up:
                return False
            time.sleep(0.001)
        with suppress(ValueError):  # another thread has been here
            _under_way.remove((carrier, key))
    return True


_LIBRARY.ask_whether_idle(_idle)
_TYPES = {
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.float32, torch.float64, torch.bfloat16),
}
_SEND, _RECV = dist.ProcessGroup.send, dist.ProcessGroup.recv


def _carrier(group: dist.ProcessGroup, values: list[torch.Tensor]) -> _NCCL | None:
    own = group._get_backend(values[0].device) if values[0].is_cuda else None
    return own if isinstance(own, _NCCL) else None


def _send(group: dist.ProcessGroup, values: list[torch.Tensor], peer: int, tag: int) -> Any:
    if (carrier := _carrier(group, values)) is not None:
        carrier.before(values[0], group.rank(), peer)
    return _SEND(group, values, peer, tag)


def _recv(group: dist.ProcessGroup, values: list[torch.Tensor], peer: int, tag: int) -> Any:
    if (carrier := _carrier(group, values)) is not None:
        carrier.before(values[0], peer, group.rank())
    return _RECV(group, values, peer, tag)


dist.ProcessGroup.send = _send  # type: ignore[method-assign, assignment]
dist.ProcessGroup.recv = _recv  # type: ignore[method-assign, assignment]
dist.ProcessGroupNCCL = distributed_c10d.ProcessGroupNCCL = _NCCL  # type: ignore[misc, assignment]
distributed_c10d._NCCL_AVAILABLE = True


class _Done:
    """What has been waited for."""

    def wait(self, timeout: Any = None) -> bool:
        """It is done."""
        return True


def _by_way_of_the_cpu(name: str) -> Any:
    """A collective of a group, whose values of the device go by way of the CPU's backend."""
    plain = getattr(dist.ProcessGroup, name)

    def call(group: dist.ProcessGroup, *arguments: Any) -> Any:
        values = [
            value
            for one in arguments
            for value in (one if isinstance(one, list) else [one])
            if isinstance(value, torch.Tensor)
        ]
        if _carrier(group, values) is None:
            return plain(group, *arguments)
        copies = {id(value): value.cpu() for value in values}

        def swapped(one: Any) -> Any:
            if isinstance(one, list):
                return [swapped(own) for own in one]
            return copies[id(one)] if isinstance(one, torch.Tensor) else one

        plain(group, *map(swapped, arguments)).wait()
        for value in values:
            value.copy_(copies[id(value)])
        return _Done()

    return call


for _name in (
    *("broadcast", "allreduce", "_allgather_base", "_reduce_scatter_base"),
    *("all_gather_single", "reduce_scatter_single"),  # as torch 2.13 calls the last two
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(dist.ProcessGroup, _name, _by_way_of_the_cpu(_name))
