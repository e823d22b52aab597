"""A CUDA device made of the CPU: import this before torch, or give it to pytest with ``-p``.

The library of `emulated.cpp` must be there before torch asks for the first time whether there is
CUDA, so it is loaded between torch's own library and its Python part. What `torch.cuda` has in
builds for CUDA alone is replaced by what this module makes; NCCL is gloo, which takes the device's
memory for the CPU's. Compiled stages are out of reach: Triton needs a real device.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import subprocess
import sys
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
        links = [f"-L{libraries}", "-ltorch_cpu", "-lc10"]
        options = ["-O1", "-std=c++20", "-fPIC", "-shared"]
        partial = built.with_suffix(".partial")
        subprocess.run(
            ["g++", *options, *includes, str(source), "-o", str(partial), *links], check=True
        )
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


class Stream:
    """A stream by its number; all runs at once, so that nothing waits."""

    _latest = 0
    _current: ClassVar[dict[torch.device, Stream]] = {}

    def __init__(self, device: Any = None, *, number: int | None = None) -> None:
        if number is None:
            number = Stream._latest = Stream._latest + 1
        self.device, self.number = _device(device), number

    def wait_stream(self, other: Stream) -> None:
        """Nothing has to be waited for."""


def _current_stream(device: Any = None) -> Stream:
    own = _device(device)
    return Stream._current.get(own) or Stream(own, number=0)


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
for _name, _value in _REPLACED.items():
    setattr(torch.cuda, _name, _value)
torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]


# ── NCCL ────────────────────────────────────────────────────────────────────────────────────────


class _NCCL(dist.ProcessGroupGloo):
    """Gloo by the name of NCCL."""

    # A group holds the C++ half alone, and would give back an object without these methods.
    _kept: ClassVar[list[_NCCL]] = []

    class Options:
        """What is set of them is of no account here."""

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        timeout = getattr(options, "_timeout", timedelta(minutes=1))
        super().__init__(store, rank, size, timeout)
        _NCCL._kept.append(self)

    def name(self) -> str:
        """As torch asks for it."""
        return "nccl"

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Gloo has connected."""

    def abort(self) -> None:
        """A wait that runs out of time closes a connection of gloo's."""
        for peer in set(range(self.size())) - {self.rank()}:
            with suppress(RuntimeError):
                bell = super().recv([torch.empty(1, device="cpu")], peer, 1)  # type: ignore[misc]
                bell.wait(timedelta(milliseconds=1))


dist.ProcessGroupNCCL = distributed_c10d.ProcessGroupNCCL = _NCCL  # type: ignore[misc, assignment]
distributed_c10d._NCCL_AVAILABLE = True
