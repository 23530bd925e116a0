"""What each kind of upstream is told beside the request itself, and what is read from its answer.

Owns the table of dialects. Always holds: a dialect adds or replaces only the members named here, on the
body's own bytes; a client can set none of them for itself (the `warmfront` member that reaches a replica is
the gateway's, an `Authorization` header is the replica's); what was added only for the gateway is taken out
of the answer again.

| dialect | adds to the body                                                                     | prompt as |
|---------|--------------------------------------------------------------------------------------|-----------|
| bundled | `warmfront` {token_ids, seed, priority, deadline_ms, request_id}, `stream_options`,  | tokens    |
|         | `max_tokens` where the client gave no limit                                          |           |
| vllm    | `stream_options`, `priority` (the class's rank, lower is first; left out where the   | text      |
|         | server has no priority scheduling), `cache_salt` (the chain seed in hex)             |           |
| openai  | `stream_options`                                                                     | text      |

Taken out of the body: `warmfront` (every dialect), and for vllm what chooses another server or cache
(`_VLLM_OWNED`, `kv_transfer_params` inside `vllm_xargs` too). Every other member passes as it is. For
openai that includes `priority` and `cache_salt`: a plain OpenAI server ignores them, but a vLLM server
behind this dialect would obey them, so such a server must be declared as vllm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from gateway.upstream.json_splice import remove_member, set_member

_VLLM_OWNED = ("kv_transfer_params", "api_base", "base_url", "api_key")


@dataclass(frozen=True, slots=True)
class Dialect:
    """One row of the table above."""

    name: str
    tokens_in: bool
    """Takes token ids and a chain seed, and reports its timings."""
    info_path: str | None
    """Where the replica describes itself; None: nowhere."""


DIALECTS: dict[str, Dialect] = {
    "bundled": Dialect("bundled", tokens_in=True, info_path="/engine/info"),
    "vllm": Dialect("vllm", tokens_in=False, info_path=None),
    "openai": Dialect("openai", tokens_in=False, info_path=None),
}


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What a dialect needs to build one upstream body; `raw` are the bytes to forward, `body` is `raw`
    parsed.
    """

    raw: bytes
    body: dict[str, Any]
    stream: bool
    asked_usage: bool
    """The client itself asked for the usage chunk."""
    tokens: bytes | None
    """Prompt token ids, int32 little-endian, or None where the upstream tokenizes."""
    seed: bytes
    priority: int
    deadline_ms: int | None
    request_id: str
    output_cap: int | None = None
    """Output tokens for a chat that names no limit; only sent to replicas that take tokens."""
    ordered: bool = True
    """The server takes a `priority` other than 0 (vLLM refuses one unless it schedules by priority)."""


def upstream_body(dialect: Dialect, outgoing: Outgoing, model: str) -> bytes:
    """The bytes to send to a replica that serves `model`."""
    raw = outgoing.raw
    body = outgoing.body
    if model and body.get("model") != model:
        raw = set_member(raw, "model", orjson.dumps(model), present="model" in body)
    if outgoing.stream and not outgoing.asked_usage:
        options = body.get("stream_options")
        merged = {**options, "include_usage": True} if isinstance(options, dict) else {"include_usage": True}
        raw = set_member(raw, "stream_options", orjson.dumps(merged), present="stream_options" in body)
    if dialect.tokens_in and outgoing.output_cap is not None:
        cap = orjson.dumps(outgoing.output_cap)
        raw = set_member(raw, "max_tokens", cap, present="max_tokens" in body)
    if dialect.tokens_in:
        extension: dict[str, object] = {
            "seed": outgoing.seed.hex(),
            "priority": outgoing.priority,
            "deadline_ms": outgoing.deadline_ms,
            "request_id": outgoing.request_id,
        }
        if outgoing.tokens is not None:
            extension["token_ids"] = memoryview(outgoing.tokens).cast("i").tolist()
        return set_member(raw, "warmfront", orjson.dumps(extension), present="warmfront" in body)
    if "warmfront" in body:
        raw = remove_member(raw, "warmfront")
    return _for_vllm(raw, outgoing) if dialect.name == "vllm" else raw


def _for_vllm(raw: bytes, outgoing: Outgoing) -> bytes:
    body = outgoing.body
    for name in _VLLM_OWNED:
        if name in body:
            raw = remove_member(raw, name)
    more = body.get("vllm_xargs")
    if isinstance(more, dict) and "kv_transfer_params" in more:
        kept = {name: value for name, value in more.items() if name != "kv_transfer_params"}
        raw = set_member(raw, "vllm_xargs", orjson.dumps(kept), present=True)
    if outgoing.ordered:
        raw = set_member(raw, "priority", b"%d" % outgoing.priority, present="priority" in body)
    elif "priority" in body:
        raw = remove_member(raw, "priority")
    salt = orjson.dumps(outgoing.seed.hex())
    return set_member(raw, "cache_salt", salt, present="cache_salt" in body)


def refuses_priority(dialect: Dialect, status: int, message: str) -> bool:
    """True for the answer of a vLLM server that does not schedule by priority to a request that has one."""
    return dialect.name == "vllm" and status == 400 and "priority scheduling" in message.lower()


def upstream_headers(api_key: str | None, request_id: str, traceparent: str | None) -> bytes:
    """Header lines for a replica. None of the client's headers pass except a well-formed `traceparent`."""
    lines = [
        b"Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n"
        b"Accept-Encoding: identity\r\nX-Request-Id: ",
        request_id.encode("ascii", "replace"),
        b"\r\n",
    ]
    if api_key:
        lines += (b"Authorization: Bearer ", api_key.encode("latin-1", "replace"), b"\r\n")
    if traceparent:
        lines += (b"Traceparent: ", traceparent.encode("ascii", "replace"), b"\r\n")
    return b"".join(lines)


@dataclass(frozen=True, slots=True)
class Usage:
    """What the upstream says it computed. Token counts; times in seconds, None where not reported."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_s: float | None = None
    prefill_s: float | None = None
    first_sample_s: float | None = None
    prefill_tokens: int | None = None

    @classmethod
    def read(cls, answer: dict[str, Any]) -> Usage | None:
        """From a non-streaming body or a usage chunk; None when it carries no usage object."""
        usage = answer.get("usage")
        if not isinstance(usage, dict):
            return None
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        extension = answer.get("warmfront")
        extension = extension if isinstance(extension, dict) else {}
        timings = extension.get("timings")
        timings = timings if isinstance(timings, dict) else {}
        return cls(
            prompt_tokens=_count(usage.get("prompt_tokens")),
            completion_tokens=_count(usage.get("completion_tokens")),
            cached_tokens=_count(cached),
            queue_s=_seconds(timings.get("queue_s")),
            prefill_s=_seconds(timings.get("prefill_s")),
            first_sample_s=_seconds(timings.get("first_sample_s")),
            prefill_tokens=_count(extension["prefill_tokens"]) if "prefill_tokens" in extension else None,
        )


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _seconds(value: object) -> float | None:
    return max(0.0, float(value)) if isinstance(value, int | float) else None
