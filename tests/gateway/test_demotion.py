"""The bypass budget: who is demoted, by what, and for how long it is remembered."""

from __future__ import annotations

import pytest

from gateway.canon import demotion
from gateway.canon.demotion import Demotions


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    at = [0.0]
    monkeypatch.setattr(demotion.time, "monotonic", lambda: at[0])
    return at


def note(demotions: Demotions, reason: str, tenant: str = "", times: int = 5, route: str = "chat") -> None:
    for _ in range(times):
        demotions.note(route, tenant, reason)


@pytest.mark.parametrize("reason", ["mismatch", "exception"])
def test_faults_of_this_side_count_for_the_route_whoever_met_them(reason: str) -> None:
    demotions = Demotions(5)
    for tenant in "aabb":
        demotions.note("chat", tenant, reason)
    assert not demotions.holds("chat", "a") and demotions.recent("chat") == 4
    demotions.note("chat", "a", reason)
    assert demotions.holds("chat") and demotions.holds("chat", "z") and not demotions.holds("other")


@pytest.mark.parametrize("reason", ["escapes", "context", "anything"])
def test_what_a_client_can_cause_at_will_counts_nothing(reason: str) -> None:
    demotions = Demotions(5)
    for tenant in ("", "a"):
        note(demotions, reason, tenant, 20)
    assert not demotions.holds("chat", "a") and demotions.recent("chat") == 0


def test_overruns_count_for_the_route_where_nobody_has_a_name() -> None:
    demotions = Demotions(5)
    note(demotions, "budget")
    assert demotions.holds("chat")


def test_overruns_of_tenants_spread_over_time_do_not_take_the_route_along(now: list[float]) -> None:
    demotions = Demotions(5)
    for tenant in "abcdef":
        note(demotions, "budget", tenant)
        now[0] += 31.0
    assert demotions.tenants("chat") == list("abcdef")
    assert not demotions.holds("chat") and demotions.routes == frozenset()
    note(demotions, "budget", "f")
    note(demotions, "budget", "g")
    note(demotions, "budget", "h")
    assert demotions.holds("chat")
    demotions.lift("chat")
    assert demotions.tenants("chat") == [] and demotions.recent("chat") == 0


def test_slow_overruns_do_not_add_up(now: list[float]) -> None:
    demotions = Demotions(5)
    for _ in range(30):
        now[0] += 20.0
        demotions.note("chat", "a", "budget")
    assert not demotions.holds("chat", "a")


def test_the_number_of_known_tenants_is_bounded() -> None:
    demotions = Demotions(1, max_tenants=4)
    for index in range(20):
        demotions.note(f"r{index}", f"t{index}", "budget")
    assert [index for index in range(20) if demotions.tenants(f"r{index}")] == [16, 17, 18, 19]
