"""The life of one front process: start, serve, drain, stop.

Owns the process-wide things: signals, the runtime directory (mode 0700), the listener, and the child.
Always holds: the front ends when its parent, its step process or its operator says so, and never leaves a
child or a socket file behind; it exits 0 after SIGTERM and 1 when the step process died, so that a
supervisor restarts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from engine.config import EngineConfig
from engine.worker.front.app import build_app
from engine.worker.front.bytemodel import END_ID, FIRST_PRINTABLE_ID, VOCAB_ROWS
from engine.worker.front.errors import unavailable
from engine.worker.front.service import FrontSettings, Service
from engine.worker.front.step_client import StepClient
from engine.worker.front.text_files import load_text_model

log = logging.getLogger("engine.front")
PARENT_POLL_S = 1.0
FAILURE_GRACE_S = 2.0
SOCKET_PATH_BYTES = 100
_PR_SET_PDEATHSIG = 1


def run(config: EngineConfig, settings: FrontSettings, *, parent_pid: int | None = None) -> int:
    """Serve until told to stop; the process's exit code."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {config.name} %(levelname)s %(message)s"
    )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    with _runtime_dir(config.runtime_dir) as folder:
        completed = _completed(config, folder)
        try:
            return uvloop.run(_serve(completed, settings, parent_pid))
        finally:
            for endpoint in (completed.command_endpoint, completed.events, completed.replay_endpoint):
                if endpoint.startswith("ipc://"):
                    Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


def _completed(config: EngineConfig, folder: str) -> EngineConfig:
    """The settings that follow from others: names, sockets, and the fake model's shape."""
    events = f"ipc://{folder}/{config.name}-events.sock" if config.events == "auto" else config.events
    served = config.served_model_name or (Path(config.model_dir).name if config.model_dir else "fake")
    changed = dataclasses.replace(config, runtime_dir=folder, events=events, served_model_name=served)
    for endpoint in (changed.command_endpoint, changed.events, changed.replay_endpoint):
        if endpoint.startswith("ipc://") and len(os.fsencode(endpoint)) - 6 > SOCKET_PATH_BYTES:
            raise SystemExit(f"error: socket path too long, choose a shorter --runtime-dir: {endpoint}")
    if config.fake and not config.model_dir:
        eos = END_ID if config.fake_mean_output else -1
        return dataclasses.replace(
            changed, fake_vocab_size=VOCAB_ROWS, fake_first_token=FIRST_PRINTABLE_ID, fake_eos_id=eos
        )
    return changed


@contextlib.contextmanager
def _runtime_dir(given: str) -> Iterator[str]:
    """A private directory for sockets: `given`, or a temporary one that goes at the end."""
    if given:
        Path(given).mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(given, 0o700)
        yield str(Path(given).resolve())
        return
    folder = tempfile.mkdtemp(prefix="warmfront-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _serve(config: EngineConfig, settings: FrontSettings, parent_pid: int | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    executor = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
    listener = _listener(config.host, config.port)
    config = dataclasses.replace(config, port=listener.getsockname()[1])
    text = None
    if config.fake and config.model_dir:
        text = await loop.run_in_executor(executor, load_text_model, config.model_dir)
        config = dataclasses.replace(config, fake_vocab_size=text.vocab_size)
    client = StepClient(config)
    service = Service(config, settings, client, executor)
    if text is not None:
        service.set_text_model(text)
    runner = web.AppRunner(
        build_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=FAILURE_GRACE_S
    )
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(stop.wait()),
        asyncio.create_task(client.failed.wait()),
    ]
    if parent_pid is not None:
        tasks.append(asyncio.create_task(_parent_gone(parent_pid)))
    try:
        await runner.setup()
        await web.SockSite(runner, listener).start()
        await client.start()
        loading = asyncio.create_task(_load(service, executor))
        print(f"engine {config.name}: listening on http://{config.host}:{config.port}", flush=True)
        await asyncio.wait([*tasks, loading], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
        elif (error := loading.exception()) is not None:
            log.error("the model can't be loaded: %s", error)
            return 1
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await _leave(client, runner, service)
    finally:
        for task in tasks:
            task.cancel()
        await runner.cleanup()
        await client.stop()
        executor.shutdown(wait=False, cancel_futures=True)


async def _load(service: Service, executor: ThreadPoolExecutor) -> None:
    if not service.has_text_model:
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(executor, load_text_model, service.config.model_dir)
        service.set_text_model(text)
    await service.client.ready.wait()
    log.info("ready: %s", service.config.served_model_name)


async def _leave(client: StepClient, runner: web.AppRunner, service: Service) -> int:
    """Let streams end: all of them on a stop, only their error events after a failure."""
    grace_s = FAILURE_GRACE_S if client.failed.is_set() else service.settings.grace_s
    log.info("stopping: %d requests still run", service.streams)
    for site in list(runner.sites):
        await site.stop()
    if await _idle(service, client, grace_s):
        return 1 if client.failed.is_set() else 0
    client.fail_all(unavailable("The engine is shutting down. Please retry.", "engine_stopping"))
    await _idle(service, client, FAILURE_GRACE_S)
    return 1 if client.failed.is_set() else 0


async def _idle(service: Service, client: StepClient, within_s: float) -> bool:
    """Wait until nothing is generated or the step process fails; False when neither came in time."""
    idle = asyncio.create_task(service.idle.wait())
    failed = asyncio.create_task(client.failed.wait())
    ends = [idle] if client.failed.is_set() else [idle, failed]
    done, _ = await asyncio.wait(ends, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    idle.cancel()
    failed.cancel()
    return bool(done)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SystemExit(f"error: can't listen on {host}:{port}: {error.strerror}") from error
    listener.listen(1024)
    listener.setblocking(False)
    return listener


async def _parent_gone(pid: int) -> None:
    """Returns when process `pid` has ended. The kernel's signal is asked for too if it is the parent."""
    if os.getppid() == pid and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        except PermissionError:
            pass
        await asyncio.sleep(PARENT_POLL_S)
