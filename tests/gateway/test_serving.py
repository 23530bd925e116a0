"""One serving process: what it says, how it ends, and what keeps it from starting."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from conftest import StartStub, policy_text
from stub_upstream import DONE, Answer, Asked, delta, sse, usage_event

from gateway.canon.kill_switch import KillSwitch
from gateway.config import GatewayConfig
from gateway.policy_source import PolicySource
from gateway.serving import serve

CHAT = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}


def config(tmp_path: Path, **fields: Any) -> GatewayConfig:
    usual: dict[str, Any] = {"port": 0, "admin_port": 0, "runtime_dir": tmp_path / "run"}
    return GatewayConfig(**(usual | {"secret": b"s" * 32, "drain_timeout_s": 5.0} | fields))


def source(tmp_path: Path, text: str) -> PolicySource:
    path = tmp_path / "my policy.yaml"
    path.write_text(text)
    return PolicySource.from_file(path)


class Serving:
    """`serve` as a task, and what it has said on stderr so far."""

    def __init__(
        self, config: GatewayConfig, source: PolicySource, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._capsys = capsys
        self.said = ""
        self.task = asyncio.create_task(serve(config, source))

    async def says(self, pattern: str, timeout_s: float = 10.0) -> re.Match[str]:
        """Wait until the pattern was said."""
        async with asyncio.timeout(timeout_s):
            while True:
                self.said += self._capsys.readouterr().err
                found = re.search(pattern, self.said)
                if found:
                    return found
                assert not self.task.done(), self.said
                await asyncio.sleep(0.01)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send this process a signal that `serve` handles; the exit code."""
        os.kill(os.getpid(), number)
        async with asyncio.timeout(10):
            code = await self.task
        self.said += self._capsys.readouterr().err
        return code


async def curl(command: str, variables: dict[str, str]) -> tuple[int, str]:
    """Do what a shell and curl do with a command line of the banner."""
    words = shlex.split(command.split("; ")[-1])
    assert words[:2] == ["curl", "-N"]
    headers = [words[i + 1] for i, word in enumerate(words) if word == "-H"]
    for name, value in variables.items():
        headers = [header.replace(f"${name}", value) for header in headers]
    fields = dict(header.split(": ", 1) for header in headers)
    data = words[words.index("-d") + 1]
    async with (
        aiohttp.ClientSession() as session,
        session.post(words[2], data=data, headers=fields) as answer,
    ):
        return answer.status, await answer.text()


async def test_the_banner_says_what_is_switched_off_and_what_is_enforced(
    tmp_path: Path, stub: StartStub, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream = f"{{url: '{(await stub(reply)).url}'}}"
    text = f"""\
version: 1
pools: {{p: {{model: m, upstreams: [{upstream}]}}}}
routes:
  - {{name: never, match: {{paths: [/v1/n]}}, canon: {{mode: off}}}}
  - {{name: always, match: {{paths: [/v1/a]}}, canon: {{mode: enforce}}}}
  - {{name: killed, match: {{paths: [/v1/k]}}}}
  - {{name: watched}}
"""
    run = tmp_path / "run"
    KillSwitch(run).set_off("killed")
    serving = Serving(config(tmp_path), source(tmp_path, text), capsys)
    admin = (await serving.says(r"dashboard +(http://127\.0\.0\.1:\d+)/dashboard\n"))[1]
    await serving.says(
        r"route watched is in observe: no prompt is changed\. To change that:\n.*enforce watched"
    )
    assert "enforce never" not in serving.said and "enforce killed" not in serving.said
    assert "  enforced: always (prompts are changed as the rules say)\n" in serving.said
    assert f"canonicalization is switched off for route killed (kill switch, {run}/" in serving.said
    assert f"canon on --route killed --admin {admin}\n" in serving.said
    assert await serving.end() == 0
    KillSwitch(run).set_off(None)
    again = Serving(config(tmp_path), source(tmp_path, text), capsys)
    await again.says(r"switched off for all routes \(kill switch, .*\n.*canon on --admin http")
    assert "enforced:" not in again.said and "policy enforce" not in again.said
    assert await again.end() == 0


def reply(asked: Asked) -> Answer:
    return sse([delta("Hello"), delta(finish="stop"), usage_event(), DONE])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_banner_holds_what_comes_next_and_a_signal_ends_it(
    tmp_path: Path, stub: StartStub, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    text = policy_text([(await stub(reply)).url], mode="observe")
    serving = Serving(config(tmp_path), source(tmp_path, text), capsys)
    base = (await serving.says(r"base URL +(http://127\.0\.0\.1:\d+/v1)\n"))[1]
    admin = (await serving.says(r"dashboard +(http://127\.0\.0\.1:\d+)/dashboard\n"))[1]
    command = (await serving.says(r"    (curl .*)\n"))[1]
    assert f"{base}/chat/completions" in command
    status, answer = await curl(command, {})
    assert status == 200
    assert answer.endswith("data: [DONE]\n\n")
    enforce = (await serving.says(r"warmfront'? (policy enforce .*)\n"))[1]
    path = shlex.quote(str(tmp_path / "my policy.yaml"))
    assert enforce == f"policy enforce chat --policy {path} --admin {admin}"
    async with aiohttp.ClientSession() as session, session.get(f"{admin}/metrics") as metrics:
        assert "warmfront_requests_total" in await metrics.text()
    assert await serving.end(number) == 0
    assert "stopping" in serving.said
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", int(base.split(":")[2].split("/")[0]))


@pytest.mark.parametrize(
    ("keys", "variable"), [("{plain: acme-key}", "KEY"), ("{env: ACME_KEY}", "ACME_KEY")]
)
async def test_the_request_to_try_carries_a_tenants_key(
    tmp_path: Path,
    stub: StartStub,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    keys: str,
    variable: str,
) -> None:
    monkeypatch.setenv("ACME_KEY", "acme-key")
    text = policy_text([(await stub(reply)).url], extra=f"tenants: {{acme: {{keys: [{keys}]}}}}")
    serving = Serving(config(tmp_path), source(tmp_path, text), capsys)
    line = (await serving.says(r"    (.*curl .*)\n"))[1]
    assert line.startswith("printf 'key of tenant acme: '; read -r KEY; curl") == (variable == "KEY")
    assert f'-H "Authorization: Bearer ${variable}"' in line
    assert "acme-key" not in serving.said
    assert (await curl(line, {variable: "acme-key"}))[0] == 200
    assert (await curl(line, {variable: "wrong"}))[0] == 401
    assert await serving.end() == 0


async def test_a_running_stream_ends_before_the_process_does(
    tmp_path: Path, stub: StartStub, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = await stub(
        lambda asked: sse([delta("Hel"), 0.5, delta("lo"), delta(finish="stop"), usage_event(), DONE])
    )
    serving = Serving(config(tmp_path), source(tmp_path, policy_text([slow.url])), capsys)
    base = (await serving.says(r"base URL +(\S+)"))[1]
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{base}/chat/completions", json=CHAT) as answer,
    ):
        first = await answer.content.readany()
        ending = asyncio.create_task(serving.end())
        rest = await answer.content.read()
    assert (first + rest).endswith(b"data: [DONE]\n\n")
    assert await ending == 0


async def test_a_signal_while_replicas_are_awaited_ends_it_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serving = Serving(config(tmp_path), source(tmp_path, policy_text(["http://127.0.0.1:9"])), capsys)
    await serving.says(r"dashboard +http")
    assert await serving.end() == 0
    assert "base URL" not in serving.said


async def test_waiting_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.serving._HEARTBEAT_S", 0.2)
    serving = Serving(config(tmp_path), source(tmp_path, policy_text(["http://127.0.0.1:9"])), capsys)
    await serving.says(r"pool p: waiting for a replica \(p@127\.0\.0\.1:9 ")
    assert await serving.end() == 0


@pytest.mark.parametrize(("flag", "field"), [("--port", "port"), ("--admin-port", "admin_port")])
async def test_a_port_in_use_is_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, field: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        code = await serve(
            config(tmp_path, **{field: port}), source(tmp_path, policy_text(["http://127.0.0.1:9"]))
        )
    assert code == 2
    error = capsys.readouterr().err
    assert f"error: {flag} {port}: 127.0.0.1:{port}: Address already in use" in error


async def test_without_tenants_only_loopback_is_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = await serve(
        config(tmp_path, host="0.0.0.0"), source(tmp_path, policy_text(["http://127.0.0.1:9"]))
    )
    assert (code, "needs tenants" in capsys.readouterr().err) == (2, True)


async def test_replicas_that_never_start_end_the_process_with_their_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "version: 1\npools: {p: {model: m, bundled: {replicas: 1}}}\nroutes: [{name: chat, pool: p}]\n"
    broken = config(tmp_path, engine_command=("sh", "-c", "echo weights are missing >&2; exit 3", "engine"))
    async with asyncio.timeout(10):
        code = await serve(broken, source(tmp_path, text))
    error = capsys.readouterr().err
    assert code == 2
    assert "[p-r0] weights are missing" in error
    assert "error: pool p: no replica starts: p-r0 exited (code 3): weights are missing" in error
