"""Canonicalization as the gateway runs it: modes, proof, budget, bypasses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from conftest import policy_text
from waiting import eventually

from canonicalizer import EditError
from gateway.canon import service as service_module
from gateway.canon.kill_switch import KillSwitch
from gateway.canon.learning import Learning
from gateway.canon.service import CanonOutcome, CanonService
from gateway.telemetry.metrics import Metrics
from policies import Policy, Route, load_policy

SYSTEM = "Current time: 2026-03-01T09:05:{s:02d}Z\nUser: Ada\n\nYou are a helpful assistant."


def body(second: int = 7, user: str = "What is the tide?", **more: Any) -> bytes:
    messages = [
        {"role": "system", "content": SYSTEM.format(s=second)},
        {"role": "user", "content": user},
    ]
    return orjson.dumps({"model": "m", "messages": messages, **more})


def _unprovable(raw: bytes, edits: object) -> bytes:
    raise EditError("the edits could not be undone exactly")


class Bench:
    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.metrics = Metrics()
        self.switch = KillSwitch(tmp_path)
        self.service = CanonService(self.metrics, b"s" * 32, self.switch, **settings)

    def run(self, route: Route, raw: bytes, asked: str | None = None, tenant: str = "t") -> CanonOutcome:
        parsed = orjson.loads(raw)
        return self.service.canonicalize(route, tenant, raw, parsed, parsed["messages"], asked)

    def bypasses(self, reason: str) -> float:
        return (
            self.metrics.registry.get_sample_value("warmfront_canon_bypass_total", {"reason": reason}) or 0.0
        )


def policy(mode: str = "enforce") -> Policy:
    return load_policy(policy_text(["http://127.0.0.1:1"], mode=mode))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A service whose time budget no slow or traced test run exceeds; tests of the budget set their own."""
    monkeypatch.setattr(service_module, "_BUDGET_BASE_S", 60.0)
    return Bench(tmp_path)


def test_off_touches_nothing(bench: Bench) -> None:
    raw = body()
    outcome = bench.run(policy("off").routes[0], raw)
    assert outcome.raw is raw and not outcome.edits and outcome.other is None
    assert outcome.header.startswith("off; ")


def test_observe_forwards_the_original_and_keeps_the_other_form(bench: Bench) -> None:
    raw = body()
    outcome = bench.run(policy("observe").routes[0], raw)
    assert outcome.raw is raw
    assert outcome.messages[0]["content"] == SYSTEM.format(s=7)
    assert outcome.other is not None and "2026" not in outcome.other[0]["content"]
    assert outcome.header.endswith("edits=0")


def test_enforce_makes_two_prompts_equal_up_to_the_users_text(bench: Bench) -> None:
    route = policy().routes[0]
    first, second = bench.run(route, body(7)), bench.run(route, body(8, user="And at Brest?"))
    assert first.mode == "enforce" and first.bypass is None
    assert first.messages[0] == second.messages[0]
    assert orjson.loads(first.raw)["messages"] == first.messages
    assert "2026-03-01T09:05" in first.messages[1]["content"]
    assert first.messages[1]["content"].startswith("What is the tide?")
    assert first.other is not None and first.other[0]["content"] == SYSTEM.format(s=7)
    assert f"edits={len(first.edits)}" in first.header
    edits = {"route": "chat", "rule": first.edits[0].rule}
    assert bench.metrics.registry.get_sample_value("warmfront_canon_edits_total", edits) == 2


def test_a_request_without_anything_to_move_is_sent_as_it_came(bench: Bench) -> None:
    raw = b'{"model":"m", "messages":[ {"role":"user","content":"hi"} ]}'
    outcome = bench.run(policy().routes[0], raw)
    assert outcome.raw is raw and outcome.other is None


@pytest.mark.parametrize(
    ("mode", "asked", "expected"),
    [
        ("enforce", "off", "off"),
        ("enforce", " Observe ", "observe"),
        ("observe", "off", "off"),
        ("observe", "enforce", "observe"),
        ("off", "observe", "off"),
        ("enforce", "nonsense", "enforce"),
        ("enforce", None, "enforce"),
    ],
)
def test_a_client_may_only_narrow(bench: Bench, mode: str, asked: str | None, expected: str) -> None:
    assert bench.run(policy(mode).routes[0], body(), asked).mode == expected


def test_an_exception_sends_the_original(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(service_module, "canonicalize", broken)
    raw = body()
    outcome = bench.run(policy().routes[0], raw)
    assert outcome.raw is raw and outcome.bypass == "exception"
    assert outcome.header.endswith("edits=0")
    assert bench.bypasses("exception") == 1


def test_a_failed_proof_sends_the_original(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "apply_proved", _unprovable)
    raw = body()
    outcome = bench.run(policy().routes[0], raw)
    assert (
        outcome.raw is raw
        and outcome.bypass == "mismatch"
        and outcome.messages[0]["content"] == SYSTEM.format(s=7)
    )


def test_a_budget_overrun_sends_the_original(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_BUDGET_BASE_S", -1.0)
    outcome = bench.run(policy().routes[0], body())
    assert outcome.bypass == "budget"


def test_five_bypasses_in_a_minute_put_the_route_in_observe(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = policy().routes[0]
    monkeypatch.setattr(service_module, "apply_proved", _unprovable)
    for _ in range(4):
        bench.run(route, body())
    assert bench.service.mode_of(route) == "enforce"
    bench.run(route, body())
    assert bench.service.mode_of(route) == "observe"
    assert bench.service.demoted == {"chat"}
    state = bench.service.state((route,))[0]
    assert (state["configured"], state["mode"], state["bypasses_last_minute"]) == ("enforce", "observe", 5)
    bench.service.restore("chat")
    assert bench.service.mode_of(route) == "enforce"


def test_slow_bypasses_do_not_add_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    route = policy().routes[0]
    now = [0.0]
    monkeypatch.setattr(service_module.time, "monotonic", lambda: now[0])
    for _ in range(20):
        now[0] += 20.0
        bench.service.count_bypass("chat", "budget")
    assert bench.service.mode_of(route) == "enforce"


UNUSUAL = (
    b'{"model":"m","messages":[{"role":"system","content":"User: Ad\\u0061\\n\\nBe brief."},'
    b'{"role":"user","content":"hi"}]}',
    b'{"model":"m","messages":[{"role":"system","content":"User: Zo\\u00EB\\n\\nBe br\\u00efef."},'
    b'{"role":"user","content":"hi"}]}',
)


@pytest.mark.parametrize("raw", UNUSUAL, ids=["ascii", "capitals"])
def test_how_a_client_escapes_is_never_held_against_a_route(bench: Bench, raw: bytes) -> None:
    route = policy().routes[0]
    for _ in range(12):
        outcome = bench.run(route, raw)
        assert outcome.raw is raw and outcome.bypass == "escapes"
    assert bench.bypasses("escapes") == 12 and bench.bypasses("mismatch") == 0
    assert bench.service.mode_of(route) == "enforce" == bench.service.mode_of(route, "t")
    assert bench.run(route, body()).edits


@pytest.mark.parametrize("levels", [150, 400, 950])
def test_how_deep_a_client_nests_is_never_held_against_a_route(bench: Bench, levels: int) -> None:
    route = policy().routes[0]
    nested = b"[" * levels + b"]" * levels
    for place in (b'"role":"user",', b'"model":"m",'):
        raw = body().replace(place, place + b'"metadata":' + nested + b",")
        for _ in range(6):
            outcome = bench.run(route, raw)
            assert outcome.bypass is None and outcome.edits
    assert bench.service.mode_of(route, "t") == "enforce"


def test_a_slow_tenant_is_demoted_alone_and_three_take_the_route_along(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = policy().routes[0]
    with monkeypatch.context() as slow:
        slow.setattr(service_module, "_BUDGET_BASE_S", -1.0)
        for _ in range(5):
            assert bench.run(route, body(), tenant="slow").bypass == "budget"
    assert bench.run(route, body(), tenant="slow").mode == "observe"
    assert bench.run(route, body(), tenant="other").mode == "enforce"
    state = bench.service.state((route,))[0]
    assert (state["mode"], state["demoted"], state["demoted_tenants"]) == ("enforce", False, ["slow"])
    for tenant in ("b", "c"):
        for _ in range(5):
            bench.service.count_bypass("chat", "budget", tenant)
    assert bench.service.mode_of(route) == "observe" and bench.service.demoted == {"chat"}
    bench.service.restore("chat")
    assert bench.service.mode_of(route, "slow") == "enforce"


def test_a_prompt_near_the_context_is_never_held_against_a_route(bench: Bench) -> None:
    route = policy().routes[0]
    for _ in range(9):
        bench.service.count_bypass("chat", "context")
    assert bench.service.mode_of(route) == "enforce" and bench.bypasses("context") == 9


def test_replay_keeps_a_conversations_prefix(bench: Bench) -> None:
    route = policy().routes[0]
    first = bench.run(route, body(7))
    history = [
        {"role": "system", "content": SYSTEM.format(s=40)},
        {"role": "user", "content": "What is the tide?"},
        {"role": "assistant", "content": "High."},
        {"role": "user", "content": "And now?"},
    ]
    second = bench.run(route, orjson.dumps({"model": "m", "messages": history}))
    assert second.messages[:2] == first.messages[:2]
    assert bench.service.forget("t") and not bench.service.forget("t")


def test_tenants_do_not_share_memory_or_fence(bench: Bench) -> None:
    route = policy().routes[0]
    one, other = bench.run(route, body(), tenant="a"), bench.run(route, body(), tenant="b")
    assert one.messages[1]["content"] != other.messages[1]["content"]
    assert bench.service.context("a").fence_key != bench.service.context("b").fence_key


def test_the_number_of_memories_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_MAX_TENANTS", 2)
    route = policy().routes[0]
    for tenant in "abcd":
        bench.run(route, body(), tenant=tenant)
    assert not bench.service.forget("a") and bench.service.forget("d")


def test_a_share_of_conversations(bench: Bench) -> None:
    text = policy_text(["http://127.0.0.1:1"], mode="enforce").replace(
        "      mode: enforce", "      mode: enforce\n      share: 0.5"
    )
    route = load_policy(text).routes[0]
    modes = {user: bench.run(route, body(user=user)).mode for user in map(str, range(60))}
    assert 10 < sum(mode == "enforce" for mode in modes.values()) < 50
    assert all(bench.run(route, body(9, user=user)).mode == mode for user, mode in modes.items())


def test_the_kill_switch(bench: Bench, tmp_path: Path) -> None:
    route = policy().routes[0]
    raw = body()
    bench.switch.set_off("chat")
    assert bench.run(route, raw).raw is raw
    assert bench.service.mode_of(route) == "off" and bench.service.state((route,))[0]["killed"]
    assert KillSwitch(tmp_path).engaged("chat")  # survives a restart
    bench.switch.set_on("chat")
    assert bench.service.mode_of(route) == "enforce"
    bench.switch.set_off(None)
    assert bench.switch.everything and bench.switch.engaged("anything")
    bench.switch.set_on(None)
    assert not bench.switch.engaged("chat")


def test_another_process_switches_off(bench: Bench, tmp_path: Path) -> None:
    KillSwitch(tmp_path).set_off("chat")
    assert not bench.switch.engaged("chat")
    bench.switch.poll()
    assert bench.switch.engaged("chat") and not bench.switch.engaged("other")
    (tmp_path / "canon-off.json").write_bytes(b"{ half a")
    bench.switch.poll()
    assert bench.switch.everything
    (tmp_path / "canon-off.json").unlink()
    bench.switch.poll()
    assert not bench.switch.engaged("chat")


async def test_learning_is_off_the_path_and_bounded() -> None:
    learning = Learning(per_s=1000.0)
    route = policy("observe").routes[0]
    task = asyncio.create_task(learning.run())
    for second in range(6):
        learning.offer(route, "t", orjson.loads(body(second))["messages"])
    await eventually(lambda: learning.proposals("chat"))
    assert any(proposal.rule.label == "Current time" for proposal in learning.proposals("chat"))
    learning.forget("chat")
    assert learning.proposals("chat") == []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for _ in range(400):
        learning.offer(route, "t", [])
    assert learning.dropped > 0
    learning.offer(policy("off").routes[0], "t", [])
