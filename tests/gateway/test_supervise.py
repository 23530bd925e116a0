"""Supervisor: start, relay, restart with back-off, stop; with a stub and with the engine's fake model."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import aiohttp
import pytest
import zmq.asyncio

from gateway.routing import NoReplica, PoolState, PrefixIndex, ReplicaMonitor, RouteQuery, Router
from gateway.routing.monitor import Probing
from gateway.supervise import (
    Backoff,
    BundledSpec,
    Supervisor,
    free_port,
    make_runtime_dir,
    threads_per_replica,
)

# A child that says what it was given, has a child of its own, and behaves as its last argument says.
STUB = """
import os, signal, subprocess, sys, time
print("args", *sys.argv[1:], file=sys.stderr, flush=True)
print("omp", os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"], file=sys.stderr, flush=True)
kind = sys.argv[-1]
if kind == "exit":
    sys.exit("no weights here")
if kind == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if kind == "long-line":
    sys.stderr.write("x" * 200_000 + "\\n")
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("grandchild", grandchild.pid, file=sys.stderr, flush=True)
time.sleep(60)
"""
QUICK = Backoff(first_s=0.05, limit_s=0.2)


async def until(condition, timeout_s: float = 8.0) -> None:
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never held")


def alive(pid: int) -> bool:
    """True while the process runs (a zombie does not)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def stub_spec(kind: str, replicas: int = 1) -> BundledSpec:
    return BundledSpec(
        pool="p",
        model_dir="/models/m",
        served_name="m",
        replicas=replicas,
        kv_tokens=4_096,
        arguments=(kind,),
        command=(sys.executable, "-c", STUB),
    )


@pytest.fixture
async def supervise(tmp_path):
    supervisors = []

    def start(spec: BundledSpec, **options) -> tuple[Supervisor, list[str]]:
        lines: list[str] = []
        supervisor = Supervisor(
            spec,
            runtime_dir=tmp_path,
            backoff=options.pop("backoff", QUICK),
            on_progress=lambda replica_id, line: lines.append(f"{replica_id} {line}"),
            **options,
        )
        supervisors.append(supervisor)
        supervisor.start()
        return supervisor, lines

    yield start
    for supervisor in supervisors:
        await supervisor.stop(grace_s=2.0)


def said(lines: list[str], word: str) -> list[str]:
    return [line for line in lines if f" {word} " in f"{line} "]


async def test_a_child_gets_its_settings_and_its_lines_are_relayed(supervise, tmp_path):
    supervisor, lines = supervise(stub_spec("sleep", replicas=2))
    await until(lambda: len(said(lines, "grandchild")) == 2)
    (line,) = [line for line in said(lines, "args") if line.startswith("p-r0")]
    words = line.split()
    port = words[words.index("--port") + 1]
    assert supervisor.replicas[0].base_url == f"http://127.0.0.1:{port}"
    assert words[words.index("--parent-pid") + 1] == str(os.getpid())
    assert words[words.index("--events") + 1] == f"ipc://{tmp_path}/p-r0.events"
    assert words[words.index("--kv-tokens") + 1] == "4096"
    assert "--max-seqs" not in words
    assert "--private" in words
    assert f"p-r0 omp {threads_per_replica(2)} PASSIVE" in lines
    assert (tmp_path / "p-r0.log").read_text().startswith("args --model /models/m")
    assert [row["restarts"] for row in supervisor.snapshot()] == [0, 0]
    assert supervisor.replicas[0].state == "starting"


async def test_stop_leaves_no_process(supervise):
    supervisor, lines = supervise(stub_spec("sleep"))
    await until(lambda: said(lines, "grandchild"))
    pid, grandchild = supervisor.processes[0].pid, int(lines[-1].split()[-1])
    assert pid is not None
    await supervisor.stop(grace_s=3.0)
    assert not alive(pid)
    await until(lambda: not alive(grandchild))
    assert supervisor.processes[0].pid is None
    assert (supervisor.replicas[0].state, supervisor.replicas[0].reason) == ("down", "stopped")
    await supervisor.stop()


async def test_a_child_that_ignores_sigterm_is_killed(supervise):
    supervisor, lines = supervise(stub_spec("stubborn"))
    await until(lambda: said(lines, "grandchild"))
    began = time.monotonic()
    await supervisor.stop(grace_s=0.2)
    assert time.monotonic() - began < 2.0
    await until(lambda: not alive(int(lines[-1].split()[-1])))


async def test_sigkill_is_seen_at_once_and_the_replica_starts_again(supervise):
    supervisor, lines = supervise(stub_spec("sleep"))
    replica, process = supervisor.replicas[0], supervisor.processes[0]
    await until(lambda: said(lines, "grandchild"))
    replica.mark_ready()
    work = replica.promise(100, 1)
    changes: list[tuple[str, float]] = []
    replica.listen(lambda r: changes.append((r.state, time.monotonic())))
    first, grandchild = process.pid, int(lines[-1].split()[-1])
    killed = time.monotonic()
    os.kill(first, signal.SIGKILL)
    await until(lambda: process.pid not in (None, first))
    assert [state for state, _ in changes] == ["down", "starting"]
    assert changes[0][1] - killed < 0.2
    assert replica.inflight == 0
    replica.release(work)
    await until(lambda: not alive(grandchild))
    assert process.restarts == 1


async def test_a_child_that_lives_and_does_not_serve_is_killed(supervise):
    supervisor, lines = supervise(stub_spec("sleep"), stall_s=0.4)
    replica, process = supervisor.replicas[0], supervisor.processes[0]
    await until(lambda: said(lines, "grandchild"))
    replica.mark_ready()
    first = process.pid
    os.killpg(first, signal.SIGSTOP)
    replica.mark_stalled()
    await asyncio.sleep(0.2)
    replica.mark_ready()
    await asyncio.sleep(0.5)
    assert process.pid == first, "it came back in time"
    reasons: list[str] = []
    replica.listen(lambda r: reasons.append(r.reason))
    replica.mark_stalled()
    await until(lambda: process.pid not in (None, first))
    assert not alive(first)
    assert reasons[:2] == ["stalled", "exited (SIGKILL)"]
    assert (process.restarts, replica.state) == (1, "starting")


async def test_time_without_service_is_no_healthy_life(supervise):
    backoff = Backoff(first_s=0.05, limit_s=30.0, healthy_s=0.3)
    supervisor, lines = supervise(stub_spec("sleep"), stall_s=0.4, backoff=backoff)
    replica, process = supervisor.replicas[0], supervisor.processes[0]
    replica.listen(lambda r: r.state == "starting" and r.mark_down("TimeoutError"))
    await until(lambda: said(lines, "grandchild"))
    replica.mark_down("TimeoutError")
    await until(lambda: process.restarts == 3)
    assert "killed: it did not serve for 0.4 s (TimeoutError)" in replica.reason
    await asyncio.sleep(0.1)
    assert process.pid is None, "the third wait is 0.2 s, not 0.05 s"


async def test_a_child_that_cannot_start_is_retried_ever_more_slowly(supervise):
    supervisor, _ = supervise(stub_spec("exit"), backoff=Backoff(first_s=0.05, limit_s=0.4))
    process = supervisor.processes[0]
    await until(lambda: process.restarts >= 3)
    assert supervisor.replicas[0].state in ("down", "starting")
    assert "no weights here" in process.log_path.read_text()


async def test_the_reason_is_what_it_said_last(supervise):
    supervisor, _ = supervise(stub_spec("exit"), backoff=Backoff(first_s=30.0))
    await until(lambda: supervisor.replicas[0].reason == "exited (code 1): no weights here")


async def test_a_command_that_does_not_exist(supervise):
    spec = BundledSpec(pool="p", model_dir="m", served_name="m", replicas=1, command=("/no/such/program",))
    supervisor, _ = supervise(spec, backoff=Backoff(first_s=30.0))
    await until(lambda: supervisor.replicas[0].state == "down")
    assert "cannot start" in supervisor.replicas[0].reason


async def test_an_endless_line_does_not_stop_the_relay(supervise):
    _, lines = supervise(stub_spec("long-line"))
    await until(lambda: said(lines, "grandchild"))


def test_backoff_doubles_up_to_its_limit():
    backoff = Backoff()
    assert [backoff.delay_s(n) for n in (0, 1, 2, 5, 6, 1_000)] == [0.5, 1.0, 2.0, 16.0, 30.0, 30.0]


def test_threads_share_the_cores():
    cores = len(os.sched_getaffinity(0))
    assert threads_per_replica(1) == cores
    assert threads_per_replica(1_000) == 1


def test_runtime_dir_is_private(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = make_runtime_dir()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/no/such/folder")
    elsewhere = make_runtime_dir()
    assert elsewhere.exists()
    elsewhere.rmdir()


async def test_an_own_runtime_dir_is_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    supervisor = Supervisor(stub_spec("sleep"))
    assert supervisor.runtime_dir.exists()
    await supervisor.stop()
    assert not supervisor.runtime_dir.exists()


def test_free_port_is_free():
    assert 1_024 <= free_port() <= 65_535


# ---- with the engine ----


async def test_a_killed_engine_is_routed_around_restarted_and_forgotten(supervise):
    """Two fake-model replicas: one is killed with SIGKILL while it streams; the other serves on."""
    spec = BundledSpec(
        pool="p", model_dir="", served_name="fake", arguments=("--fake", "--fake-decode-ms", "20")
    )
    supervisor, _ = supervise(spec)
    pool, index = PoolState("p", supervisor.replicas), PrefixIndex()
    router, context = Router(index), zmq.asyncio.Context()
    async with aiohttp.ClientSession() as session:
        probing = Probing(interval_s=0.2, waiting_s=0.1)
        monitors = [
            ReplicaMonitor(replica, session, index, context=context, probing=probing)
            for replica in pool.replicas.values()
        ]
        for monitor in monitors:
            monitor.start()
        assert await pool.wait_ready(2, timeout_s=20.0)
        victim, other = supervisor.replicas
        for replica in (victim, other):
            await complete(session, replica.base_url, max_tokens=4)
            await until(lambda replica=replica: index.blocks(replica.id) > 0)
        streaming = asyncio.create_task(complete(session, victim.base_url, max_tokens=400))
        await asyncio.sleep(0.3)
        pid = supervisor.processes[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: victim.state == "down", timeout_s=1.0)
        assert index.blocks(victim.id) == 0
        assert index.blocks(other.id) > 0
        assert router.choose(pool, RouteQuery(tokens=10)).replica is other
        with pytest.raises(NoReplica):
            router.choose(pool, RouteQuery(tokens=10), frozenset({other.id}))
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await streaming
        await complete(session, other.base_url, max_tokens=4)
        assert await pool.wait_ready(2, timeout_s=20.0)
        await complete(session, victim.base_url, max_tokens=4)
        await until(lambda: index.blocks(victim.id) > 0)
        index.check()
        await asyncio.gather(*(monitor.stop() for monitor in monitors))
    context.destroy(linger=0)


async def complete(session: aiohttp.ClientSession, base_url: str, *, max_tokens: int) -> str:
    """One streamed completion, read to its end."""
    body = {
        "model": "fake",
        "prompt": "warm " * 40,
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
    }
    async with session.post(base_url + "/v1/completions", json=body) as response:
        text = await response.text()
        assert response.status == 200, text
        return text
