"""Every rule of `fpipe.verify`, broken once."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import pytest

from fpipe import Action, Op, Schedule, ScheduleError, schedules, verify
from tests.schedule.rows import parse_row


def read(*rows: str, placement: Sequence[int] | None = None) -> Schedule:
    """A schedule from one text per rank; stage s is on rank s unless told otherwise."""
    actions = [parse_row(row) for row in rows]
    return Schedule(range(len(rows)) if placement is None else placement, actions)


def refused(schedule: Schedule, text: str, requires: str | Sequence[str] | None = None) -> None:
    with pytest.raises(ScheduleError, match=re.escape(text)):
        verify(schedule, requires)


# ── an action by itself ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(2, Op.F, 0), "2F0 (actions[0][0]) has stage=2: it must be a number from 0 to 1"),
        (Action(-1, Op.F, 0), "-1F0 (actions[0][0]) has stage=-1"),
        (Action(0, Op.F, None), "0F (actions[0][0]) has microbatch=None: F needs a number"),
        (Action(0, Op.W, -1), "0W-1 (actions[0][0]) has microbatch=-1"),
        (Action(0, Op.RESHARD, 0), "has microbatch=0: RESHARD is of the whole stage"),
        (Action(0, Op.SEND_F, 0), "0SEND_F0 (actions[0][0]) moves data between ranks"),
        (Action(0, Op.RECV_B, 0), "which lowering a schedule inserts: leave it out"),
        (
            Action(1, Op.F, 0),
            "1F0 (actions[0][0]) is on rank 0, and placement[1] puts stage 1 on rank 1",
        ),
        (Action(1, Op.UNSHARD, None), "1UNSHARD (actions[0][0]) is on rank 0"),
    ],
)
def test_malformed_action(action: Action, text: str) -> None:
    refused(Schedule([0, 1], [[action], []]), text)


def test_ops_may_be_plain_text() -> None:
    rows = [[Action(0, "F", 0), Action(0, "I", 0), Action(0, "W", 0)]]  # type: ignore[arg-type]
    verify(Schedule([0], rows))


# ── each action once ────────────────────────────────────────────────────────────────────────────


def test_what_is_no_schedule() -> None:
    with pytest.raises(ScheduleError, match=r"schedule='zbv' is a str: it must be a fpipe"):
        verify("zbv")  # type: ignore[arg-type]


def test_nothing_to_do() -> None:
    refused(read("", ""), "actions names no microbatch")
    refused(read("0REDUCE_GRAD"), "actions names no microbatch")


def test_an_action_twice() -> None:
    refused(read("0F0 0B0 0B0"), "0B0 (actions[0][2]) repeats actions[0][1]")


@pytest.mark.parametrize("row", ["0F0 0B0 0W0", "0F0 0I0 0B0", "0F0 0W0 0I0 0B0"])
def test_a_full_backward_and_a_part_of_it(row: str) -> None:
    refused(read(row), "B is the whole backward, I and W in one")


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (("0F0 0B0", "1F0"), "stage 1 has F on microbatch 0 (rank 1): it owes F+B or F+I+W"),
        (("0F0 0I0", "1F0 1B0"), "stage 0 has F+I on microbatch 0"),
        (("0F0 0B0", "1F0 1W0"), "stage 1 has F+W on microbatch 0"),
        (("0F0 0B0", "1B0"), "stage 1 has B on microbatch 0"),
        (("0F0 0B0", ""), "stage 1 has nothing on microbatch 0"),
        (("0F1 0B1", "1F1 1B1"), "stage 0 has nothing on microbatch 0"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0"), "on each of the microbatches 0 to 1"),
    ],
)
def test_a_missing_action(rows: tuple[str, ...], text: str) -> None:
    refused(read(*rows), text)


def test_a_huge_microbatch_number_is_refused_at_once() -> None:
    refused(read("0F9999999999 0B9999999999"), "stage 0 has nothing on microbatch 0")


# ── order ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (("0F0 0B0", "1B0 1F0"), "rank 1 runs 1B0 (actions[1][0]) before 1F0 (actions[1][1])"),
        (("0F0 0W0 0I0", "1F0 1B0"), "rank 0 runs 0W0 (actions[0][1]) before 0I0 (actions[0][2])"),
    ],
)
def test_an_action_before_its_input_on_the_rank(rows: tuple[str, ...], text: str) -> None:
    refused(read(*rows), text)


def test_the_turn_of_a_v_is_on_one_rank() -> None:
    wrong = read("0F0 3F0 3B0 0B0", "2F0 1F0 2B0 1B0", placement=[0, 1, 1, 0])
    refused(wrong, "rank 1 runs 2F0 (actions[1][0]) before 1F0 (actions[1][1])")


def test_ranks_that_wait_for_each_other() -> None:
    # Rank 0 wants the backward of 1 before it sends forward 1, which rank 1 wants first.
    refused(
        read("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
        "the ranks wait for each other in a circle, so none can go on: "
        "rank 0 stops at 0B0 (actions[0][1]), which reads 1B0 (actions[1][2]); "
        "rank 1 stops at 1F1 (actions[1][1]), which reads 0F1 (actions[0][2])",
    )


def test_a_rank_outside_the_circle_is_not_named() -> None:
    with pytest.raises(ScheduleError, match="circle") as refusal:
        verify(read("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"))
    assert "rank 0" not in str(refusal.value)
    assert "rank 1 stops at 1B0" in str(refusal.value)
    assert "rank 2 stops at 2F1" in str(refusal.value)


def test_microbatches_may_come_in_any_order() -> None:
    # Sends do not block and an early message is kept, so ranks may even disagree about the order.
    verify(read("0F0 0F1 0F2 0B0 0B2 0B1", "1F2 1B2 1F0 1F1 1B1 1B0"))


def test_full_and_split_backwards_may_be_mixed() -> None:
    verify(read("0F0 0F1 0I0 0B1 0W0", "1F0 1B0 1F1 1I1 1W1"))


# ── what is owed ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rows", "requires"),
    [
        (("0F0 0F1", "1F0 1F1"), "F"),
        (("0F0 0F1", "1F0 1F1"), ["F", "F"]),
        (("0F0 0F1", "1F0 1F1"), [{"F"}, {Op.F}]),
        (("0F0", "1F0 1B0", "2F0 2B0"), ["F", "FW", "FIW"]),
        (("0F0", "1F0 1W0", "2F0 2B0"), ["F", "FW", "FIW"]),
        (("0F0", "1F0 1I0 1W0", "2F0 2I0 2W0"), ["F", "WF", "WIF"]),
        (("0F0 0B0", "1F0 1I0", "2F0 2B0"), ["FIW", "FI", "FIW"]),
        (("0F0 0W0", "1F0 1B0", "2F0 2I0"), ["FW", "FI", "FI"]),
        (("0F0 0B0", "1F0 1B0", "2F0 2B0"), [{"F", "W"}, ("F", "I"), "FI"]),
        (("0F0", "1F0 1B0"), ["F", "FIW"]),
    ],
)
def test_what_is_owed_may_be_done(
    rows: tuple[str, ...], requires: str | Sequence[Collection[str]]
) -> None:
    verify(read(*rows), requires)


@pytest.mark.parametrize(
    ("rows", "requires", "text"),
    [
        (("0F0 0B0",), ["F"], "0B0 (actions[0][1]) is not owed: stage 0 owes F;"),
        (("0F0 0I0 0W0",), ["FI"], "0W0 (actions[0][2]) is not owed: stage 0 owes F+I"),
        (("0F0 0I0 0B0",), ["FI"], "0B0 (actions[0][2]) does not go with F+I"),
        (("0F0 0I0",), ["FW"], "stage 0 has F+I on microbatch 0 (rank 0): it owes F+W or F+B or"),
        (("0F0 0W0 0B0",), ["FW"], "0B0 (actions[0][2]) does not go with F+W"),
        (("0F0",), ["FI"], "it owes F+I or F+B on each"),
        (
            ("0W0 0F0", "1F0 1B0"),
            ["FW", "FIW"],
            "rank 0 runs 0W0 (actions[0][0]) before 0F0",
        ),
        (
            # A W that stands alone waits for the stage after, as any backward does.
            ("0F0 0W0 0F1 0W1", "1F0 1F1 1B0 1B1"),
            ["FW", "FIW"],
            "rank 0 stops at 0W0 (actions[0][1]), which reads 1B0 (actions[1][2])",
        ),
    ],
)
def test_what_is_owed_is_what_is_done(
    rows: tuple[str, ...], requires: Sequence[str], text: str
) -> None:
    refused(read(*rows), text, requires)


@pytest.mark.parametrize(
    ("requires", "text"),
    [
        (["F"], "requires has 1 entries and the schedule 2 stages"),
        (["F", "FB"], "requires[1]='FB' must be one of 'F', 'FI', 'FW' and 'FIW'"),
        (["F", "IW"], "requires[1]='IW' must be one of"),
        (["F", ["F", []]], "requires[1]=['F', []] must be one of"),
        (["F", ""], "requires[1]='' must be one of"),
        ("", "requires[0]='' must be one of"),
        ("FX", "requires[0]='FX' must be one of"),
        (["FW", "FW"], "requires[0]='FW' owes a gradient, which comes from the input gradient of"),
        (["FI", "F"], "requires[1]='F' has no I: add it there, or owe F alone at stage 0"),
        (3, "requires=3 is an int: give one entry per stage"),
        (["FIW", None], "requires[1]=None must be one of 'F', 'FI', 'FW' and 'FIW'"),
    ],
)
def test_requires_is_checked(requires: str | Sequence[str], text: str) -> None:
    refused(read("0F0", "1F0"), text, requires)


# ── whole-stage actions ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "row",
    [
        "0UNSHARD 0F0 0F1 0RESHARD 0UNSHARD 0B0 0B1 0REDUCE_GRAD 0RESHARD",
        "0UNSHARD 0F0 0I0 0W0 0F1 0B1 0RESHARD 0REDUCE_GRAD",
        "0F0 0F1 0B0 0I1 0W1 0REDUCE_GRAD",
        "0F0 0F1 0B0 0REDUCE_GRAD 0B1 0REDUCE_GRAD",  # after every microbatch
        "0UNSHARD 0F0 0F1 0B0 0B1",  # the last RESHARD may be left to the end of the step
    ],
)
def test_whole_stage_actions(row: str) -> None:
    verify(read(row))


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("0UNSHARD 0F0 0UNSHARD 0B0", "0UNSHARD (actions[0][2], rank 0) follows another 0UNSHARD"),
        ("0RESHARD 0F0 0B0", "0RESHARD (actions[0][0], rank 0) has no 0UNSHARD before it"),
        ("0UNSHARD 0RESHARD 0RESHARD 0F0 0B0", "0RESHARD (actions[0][2], rank 0) has no"),
        ("0F0 0UNSHARD 0B0", "0F0 (actions[0][0], rank 0) computes while stage 0 is resharded"),
        ("0UNSHARD 0F0 0RESHARD 0B0", "0B0 (actions[0][3], rank 0) computes while stage 0 is"),
        ("0F0 0I0 0REDUCE_GRAD 0W0", "0REDUCE_GRAD (actions[0][2], rank 0) has nothing to reduce"),
        ("0F0 0REDUCE_GRAD 0B0", "0REDUCE_GRAD (actions[0][1], rank 0) has nothing to reduce: it"),
        (
            "0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD",
            "(actions[0][3], rank 0) has nothing to reduce after actions[0][2]",
        ),
        (
            "0F0 0F1 0B0 0REDUCE_GRAD 0B1",
            "0B1 (actions[0][4], rank 0) comes after 0REDUCE_GRAD (actions[0][3]), which misses",
        ),
    ],
)
def test_whole_stage_rules(row: str, text: str) -> None:
    refused(read(row), text)


def test_reduce_grad_without_a_weight_gradient() -> None:
    refused(read("0F0 0B0 0REDUCE_GRAD"), "0REDUCE_GRAD (actions[0][2], rank 0) has", ["FI"])


# ── size ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1"])
def test_a_large_schedule(name: str) -> None:
    """64 ranks, 512 microbatches: a second if the time is linear, many minutes if it is not."""
    schedule = schedules.get(name, ranks=64, microbatches=512)
    verify(schedule)
    # The same, with the very last rank's order broken: finding the circle is linear too.
    *rows, last = schedule.actions
    broken = Schedule(schedule.placement, [*rows, last[::-1]])
    refused(broken, "rank 63 runs 63")
