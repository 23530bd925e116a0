"""Sends one streaming chat request and times it. Owns what a measured request is.

Always holds: time to first token is taken at the first non-empty content, never at a role-only chunk; a
failed request has `error` set and no timings are made up for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson


@dataclass(slots=True)
class Measured:
    """One request as the client saw it. Times in seconds; `started` is time.perf_counter() at sending."""

    conversation: str
    turn: int
    started: float
    status: int = 0
    error: str | None = None
    ttft_s: float | None = None
    total_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    replica: str = ""
    text: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when the stream ended well."""
        return self.error is None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first, or None with fewer than two tokens."""
        if self.ttft_s is None or self.total_s is None or self.output_tokens < 2:
            return None
        return (self.total_s - self.ttft_s) / (self.output_tokens - 1)


async def send(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    *,
    conversation: str,
    turn: int,
    timeout_s: float = 600.0,
) -> Measured:
    """POST `body` as a stream to `url` (the full chat-completions URL) and return its measurement. Never
    raises for what the server does.
    """
    payload = orjson.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    result = Measured(conversation, turn, time.perf_counter(), messages=body["messages"])
    try:
        async with asyncio.timeout(timeout_s):
            async with session.post(url, data=payload, headers=headers) as response:
                result.status = response.status
                result.replica = response.headers.get("x-warmfront-replica", "")
                if response.status != 200:
                    result.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                    return result
                await _read_stream(response, result)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.total_s = time.perf_counter() - result.started
    return result


async def _read_stream(response: aiohttp.ClientResponse, result: Measured) -> None:
    pieces: list[str] = []
    last = 0.0
    done = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        event = orjson.loads(data)
        if "error" in event:
            result.error = f"stream error: {event['error'].get('message')}"
            return
        usage = event.get("usage")
        if usage:
            result.prompt_tokens = usage.get("prompt_tokens", 0)
            result.output_tokens = usage.get("completion_tokens", 0)
            result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in event.get("choices", ()):
            content = (choice.get("delta") or {}).get("content")
            if content:
                now = time.perf_counter()
                if result.ttft_s is None:
                    result.ttft_s = now - result.started
                else:
                    result.gaps_s.append(now - last)
                last = now
                pieces.append(content)
    result.text = "".join(pieces)
    if not done:
        result.error = "stream ended without [DONE]"
