"""Files of schedules: nothing is lost on the way, and what is malformed is refused by its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given

from fpipe import Cost, Schedule, ScheduleError, schedules
from fpipe.schedule.exchange.csv_file import format_csv, parse_csv
from fpipe.schedule.exchange.json_file import format_json, parse_json
from fpipe.schedule.exchange.text_form import format_text, parse_text
from tests.laboratory.random_schedules import schedules as random_schedules

ZBV = schedules.zbv(ranks=2, microbatches=2)


@pytest.mark.parametrize("name", schedules.FAMILIES)
def test_every_form_brings_a_family_back(name: str, tmp_path: Path) -> None:
    schedule = schedules.get(name, ranks=4, microbatches=8)
    schedule.to_csv(tmp_path / "a.csv")
    schedule.to_json(tmp_path / "a.json")
    schedule.to_text(tmp_path / "a.txt")
    assert Schedule.from_csv(tmp_path / "a.csv") == schedule
    assert Schedule.from_json(tmp_path / "a.json") == schedule
    assert Schedule.from_text((tmp_path / "a.txt").read_text("utf-8")) == schedule
    assert Schedule.from_csv(tmp_path / "a.csv", name="b").name == "b"


@given(random_schedules())
def test_every_form_brings_any_schedule_back(schedule: Schedule) -> None:
    placement, actions, name = schedule.placement, schedule.actions, "näme \"with' quotes"
    assert parse_csv(format_csv(placement, actions), name=name) == (placement, actions, name)
    assert parse_json(format_json(placement, actions, name)) == (placement, actions, name)
    assert parse_text(format_text(placement, actions, name)) == (placement, actions, name)


@pytest.mark.parametrize("name", ["my #2", '"quoted"', '"', "#", 'a "b" # \\', '"#', '"a" # "b"'])
def test_text_keeps_a_name_with_signs_of_its_own(name: str) -> None:
    text = format_text(ZBV.placement, ZBV.actions, name)
    assert parse_text(text) == (ZBV.placement, ZBV.actions, name)
    first, rest = text.split("\n", 1)
    assert parse_text(f"{first}  # mine\n{rest}").name == name


def test_the_three_forms() -> None:
    assert ZBV.to_csv().splitlines() == [
        "0F0,0F1,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,0I1,0W1",
        "1F0,2F0,1F1,2F1,2I0,2W0,1I0,1W0,2I1,2W1,1I1,1W1",
    ]
    assert json.loads(ZBV.to_json()) == {
        "format": "fpipe.schedule",
        "version": 1,
        "name": "zbv",
        "placement": [0, 1, 1, 0],
        "actions": [row.replace(",", " ") for row in ZBV.to_csv().splitlines()],
    }
    assert ZBV.to_text().splitlines()[:2] == ["schedule zbv", "placement 0 1 1 0"]


def test_json_and_text_keep_what_csv_cannot() -> None:
    idle = Schedule([0, 0, 1], [Schedule.from_text("0F0 0B0").actions[0], ()], name="idle")
    assert Schedule(*parse_json(idle.to_json())) == idle
    assert Schedule.from_text(idle.to_text()) == idle
    with pytest.raises(ScheduleError, match=r"actions\[1\] is empty, and CSV would lose it"):
        idle.to_csv()
    row = Schedule.from_text("0F0 0B0").actions
    with pytest.raises(ScheduleError, match=r"placement=\(0, 0\) cannot be told .* imply \(0,\)"):
        Schedule([0, 0], row).to_csv()


def test_text_may_be_typed_by_hand() -> None:
    assert Schedule.from_text("# tiny\n\n 0F0 0B0 # first\nrank 1 : 1F0 1B0").placement == (0, 1)
    assert Schedule.from_text("schedule\n0F0 0B0").name == "custom"


def test_csv_with_a_byte_order_mark_and_spaces(tmp_path: Path) -> None:
    path = tmp_path / "from_a_spreadsheet.csv"
    path.write_bytes("\ufeff0F0, ,0B0 ,\r\n,1F0,1B0,\r\n".encode())
    assert Schedule.from_csv(path) == Schedule.from_text("0F0 0B0\n1F0 1B0")


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "f.csv: the file is empty"),
        ("0F0,0B0\n\n1F0,1B0\n", r"row 2 \(rank 1\) has no action"),
        ("0F0,0B0\n1F0,1X0\n", r"row 2 \(rank 1\), column 2: text='1X0' is not an action"),
        ("0F0;0B0\n", r"row 1 \(rank 0\), column 1: text='0F0;0B0' is not an action"),
        ("0F0,0B0\n1F0,0B1\n", r"row 2 \(rank 1\), column 2: 0B1 is on rank 1, and stage 0 is on"),
        ("0F0\n3F0\n", r"row 2 \(rank 1\), column 1: stage 3 is named here, and stage 1 nowhere"),
        ('0F0\n"1F0\n', "row 2 is not CSV"),
        ("(0F1;0B0)OVERLAP\n", "column 1: .* what is in brackets must be actions"),
        ("0F0,(0F1;0B)OVERLAP_F_B\n", "column 2: text='0B' is not an action"),
        ("(0F1;0SEND_F0)OVERLAP_F_B\n", "overlaps 0SEND_F0, which does not compute"),
    ],
)
def test_malformed_csv_is_refused_by_row_and_column(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    path.write_text(text, "utf-8")
    with pytest.raises(ScheduleError, match=reason):
        Schedule.from_csv(path)


def test_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    path.write_bytes(b"0F0\xff")
    with pytest.raises(ScheduleError, match=r"f\.csv: byte 3 is not UTF-8 text"):
        Schedule.from_csv(path)


@pytest.mark.parametrize(
    "edit, reason",
    [
        ({"format": "other"}, 'must be an object with "format": "fpipe.schedule"'),
        ({"version": 2}, "version=2 is not 1"),
        ({"extra": 0}, "has an unknown key 'extra'"),
        ({"name": None}, "name=None must be a string"),
        ({"placement": 3}, "placement=3 must be a list of ranks"),
        ({"placement": [0, True]}, r"placement\[1\]=True must be a rank"),
        ({"placement": [0, 7]}, r"placement\[1\]=7 must be a rank from 0 to 1"),
        ({"actions": ["0F0", 4]}, r"actions\[1\]=4 must be a string"),
        ({"actions": ["0F0", "1F0 oops"]}, r"actions\[1\], word 2: text='oops' is not an action"),
    ],
)
def test_malformed_json_is_refused(edit: dict[str, object], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps(json.loads(ZBV.to_json()) | edit), "utf-8")
    with pytest.raises(ScheduleError, match=reason):
        Schedule.from_json(path)


def test_json_that_is_none_is_refused_by_line_and_column() -> None:
    with pytest.raises(ScheduleError, match=r"json: not JSON: .* line 2 column 1"):
        parse_json("{\n,}")
    with pytest.raises(ScheduleError, match="not JSON: nested too deeply"):
        parse_json("[" * 100_000)
    with pytest.raises(ScheduleError, match="lacks the key 'actions'"):
        parse_json('{"format": "fpipe.schedule", "version": 1, "name": "", "placement": []}')


@pytest.mark.parametrize(
    "text, reason",
    [
        ("placement 0 1\n", "text: no line has actions"),
        ("0F0 0B0\n  1F0 1G0", "line 2, column 7: text='1G0' is not an action"),
        ("0F0,0B0", r"With commas it is a row of CSV, which Schedule\.from_csv reads"),
        ("rank 0: 0F0\nrank 2: 1F0", "line 2, column 1: 'rank 2' stands where rank 1 belongs"),
        # The last one counted, and nobody was told.
        ("placement 0 1\n0F0\n1F0\nplacement 1 0", "line 4: a second placement: leave one out"),
        ("schedule a\nschedule b\n0F0", "line 2: a second schedule: leave one out"),
        ("placement 0 x\n0F0", "line 1: placement has 'x', which is no rank"),
        ("# two\n0F0\n0B0", r"line 3 \(rank 1\), column 1: 0B0 is on rank 1, and stage 0"),
    ],
)
def test_malformed_text_is_refused_by_line_and_column(text: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        Schedule.from_text(text)


def test_a_printed_schedule_is_no_text_form() -> None:
    with pytest.raises(
        ScheduleError, match=r"line 1, column 1: .*what can be read is its .to_text"
    ):
        Schedule.from_text(str(ZBV))
    assert Schedule.from_text(ZBV.to_text()) == ZBV


LONG = "9" * 5000  # Python's int refuses so many digits


@pytest.mark.parametrize(
    "text",
    [f"0F{LONG}", f"{LONG}F0", f"placement {LONG}\n0F0", f"rank {LONG}: 0F0"],
)
def test_a_number_of_thousands_of_digits_is_refused_in_a_short_line(text: str) -> None:
    with pytest.raises(ScheduleError, match="line 1") as refused:
        Schedule.from_text(text)
    assert len(str(refused.value)) < 400


def test_json_with_a_number_of_thousands_of_digits_is_refused() -> None:
    text = format_json([0], [[]], "a").replace("[0]", f"[{LONG}]")
    with pytest.raises(ScheduleError, match=r"a.json: a number in it is too long to read"):
        parse_json(text, source="a.json")


def test_json_with_a_key_twice_is_refused() -> None:
    text = format_json([0], [[]], "a").replace('"name"', '"placement": [0, 0], "name"')
    with pytest.raises(ScheduleError, match=r"a.json: has the key 'placement' twice"):
        parse_json(text, source="a.json")


def test_text_may_have_tabs_after_its_words() -> None:
    found = Schedule.from_text("schedule\tmine\nplacement\t0\t0\nrank 0:\t0F0 1F0")
    assert (found.name, found.placement) == ("mine", (0, 0))


def test_a_name_with_what_is_no_character_can_be_written(tmp_path: Path) -> None:
    # Such is the name of a file whose name is not UTF-8.
    schedule = Schedule(ZBV.placement, ZBV.actions, name="a\udce9")
    schedule.to_text(tmp_path / "a.txt")
    assert Schedule.from_text((tmp_path / "a.txt").read_text("utf-8")).name == "a?"
    schedule.to_json(tmp_path / "a.json")
    assert Schedule.from_json(tmp_path / "a.json").name == "a\udce9"


def test_what_names_no_file_is_refused() -> None:
    for use in (Schedule.from_csv, Schedule.from_json, ZBV.to_csv, ZBV.to_json, ZBV.to_svg):
        with pytest.raises(ScheduleError, match=r"path=3 must be the name of a file"):
            use(3)  # type: ignore[arg-type]


def test_a_text_in_place_of_its_file_is_told() -> None:
    long = schedules.zb_h1(ranks=4, microbatches=16)  # too long for a name
    for read, text in (
        (Schedule.from_json, ZBV.to_json()),
        (Schedule.from_csv, ZBV.to_csv()),
        (Schedule.from_json, long.to_json()),
        (Schedule.from_csv, long.to_csv()),
    ):
        with pytest.raises(ScheduleError, match=r"path='.* is the text of a file, not its name"):
            read(text)


WIDE = "x" * 100_000


@pytest.mark.parametrize(
    "edit",
    [
        *({key: value} for key in ("version", "name", "placement", "actions")
          for value in ([WIDE], {WIDE: 1}, [[1] * 50_000], 1.5)),
        {"format": WIDE}, {"version": WIDE}, {"placement": WIDE}, {"actions": WIDE},
        {"actions": [WIDE]}, {WIDE: 1}, {"placement": [5] * 50_000},
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_quoted_short(edit: dict[str, object], tmp_path: Path) -> None:
    """It was quoted whole, in a message of megabytes."""
    path = tmp_path / "schedule.json"
    tiny = json.loads(format_json([0], schedules.gpipe(ranks=1, microbatches=1).actions, "tiny"))
    path.write_text(json.dumps(tiny | edit))
    with pytest.raises(ScheduleError) as found:
        Schedule.from_json(path)
    assert len(str(found.value)) < len(str(path)) + 400


@pytest.mark.parametrize("key", ["f", "comm", "b", "activation", "sizes", WIDE])
@pytest.mark.parametrize("value", [WIDE, [WIDE], {WIDE: 1}, [-1] * 50_000])
def test_a_cost_of_the_wrong_type_is_quoted_short(key: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"f": 1, "i": 1, "w": 1} | {key: value}))
    with pytest.raises(ScheduleError) as found:
        Cost.from_json(path)
    assert len(str(found.value)) < len(str(path)) + 400


@pytest.mark.parametrize(
    "text", [WIDE, f"0F0,({WIDE}", f"({WIDE};0F0)OVERLAP_F_B", f"({'0F0;' * 50_000}",
             f"0F0\0{WIDE}", "(" + "0F0;" * 50_000 + "1SEND_F0)OVERLAP_F_B"],
)  # fmt: skip
def test_a_cell_of_csv_is_quoted_short(text: str, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError) as found:
        parse_csv(text)
    assert len(str(found.value)) < 400


@pytest.mark.parametrize("read", [Schedule.from_csv, Schedule.from_json, Cost.from_json])
def test_one_long_line_in_place_of_its_file_is_told(read: Callable[[str], object]) -> None:
    """The system refused a name as long as that, and quoted it whole."""
    with pytest.raises(
        ScheduleError, match=r"path='0F0,0F0,.* is the text of a file, not its name"
    ):
        read("0F0," * 2_000)
