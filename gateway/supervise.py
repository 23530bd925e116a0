"""Supervisor: runs the bundled replicas of a pool as child processes and keeps them running.

One `ReplicaProcess` per replica: start, relay what it says on stderr, mark the record starting / down,
restart with back-off. That a child ended is known from the operating system at once (its exit is
awaited), never from a poll; from that moment its record is down, so that its index entries are gone and
no request is sent there. Whether it *serves* is the monitor's question (`/health`), not asked here; but a
child that lives while its record says down for `stall_s` (stopped, or stuck in a step) is killed, so that
it starts again.

Must always hold: at most one live child per replica; after `stop` no child and no runtime directory is
left. Every child has its own process group, killed as a whole, so that a front process killed alone
leaves no step process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gateway.routing.replica import Replica

_log = logging.getLogger(__name__)
_LOG_BYTES = 8 * 1024 * 1024
_LINE_BYTES = 64 * 1024
STALL_S = 60.0

Progress = Callable[[str, str], None]  # (replica id, one line of its stderr)


@dataclass(frozen=True, slots=True)
class BundledSpec:
    """What every bundled replica of a pool is started with.

    model_dir: directory of weights and tokenizer. served_name: the model name that clients use. threads: per
    replica; None divides the cores that this process may use. arguments: appended to the command line.
    """

    pool: str
    model_dir: str
    served_name: str
    replicas: int = 2
    dtype: str = "auto"
    mode: str = "fast"
    threads: int | None = None
    kv_tokens: int | None = None
    max_seqs: int | None = None
    arguments: tuple[str, ...] = ()
    command: tuple[str, ...] = (sys.executable, "-m", "engine", "serve")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delay before the n-th restart in a row: `first_s` doubled each time, up to `limit_s`.

    A child that lived for `healthy_s` starts the row anew.
    """

    first_s: float = 0.5
    limit_s: float = 30.0
    healthy_s: float = 60.0

    def delay_s(self, restarts_in_a_row: int) -> float:
        return float(min(self.limit_s, self.first_s * 2 ** min(restarts_in_a_row, 16)))


def threads_per_replica(replicas: int) -> int:
    """Cores that this process may use, divided evenly: replicas that share a core slow each other down."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, replicas))


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_runtime_dir() -> Path:
    """A fresh directory (mode 0700) for sockets and logs, under XDG_RUNTIME_DIR or the temporary
    directory.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base is not None and not os.access(base, os.W_OK):
        base = None
    return Path(tempfile.mkdtemp(prefix="warmfront-", dir=base))


class ReplicaProcess:
    """One supervised child and its record. `run` is the whole life; `stop` ends it."""

    def __init__(
        self,
        replica: Replica,
        spec: BundledSpec,
        runtime_dir: Path,
        *,
        backoff: Backoff,
        on_progress: Progress,
        stall_s: float = STALL_S,
    ) -> None:
        self.replica = replica
        self.restarts = 0
        self.log_path = runtime_dir / f"{_file_name(replica.id)}.log"
        self._spec = spec
        self._runtime_dir = runtime_dir
        self._backoff = backoff
        self._on_progress = on_progress
        self._stall_s = stall_s
        self._down_s = 0.0
        self._child: asyncio.subprocess.Process | None = None
        self._last_line = ""
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Process id of the live child; None between two lives."""
        child = self._child
        return child.pid if child is not None and child.returncode is None else None

    async def run(self) -> None:
        """Start the child, and start it again whenever it ends, until `stop`."""
        in_a_row = 0
        while not self._stopping:
            began = time.monotonic()
            try:
                reason = await self._live()
            except OSError as error:
                reason = f"cannot start: {error}"
            if self._stopping:
                return
            if time.monotonic() - began - self._down_s >= self._backoff.healthy_s:
                in_a_row = 0
            delay_s = self._backoff.delay_s(in_a_row)
            in_a_row += 1
            self.restarts += 1
            _log.warning("%s %s; restarting in %.1f s", self.replica.id, reason, delay_s)
            self.replica.mark_down(reason)
            self.replica.reason = reason
            await asyncio.sleep(delay_s)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL to its whole group after `grace_s` seconds at the latest."""
        self._stopping = True
        child = self._child
        if child is not None:
            if child.returncode is None:
                _signal_group(child.pid, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await child.wait()
            _signal_group(child.pid, signal.SIGKILL)
            await child.wait()
        self.replica.mark_down("stopped")
        self.replica.reason = "stopped"

    def command(self, port: int) -> list[str]:
        """The child's command line."""
        spec, name = self._spec, _file_name(self.replica.id)
        threads = spec.threads or threads_per_replica(spec.replicas)
        optional = {"--kv-tokens": spec.kv_tokens, "--max-seqs": spec.max_seqs}
        return [
            *spec.command,
            *("--model", spec.model_dir),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--name", name, "--served-model-name", spec.served_name),
            *("--dtype", spec.dtype, "--mode", spec.mode, "--threads", str(threads)),
            *("--events", f"ipc://{self._runtime_dir}/{name}.events"),
            *("--runtime-dir", str(self._runtime_dir), "--private"),
            *("--parent-pid", str(os.getpid())),
            *(word for flag, value in optional.items() if value is not None for word in (flag, str(value))),
            *spec.arguments,
        ]

    async def _live(self) -> str:
        """One life of the child, from start to exit; returns how it ended."""
        for stale in self._runtime_dir.glob(f"{_file_name(self.replica.id)}.events*"):
            stale.unlink(missing_ok=True)
        port = free_port()
        self.replica.base_url = f"http://127.0.0.1:{port}"
        read_end, write_end = os.pipe()
        try:
            # A pipe of our own: asyncio's would put off the child's exit until its descendants closed it too.
            child = await asyncio.create_subprocess_exec(
                *self.command(port),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=write_end,
                env=_environment(self._spec.threads or threads_per_replica(self._spec.replicas)),
                start_new_session=True,
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._child = child
        if self._stopping:
            _signal_group(child.pid, signal.SIGKILL)
        self.replica.mark_starting("loading")
        relay = asyncio.create_task(self._relay(read_end))
        stuck = asyncio.create_task(self._kill_when_stuck(child.pid))
        try:
            code = await child.wait()
            self.replica.mark_down(f"exited ({_exit_text(code)})")
            _signal_group(child.pid, signal.SIGKILL)  # what is left of its group
            await asyncio.wait({relay}, timeout=1.0)
        finally:
            relay.cancel()
            stuck.cancel()
            await asyncio.gather(relay, stuck, return_exceptions=True)
        if not stuck.cancelled():
            return stuck.result()
        said = f": {self._last_line}" if code > 0 and self._last_line else ""
        return f"exited ({_exit_text(code)}){said}"

    async def _kill_when_stuck(self, pid: int) -> str:
        """SIGKILL the group of a child that lives while its replica is down for `stall_s`; returns why.

        Seconds are counted in ticks, so that a pause of this process is not held against the child.
        """
        tick_s = min(1.0, self._stall_s / 10)
        self._down_s = 0.0
        while self._down_s < self._stall_s:
            await asyncio.sleep(tick_s)
            self._down_s = self._down_s + tick_s if self.replica.state == "down" else 0.0
        why = f"killed: it did not serve for {self._stall_s:g} s ({self.replica.reason})"
        _signal_group(pid, signal.SIGKILL)
        return why

    async def _relay(self, read_end: int) -> None:
        """Append the child's stderr to its log file and hand every line on."""
        stream = asyncio.StreamReader(limit=_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb", buffering=0)
        )
        try:
            while True:
                try:
                    line = await stream.readuntil(b"\n")
                except asyncio.IncompleteReadError as end:
                    line = end.partial
                except asyncio.LimitOverrunError as overrun:
                    line = await stream.read(max(1, overrun.consumed))
                if not line:
                    return
                self._said(line.decode("utf-8", "replace").rstrip())
        finally:
            transport.close()

    def _said(self, text: str) -> None:
        self._append(text)
        if text:
            self._last_line = text
            self._on_progress(self.replica.id, text)

    def _append(self, text: str) -> None:
        with contextlib.suppress(OSError):
            if self.log_path.exists() and self.log_path.stat().st_size > _LOG_BYTES:
                self.log_path.replace(self.log_path.with_suffix(".log.1"))
            with self.log_path.open("a", encoding="utf-8") as log:
                log.write(text + "\n")


class Supervisor:
    """The bundled replicas of one pool. Their records are `replicas`; monitors watch them like any other.

    `on_progress(replica_id, line)` gets every line that a replica writes to stderr. Without `runtime_dir`
    a fresh one is made and removed again at the end (logs included). A replica that lives but does not serve
    for `stall_s` seconds is killed and started again.
    """

    def __init__(
        self,
        spec: BundledSpec,
        *,
        runtime_dir: Path | None = None,
        backoff: Backoff | None = None,
        on_progress: Progress | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        self.spec = spec
        self.runtime_dir = runtime_dir or make_runtime_dir()
        self._owns_dir = runtime_dir is None
        self.replicas = [
            Replica(
                f"{spec.pool}-r{number}",
                pool=spec.pool,
                base_url="http://127.0.0.1:0",
                model=spec.served_name,
            )
            for number in range(spec.replicas)
        ]
        self.processes = [
            ReplicaProcess(
                replica,
                spec,
                self.runtime_dir,
                backoff=backoff or Backoff(),
                on_progress=on_progress or _ignore,
                stall_s=stall_s,
            )
            for replica in self.replicas
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start every replica; returns at once (`PoolState.wait_ready` waits until they serve)."""
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(process.run(), name=f"supervise {process.replica.id}")
                for process in self.processes
            ]

    async def stop(self, grace_s: float = 5.0) -> None:
        """Stop every replica: SIGTERM, then SIGKILL after `grace_s`. Idempotent."""
        await asyncio.gather(*(process.stop(grace_s) for process in self.processes))
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()  # it may wait for its next start
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._owns_dir:
            shutil.rmtree(self.runtime_dir, ignore_errors=True)

    def snapshot(self) -> list[dict[str, object]]:
        """For the admin plane: one row per child."""
        return [
            {"id": p.replica.id, "pid": p.pid, "restarts": p.restarts, "log": str(p.log_path)}
            for p in self.processes
        ]


def _ignore(replica_id: str, line: str) -> None:
    return None


def _file_name(replica_id: str) -> str:
    return "".join(char if char.isalnum() or char in "-_" else "_" for char in replica_id)


def _environment(threads: int) -> dict[str, str]:
    """The child's environment: its share of the cores, and threads that sleep while they wait."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _exit_text(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"code {code}"


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
