"""Reading arguments: a parser that errs in one line, and the values that options take."""

from __future__ import annotations

import argparse
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


_WHOLE_STAGE: Final = {
    "unshard": "gathering the parameters before the step",
    "reduce_grad": "reducing the gradients behind the last of a stage",
    "update": "the optimizer's step of a rank",
}


_SIZES: Final = {
    "sizes": "its times are multiplied, and what it keeps and sends",
    "memory_sizes": "what it keeps and sends is multiplied, where that is not --sizes",
}


def add_cost(parser: argparse.ArgumentParser) -> None:
    """Add ``--cost``, ``--comm`` and the times of whole-stage work."""
    parser.add_argument(
        "--cost",
        default="1,1,1",
        metavar="F,I,W[,B]",
        help="times of forward, input gradient, weight gradient (and full backward, if it is not "
        "their sum) per rank and microbatch; or a JSON file with the arguments of fpipe.Cost "
        f"({', '.join(KEYS)}), where a list gives each stage its own, and sizes are those of "
        "the microbatches (default: 1,1,1)",
    )
    parser.add_argument(
        "--comm",
        type=float,
        metavar="C",
        help="latency from rank to rank (default: 0, or what the file says)",
    )
    parser.add_argument(
        "--transfer",
        type=float,
        metavar="T",
        help="how long the message of a microbatch occupies the link from one rank to another, "
        "which carries one at a time (default: 0, or what the file says)",
    )
    parser.add_argument(
        "--message",
        type=memory,
        metavar="B[,B...]",
        help="what a stage hands to the next, for all or each, by which --transfer is multiplied: "
        "with bytes, --transfer is one over the bandwidth (default: 1, or what the file says)",
    )
    parser.add_argument(
        "--shared",
        action="store_const",
        const=True,
        help="both ways between two ranks are one link (half duplex); a file may say of each hop "
        "which link it takes",
    )
    parser.add_argument(
        "--blocking",
        action="store_const",
        const=True,
        help="a send occupies its rank until its transfer has ended",
    )
    parser.add_argument(
        "--pair",
        type=float,
        metavar="S",
        help="share of the sum of their times that an F and the B of another microbatch behind it "
        "take, together (default: they do not run together, or what the file says)",
    )
    parser.add_argument(
        "--speed",
        type=numbers,
        metavar="V,V...",
        help="of each rank, by which its times are divided (default: all alike, or what the file "
        "says)",
    )
    for name, what in _SIZES.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=numbers,
            metavar="Z,Z...",
            help=f"of each microbatch, by which {what} (default: all 1, or what the file says)",
        )
    for name, what in _WHOLE_STAGE.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=float,
            metavar="T",
            help=f"time of {what}, per rank; schedules without whole-stage actions get them "
            "(default: 0, or what the file says)",
        )
    parser.add_argument(
        "--no-collective-lane",
        dest="collective_lane",
        action="store_const",
        const=False,
        help="gathers and reductions occupy their rank (default: they run beside it)",
    )


_GIVEN: Final = (
    *("comm", "transfer", "message", "shared", "blocking", "pair", "speed", "collective_lane"),
    *_SIZES,
    *_WHOLE_STAGE,
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
    values = {name: getattr(options, name) for name in _GIVEN}
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
