"""The demo: one request list, three ways through the same two replicas, side by side.

(a) canonicalizer off and round robin, (b) off and cost routing on a third of the list, (c) enforce, cost
routing and pins; then a third of the list once more with replay off. Owns the phases, their policies and
the result file. Always holds: every phase starts with empty caches; prompt tokens and cached tokens are
the engine's own usage figures; original prompt tokens are counted on what the client sent, with the
model's own template and tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from canonicalizer.tokens import TextModel
from gateway.bench.client import Measured
from gateway.bench.load import LoadOptions, LoadResult, run_load
from gateway.bench.progress import ProgressBar
from gateway.bench.report import Row, claims_table, document, summary
from gateway.bench.server import Server, start_server
from gateway.bench.workload import Conversation, chat_tenants, stable_system_text, volatile_header_lines

MODEL = "smollm2-135m-instruct"
TENANTS = 8
_RULES = """\
        - {label: "Current time", shape: clock, precision: minute}
        - {label: "Request id", shape: uuid}
        - {label: "User", shape: name}
"""


@dataclass(frozen=True, slots=True)
class Phase:
    """One pass over (a part of) the list under one policy."""

    key: str
    title: str
    mode: str
    routing: str
    pins: bool = False
    replay: bool = True
    share: int = 1


PHASES = (
    Phase("a", "off + round robin", "off", "round-robin"),
    Phase("b", "off + cost routing", "off", "cost", share=3),
    Phase("c", "enforce + cost routing + pins", "enforce", "cost", pins=True),
    Phase("no_replay", "as (c), replay off", "enforce", "cost", pins=True, replay=False, share=3),
)


def policy_text(phase: Phase, tenants: Sequence[str], keys: Mapping[str, str]) -> str:
    """Return the YAML policy of a phase; `tenants` are those whose system prompt is pinned."""
    lines = ["version: 1", "tenants:"]
    lines += [
        f'  {name}: {{keys: [{{plain: "{key}"}}], allow_metrics_label: true}}' for name, key in keys.items()
    ]
    lines += [
        "pools:",
        f"  default: {{model: {MODEL}, routing: {phase.routing}, bundled: {{replicas: 2, model: {MODEL}}}}}",
        "routes:",
        "  - name: chat",
        "    class: interactive",
        "    pool: default",
        "    canon:",
        f"      mode: '{phase.mode}'",
        f"      replay: {str(phase.replay).lower()}",
        "      rules:",
    ]
    text = "\n".join(lines) + "\n" + _RULES
    if phase.pins:
        text += "pins:\n"
        for name in tenants:
            index = int(name.rsplit("-", 1)[1])
            system = volatile_header_lines(
                "2026-01-01T00:00:00Z", "0" * 8 + "-0000-4000-8000-" + "0" * 12, "nobody"
            )
            body = json.dumps(system + stable_system_text(index))
            text += (
                f"  - {{name: system-{name}, tenant: {name}, route: chat, pool: default, system: {body}}}\n"
            )
    return text


async def run_demo(folder: Path, port: int, admin_port: int, *, exit_after: bool) -> int:
    """Run the phases, print both tables, write `folder/result.json`; 0 when every bound is kept, else 1."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = {f"tenant-{index}": f"demo-key-{index}" for index in range(TENANTS)}
    conversations = chat_tenants(tenants=TENANTS, keys=keys)
    policy_file = folder / "policy.yaml"
    policy_file.write_text(policy_text(PHASES[0], [], keys), encoding="utf-8")
    server = await start_server(policy_file, port, admin_port, folder / "server.log")
    try:
        await server.wait_for_replicas(2)
        phases: dict[str, dict[str, Any]] = {}
        results: dict[str, LoadResult] = {}
        async with aiohttp.ClientSession() as session:
            text_model = await server.text_model(session)
            for phase in PHASES:
                chosen = conversations[:: phase.share]
                tenants = sorted({item.tenant for item in chosen})
                await server.apply_policy(session, policy_text(PHASES[0], [], keys))
                await server.clear_caches(session)
                warm = await _warm_up(server, session, phase, policy_text(phase, tenants, keys), len(tenants))
                results[phase.key] = result = await _measure(server, phase, chosen)
                phases[phase.key] = _figures(result, warm, text_model)
        phases["replay"] = _subset(results["c"], conversations[::3], text_model)
        rows = claims(phases)
        print(
            "\n"
            + phase_table(phases)
            + "\n\n"
            + replay_table(phases)
            + "\n\n"
            + claims_table(rows, peer_title="(a)")
        )
        result_file = folder / "result.json"
        result_file.write_text(json.dumps(document(rows, phases=phases), indent=1) + "\n", encoding="utf-8")
        print(f"\nwritten: {result_file}")
        if not exit_after:
            print(f"the server stays up: dashboard {server.admin_url}/dashboard   (Ctrl-C ends it)")
            await server.wait()
        return 0 if all(row.ok for row in rows) else 1
    finally:
        await server.stop()


async def _warm_up(
    server: Server, session: aiohttp.ClientSession, phase: Phase, policy: str, pins: int
) -> Mapping[str, float]:
    """Put the phase's policy in force and wait for its pins; return what warming them took."""
    before = await server.pins(session)
    await server.apply_policy(session, policy)
    if phase.pins:
        await server.wait_for_pins(session, pins, ProgressBar(f"({phase.key}) warming {pins} pins"))
    after = await server.pins(session)
    return {name: after[name] - before[name] for name in ("warmup_tokens", "warmup_s")}


async def _measure(server: Server, phase: Phase, conversations: Sequence[Conversation]) -> LoadResult:
    options = LoadOptions(server.base_url, MODEL, concurrency=2)
    result = await run_load(conversations, options, ProgressBar(f"({phase.key}) {phase.title}"))
    failures = [item.error for item in result.requests if item.error]
    if failures:
        raise RuntimeError(f"phase {phase.key}: {len(failures)} requests failed, first: {failures[0]}")
    return result


def original_tokens(requests: Sequence[Measured], text_model: TextModel) -> int:
    """Return the prompt tokens of what the client sent, before any edit."""
    return sum(len(text_model.encode_segments(text_model.render_chat(r.messages))) // 4 for r in requests)


def _figures(result: LoadResult, warm: Mapping[str, float], text_model: TextModel) -> dict[str, Any]:
    figures = summary(result)
    figures["original_prompt_tokens"] = original_tokens(result.requests, text_model)
    figures.update(warmup_tokens=int(warm["warmup_tokens"]), warmup_s=round(warm["warmup_s"], 3))
    return figures


def _subset(
    result: LoadResult, conversations: Sequence[Conversation], text_model: TextModel
) -> dict[str, Any]:
    names = {item.id for item in conversations}
    requests = tuple(item for item in result.requests if item.conversation in names)
    return _figures(replace(result, requests=requests), {"warmup_tokens": 0, "warmup_s": 0.0}, text_model)


def claims(phases: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return the bounds that the demo must keep, as rows."""
    a, c = phases["a"], phases["c"]
    with_warmup = (c["prompt_tokens_computed"] + c["warmup_tokens"]) / c["original_prompt_tokens"]
    without = c["prompt_tokens_computed"] / c["original_prompt_tokens"]
    return [
        Row("prefix hit rate, (c)", "", c["hit_rate"], (">=", 0.87), peer=a["hit_rate"]),
        Row("TTFT p50, (c) / (a)", "x", c["ttft_p50_ms"] / a["ttft_p50_ms"], ("<=", 0.30)),
        Row("TTFT p95, (c) / (a)", "x", c["ttft_p95_ms"] / a["ttft_p95_ms"], ("<=", 0.50)),
        Row("prompt tokens computed / original, with warm-up", "x", with_warmup, ("<=", 0.30)),
        Row("prompt tokens computed / original, without", "x", without, ("<=", 0.13)),
    ]


def phase_table(phases: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the demo's first table: the three phases side by side, and why one of them sends less."""
    shown = [phase for phase in PHASES if phase.key in ("a", "b", "c")]
    rows: tuple[tuple[str, Any], ...] = (
        ("requests", lambda f: f"{f['requests']}"),
        ("prefix hit rate", lambda f: f"{f['hit_rate']:.1%}"),
        ("TTFT p50", lambda f: f"{f['ttft_p50_ms']:,.0f} ms"),
        ("TTFT p95", lambda f: f"{f['ttft_p95_ms']:,.0f} ms"),
        ("original prompt tokens", lambda f: f"{f['original_prompt_tokens']:,}"),
        ("prompt tokens computed", lambda f: f"{f['prompt_tokens_computed']:,}"),
        ("warm-up of pins", lambda f: f"{f['warmup_tokens']:,} tokens, {f['warmup_s']:.1f} s"),
    )
    table = [["", *(f"({phase.key}) {phase.title}" for phase in shown)]]
    table += [[name, *(cell(phases[phase.key]) for phase in shown)] for name, cell in rows]
    note = (
        "(b) sends a third of the list, to keep the demo short: routing alone can't change its hit rate much"
    )
    return f"{_aligned(table)}\n{note}"


def replay_table(phases: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the second table: the same conversations with replay on and off."""
    on, off = phases["replay"], phases["no_replay"]
    table = [["the same third of the list under enforce", "replay on", "replay off"]]
    table += [
        ["prefix hit rate", *(f"{f['hit_rate']:.1%}" for f in (on, off))],
        ["prompt tokens computed", *(f"{f['prompt_tokens_computed']:,}" for f in (on, off))],
        ["TTFT p50", *(f"{f['ttft_p50_ms']:,.0f} ms" for f in (on, off))],
    ]
    return _aligned(table)


def _aligned(table: Sequence[Sequence[str]]) -> str:
    """The rows as text: the first column to the left, the others to the right, three blanks between them."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "   ".join(
            [f"{row[0]:<{widths[0]}}", *(f"{t:>{w}}" for t, w in zip(row[1:], widths[1:], strict=True))]
        )
        for row in table
    )


def main(folder: str, port: int, admin_port: int, exit_after: bool) -> int:
    """Run the demo to its end and return the exit code."""
    try:
        return asyncio.run(run_demo(Path(folder), port, admin_port, exit_after=exit_after))
    except (RuntimeError, OSError, aiohttp.ClientError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
