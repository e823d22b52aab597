"""The boundary beneath the interpreter: how values get from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from fpipe.program.program import Message


class Transport(Protocol):
    """Moves the values of messages between ranks.

    Messages of one channel, that is from one rank to another, are sent and posted in the order of
    their numbers. Waiting may block; a transport that cannot block because all ranks run in one
    thread returns None instead, and the interpreter lets another rank go on.
    """

    def post(self, message: Message) -> None:
        """Make room for a message that is going to be received."""

    def send(self, message: Message, values: Sequence[Tensor]) -> None:
        """Start to send; `values` stay as they are until `wait_sent`."""

    def wait_sent(self, message: Message) -> None:
        """Return once the values of an earlier `send` may be freed."""

    def receive(self, message: Message) -> Sequence[Tensor] | None:
        """The values of a posted message, or None if they have not arrived."""


class ConnectionLost(Exception):
    """A message could not be moved: the connection to a rank broke, wherever the cause is.

    Attributes:
        peer: the rank at the other end, None for an operation of all ranks.
    """

    def __init__(self, peer: int | None, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class Interrupted(Exception):
    """Another rank failed, so there is no use in computing the rest of the step."""
