"""JSON of schedules and of costs, nothing lost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fpipe.errors import ScheduleError
from fpipe.schedule.action import Action
from fpipe.schedule.exchange.files import Plain, load_json

FORMAT: Final = "fpipe.schedule"
VERSION: Final = 1
_SCHEDULE_KEYS: Final = ("format", "version", "name", "placement", "actions")


def format_json(placement: Sequence[int], actions: Sequence[Sequence[Action]], name: str) -> str:
    """Write a schedule as a JSON object, one line per rank.

    Its keys are ``format`` ("fpipe.schedule"), ``version`` (1), ``name``, ``placement`` (the rank
    of each stage) and ``actions`` (per rank a string, its actions with a space between).

    Example:
        >>> print(format_json([0], [[Action.parse("0F0"), Action.parse("0B0")]], "tiny"), end="")
        {
          "format": "fpipe.schedule",
          "version": 1,
          "name": "tiny",
          "placement": [0],
          "actions": [
            "0F0 0B0"
          ]
        }
    """
    rows = ",\n".join(f'    "{" ".join(map(str, row))}"' for row in actions)
    return (
        f'{{\n  "format": "{FORMAT}",\n  "version": {VERSION},\n  "name": {json.dumps(name)},\n'
        f'  "placement": {json.dumps(list(placement))},\n  "actions": [\n{rows}\n  ]\n}}\n'
    )


def parse_json(text: str, *, source: str = "json") -> Plain:
    """Read what `format_json` writes.

    Errors call the text `source`.

    Raises:
        ScheduleError: the text is not JSON (with line and column), is of another format or version,
            lacks a key or has one too many, or an entry is not an action (with row and position).

    Example:
        >>> parse_json(format_json([0], [[Action.parse("0F0")]], "tiny")).name
        'tiny'
    """
    content = load_json(text, source)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ScheduleError(
            f'{source}: not a schedule: it must be an object with "format": "{FORMAT}", as '
            "schedule.to_json writes it"
        )
    if content.get("version") != VERSION:
        raise ScheduleError(
            f"{source}: version={content.get('version')!r:.60} is not {VERSION}, which is all that "
            "this fpipe reads: take the fpipe that wrote the file, or a newer one"
        )
    for key in (*_SCHEDULE_KEYS, *content):
        if key not in content or key not in _SCHEDULE_KEYS:
            fault = "lacks the key" if key not in content else "has an unknown key"
            raise ScheduleError(
                f"{source}: {fault} {key!r:.60}: the keys are {', '.join(_SCHEDULE_KEYS)}"
            )
    name, placement, actions = content["name"], content["placement"], content["actions"]
    _check("name", name, str, "a string", source)
    _check("placement", placement, list, "a list of ranks", source)
    _check("actions", actions, list, "a list of strings, one per rank", source)
    for stage, rank in enumerate(placement):
        _check(f"placement[{stage}]", rank, int, "a rank", source)
    for rank, row in enumerate(actions):
        _check(f"actions[{rank}]", row, str, "a string", source)
    rows = tuple(
        tuple(_action(word, rank, at, source) for at, word in enumerate(row.split()))
        for rank, row in enumerate(actions)
    )
    return Plain(tuple(placement), rows, name)


def _check(key: str, value: Any, kind: type, rule: str, source: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ScheduleError(f"{source}: {key}={value!r:.60} must be {rule}")


def _action(word: str, rank: int, at: int, source: str) -> Action:
    try:
        return Action.parse(word)
    except ScheduleError as error:
        raise ScheduleError(f"{source}: actions[{rank}], word {at + 1}: {error}") from error


NEEDED: Final = ("f", "i", "w")
_LATER: Final = {
    "unshard": 0,
    "reduce_grad": 0,
    "collective_lane": True,
    "update": 0,
    "transfer": 0,
    "recompute": None,
    "kept": None,
    "pair": None,
    "speed": None,
    "message": 1,
    "shared": False,
    "blocking": False,
    "memory_sizes": None,
}
KEYS: Final = (*NEEDED, "comm", "b", "activation", "freed_by_i", "sizes", *_LATER)


def format_cost(values: Mapping[str, Any]) -> str:
    """Write the arguments of a cost as a JSON object, one line for each that is not None.

    Those from `unshard` on are left out where they are as by default.

    Example:
        >>> print(format_cost({"f": (1, 2), "i": 1, "w": 1, "b": None}), end="")
        {
          "f": [1, 2],
          "i": 1,
          "w": 1
        }
    """
    unset = {**dict.fromkeys(KEYS), **_LATER}
    present = {
        key: values[key]
        for key in KEYS
        if values.get(key) is not None and values[key] != unset[key]
    }
    lines = ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in present.items())
    return f"{{\n{lines}\n}}\n"


def parse_cost(text: str, *, source: str = "json") -> dict[str, Any]:
    """Read an object that `format_cost` or a person wrote: f, i and w, and any of the others.

    Errors call the text `source`.

    Raises:
        ScheduleError: the text is not JSON (with line and column), or not such an object.

    Example:
        >>> parse_cost('{"f": [1, 2], "i": 1, "w": 1}')
        {'f': [1, 2], 'i': 1, 'w': 1}
    """
    content = load_json(text, source)
    if not isinstance(content, dict) or not set(NEEDED) <= content.keys() <= set(KEYS):
        unknown = sorted(content.keys() - set(KEYS)) if isinstance(content, dict) else []
        which = f", for it has {', '.join(unknown):.60}" if unknown else ""
        raise ScheduleError(
            f"{source}: not a cost{which}: it must be an object with f, i and w, and of "
            f"{', '.join(KEYS[len(NEEDED) :])} what you wish"
        )
    return content
