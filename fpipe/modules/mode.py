"""What a forward depends on beside its arguments, as it is at a call: it is traced once for each.

A trace has the buffers that the module had: numbers written to them count, but not what is put in
their place. So each time that some are others than before, the mode is another one.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Final

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

log = logging.getLogger("fpipe")

MANY: Final = 8
"""As often as buffers may be replaced without a word."""


class Mode:
    """Which of the modules that are traced train, what they drop, and which buffers they have.

    Equal on all ranks whose modules are treated alike: buffers are told by when they were first
    seen, not by where they lie.

    Args:
        modules: which are traced.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._modules: Final = modules
        # The tensors too: the number of one that is gone would be given to another.
        self._seen: dict[tuple[int, ...], tuple[int, list[Tensor | None]]] = {}
        self._warned = False

    def __call__(self) -> Hashable:
        """The mode at this moment."""
        parts = [part for one in self._modules for part in one.modules()]
        buffers = [buffer for part in parts for buffer in part._buffers.values()]
        number, _ = self._seen.setdefault(tuple(map(id, buffers)), (len(self._seen), buffers))
        if number == MANY and not self._warned:
            self._warned = True
            log.warning(
                "the buffers of %s have been replaced %d times, and each time it was traced again, "
                "which is kept with the buffers: write to them in place (buffer.copy_(...)), which "
                "counts too, or let the step thread them (has_state=True)",
                type(self._modules[0]).__name__,
                number,
            )
        drops = tuple(part.p for part in parts if isinstance(part, _DropoutNd))
        return tuple(part.training for part in parts), drops, number
