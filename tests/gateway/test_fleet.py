"""The live side of a policy: text models, pins, bundled replicas and their death."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import orjson
import pytest
from conftest import Running, StartGateway, StartStub
from stub_upstream import DONE, Answer, Asked, StubUpstream, completion, delta, sse, usage_event, whole
from tiny_model import write_tiny_model
from waiting import eventually

from canonicalizer.chain import chain_seed
from policies import load_policy

SYSTEM = (
    "Current time: 2026-03-01T09:05:{s:02d}Z\nUser: Ada\n\n" + "You answer questions about the harbour. " * 12
)
RULES = """
        - {label: "Current time", shape: clock, precision: minute}
        - {label: "User", shape: name}
"""


def text(pool: str, *, mode: str = "enforce", pins: str = "") -> str:
    return f"""
version: 1
pools:
  p:
    model: m
    {pool}
routes:
  - name: chat
    class: interactive
    pool: p
    canon: {{mode: {mode}, learn: {{accept: "off"}}, rules: [{RULES.replace("- {", "{").replace("}", "},")}]}}
{pins}
"""


def info(model_dir: Path, **changes: Any) -> dict[str, Any]:
    fields = {
        "model": "m",
        "fingerprint": "fp-1",
        "context_length": 2048,
        "block_size": 16,
        "num_blocks": 512,
        "max_seqs": 4,
        "model_dir": str(model_dir),
        "pid": 1,
    }
    return {**fields, **changes}


async def bundled_stub(stub: StartStub, model_dir: Path, **changes: Any) -> StubUpstream:
    """A stub that speaks the bundled engine's interface."""

    def reply(asked: Asked) -> Answer:
        if asked.path == "/engine/pins":
            tokens = asked.json["token_ids"]
            pinned[asked.json["id"]] = {
                "id": asked.json["id"],
                "state": "resident",
                "computed_tokens": len(tokens),
            }
            return whole(pinned[asked.json["id"]])
        count = len(asked.json["warmfront"].get("token_ids", ()))
        if asked.json.get("stream"):
            return sse([delta("a"), delta(finish="stop"), usage_event(count, 1, 16), DONE])
        usage = {
            "prompt_tokens": count,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        timings = {"queue_s": 0.001, "prefill_s": 0.002, "first_sample_s": 0.0005}
        extension = {"timings": timings, "prefill_tokens": count - 16}
        return whole({**completion(), "usage": usage, "warmfront": extension})

    pinned: dict[str, Any] = {}
    upstream = await stub(reply)
    upstream.gets["/engine/info"] = info(model_dir, **changes)
    upstream.gets["/engine/cache"] = {
        "total": 512,
        "free": 512,
        "cached": 0,
        "running": 0,
        "waiting": 0,
        "epoch": 1,
    }
    upstream.gets["/engine/pins"] = {"pins": []}
    return upstream


def chat(second: int, *, user: str = "hi", **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM.format(s=second)}, {"role": "user", "content": user}]
    return {"model": "m", "messages": messages, **more}


async def ready(running: Running) -> None:
    await eventually(lambda: "p" in running.gateway.services.texts)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


async def test_the_bundled_engine_gets_the_canonical_tokens(
    stub: StartStub, serve: StartGateway, model_dir: Path
) -> None:
    upstream = await bundled_stub(stub, model_dir)
    gateway = await serve([], text=text(f'upstreams: [{{url: "{upstream.url}", dialect: bundled}}]'))
    await ready(gateway)
    first = (await gateway.post(chat(1)))[2]
    await gateway.post(chat(2, user="and now?", stream=True))
    one, two = (asked.json for asked in upstream.posts)
    assert one["warmfront"]["seed"] == chain_seed("fp-1", "tenant:").hex()
    assert one["warmfront"]["priority"] == gateway.gateway.policy.classes["interactive"].rank
    ids, others = one["warmfront"]["token_ids"], two["warmfront"]["token_ids"]
    shared = next(i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b)
    assert shared > 480
    model = gateway.gateway.services.texts["p"].model
    assert model is not None and "2026" not in model.decode(ids[:480]) and "2026" in model.decode(ids)
    assert one["messages"][0] == two["messages"][0]
    assert "warmfront" not in first
    entry = gateway.gateway.ledger.recent(1)[0]
    assert entry.chain == "tokens-in" and entry.delivered_tokens == 16
    status, ready_body = await gateway.get("/readyz")
    assert status == 200 and ready_body["pools"]["p"]["prompts"] == "tokens-in"


async def test_a_count_that_differs_is_counted(stub: StartStub, serve: StartGateway, model_dir: Path) -> None:
    upstream = await bundled_stub(stub, model_dir)
    upstream.reply = lambda asked: whole(completion())
    gateway = await serve([], text=text(f'upstreams: [{{url: "{upstream.url}", dialect: bundled}}]'))
    await ready(gateway)
    await gateway.post(chat(1))
    value = gateway.gateway.metrics.registry.get_sample_value(
        "warmfront_template_mismatch_total", {"pool": "p"}
    )
    assert value == 1


async def test_prompts_longer_than_the_context(stub: StartStub, serve: StartGateway, model_dir: Path) -> None:
    upstream = await bundled_stub(stub, model_dir)
    gateway = await serve([], text=text(f'upstreams: [{{url: "{upstream.url}", dialect: bundled}}]'))
    await ready(gateway)
    for stream in (False, True):
        status, _, body = await gateway.post(chat(1, user="x" * 3000, stream=stream))
        assert status == 400
        assert body["error"]["code"] == "context_length_exceeded" and body["error"]["param"] == "messages"
    assert not upstream.posts
    # Just below the limit only the context block is too much: the original goes out.
    model = gateway.gateway.services.texts["p"].model
    assert model is not None
    base = len(model.encode_segments(model.render_chat(chat(1, user="")["messages"]))) // 4
    raw = orjson.dumps(chat(1, user="y" * (2040 - base)))
    status, headers, _ = await gateway.post(raw)
    assert status == 200 and headers["x-warmfront-canon"].endswith("edits=0")
    assert upstream.posts[0].json["messages"] == orjson.loads(raw)["messages"]
    assert len(upstream.posts[0].json["warmfront"]["token_ids"]) == 2040
    labels = {"reason": "context"}
    assert gateway.gateway.metrics.registry.get_sample_value("warmfront_canon_bypass_total", labels) == 1


PINS = """
pins:
  - name: harbour
    pool: p
    route: chat
    system: |-
      Current time: 2026-01-01T00:00:00Z
      User: Bob

      {body}
"""


async def test_pins_are_canonicalized_like_requests(
    stub: StartStub, serve: StartGateway, model_dir: Path
) -> None:
    upstream = await bundled_stub(stub, model_dir)
    pins = PINS.format(body=("You answer questions about the harbour. " * 12).rstrip())
    pool = f'upstreams: [{{url: "{upstream.url}", dialect: bundled}}]'
    gateway = await serve([], text=text(pool, pins=pins))
    await eventually(lambda: [asked for asked in upstream.posts if asked.path == "/engine/pins"])
    pinned = upstream.posts[0].json
    await gateway.post(chat(7))
    sent = next(asked for asked in upstream.posts if asked.path != "/engine/pins").json["warmfront"]
    shared = sum(1 for a, b in zip(pinned["token_ids"], sent["token_ids"], strict=False) if a == b)
    assert pinned["seed"] == sent["seed"]
    assert shared >= len(pinned["token_ids"]) - 16 > 400
    await eventually(lambda: [row for row in gateway.gateway.pins.states() if row.state == "resident"])
    gateway.gateway.publish_gauges()
    row = gateway.gateway.pins.states()[0]
    labels = {"pin": "harbour", "replica": row.replica, "state": "resident"}
    assert gateway.gateway.metrics.registry.get_sample_value("warmfront_pin_state", labels) == 1
    await gateway.gateway.apply_policy(load_policy(text(pool)))
    assert gateway.gateway.pins.states() == []


async def test_a_killed_replica(serve: StartGateway, model_dir: Path) -> None:
    """SIGKILL in mid-stream: that stream ends with an error, the others finish, the replica comes back."""
    pool = f'bundled: {{replicas: 2, model: "{model_dir}", kv_tokens: 16384, max_seqs: 8}}'
    arguments = ("--fake", "--fake-decode-ms", "15")
    gateway = await serve([], text=text(pool), engine_arguments=arguments, ready=0)
    state = gateway.gateway.pools["p"]
    assert await state.wait_ready(2, 30)
    await ready(gateway)
    body = chat(1, stream=True, max_tokens=100, ignore_eos=True)
    conversations = [{**body, "user": str(i)} for i in range(6)]
    for i, each in enumerate(conversations):
        each["messages"] = [{"role": "system", "content": f"Tenant {i} " * 30}, *body["messages"][1:]]
    tasks = [asyncio.create_task(gateway.post(each)) for each in conversations]
    await eventually(lambda: sum(replica.decoding for replica in state.replicas.values()) == 6)
    assert all(replica.inflight for replica in state.replicas.values())
    victim = next(iter(state.replicas.values()))
    lost = victim.inflight
    pid = next(
        row["pid"] for row in gateway.gateway.fleet.supervisors[0].snapshot() if row["id"] == victim.id
    )
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: victim.state != "ready")
    assert gateway.gateway.index.blocks(victim.id) == 0
    assert (await gateway.post({**body, "stream": False, "max_tokens": 2}))[0] == 200
    answers = await asyncio.gather(*tasks)
    broken = [answer for _, _, answer in answers if b'"error"' in answer]
    whole_ones = [answer for _, _, answer in answers if answer.endswith(DONE)]
    assert len(broken) == lost and len(whole_ones) == 6 - lost
    assert not any(b"[DONE]" in answer for answer in broken)
    assert await state.wait_ready(2, 30)
    status, _, _ = await gateway.post(body)
    assert status == 200
