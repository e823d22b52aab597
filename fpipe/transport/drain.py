"""Drain: end a step that failed without computing, so that no rank is left waiting.

Every message that is still owed is sent without its contents, and every one that is still coming is
taken, so all channels are empty afterwards and the next step can use them.
"""

from __future__ import annotations

from fpipe.program.interpreter import Run
from fpipe.program.program import Recv, Send, WaitRecv, WaitSend
from fpipe.transport.group import GroupTransport


def drain(run: Run, transport: GroupTransport) -> None:
    """Go through the rest of a program, from the instruction that failed, moving messages only."""
    run.slots[:] = [None] * len(run.slots)
    for instruction in run.program.instructions[run.next :]:
        if isinstance(instruction, Send):
            transport.send_blank(instruction.message)
        elif isinstance(instruction, Recv):
            transport.post(instruction.message)
        elif isinstance(instruction, WaitRecv):
            transport.take(instruction.message)
        elif isinstance(instruction, WaitSend):
            transport.wait_sent(instruction.message)
    run.next = len(run.program.instructions)
