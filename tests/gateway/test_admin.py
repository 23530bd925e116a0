"""The admin plane: what it shows, what it changes, whom it refuses, and that a failure leaves no trace."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from conftest import Running, StartGateway, StartStub, policy_text
from stub_upstream import DONE, Answer, Asked, delta, sse, usage_event, whole
from waiting import eventually

from gateway.admin import AdminPlane
from gateway.policy_source import PolicySource
from policies import Policy

CHAT = {"model": "m", "messages": [{"role": "user", "content": "a secret question"}]}
BROKEN = "version: 1\nroutes: 3\n"


@dataclass
class Admin:
    """An admin plane that listens, its gateway, its source and the policy file."""

    running: Running
    source: PolicySource
    path: Path
    url: str
    port: int

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.running.session.get(self.url + path, headers=headers) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        headers = {"Content-Type": "application/json", **headers}
        async with self.running.session.post(
            self.url + path, data=io.BytesIO(data), headers=headers
        ) as response:
            return response.status, await response.json()

    async def mode(self) -> str:
        _, state = await self.get("/admin/state")
        return str(state["routes"][0]["mode"])


StartAdmin = Callable[..., Awaitable[Admin]]


@pytest.fixture
async def start(serve: StartGateway, tmp_path: Path) -> AsyncIterator[StartAdmin]:
    """Start a gateway over upstreams with its admin plane: `await start([url], **as serve)`."""
    servers: list[TestServer] = []

    async def start(urls: list[str], **kwargs: Any) -> Admin:
        text = policy_text(urls, **{k: kwargs.pop(k) for k in ("mode", "dialect", "extra") if k in kwargs})
        path = tmp_path / "policy.yaml"
        path.write_text(text)
        running = await serve(urls, text=text, **kwargs)
        source = PolicySource.from_file(path)
        server = TestServer(AdminPlane(running.gateway, source, running.session).app)
        await server.start_server()
        servers.append(server)
        assert server.port is not None
        return Admin(running, source, path, f"http://127.0.0.1:{server.port}", server.port)

    yield start
    for server in servers:
        await server.close()


@pytest.fixture
async def admin(start: StartAdmin, stub: StartStub) -> Admin:
    upstream = await stub(
        lambda asked: sse([delta("Hi"), delta(finish="stop"), usage_event(26, 1, 16), DONE])
    )
    return await start([upstream.url], mode="observe")


def message(answer: Any) -> str:
    assert answer["error"]["type"] == "invalid_request_error"
    return str(answer["error"]["message"])


# ---- what is ----


async def test_state_and_metrics_tell_the_same_of_a_request(admin: Admin) -> None:
    status, _, _ = await admin.running.post({**CHAT, "stream": True})
    assert status == 200
    _, state = await admin.get("/admin/state")
    async with admin.running.session.get(admin.url + "/metrics") as response:
        text = await response.text()
        assert response.headers["Content-Type"].startswith("text/plain; version=")
    assert state["totals"] | {"requests": 1, "prompt_tokens": 26, "delivered_tokens": 16} == state["totals"]
    assert state["totals"]["hit_ratio"] == 16 / 26
    assert 'warmfront_prompt_tokens_total{model="m",route="chat"} 26.0' in text
    assert 'warmfront_delivered_tokens_total{model="m",route="chat"} 16.0' in text
    assert 'warmfront_replica_up{pool="p",' in text, "gauges are fresh at every scrape"
    assert state["replicas"][0]["state"] == "ready"
    assert state["recent"][0]["prompt_tokens"] == 26
    assert "a secret question" not in json.dumps(state)


async def test_what_varies_is_proposed_with_its_rule_and_without_its_values(admin: Admin) -> None:
    ids = ["3fcb4b70-f79a-4ffc-a71b-9592244ececa", "9592244e-0a1b-4ffc-a71b-3fcb4b70f79a"]
    for trace in ids:
        system = f"Trace id: {trace}\nYou are a patient colleague and answer in the customer's language."
        messages = [{"role": "system", "content": system}, *CHAT["messages"]]
        assert (await admin.running.post({**CHAT, "messages": messages, "stream": True}))[0] == 200
    await eventually(lambda: admin.running.gateway.learned("chat"))
    _, answer = await admin.get("/admin/proposals")
    (row,) = answer["proposals"]
    assert (row["route"], row["rule"]) == ("chat", {"label": "Trace id", "shape": "uuid"})
    assert row["values"] == 2 and row["requests"] == 2 and row["prefix_lost_chars"] > 0
    assert not any(trace in json.dumps(answer) for trace in ids)


async def test_metrics_speak_openmetrics_when_asked(admin: Admin) -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with admin.running.session.get(admin.url + "/metrics", headers=accept) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        assert (await response.text()).endswith("# EOF\n")


async def test_requests_are_listed_newest_first_and_limited(admin: Admin) -> None:
    for name in ("one", "two", "three"):
        await admin.running.post({**CHAT, "stream": True}, headers={"x-request-id": name})
    _, answer = await admin.get("/admin/requests?limit=2")
    assert [entry["request_id"] for entry in answer["requests"]] == ["three", "two"]
    assert answer["requests"][0]["route"] == "chat"
    assert answer["requests"][0]["candidates"][0]["replica_id"].startswith("p@127.0.0.1")
    assert "a secret question" not in json.dumps(answer)
    _, answer = await admin.get("/admin/requests?limit=-5")
    assert len(answer["requests"]) == 1
    status, answer = await admin.get("/admin/requests?limit=many")
    assert (status, message(answer)) == (400, "limit: must be a whole number")


async def test_a_pin_that_waits_for_its_pool_is_listed_as_pending(start: StartAdmin, stub: StartStub) -> None:
    pins = "pins: [{name: greeting, pool: p, route: chat, system: 'You greet.'}]"
    admin = await start([(await stub()).url], extra=pins)
    _, answer = await admin.get("/admin/pins")
    assert answer["pending"] == 1
    assert answer["pins"][0] | {"name": "greeting", "state": "pending", "replica": ""} == answer["pins"][0]
    assert "You greet" not in json.dumps(answer)


async def test_the_page_and_its_files_are_served_and_nothing_else(admin: Admin) -> None:
    session = admin.running.session
    for path in ("/", "/dashboard/", "/dashboard"):
        async with session.get(admin.url + path) as response:
            assert response.url.path == "/dashboard"
            assert response.content_type == "text/html"
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            assert response.headers["X-Content-Type-Options"] == "nosniff"
    async with session.get(admin.url + "/dashboard/static/vendor/uPlot.iife.min.js") as response:
        assert (response.status, response.content_type) == (200, "text/javascript")
    assert (await admin.get("/dashboard/static/nothing.js"))[0] == 404
    assert (await admin.get("/admin/nothing"))[0] == 404


@pytest.mark.parametrize(
    "path",
    [
        "../state.py",
        "..%2fstate.py",
        "vendor/../../state.py",
        "/etc/passwd",
        "%2e%2e/state.py",
        "..\\state.py",
    ],
)
async def test_no_path_leads_out_of_the_static_files(admin: Admin, path: str) -> None:
    answer = await raw(admin, f"GET /dashboard/static/{path} HTTP/1.1", f"Host: 127.0.0.1:{admin.port}")
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"def " not in answer


async def raw(admin: Admin, *lines: str) -> bytes:
    """The answer to a request written by hand, which no client library has tidied up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", admin.port)
    writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode())
    answer = await reader.read()
    writer.close()
    return answer


# ---- who may ask ----


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
async def test_every_loopback_name_is_answered(admin: Admin, host: str) -> None:
    for shown in (host, f"{host}:{admin.port}"):
        assert (await admin.get("/admin/policy", Host=shown))[0] == 200
    assert (await admin.get("/admin/policy", Host=host, Origin=f"http://{host}"))[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:9090"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost.evil.example:9090"},
        {"Host": "0.0.0.0"},
        {"Host": "[::2]"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
    ],
)
async def test_another_sites_page_is_refused(admin: Admin, headers: dict[str, str]) -> None:
    for path in ("/admin/state", "/dashboard", "/metrics"):
        assert (await admin.get(path, **headers))[0] == 403
    status, answer = await admin.post("/admin/policy/mode", {"route": "chat", "mode": "enforce"}, **headers)
    assert (status, await admin.mode()) == (403, "observe")
    assert "loopback" in message(answer)


async def test_a_cross_site_post_is_refused_even_without_an_origin(admin: Admin) -> None:
    cross = {"Sec-Fetch-Site": "cross-site"}
    assert (await admin.post("/admin/policy/reload", **cross))[0] == 403
    async with admin.running.session.get(admin.url + "/dashboard", headers=cross) as response:
        assert response.status == 200, "a link on another page may lead here"


# ---- bodies ----


@pytest.mark.parametrize(
    "path", ["/admin/policy", "/admin/policy/mode", "/admin/canon/off", "/admin/canon/on"]
)
async def test_bodies_that_cannot_be_used_are_refused(admin: Admin, path: str) -> None:
    status, answer = await admin.post(path, b"{")
    assert (status, message(answer)[:9]) == (400, "not JSON:")
    status, answer = await admin.post(path, [1])
    assert (status, message(answer)) == (400, "expected a JSON object")
    status, answer = await admin.post(path, b"a=1", **{"Content-Type": "application/x-www-form-urlencoded"})
    assert (status, message(answer)) == (415, "send application/json")
    status, answer = await admin.post(path, b" " * (4 * 1024 * 1024 + 1))
    assert status == 413
    assert "4,194,304 bytes" in message(answer)


async def test_a_body_that_stalls_is_cut(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.admin._BODY_TIMEOUT_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", admin.port)
    head = "POST /admin/policy HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
    answer = await asyncio.wait_for(reader.readuntil(b"did not arrive in time"), 2)
    assert answer.startswith(b"HTTP/1.1 408 ") and b"Connection: close\r\n" in answer
    writer.close()
    await writer.wait_closed()


async def test_fields_of_the_wrong_type_are_named(admin: Admin) -> None:
    for body in ({}, {"text": 3}, {"text": None}):
        assert message((await admin.post("/admin/policy", body))[1]).startswith("text: ")
    for source in ("", 7, "a\nb", "x" * 201):
        status, answer = await admin.post("/admin/policy", {"text": admin.source.text, "source": source})
        assert (status, message(answer)[:7]) == (400, "source:")
    for body in ({}, {"route": "chat"}, {"route": ["chat"], "mode": "off"}, {"route": "chat", "mode": 1}):
        status, answer = await admin.post("/admin/policy/mode", body)
        assert (status, message(answer)) == (400, "route and mode: must be strings")
    for route in ([], {}, 3):
        status, answer = await admin.post("/admin/canon/off", {"route": route})
        assert (status, message(answer)) == (400, "route: must be a string")


async def test_a_wrong_method_says_which_is_right(admin: Admin) -> None:
    async with admin.running.session.post(admin.url + "/metrics") as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET,HEAD")
        assert message(await response.json())


# ---- policy ----


async def test_a_policy_is_replaced_and_read_again(admin: Admin) -> None:
    text = admin.source.text.replace("mode: observe", "mode: enforce")
    status, answer = await admin.post("/admin/policy", {"text": text, "source": "experiment"})
    assert (status, answer["source"]) == (200, "experiment")
    assert answer["text_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert admin.running.gateway.policy.version == answer["version"]
    assert await admin.mode() == "enforce"
    assert "mode: observe" in admin.path.read_text()
    status, answer = await admin.post("/admin/policy/reload")
    assert (status, answer["source"], await admin.mode()) == (200, str(admin.path), "observe")
    _, shown = await admin.get("/admin/policy")
    assert shown == {"version": answer["version"], "source": str(admin.path), "path": str(admin.path)}


async def test_a_mode_is_changed_in_the_file_too(admin: Admin) -> None:
    status, answer = await admin.post("/admin/policy/mode", {"route": "chat", "mode": "enforce"})
    assert status == 200
    assert answer | {"before": "observe", "after": "enforce"} == answer
    assert "mode: enforce" in admin.path.read_text()
    assert await admin.mode() == "enforce"
    _, state = await admin.get("/admin/state")
    assert f"policy observe chat --policy {admin.path} --admin {admin.url}" in state["routes"][0]["change"]


async def test_a_policy_that_does_not_load_changes_nothing(admin: Admin) -> None:
    before = admin.source.policy
    status, answer = await admin.post("/admin/policy", {"text": BROKEN})
    assert (status, message(answer).split(" ")[0]) == (400, "admin")
    assert "admin request:2: routes" in message(answer)
    file = admin.path.read_text()
    admin.path.write_text(BROKEN)
    status, answer = await admin.post("/admin/policy/reload")
    assert (status, f"{admin.path}:2: " in message(answer)) == (400, True)
    status, answer = await admin.post("/admin/policy/mode", {"route": "chat", "mode": "enforce"})
    assert (status, f"{admin.path}:2: " in message(answer)) == (400, True)
    admin.path.write_text(file)
    for body in ({"route": "nope", "mode": "enforce"}, {"route": "chat", "mode": "sometimes"}):
        status, answer = await admin.post("/admin/policy/mode", body)
        assert (status, message(answer).startswith(f"{admin.path}:")) == (400, True)
    assert admin.source.policy is before
    assert admin.running.gateway.policy.version == before.version


async def test_a_file_that_is_gone_or_no_text_is_named(admin: Admin) -> None:
    admin.path.write_bytes(b"\xff\xff")
    _, answer = await admin.post("/admin/policy/reload")
    assert message(answer) == f"{admin.path}: line 1: is not UTF-8 text (byte 0xff)"
    admin.path.unlink()
    status, answer = await admin.post("/admin/policy/reload")
    assert (status, message(answer)) == (400, f"{admin.path}: No such file or directory")


@pytest.mark.parametrize(
    ("failure", "status"), [(ValueError("not here"), 409), (OSError(24, "no files left"), 500)]
)
async def test_a_policy_that_cannot_be_put_in_force_leaves_no_trace(
    admin: Admin, monkeypatch: pytest.MonkeyPatch, failure: Exception, status: int
) -> None:
    gateway = admin.running.gateway
    before, file, apply = admin.source.policy, admin.path.read_text(), gateway.apply_policy
    asked: list[str] = []

    async def failing(policy: Policy) -> None:
        asked.append(policy.version)
        if len(asked) % 2:
            raise failure
        await apply(policy)

    monkeypatch.setattr(gateway, "apply_policy", failing)
    for path, body in (
        ("/admin/policy/mode", {"route": "chat", "mode": "enforce"}),
        ("/admin/policy", {"text": file.replace("mode: observe", "mode: enforce")}),
    ):
        got, answer = await admin.post(path, body)
        assert got == status
        assert ("not here" if status == 409 else "no files left") in answer["error"]["message"]
        assert asked[-1] == before.version, "what a half-made change left behind is put right"
        assert admin.source.policy is before
        assert admin.path.read_text() == file
        assert await admin.mode() == "observe"


async def test_a_change_that_cannot_be_undone_says_so(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(policy: Policy) -> None:
        admin.path.write_text("# somebody else was here\n")
        raise ValueError("not here")

    monkeypatch.setattr(admin.running.gateway, "apply_policy", failing)
    before = admin.source.policy
    _, answer = await admin.post("/admin/policy/mode", {"route": "chat", "mode": "enforce"})
    assert "still has the new text" in message(answer)
    assert "restart the gateway" in message(answer)
    assert admin.source.policy is before


async def test_a_policy_that_would_expose_the_gateway_is_refused(start: StartAdmin, stub: StartStub) -> None:
    tenants = "tenants: {acme: {keys: [{plain: key}]}}"
    admin = await start([(await stub()).url], extra=tenants, host="0.0.0.0")
    open_text = admin.source.text.replace(tenants, "")
    status, answer = await admin.post("/admin/policy", {"text": open_text})
    assert (status, "needs tenants" in message(answer)) == (409, True)
    assert admin.running.gateway.policy.requires_key


# ---- caches and the kill switch ----


async def test_caches_of_bundled_replicas_are_cleared(start: StartAdmin, stub: StartStub) -> None:
    codes = [200, 500]

    def reply(asked: Asked) -> Answer:
        return whole({}, codes[0] if asked.path == "/engine/cache/clear" else 404)

    upstream = await stub(reply)
    admin = await start([upstream.url], dialect="bundled")
    status, answer = await admin.post("/admin/cache/clear")
    assert (status, len(answer["cleared"])) == (200, 1)
    assert [asked.path for asked in upstream.posts] == ["/engine/cache/clear"]
    codes.reverse()
    status, answer = await admin.post("/admin/cache/clear")
    assert (status, answer["error"]["type"]) == (502, "server_error")
    assert answer["error"]["message"].startswith("not cleared: p@127.0.0.1")


async def test_the_kill_switch_is_in_force_at_once_and_outlives_the_process(admin: Admin) -> None:
    await admin.post("/admin/policy/mode", {"route": "chat", "mode": "enforce"})
    status, answer = await admin.post("/admin/canon/off")
    assert (status, answer) == (200, {"off": "all routes"})
    _, state = await admin.get("/admin/state")
    route = state["routes"][0]
    assert (route["mode"], route["configured"], route["lowered"]) == ("off", "enforce", "switched off")
    kept = admin.running.gateway.config.runtime_dir / "canon-off.json"
    assert json.loads(kept.read_text())["all"] is True
    status, answer = await admin.post("/admin/canon/on", {"route": "chat"})
    assert answer == {"on": "chat", "still_off": ["chat"]}, "one route's switch does not lift that of all"
    status, answer = await admin.post("/admin/canon/on")
    assert answer == {"on": "all routes", "still_off": []}
    assert await admin.mode() == "enforce"


async def test_one_route_is_switched_off_by_name(admin: Admin) -> None:
    assert (await admin.post("/admin/canon/off", {"route": "chat"}))[1] == {"off": "chat"}
    assert await admin.mode() == "off"
    status, answer = await admin.post("/admin/canon/off", {"route": "nope"})
    assert (status, message(answer)) == (400, "route: no route 'nope'; there are chat")
    await admin.post("/admin/canon/on", {"route": "chat"})
    assert await admin.mode() == "observe"


async def test_switching_on_lifts_a_demotion(admin: Admin) -> None:
    await admin.post("/admin/policy/mode", {"route": "chat", "mode": "enforce"})
    for _ in range(5):
        admin.running.gateway.canon.count_bypass("chat", "budget")
    _, state = await admin.get("/admin/state")
    assert (state["routes"][0]["mode"], state["routes"][0]["lowered"]) == (
        "observe",
        "lowered after bypasses",
    )
    await admin.post("/admin/canon/on")
    assert await admin.mode() == "enforce"


async def test_a_fault_of_a_handler_is_json_too(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(route: str | None) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(admin.running.gateway.kill_switch, "set_off", failing)
    status, answer = await admin.post("/admin/canon/off")
    assert status == 500
    assert answer["error"]["message"] == "POST /admin/canon/off: PermissionError: Permission denied"
