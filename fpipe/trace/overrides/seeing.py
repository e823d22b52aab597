"""What sees each operation while something is traced."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Seeing(TorchDispatchMode):
    """A dispatch mode within which nothing is compiled.

    torch keeps Dynamo out of every call of a mode anew, which takes longer than most of what ours
    do. Tracing is kept from it as a whole.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
