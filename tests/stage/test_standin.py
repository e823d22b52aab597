"""What stands in for functions of torch while something is traced, and what is left afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fpipe
from fpipe.trace.overrides.standin import StandIn


class Kind:
    """What has the method that is replaced."""

    @staticmethod
    def name() -> str:
        """What it is called for."""
        return "own"


def stand_in() -> StandIn:
    def name() -> str:
        own: Callable[[], str] = made.original(Kind).__func__
        return "instead" if made.is_active else own()

    made = StandIn("name", {Kind: staticmethod(name)})
    return made


def test_what_was_put_there_since_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = stand_in()
    other = staticmethod(lambda: "other")
    monkeypatch.setattr(Kind, "name", other)
    with replaced.active():
        assert Kind.name() == "instead"
    assert vars(Kind)["name"] is other


def test_what_is_put_over_it_stays_and_calls_what_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replaced, own = stand_in(), vars(Kind)["name"]
    monkeypatch.setattr(Kind, "name", own)
    with replaced.active():
        beneath = Kind.name
        Kind.name = staticmethod(lambda: f"over {beneath()}")  # type: ignore[method-assign]
    for _ in range(2):
        assert Kind.name() == "over own"
        with replaced.active():
            assert Kind.name() == "over instead"
    Kind.name = own  # type: ignore[method-assign]
    with replaced.active():
        assert Kind.name() == "instead"
    assert vars(Kind)["name"] is own


def test_what_is_put_over_it_and_taken_away_later_leaves_it_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who had put it there in another thread's trace put the stand-in back: it called itself."""
    replaced, own = stand_in(), vars(Kind)["name"]
    monkeypatch.setattr(Kind, "name", own)
    with replaced.active():
        before = vars(Kind)["name"]
        Kind.name = staticmethod(lambda: "over")  # type: ignore[method-assign]
    setattr(Kind, "name", before)  # noqa: B010
    assert Kind.name() == "own"
    with replaced.active():
        assert Kind.name() == "instead"
    assert Kind.name() == "own"


def test_what_was_put_there_before_and_is_taken_away_within(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replaced, own = stand_in(), vars(Kind)["name"]
    monkeypatch.setattr(Kind, "name", staticmethod(lambda: "other"))
    with replaced.active():
        setattr(Kind, "name", own)  # noqa: B010
    assert Kind.name() == "own"
    with replaced.active():
        assert Kind.name() == "instead"
    assert vars(Kind)["name"] is own


def test_a_seeding_function_of_the_users_outlives_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was lost, as was torch._dynamo's, whose address TorchScript keeps."""
    before, seeds = torch.manual_seed, list[int]()

    def mine(seed: int) -> torch.Generator:
        seeds.append(seed)
        return before(seed)

    monkeypatch.setattr(torch, "manual_seed", mine)
    schedule = fpipe.schedules.gpipe(ranks=1, microbatches=1)
    pipe = fpipe.pipeline([lambda w, x: x @ w], lambda y, _: y.mean(), schedule, compile=False)
    pipe.step([torch.ones(2, 2)], torch.ones(2, 2))
    assert torch.manual_seed is mine
    torch.manual_seed(3)
    assert seeds == [3]
