"""JSON of a cost: an object with the arguments of `Cost`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from fpipe.errors import ScheduleError
from fpipe.schedule.exchange.plain import load_json

NEEDED: Final = ("f", "i", "w")
KEYS: Final = (*NEEDED, "comm", "b", "activation", "freed_by_i", "sizes")


def format_cost(values: Mapping[str, Any]) -> str:
    """Write the arguments of a cost as a JSON object, one line for each that is given.

    Example:
        >>> print(format_cost({"f": (1, 2), "i": 1, "w": 1, "b": None}), end="")
        {
          "f": [1, 2],
          "i": 1,
          "w": 1
        }
    """
    given = {key: values[key] for key in KEYS if values.get(key) is not None}
    lines = ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in given.items())
    return f"{{\n{lines}\n}}\n"


def parse_cost(text: str, *, source: str = "json") -> dict[str, Any]:
    """Read what `format_cost` writes, or what people write: f, i and w, and of the rest any.

    Args:
        text: the text of the file.
        source: what the text is called in errors, such as its path.

    Raises:
        ScheduleError: the text is not JSON (with line and column), or is no such object.

    Example:
        >>> parse_cost('{"f": [1, 2], "i": 1, "w": 1}')
        {'f': [1, 2], 'i': 1, 'w': 1}
    """
    found = load_json(text, source)
    if not isinstance(found, dict) or not set(NEEDED) <= found.keys() <= set(KEYS):
        unknown = sorted(found.keys() - set(KEYS)) if isinstance(found, dict) else []
        which = f", for it has {', '.join(unknown):.60}" if unknown else ""
        raise ScheduleError(
            f"{source}: not a cost{which}: it must be an object with f, i and w, and of "
            f"{', '.join(KEYS[len(NEEDED) :])} what you wish"
        )
    return found
