"""Runs a workload against a base URL, closed loop (fixed concurrency) or open loop (Poisson or constant
arrivals).

Always holds: a conversation's turns run in order, each with the replies before it; in a closed loop
never more than `concurrency` requests are in flight; in an open loop arrivals do not wait for
completions.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from gateway.bench.client import Measured, send
from gateway.bench.workload import Conversation

Progress = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to send: base URL with or without `/v1`, model, and either concurrency (closed) or rate_per_s
    (open).
    """

    base_url: str
    model: str
    concurrency: int = 2
    rate_per_s: float | None = None
    arrivals: str = "poisson"
    api_key: str | None = None
    temperature: float = 0.0
    timeout_s: float = 600.0
    seed: int = 7


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All measurements in order of completion, and the wall time from first send to last byte, in seconds."""

    requests: tuple[Measured, ...]
    wall_s: float


def chat_url(base_url: str) -> str:
    """Return the chat-completions URL for a base URL given with or without its `/v1`."""
    base = base_url.rstrip("/")
    return f"{base}/chat/completions" if base.endswith("/v1") else f"{base}/v1/chat/completions"


async def run_load(
    conversations: Sequence[Conversation], options: LoadOptions, progress: Progress | None = None
) -> LoadResult:
    """Send every conversation and return the measurements. `progress(done, total, failed)` is called per
    request.
    """
    total = sum(len(item.turns) for item in conversations)
    measured: list[Measured] = []
    failed = 0
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def converse(conversation: Conversation) -> None:
            nonlocal failed
            messages: list[dict[str, Any]] = []
            for number, turn in enumerate(conversation.turns):
                body = _body(conversation, number, messages, options)
                headers = {"Content-Type": "application/json", **conversation.headers}
                key = conversation.api_key or options.api_key
                if key:
                    headers["Authorization"] = f"Bearer {key}"
                result = await send(
                    session,
                    chat_url(options.base_url),
                    body,
                    headers,
                    conversation=conversation.id,
                    turn=number,
                    timeout_s=options.timeout_s,
                )
                measured.append(result)
                failed += not result.ok
                if progress is not None:
                    progress(len(measured), total, failed)
                messages += [
                    {"role": "user", "content": turn.user},
                    {"role": "assistant", "content": result.text},
                ]

        started = time.perf_counter()
        if options.rate_per_s is None:
            await _closed_loop(conversations, converse, options.concurrency)
        else:
            await _open_loop(conversations, converse, options)
        return LoadResult(tuple(measured), time.perf_counter() - started)


def _body(
    conversation: Conversation, number: int, history: list[dict[str, Any]], options: LoadOptions
) -> dict[str, Any]:
    turn = conversation.turns[number]
    if "messages" in conversation.fields:
        return {"model": options.model, **conversation.fields}
    messages = [{"role": "system", "content": turn.system}] if turn.system is not None else []
    return {
        "model": options.model,
        "messages": [*messages, *history, {"role": "user", "content": turn.user}],
        "max_tokens": turn.max_tokens,
        "temperature": options.temperature,
        **conversation.fields,
    }


async def _closed_loop(conversations: Sequence[Conversation], converse: Any, concurrency: int) -> None:
    waiting = iter(conversations)

    async def worker() -> None:
        for conversation in waiting:
            await converse(conversation)

    await asyncio.gather(*(worker() for _ in range(max(1, concurrency))))


async def _open_loop(conversations: Sequence[Conversation], converse: Any, options: LoadOptions) -> None:
    rng = random.Random(options.seed)
    rate = options.rate_per_s or 1.0
    tasks = []
    due = time.perf_counter()
    for conversation in conversations:
        delay = due - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(converse(conversation)))
        due += rng.expovariate(rate) if options.arrivals == "poisson" else 1.0 / rate
    await asyncio.gather(*tasks)
