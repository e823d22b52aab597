"""Reading arguments: a parser that errs in one line, and the values that options take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Final, NoReturn

from fpipe.errors import ScheduleError
from fpipe.schedule.cost import Cost
from fpipe.schedule.exchange.files import is_number
from fpipe.schedule.exchange.json_file import KEYS
from fpipe.schedule.simulation.jitter import Jitter


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (try {self.prog} --help)\n")


Commands = argparse._SubParsersAction  # what `add_subparsers` returns, which argparse does not name


def new_parser(
    commands: Commands[Any], name: str, purpose: str, example: str
) -> argparse.ArgumentParser:
    """A parser for a subcommand, whose help ends in an example."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=purpose,
        description=purpose[0].upper() + purpose[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def count(text: str) -> int:
    """A whole number, 1 or more."""
    if not (text.isascii() and text.isdigit() and text.strip("0")):
        raise argparse.ArgumentTypeError(f"{text!r:.60} must be a whole number, 1 or more")
    if not is_number(text):
        raise argparse.ArgumentTypeError(f"{text!r:.60} is too large: it has {len(text)} digits")
    return int(text)


def numbers(text: str) -> tuple[float, ...]:
    """Numbers with a comma between.

    Example:
        >>> numbers("10,12.5")
        (10.0, 12.5)
    """
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} must be a number, or several with a comma between"
        ) from None


def memory(text: str) -> float | tuple[float, ...]:
    """A number for all ranks, or one for each."""
    values = numbers(text)
    return values[0] if len(values) == 1 else values


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Add ``--memory``."""
    parser.add_argument(
        "--memory",
        type=memory,
        metavar="A[,A...]",
        help="most activations that a rank may hold, for all ranks or each; 1 is what F keeps of "
        "one microbatch on 1/p of the model, unless the cost says otherwise (default: no limit)",
    )


_FILE: Final = "or what the file says)"
_SIZE: Final = f"of each microbatch, by which {{}} (default: all 1, {_FILE}"
_TIME: Final = (
    f"time of {{}}, per rank; schedules without whole-stage actions get them (default: 0, {_FILE}"
)
# Arguments of a cost beside F, I, W and B: how each is read, its placeholder, and its help.
_ARGUMENTS: Final[dict[str, tuple[Callable[[str], Any], str, str]]] = {
    "comm": (float, "C", f"latency from rank to rank (default: 0, {_FILE}"),
    "transfer": (
        float,
        "T",
        "how long the message of a microbatch occupies the link from one rank to another, "
        f"which carries one at a time (default: 0, {_FILE}",
    ),
    "message": (
        memory,
        "B[,B...]",
        "what a stage hands to the next, for all or each, by which --transfer is multiplied: "
        f"with bytes, --transfer is one over the bandwidth (default: 1, {_FILE}",
    ),
    "shared": (
        bool,
        "",
        "both ways between two ranks are one link (half duplex); a file may say of each hop "
        "which link it takes",
    ),
    "blocking": (bool, "", "a send occupies its rank until its transfer has ended"),
    "pair": (
        float,
        "S",
        "share of the sum of their times that an F and the B of another microbatch behind it "
        f"take, together (default: they do not run together, {_FILE}",
    ),
    "speed": (
        numbers,
        "V,V...",
        f"of each rank, by which its times are divided (default: all alike, {_FILE}",
    ),
    "sizes": (
        numbers,
        "Z,Z...",
        _SIZE.format("its times are multiplied, and what it keeps and sends"),
    ),
    "memory_sizes": (
        numbers,
        "Z,Z...",
        _SIZE.format("what it keeps and sends is multiplied, where that is not --sizes"),
    ),
    "unshard": (float, "T", _TIME.format("gathering the parameters before the step")),
    "reduce_grad": (
        float,
        "T",
        _TIME.format("reducing the gradients behind the last of a stage"),
    ),
    "update": (float, "T", _TIME.format("the optimizer's step of a rank")),
}


def add_cost(parser: argparse.ArgumentParser) -> None:
    """Add ``--cost``, and an option for each of the other arguments of a cost."""
    parser.add_argument(
        "--cost",
        default="1,1,1",
        metavar="F,I,W[,B]",
        help="times of forward, input gradient, weight gradient (and full backward, if it is not "
        "their sum) per rank and microbatch; or a JSON file with the arguments of fpipe.Cost "
        f"({', '.join(KEYS)}), where a list gives each stage its own, and sizes are those of "
        "the microbatches (default: 1,1,1)",
    )
    for name, (read, metavar, text) in _ARGUMENTS.items():
        option = f"--{name.replace('_', '-')}"
        if read is bool:
            parser.add_argument(option, action="store_const", const=True, help=text)
        else:
            parser.add_argument(option, type=read, metavar=metavar, help=text)
    parser.add_argument(
        "--no-collective-lane",
        dest="collective_lane",
        action="store_const",
        const=False,
        help="gathers and reductions occupy their rank (default: they run beside it)",
    )


def add_jitter(parser: argparse.ArgumentParser) -> None:
    """Add ``--jitter`` and ``--trials``."""
    parser.add_argument(
        "--jitter",
        type=numbers,
        metavar="J[,R[,P,S]]",
        help="simulate trials in which times vary: by the standard deviations J of each action and "
        "R of each rank, as fractions, and by stalls with the chance P and the length S",
    )
    parser.add_argument(
        "--trials", type=count, default=200, metavar="N", help="how many of them (default: 200)"
    )


def jitter_of(options: argparse.Namespace) -> Jitter | None:
    """The jitter that the options describe; None where there is none.

    Raises:
        ScheduleError: a number is out of range, or there are too many.
    """
    values = options.jitter
    if values is None:
        return None
    if len(values) > len(fields(Jitter)):
        raise ScheduleError(f"--jitter has {len(values)} numbers: it must be J[,R[,P,S]]")
    return Jitter(*values)


def cost_of(options: argparse.Namespace) -> Cost:
    """The cost that the options of `add_cost` describe.

    Raises:
        ScheduleError: they describe none.
        OSError: the file cannot be opened.
    """
    text = str(options.cost)
    cost = Cost.from_json(text) if text.endswith(".json") else Cost(**_cost_numbers(text))
    values = {name: getattr(options, name) for name in (*_ARGUMENTS, "collective_lane")}
    return replace(cost, **{name: value for name, value in values.items() if value is not None})


def _cost_numbers(text: str) -> dict[str, Any]:
    rule = "three or four numbers F,I,W[,B], such as 10,12,8, or a .json file"
    try:
        values = numbers(text)
    except argparse.ArgumentTypeError:
        raise ScheduleError(f"--cost {text!r:.60} must be {rule}") from None
    if len(values) not in (3, 4):
        raise ScheduleError(f"--cost {text!r:.60} has {len(values)} numbers: it must be {rule}")
    return dict(zip(("f", "i", "w", "b"), values, strict=False))
