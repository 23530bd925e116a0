"""The gateway alone: latency it adds and requests per second on one core, in front of a stub upstream.

    python tests/bench/gateway_alone.py [--json FILE] [--seconds 4] [--runs 3]

Three processes: the gateway on core 0, a stub upstream and a loader on core 1, the latter two raw asyncio
protocols. The loader first asks the stub directly; the run is invalid unless that reaches 5x the gateway's
rate. Every request is a chat with a 4 kB system prompt whose first lines hold a clock, an id and a user
name (8 tenants with keys, three routes, canonicalization in `enforce`, every answer checked for status
200). Two kinds of upstream: `text` (an OpenAI-compatible server: text-chunk hashes) and `tokens` (speaks
the bundled engine's interface: the gateway renders, tokenizes, hashes and sends token ids). Printed: median
of the runs, spread in parentheses.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gateway")]

TENANTS = 8
BODIES = 64
POLICY = """
version: 1
tenants:
{tenants}
pools:
  chat:
    model: stub
    upstreams: [{{url: "http://127.0.0.1:{port}", dialect: {dialect}}}]
routes:
  - name: batch
    match: {{headers: {{x-job: batch}}}}
    class: batch
    pool: chat
  - name: chat
    match: {{paths: [/v1/chat/completions]}}
    class: interactive
    pool: chat
    canon:
      mode: enforce
      replay: true
      rules:
        - {{label: "Current time", shape: clock, precision: minute}}
        - {{label: "Request id", shape: uuid}}
        - {{label: "User", shape: name}}
      learn: {{accept: "off"}}
  - name: rest
    class: standard
    pool: chat
"""

# --- stub upstream ------------------------------------------------------------------------------------------

_USAGE = {
    "prompt_tokens": 1000,
    "completion_tokens": 2,
    "total_tokens": 1002,
    "prompt_tokens_details": {"cached_tokens": 900},
}


def _chunk(delta: dict[str, str], finish: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "stub", "choices": [choice]}
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def _answers(model_dir: str) -> dict[bytes, bytes]:
    message = {"role": "assistant", "content": "Hello there."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    whole = {"id": "c", "object": "chat.completion", "created": 1, "model": "stub", "choices": [choice]}
    info = {
        "model": "stub",
        "fingerprint": "stub",
        "context_length": 65536,
        "block_size": 16,
        "num_blocks": 8192,
        "max_seqs": 64,
        "model_dir": model_dir,
        "pid": 1,
    }
    usage = json.dumps({"choices": [], "usage": _USAGE}, separators=(",", ":")).encode()
    events = (
        _chunk({"role": "assistant", "content": "Hello"}, None),
        _chunk({"content": " there."}, None),
        _chunk({}, "stop"),
        b"data: " + usage + b"\n\n",
        b"data: [DONE]\n\n",
    )
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return {
        b"whole": _plain({**whole, "usage": _USAGE}),
        b"stream": head + chunked,
        b"/engine/info": _plain(info),
        b"/engine/cache": _plain(
            {"total": 8192, "free": 8192, "cached": 0, "running": 0, "waiting": 0, "epoch": 1}
        ),
        b"other": _plain({"status": "ok", "object": "list", "data": []}),
    }


def _plain(value: Any) -> bytes:
    body = json.dumps(value, separators=(",", ":")).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )


class Stub(asyncio.Protocol):
    """Answers whole requests; knows just enough HTTP for that."""

    def __init__(self, answers: dict[bytes, bytes]) -> None:
        self._answers = answers
        self._buffer = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer = buffer = self._buffer + data if self._buffer else data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = buffer[:end].lower()
        at = head.find(b"content-length:")
        length = (
            int(head[at + 15 : head.find(b"\r\n", at) if b"\r\n" in head[at:] else end]) if at >= 0 else 0
        )
        if len(buffer) < end + 4 + length:
            return
        self._buffer = b""
        if head.startswith(b"post"):
            name = b"stream" if b'"stream":true' in buffer[end:] else b"whole"
        else:
            name = head.split(b" ", 2)[1]
        self._transport.write(self._answers.get(name, self._answers[b"other"]))


async def serve_stub(port: int, model_dir: str) -> None:
    answers = _answers(model_dir)
    server = await asyncio.get_running_loop().create_server(lambda: Stub(answers), "127.0.0.1", port)
    print("up", flush=True)
    await server.serve_forever()


# --- loader -------------------------------------------------------------------------------------------------


def requests(stream: bool) -> list[bytes]:
    """Whole HTTP requests, each with its own clock, id and user."""
    made = []
    for i in range(BODIES):
        tenant = i % TENANTS
        system = (
            f"Current time: 2026-03-{1 + i % 28:02d}T09:{i % 60:02d}:07Z\n"
            f"Request id: {0x6F9619FF + i:08x}-b42d-4c4d-8f3a-{i:012x}\n"
            f"User: Ada Example{chr(97 + i % 26)}\n\n"
            + f"You are assistant number {tenant} of the service. Answer briefly and cite the manual. "
            * 50
        )
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Question {i}: how?"}]
        body = {"model": "stub", "messages": messages, "max_tokens": 16, "temperature": 0}
        if stream:
            body["stream"] = True
        raw = json.dumps(body, separators=(",", ":")).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer key-{tenant}\r\nContent-Length: {len(raw)}\r\n\r\n"
        )
        made.append(head.encode() + raw)
    return made


class Client(asyncio.Protocol):
    """Sends one request after the other on one connection until told to stop."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._buffer = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._next()

    def _next(self) -> None:
        self._started = time.perf_counter()
        self._transport.write(self._load.next_request())

    def data_received(self, data: bytes) -> None:
        self._buffer = buffer = self._buffer + data if self._buffer else data
        if not _complete(buffer):
            return
        if not buffer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"not a 200: {buffer[:300]!r}")
        self._buffer = b""
        if self._load.finished(time.perf_counter() - self._started):
            self._transport.close()
        else:
            self._next()


def _complete(buffer: bytes) -> bool:
    if buffer.endswith(b"0\r\n\r\n"):
        return True
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = buffer[:end].lower()
    at = head.find(b"content-length: ")
    if at < 0:
        return False
    stop = head.find(b"\r\n", at)
    return len(buffer) >= end + 4 + int(head[at + 16 : stop if stop >= 0 else end])


class Load:
    """What the clients share: requests to send, latencies seen, when to stop."""

    def __init__(self, seconds: float, made: list[bytes], clients: int) -> None:
        self.latencies: list[float] = []
        self._made = made
        self.sent = 0
        self._clients = clients
        self._warm = time.perf_counter() + min(1.0, seconds / 4)
        self._end = self._warm + seconds
        self._seconds = seconds
        self.done = asyncio.get_running_loop().create_future()

    def next_request(self) -> bytes:
        self.sent += 1
        return self._made[self.sent % BODIES]

    def finished(self, latency: float) -> bool:
        now = time.perf_counter()
        if now < self._warm:
            return False
        self.latencies.append(latency)
        if now < self._end:
            return False
        self._clients -= 1
        if not self._clients:
            self.done.set_result(None)
        return True


async def run_load(port: int, concurrency: int, seconds: float, stream: bool) -> None:
    load = Load(seconds, requests(stream), concurrency)
    loop = asyncio.get_running_loop()
    for _ in range(concurrency):
        await loop.create_connection(lambda: Client(load), "127.0.0.1", port)
    await load.done
    figures = {
        "requests": load.sent,
        "rps": len(load.latencies) / seconds,
        "p50_ms": 1000 * statistics.median(load.latencies),
    }
    print(json.dumps(figures), flush=True)


# --- the gateway --------------------------------------------------------------------------------------------


async def serve_gateway(port: int, upstream: int, dialect: str) -> None:
    from gateway.app import Gateway
    from gateway.config import GatewayConfig
    from gateway.telemetry.metrics import PARTS
    from policies import load_policy

    tenants = "\n".join(f"  t{i}: {{keys: [{{plain: key-{i}}}]}}" for i in range(TENANTS))
    policy = load_policy(POLICY.format(tenants=tenants, port=upstream, dialect=dialect))
    with tempfile.TemporaryDirectory() as folder:
        gateway = Gateway(GatewayConfig(port=port, runtime_dir=Path(folder)), policy)
        await gateway.start()
        pool = gateway.pools["chat"]
        await pool.wait_ready(1, 10)
        for _ in range(200):
            if dialect != "bundled" or "chat" in gateway.services.texts:
                break
            await asyncio.sleep(0.05)
        gc.collect()
        gc.freeze()  # as `warmfront serve` does once it is ready
        print("up", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        enforced = [entry for entry in gateway.ledger.recent(100) if entry.edits and entry.bypass is None]
        steps = {name: _mean_us(entry.parts[i] for entry in enforced) for i, name in enumerate(PARTS[:5])}
        print(json.dumps({"enforced": len(enforced), "steps_us": steps}), flush=True)
        await gateway.stop()


def _mean_us(seconds: Iterable[float]) -> float:
    values = list(seconds)
    return round(1e6 * sum(values) / len(values), 1) if values else 0.0


# --- the run ------------------------------------------------------------------------------------------------


def _role(core: int, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--core", str(core), *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _started(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if line.strip() != "up":
        raise SystemExit(f"a process did not start: {line!r}")
    return process


def _load(core: int, port: int, concurrency: int, seconds: float, stream: bool) -> dict[str, float]:
    words = [
        "--role",
        "load",
        "--port",
        str(port),
        "--concurrency",
        str(concurrency),
        "--seconds",
        str(seconds),
    ]
    done = _role(core, *words, *(["--stream"] if stream else []))
    out, _ = done.communicate(timeout=seconds + 60)
    if done.returncode:
        raise SystemExit("the loader failed")
    figures: dict[str, float] = json.loads(out)
    return figures


def measure(dialect: str, seconds: float, runs: int, model_dir: str) -> list[dict[str, Any]]:
    """Rows for one kind of upstream."""
    cores = sorted(os.sched_getaffinity(0))
    gateway_core, other_core = cores[0], cores[-1]
    stub_port, gateway_port = _free_port(), _free_port()
    words = ["--role", "stub", "--port", str(stub_port), "--model-dir", model_dir]
    stub = _started(_role(other_core, *words))
    words = [
        "--role",
        "gateway",
        "--port",
        str(gateway_port),
        "--upstream",
        str(stub_port),
        "--dialect",
        dialect,
    ]
    gateway = _started(_role(gateway_core, *words))
    kind = "tokens" if dialect == "bundled" else "text"
    rows: list[dict[str, Any]] = []
    try:
        for stream in (False, True):
            shape = f"{kind}, {'streamed' if stream else 'whole'}"
            direct1 = [_load(other_core, stub_port, 1, seconds / 2, stream) for _ in range(runs)]
            ours1 = [_load(other_core, gateway_port, 1, seconds, stream) for _ in range(runs)]
            spent = _cpu_s(stub.pid)
            direct16 = [_load(other_core, stub_port, 16, seconds / 2, stream) for _ in range(runs)]
            stub_ms = 1000 * (_cpu_s(stub.pid) - spent) / sum(run["requests"] for run in direct16)
            ours16 = []
            costs = []
            for _ in range(runs):
                spent = _cpu_s(gateway.pid)
                ours16.append(_load(other_core, gateway_port, 16, seconds, stream))
                costs.append(1000 * (_cpu_s(gateway.pid) - spent) / ours16[-1]["requests"])
            base = statistics.median(run["p50_ms"] for run in direct1)
            added = [run["p50_ms"] - base for run in ours1]
            rates = [run["rps"] for run in ours16]
            direct = statistics.median(run["rps"] for run in direct16)
            rows.append(_row(f"added latency p50, {shape}", "ms", added, base, "<=", 1.0))
            rows.append(_row(f"requests/s at 16, {shape}", "1/s", rates, direct, ">=", 1200.0))
            rows.append(_row(f"CPU per request at 16, {shape}", "ms", costs, stub_ms, "<=", 1000 / 1200))
            times = direct / statistics.median(rates)
            rows.append(_row(f"stub and loader alone / gateway, {shape}", "x", [times], 1.0, ">=", 5.0))
    finally:
        out, _ = gateway.communicate(timeout=30)
        stub.kill()
        stub.wait()
    if not json.loads(out.strip().splitlines()[-1])["enforced"]:
        raise SystemExit("invalid: the gateway edited nothing")
    return rows


def _row(name: str, unit: str, values: list[float], peer: float, op: str, limit: float) -> dict[str, Any]:
    ours = statistics.median(values)
    ok = ours <= limit if op == "<=" else ours >= limit
    return {
        "name": name,
        "unit": unit,
        "ours": round(ours, 3),
        "spread": [round(min(values), 3), round(max(values), 3)],
        "peer": round(peer, 4),
        "limit": limit,
        "ratio": round(ours / peer, 4),
        "must": {"op": op, "value": limit},
        "ok": ok,
    }


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one measurement (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="measurements of each figure (%(default)s)")
    parser.add_argument("--only", choices=("text", "tokens"), help="one kind of upstream")
    hidden = ("--role", "--core", "--port", "--upstream", "--dialect", "--model-dir", "--concurrency")
    for name in hidden:
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--stream", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {int(args.core)})
    if args.role == "stub":
        uvloop.run(serve_stub(int(args.port), args.model_dir or ""))
    elif args.role == "gateway":
        uvloop.run(serve_gateway(int(args.port), int(args.upstream), args.dialect))
    elif args.role == "load":
        uvloop.run(run_load(int(args.port), int(args.concurrency), args.seconds, args.stream))
    else:
        return report(args)
    return 0


def _corpus() -> str:
    """Text like the requests', so that the trained tokenizer has about four characters a token."""
    return " ".join(raw.decode() for raw in requests(stream=False)[:TENANTS])


def report(args: argparse.Namespace) -> int:
    """Measure, print the table, write the file; 1 when a row is not ok."""
    from tiny_model import write_tiny_model

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model_dir = str(write_tiny_model(Path(folder) / "model", _corpus()))
        for kind, dialect in (("text", "openai"), ("tokens", "bundled")):
            if args.only in (None, kind):
                rows += measure(dialect, args.seconds, args.runs, model_dir)
    print(f"{'':52} {'ours':>10} {'spread':>20} {'stub alone':>10} {'must':>10}")
    for row in rows:
        spread = f"({row['spread'][0]:g}-{row['spread'][1]:g})"
        must = f"{row['must']['op']} {round(row['must']['value'], 3):g}"
        mark = "ok" if row["ok"] else "NOT MET"
        print(f"{row['name']:52} {row['ours']:>10.2f} {spread:>20} {row['peer']:>10.2f} {must:>10} {mark}")
    if args.json:
        processor = platform.processor() or platform.machine()
        machine = f"{processor}, {os.cpu_count()} cores, Python {sys.version.split()[0]}"
        command = " ".join(["python", "tests/bench/gateway_alone.py", *sys.argv[1:]])
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        document = {"machine": machine, "command": command, "date": date, "rows": rows}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
