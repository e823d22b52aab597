"""Where the names of other projects are documented, for builds with and without a network.

Sphinx reads the list of names of each project from its site. Without a network it takes these: the
names that pages and docstrings of fpipe use.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Final

TORCH: Final = "https://docs.pytorch.org/docs/stable/"
OPTREE: Final = "https://optree.readthedocs.io/en/latest/"
PYTHON: Final = "https://docs.python.org/3/"

# Per project: its address, its name, and lines of "name domain:role priority address".
NAMES: Final = {
    "torch": (
        TORCH,
        "PyTorch",
        [
            "torch.Tensor py:class 1 tensors.html#$ -",
            "torch.device py:class 1 tensor_attributes.html#$ -",
            "torch.dtype py:class 1 tensor_attributes.html#$ -",
            "torch.nn.Module py:class 1 generated/$.html#$ -",
            "torch.nn.Parameter py:class 1 generated/torch.nn.parameter.Parameter.html#$ -",
            "torch.optim.Optimizer py:class 1 optim.html#$ -",
            "torch.optim.AdamW py:class 1 generated/$.html#$ -",
            "torch.func.vmap py:function 1 generated/$.html#$ -",
            "torch.func.grad_and_value py:function 1 generated/$.html#$ -",
            "torch.compile py:function 1 generated/$.html#$ -",
            "torch.distributed.ProcessGroup py:class 1 distributed.html#$ -",
            "torch.distributed.device_mesh.DeviceMesh py:class 1 distributed.html#$ -",
            "torch.distributed.fsdp.MixedPrecisionPolicy py:class 1 "
            "distributed.fsdp.fully_shard.html#$ -",
        ],
    ),
    "optree": (OPTREE, "optree", ["optree.PyTreeSpec py:class 1 api.html#$ -"]),
    "python": (
        PYTHON,
        "Python",
        [
            "dict py:class 1 library/stdtypes.html#$ -",
            "list py:class 1 library/stdtypes.html#$ -",
            "tuple py:class 1 library/stdtypes.html#$ -",
            "str py:class 1 library/stdtypes.html#$ -",
            "int py:class 1 library/functions.html#$ -",
            "float py:class 1 library/functions.html#$ -",
            "bool py:class 1 library/functions.html#$ -",
            "pathlib.Path py:class 1 library/pathlib.html#$ -",
        ],
    ),
}


def mapping(folder: Path) -> dict[str, tuple[str, tuple[None, str]]]:
    """Sphinx's mapping of projects: the site of each, or the names above, written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {}
    for key, (address, name, lines) in NAMES.items():
        file = folder / f"{key}.inv"
        head = (
            f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n"
            "# The remainder of this file is compressed using zlib.\n"
        )
        file.write_bytes(head.encode() + zlib.compress("\n".join([*lines, ""]).encode()))
        places[key] = (address, (None, str(file)))
    return places
