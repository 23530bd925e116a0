"""The step process as the front sees it: started, spoken to, watched.

Owns the child process and the one socket to it. Always holds: reading never blocks the loop; every
registered request gets its tokens or one failure; once the child has exited nothing can be submitted and
`failed` is set, so that the front can end and be restarted as a whole; each stats query has one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import deque
from typing import Any, TypeVar

import zmq

from engine.config import EngineConfig, cpu_flags, step_environment
from engine.core.pins import PinSpec
from engine.core.request import Request
from engine.core.sequence import TokenOutput
from engine.worker import wire
from engine.worker.front.errors import ApiError, unavailable
from engine.worker.front.inbox import Inbox

log = logging.getLogger("engine.front")
T = TypeVar("T")
ANSWER_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0


def refusal(code: str, message: str) -> ApiError:
    """The HTTP form of a request that the step process refused or failed."""
    status = {"queue_full": 429, "deadline_exceeded": 504, "step_failed": 500}.get(code, 400)
    param = "messages" if code == "context_length_exceeded" else None
    return ApiError(status, message, param=param, code=code)


class StepClient:
    """Starts the step process and exchanges messages with it on the running event loop."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._context = zmq.Context(1)
        self._socket = self._context.socket(zmq.PAIR)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._routes: dict[str, tuple[Inbox, int]] = {}
        self._stats_waiters: deque[asyncio.Future[dict[str, Any]]] = deque()  # one for each query sent
        self._pin_waiters: list[asyncio.Future[tuple[dict[str, Any], ...]]] = []
        self._pin_lock = asyncio.Lock()
        self._stopping = False
        self._heard_at = time.monotonic()
        self.info: dict[str, Any] | None = None
        self.stats: dict[str, Any] = {}
        self.pins: tuple[dict[str, Any], ...] = ()
        self.ready = asyncio.Event()
        self.failed = asyncio.Event()

    @property
    def active_requests(self) -> int:
        """Engine requests that have not finished."""
        return len(self._routes)

    def silence_s(self) -> float:
        """Seconds since the last message of the step process, those that wait to be read included."""
        self._drain()
        return time.monotonic() - self._heard_at

    async def start(self) -> None:
        """Bind the socket and start the child; returns before the model is loaded (see `ready`).

        The child has a session of its own, so that an interrupt from a terminal lets it finish its streams.
        """
        loop = asyncio.get_running_loop()
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        endpoint = self._config.command_endpoint
        self._socket.bind(endpoint)
        os.chmod(endpoint.removeprefix("ipc://"), 0o600)
        loop.add_reader(self._descriptor, self._drain)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "engine.worker.step_main",
            self._config.to_json(),
            env=step_environment(self._config, os.environ, cpu_flags()),
            start_new_session=True,
        )
        self._watch = asyncio.create_task(self._watch_child(self._process))

    def submit(self, inbox: Inbox, index: int, request: Request) -> None:
        """Queue a request; its tokens arrive in `inbox` as choice `index`."""
        if self.failed.is_set():
            inbox.fail(unavailable("The engine has stopped.", "engine_stopped"))
            return
        self._routes[request.request_id] = (inbox, index)
        self._send(wire.Add(request))

    def abort(self, request_id: str) -> None:
        """Forget a request; tokens of it that are on their way are dropped."""
        if self._routes.pop(request_id, None) is not None and not self.failed.is_set():
            self._send(wire.Abort(request_id))

    def fail_all(self, error: ApiError) -> None:
        """End every request with an error."""
        for inbox, _ in self._routes.values():
            inbox.fail(error)
        self._routes.clear()

    async def query_stats(self) -> dict[str, Any]:
        """The fields of `CacheStats`, as they are after everything sent so far."""
        return await self._answer(asyncio.shield(self._ask_stats()))

    async def recent_stats(self, within_s: float) -> dict[str, Any]:
        """The fields of `CacheStats`: fresh if the step process answers in time, else the last it told."""
        waiters = self._stats_waiters
        future = waiters[-1] if waiters else self._ask_stats()  # a silent process is asked once
        await asyncio.wait({future}, timeout=within_s)
        return future.result() if future.done() else self.stats

    async def clear_cache(self) -> dict[str, Any]:
        """Drop every cached block; returns the stats after it."""
        self._send(wire.ClearCache())
        return await self.query_stats()

    async def pin(self, spec: PinSpec) -> tuple[dict[str, Any], ...]:
        """Create or refresh a pin; returns every pin's status."""
        return await self._change_pins(wire.PinPrefix(spec))

    async def unpin(self, pin_id: str) -> tuple[dict[str, Any], ...]:
        """Release a pin; returns the pins that are left."""
        return await self._change_pins(wire.Unpin(pin_id))

    async def stop(self) -> None:
        """Ask the child to leave, then insist. Safe to call twice."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            if self.ready.is_set():
                self._send(wire.Shutdown())
            else:
                process.terminate()
            for insist in (process.terminate, process.kill):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
                    break
                insist()
            await process.wait()
        if self._watch is not None:
            await self._watch
        if not self._socket.closed:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._socket.close()
            self._context.term()

    def _ask_stats(self) -> asyncio.Future[dict[str, Any]]:
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.exception())  # whoever waited may have given up
        self._stats_waiters.append(future)
        self._send(wire.QueryStats())
        return future

    async def _change_pins(self, command: wire.Command) -> tuple[dict[str, Any], ...]:
        async with self._pin_lock:
            future: asyncio.Future[tuple[dict[str, Any], ...]] = asyncio.get_running_loop().create_future()
            self._pin_waiters.append(future)
            self._send(command)
            return await self._answer(future)

    async def _answer(self, future: asyncio.Future[T]) -> T:
        if self.failed.is_set():
            raise unavailable("The engine has stopped.", "engine_stopped")
        try:
            return await asyncio.wait_for(future, ANSWER_TIMEOUT_S)
        except TimeoutError as error:
            raise unavailable("The engine did not answer in time.", "engine_timeout") from error

    def _send(self, command: wire.Command) -> None:
        if self._socket.closed:
            return
        self._socket.send(wire.encode_command(command), zmq.NOBLOCK, copy=True)
        # A send can consume the edge that would have announced a message, so look again.
        asyncio.get_running_loop().call_soon(self._drain)

    def _drain(self) -> None:
        while not self._socket.closed:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard_at = time.monotonic()
            try:
                self._take(wire.decode_report(data))
            except wire.WireError:
                log.exception("unreadable message from the step process")

    def _take(self, report: wire.Report) -> None:
        match report:
            case wire.Tokens(outputs):
                for output in outputs:
                    self._deliver(output)
            case wire.Stats(values, answer):
                self.stats = values
                if answer and self._stats_waiters:
                    self._stats_waiters.popleft().set_result(values)
            case wire.Pins(pins):
                self.pins = pins
                _resolve(self._pin_waiters, pins)
            case wire.Ready(info):
                self.info = info
                self.ready.set()
            case wire.Failed(request_id, message, code):
                self._fail_one(request_id, refusal(code, message))

    def _deliver(self, output: TokenOutput) -> None:
        route = self._routes.get(output.request_id)
        if route is None:
            return
        inbox, index = route
        if output.finish_reason is not None:
            del self._routes[output.request_id]
        if output.finish_reason in ("error", "abort"):
            inbox.fail(refusal("step_failed", output.message or "The engine ended this request."))
        else:
            inbox.put(index, output)

    def _fail_one(self, request_id: str | None, error: ApiError) -> None:
        route = None if request_id is None else self._routes.pop(request_id, None)
        if route is not None:
            route[0].fail(error)
            return
        _reject(self._pin_waiters, error)
        log.warning("the step process reports: %s", error.message)

    async def _watch_child(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        self._drain()
        self.ready.clear()
        self.failed.set()
        if not self._stopping:
            log.error("the step process ended with code %s; %d requests fail", code, len(self._routes))
        error = ApiError(
            500, "The engine stopped while this request ran. Please retry.", code="engine_stopped"
        )
        self.fail_all(error)
        _reject(self._stats_waiters, error)
        _reject(self._pin_waiters, error)


def _reject(waiters: list[asyncio.Future[T]] | deque[asyncio.Future[T]], error: ApiError) -> None:
    for future in waiters:
        if not future.done():
            future.set_exception(error)
    waiters.clear()


def _resolve(waiters: list[asyncio.Future[T]], value: T) -> None:
    for future in waiters:
        if not future.done():
            future.set_result(value)
    waiters.clear()
