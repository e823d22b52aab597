"""Makes what a process needs for the first graph that it compiles with Inductor.

Keys of caches are hashes of all files of torch and of Triton: the better part of a second, which a
server spends once for all its forks.
"""

from __future__ import annotations

import setuptools  # type: ignore[import-untyped]  # noqa: F401
from torch._inductor.codecache import torch_key, triton_key
from torch._inductor.compile_fx import compile_fx  # noqa: F401

torch_key()
triton_key()
