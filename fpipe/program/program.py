"""A Program: what one rank runs, as a flat tuple of instructions over numbered slots.

Everything is decided before anything runs: which slot holds which value, when it is let go, when
a message is sent and when its buffer is posted. So a program can be read, and its peak is a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from torch import Tensor

from fpipe.errors import FpipeError
from fpipe.inputs.signature import Spec
from fpipe.pieces.boxed import Boxed
from fpipe.schedule import Action


class Message(NamedTuple):
    """Values that travel together from one rank to another.

    Attributes:
        number: place in the channel from `source` to `target`, from 0: messages of a channel are
            sent in this order and received in this order.
        source: the sending rank.
        target: the receiving rank.
        action: the action whose outputs these are; its op is SEND_F or SEND_B.
        specs: shape and dtype of each value.
    """

    number: int
    source: int
    target: int
    action: Action
    specs: tuple[Spec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(spec.nbytes for spec in self.specs)


class Compute(NamedTuple):
    """Run a compiled piece of a stage.

    Attributes:
        call: boxed callable.
        inputs: slots of its arguments, in order.
        last_use: those of `inputs` that nothing reads afterwards; the callee may free them.
        outputs: slots for its results; -1 for one that nothing reads.
        action: what is computed.
    """

    call: Boxed
    inputs: tuple[int, ...]
    last_use: tuple[int, ...]
    outputs: tuple[int, ...]
    action: Action


class Send(NamedTuple):
    """Hand the values in `slots` to the transport; the slots must live until `WaitSend`."""

    message: Message
    slots: tuple[int, ...]


class WaitSend(NamedTuple):
    """Wait until the values of an earlier `Send` may be freed."""

    message: Message


class Recv(NamedTuple):
    """Post the buffers of a message."""

    message: Message


class WaitRecv(NamedTuple):
    """Wait for a message and put its values into `slots`."""

    message: Message
    slots: tuple[int, ...]


class Free(NamedTuple):
    """Let the values in `slots` go."""

    slots: tuple[int, ...]


Instruction = Compute | Send | WaitSend | Recv | WaitRecv | Free


class Bindings(NamedTuple):
    """Slots that are filled before a program starts. Each entry ends with the slot.

    Attributes:
        params: ``(stage, leaf, slot)``.
        batch: ``(microbatch, leaf, slot)``.
        constants: ``(tensor, slot)``.
        seeds: ``(microbatch, slot)``: the weight of a microbatch's loss.
        keys: ``(microbatch, number, slot)``: the key of a microbatch, with the number of the stage
            or of the draw folded in unless that is -1.
        moments: ``(stage, leaf, slot)``: the optimizer's state of a parameter.
        move: ``(slot,)`` of the optimizer's step of one parameter, where it is read.
    """

    params: tuple[tuple[int, int, int], ...]
    batch: tuple[tuple[int, int, int], ...]
    constants: tuple[tuple[Tensor, int], ...]
    seeds: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, int, int], ...] = ()
    moments: tuple[tuple[int, int, int], ...] = ()
    move: tuple[tuple[int], ...] = ()


class Results(NamedTuple):
    """Slots that are read when a program has ended.

    Attributes:
        grads: ``(stage, leaf, microbatch, slot)``; the microbatch is -1 for the sum over all.
        outputs: ``(microbatch, number, slot)``: the values that the caller gets, by their numbers
            over all stages: the last stage's outputs, or the loss and what was declared beside it.
        batch_grads: ``(stage, leaf, microbatch, slot)``: each stage's part of the gradient of a
            batch leaf, on the rank of the first stage.
        states: ``(leaf, slot)``: what the last microbatch has left of each leaf of the state.
        updates: ``(stage, leaf, slot)``: a parameter and its moments after the optimizer's step.
    """

    grads: tuple[tuple[int, int, int, int], ...]
    outputs: tuple[tuple[int, int, int], ...]
    batch_grads: tuple[tuple[int, int, int, int], ...] = ()
    states: tuple[tuple[int, int], ...] = ()
    updates: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class Program:
    """The program that one rank runs.

    Attributes:
        rank: the rank.
        instructions: in order.
        bindings: what is put into slots before.
        results: what is read from slots afterwards.
        num_slots: how many slots there are.
        sizes: bytes of the value that each instruction puts into each slot, in the order of the
            instructions: ``{(instruction index, slot): bytes}``.
        needs: bytes that each `Compute` holds at most while it runs, beyond what was held when it
            started: ``{instruction index: bytes}``.
    """

    rank: int
    instructions: tuple[Instruction, ...]
    bindings: Bindings
    results: Results
    num_slots: int
    sizes: dict[tuple[int, int], int]
    needs: dict[int, int]

    def __repr__(self) -> str:
        # A notebook shows what `pipe.programs` returns, and there is a page of each.
        return (
            f"<Program of rank {self.rank}: {len(self.instructions)} instructions, at most "
            f"{self.peak_bytes:,} bytes; print shows it>"
        )

    def __str__(self) -> str:
        return describe(self)

    def _repr_html_(self) -> str:
        """The bytes that it holds, in a notebook, a table of its instructions, and all of them."""
        from fpipe.schedule.picture.tables import curve, folded, table

        held = memory_curve(self)
        peak, count = max(held, default=0), len(self.instructions)
        at = held.index(peak) if held else 0
        title = f"Program of rank {self.rank}"
        most = f"at most {peak:,} bytes, at instruction {at} of {count}"
        picture = curve(held, f"{title}: bytes held, {most}.", most, f"instructions 0 to {count}")
        kinds: dict[str, list[int]] = {}
        for instruction in self.instructions:
            kind, nbytes = _kind(instruction)
            kinds.setdefault(kind, []).append(nbytes)
        rows = [(kind, len(each), sum(each) or "") for kind, each in kinds.items()]
        header = ["instruction", "number", "bytes of messages"]
        note = f"{self.num_slots} slots; {most}"
        return picture + table(title, header, rows, note) + folded("All instructions", str(self))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise FpipeError(
            f"{self!r} cannot be copied or pickled, for its code is this process's: keep what "
            "str(program) and program.peak_bytes tell of it, or the schedule, of which "
            "pipe.programs makes it again"
        )

    @property
    def peak_bytes(self) -> int:
        """Most bytes that slots, receive buffers, gradient sums and running kernels hold at once.

        The caller's parameters and batch, and tensors that stages close over, are not counted; nor
        are copies of the batch, where it lies elsewhere or is not contiguous along its rows. The
        memory that a kernel needs while it runs is read off its graph, so it is close, not exact: a
        compiler may fuse more or less, and a library may take memory for itself.
        """
        return max(memory_curve(self), default=0)


def memory_curve(program: Program, *, running: bool = True) -> list[int]:
    """Bytes held during each instruction of `program`, as `Program.peak_bytes` counts them.

    Args:
        program: of one rank.
        running: count what kernels need while they run, which depends on how they are compiled, or
            only their arguments and results.
    """
    curve = []
    held: dict[int, int] = {}
    posted: dict[Message, int] = {}
    total = 0
    for index, instruction in enumerate(program.instructions):
        gone: tuple[int, ...] = ()
        if isinstance(instruction, Recv):
            posted[instruction.message] = instruction.message.nbytes
            total += posted[instruction.message]
        elif isinstance(instruction, WaitRecv):
            total -= posted.pop(instruction.message)
        elif isinstance(instruction, Compute):
            gone = instruction.last_use
        elif isinstance(instruction, Free):
            gone = instruction.slots
        written = {slot: program.sizes[index, slot] for slot in _written(instruction)}
        needed = program.needs.get(index, 0) if running else sum(written.values())
        during = total + needed
        total += sum(written.values()) - sum(held.pop(slot, 0) for slot in gone)
        held |= written
        curve.append(max(during, total))
    return curve


def _written(instruction: Instruction) -> tuple[int, ...]:
    match instruction:
        case Compute(outputs=outputs):
            return tuple(slot for slot in outputs if slot >= 0)
        case WaitRecv(slots=slots):
            return slots
        case _:
            return ()


def describe(program: Program, *, weighed: bool = True) -> str:
    """The program as text, one instruction a line; ``!`` marks the last use of a slot.

    Args:
        program: of one rank.
        weighed: say what it holds at most; without it, the text is the same however it is compiled.
    """
    peak = f", peak {program.peak_bytes:,} bytes" if weighed else ""
    lines = [
        f"program of rank {program.rank}: {len(program.instructions)} instructions, "
        f"{program.num_slots} slots{peak}"
    ]
    bound: dict[str, list[str]] = {}
    for stage, leaf, slot in program.bindings.params:
        bound.setdefault(f"params of stage {stage}", []).append(f"%{slot}={leaf}")
    for microbatch, leaf, slot in program.bindings.batch:
        bound.setdefault(f"microbatch {microbatch}", []).append(f"%{slot}={leaf}")
    for constant, slot in program.bindings.constants:
        bound.setdefault("constants", []).append(f"%{slot}={list(constant.shape)}")
    for microbatch, number, slot in program.bindings.keys:
        folded = "" if number < 0 else f" with {number} folded in"
        lines.append(f"  %{slot} = key of microbatch {microbatch}{folded}")
    for microbatch, slot in program.bindings.seeds:
        bound.setdefault("loss weights", []).append(f"%{slot}={microbatch}")
    for stage, leaf, slot in program.bindings.moments:
        bound.setdefault(f"moments of stage {stage}", []).append(f"%{slot}={leaf}")
    lines += [f"  %{slot} = the optimizer's step" for (slot,) in program.bindings.move]
    lines += [f"  {what}: {' '.join(slots)}" for what, slots in bound.items()]
    width = len(str(len(program.instructions)))
    for index, instruction in enumerate(program.instructions):
        lines.append(f"  {index:>{width}}  {_describe(instruction)}")
    for stage, leaf, microbatch, slot in program.results.grads:
        of = "" if microbatch < 0 else f" for microbatch {microbatch}"
        lines.append(f"  gradient of params[{stage}] leaf {leaf}{of}: %{slot}")
    for stage, leaf, microbatch, slot in program.results.batch_grads:
        lines.append(
            f"  gradient of microbatch {microbatch} leaf {leaf} from stage {stage}: %{slot}"
        )
    for stage, leaf, slot in program.results.updates:
        lines.append(f"  params[{stage}] leaf {leaf} after the step: %{slot}")
    for leaf, slot in program.results.states:
        lines.append(f"  state of leaf {leaf}: %{slot}")
    for microbatch, number, slot in program.results.outputs:
        lines.append(f"  output leaf {number} of microbatch {microbatch}: %{slot}")
    return "\n".join(lines)


def _describe(instruction: Instruction) -> str:
    match instruction:
        case Compute(_, inputs, last_use, outputs, action):
            over = frozenset(last_use)
            read = " ".join(f"%{i}{'!' if i in over else ''}" for i in inputs)
            written = " ".join(f"%{o}" if o >= 0 else "_" for o in outputs)
            return f"{action!s:8} {written} <- {read}"
        case Send(message, slots):
            return f"send     {_route(message)} {_slots(slots)}"
        case WaitSend(message):
            return f"sent     {_route(message)}"
        case Recv(message):
            return f"post     {_route(message)} ({message.nbytes:,} bytes)"
        case WaitRecv(message, slots):
            return f"receive  {_route(message)} -> {_slots(slots)}"
        case Free(slots):
            return f"free     {_slots(slots)}"


def _kind(instruction: Instruction) -> tuple[str, int]:
    """The words for an instruction in a table, and the bytes of its message."""
    match instruction:
        case Compute(action=action):
            return f"compute {action.op}", 0
        case Send(message) | Recv(message):
            return "send" if isinstance(instruction, Send) else "post a buffer", message.nbytes
        case WaitSend():
            return "wait until it is sent", 0
        case WaitRecv():
            return "receive", 0
        case Free():
            return "free", 0


def _route(message: Message) -> str:
    return f"{message.action} {message.source}->{message.target} #{message.number}"


def _slots(slots: tuple[int, ...]) -> str:
    return " ".join(f"%{slot}" for slot in slots)
