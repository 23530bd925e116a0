"""What the dashboard shows, as one JSON value.

Always holds: totals and means of parts are read from the same counters that `/metrics` prints, series
and percentiles from the ledger that feeds those counters; nothing in it is a prompt, a key or a
credential.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Histogram

from canonicalizer import Proposal
from gateway.hints import switch_command
from gateway.pins import PinKeeper
from gateway.routing.index import PrefixIndex
from gateway.routing.pool import PoolState
from gateway.routing.replica import Replica
from gateway.telemetry.ledger import Ledger, LedgerEntry, percentile
from gateway.telemetry.metrics import PARTS, Metrics
from policies import Pin, Policy

_SERIES_S = 600
_SERIES_STEP_S = 5
_RECENT = 30
_PREFIXES = 20


def total_of(counter: Counter) -> float:
    """Return a counter's value summed over its labels."""
    return sum(
        sample.value
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    )


def failed_requests(requests: Counter) -> float:
    """Return how many requests were answered with a status of 400 or above."""
    return sum(
        sample.value
        for family in requests.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and int(sample.labels["code"]) >= 400
    )


def part_means_ms(histogram: Histogram) -> list[dict[str, Any]]:
    """Return each TTFT part's mean since the start, in milliseconds; None before the first request."""
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for family in histogram.collect():
        for sample in family.samples:
            if sample.name.endswith("_sum"):
                sums[sample.labels["part"]] = sample.value
            elif sample.name.endswith("_count"):
                counts[sample.labels["part"]] = sample.value
    return [
        {"part": part, "mean_ms": 1000 * sums[part] / counts[part] if counts.get(part) else None}
        for part in PARTS
    ]


def totals(metrics: Metrics) -> dict[str, Any]:
    """Return the totals since the start: requests, tokens of the hit funnel, and ratios of prompt tokens
    (None before the first).
    """
    prompt = total_of(metrics.prompt_tokens)
    delivered = total_of(metrics.delivered_tokens)
    recovered = total_of(metrics.recovered_tokens)
    recoverable = total_of(metrics.recoverable_tokens)
    return {
        "requests": total_of(metrics.requests),
        "failed": failed_requests(metrics.requests),
        "prompt_tokens": prompt,
        "available_tokens": total_of(metrics.available_tokens),
        "captured_tokens": total_of(metrics.captured_tokens),
        "delivered_tokens": delivered,
        "recovered_tokens": recovered,
        "recoverable_tokens": recoverable,
        "completion_tokens": total_of(metrics.completion_tokens),
        "hit_ratio": delivered / prompt if prompt else None,
        "recovered_ratio": recovered / prompt if prompt else None,
        "recoverable_ratio": recoverable / prompt if prompt else None,
    }


def series(ledger: Ledger) -> dict[str, Any]:
    """Return the columns that the charts draw, oldest first, one value per step that held a request.

    `potential_ratio` is the hit rate with what could be recovered, `original_ratio` the one without what
    canonicalization recovered; None where that changed nothing.
    """
    columns = ledger.series(_SERIES_S, _SERIES_STEP_S)
    delivered = columns["delivered"]
    return {
        "window_s": _SERIES_S,
        "step_s": _SERIES_STEP_S,
        "t": columns["t"],
        "requests": columns["requests"],
        "delivered_ratio": delivered,
        "potential_ratio": _shifted(delivered, columns["recoverable"], 1.0),
        "original_ratio": _shifted(delivered, columns["recovered"], -1.0),
        "parts_ms": {part: [_ms(value) for value in columns[f"part_{part}"]] for part in PARTS},
    }


def _shifted(base: Sequence[float | None], by: Sequence[float | None], sign: float) -> list[float | None]:
    """`base` plus or minus `by`, within 0 and 1; None where there is nothing to add."""
    return [
        None if low is None or not more else min(1.0, max(0.0, low + sign * more))
        for low, more in zip(base, by, strict=True)
    ]


def replica_row(replica: Replica, index: PrefixIndex) -> dict[str, Any]:
    """Return one replica's row."""
    load = replica.load
    queried = load.get("query_tokens_total") or 0
    return {
        "id": replica.id,
        "pool": replica.pool,
        "state": replica.state,
        "reason": replica.reason,
        "dialect": replica.dialect,
        "base_url": replica.base_url,
        "model_dir": replica.info.get("model_dir"),
        "inflight": replica.inflight,
        "running": load.get("running"),
        "waiting": load.get("waiting"),
        "total_blocks": load.get("total"),
        "used_blocks": load.get("used"),
        "cached_blocks": load.get("cached"),
        "pinned_blocks": load.get("pinned"),
        "free_blocks": load.get("free"),
        "resident_blocks": index.blocks(replica.id),
        "prefill_rate": replica.prefill_rate,
        "hit_ratio": (load.get("hit_tokens_total") or 0) / queried if queried else None,
        "computed_tokens_total": load.get("computed_tokens_total"),
    }


def pin_rows(pins: PinKeeper, wanted: Iterable[Pin]) -> list[dict[str, Any]]:
    """Return every pin on every replica it was placed on; those of `wanted` that could not be tokenized yet
    are pending.
    """
    rows = [
        {
            "name": status.pin,
            "tenant": status.tenant,
            "replica": status.replica,
            "state": status.state,
            "tokens": status.tokens,
            "computed_tokens": status.computed_tokens,
            "reason": status.reason,
        }
        for status in pins.states()
    ]
    placed = {row["name"] for row in rows}
    waiting = [
        {
            "name": pin.name,
            "tenant": pin.tenant or "",
            "replica": "",
            "state": "pending",
            "tokens": None,
            "computed_tokens": 0,
            "reason": f"waits for a bundled replica of pool {pin.pool}",
        }
        for pin in wanted
        if pin.name not in placed
    ]
    return rows + waiting


def prefix_rows(entries: Iterable[LedgerEntry], index: PrefixIndex) -> list[dict[str, Any]]:
    """Return the busiest system prefixes of the recent requests and who holds them now."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if not entry.prefix or not entry.counted:
            continue
        row = found.get(entry.prefix)
        if row is None:
            row = found[entry.prefix] = {
                "prefix": entry.prefix[:12],
                "hash": entry.prefix,
                "route": entry.route,
                "tokens": entry.prefix_tokens,
                "requests": 0,
                "prompt": 0,
                "delivered": 0,
            }
        row["requests"] += 1
        row["prompt"] += entry.prompt_tokens
        row["delivered"] += entry.delivered_tokens
    rows = sorted(found.values(), key=lambda row: -row["requests"])[:_PREFIXES]
    for row in rows:
        prompt, delivered = row.pop("prompt"), row.pop("delivered")
        row["hit_ratio"] = delivered / prompt if prompt else None
        row["replicas"] = sorted(index.longest([bytes.fromhex(row.pop("hash"))]))
    return rows


def route_rows(
    policy: Policy, canon: Sequence[Mapping[str, Any]], path: Path | None, admin_url: str
) -> list[dict[str, Any]]:
    """Return every route with the mode in force, why that is not the policy's where it is not, and the
    command that changes it.
    """
    live = {row["route"]: row for row in canon}
    rows = []
    for route in policy.routes:
        now = live[route.name]
        other = "observe" if route.canon.mode == "enforce" else "enforce"
        lowered = "switched off" if now["killed"] else "lowered after bypasses" if now["demoted"] else ""
        if not lowered and (slow := now.get("demoted_tenants")):
            lowered = f"lowered for {', '.join(slow[:3])}{' and others' if len(slow) > 3 else ''}"
        rows.append(
            {
                "name": route.name,
                "class": route.class_,
                "pool": route.pool,
                "mode": now["mode"],
                "configured": now["configured"],
                "lowered": lowered,
                "bypasses_last_minute": now["bypasses_last_minute"],
                "replay": route.canon.replay,
                "rules": now["rules"],
                "ruleset": now["ruleset"],
                "change": switch_command(route.name, other, path=path, admin_url=admin_url),
            }
        )
    return rows


def proposal_row(route: str, proposal: Proposal) -> dict[str, Any]:
    """Return what was seen to vary and the rule that would move it; no value is in it."""
    rule = proposal.rule
    return {
        "route": route,
        "tenant": proposal.tenant,
        "rule": {"label": rule.label, "shape": rule.shape} if rule is not None else None,
        "stage": proposal.stage,
        "values": proposal.values,
        "requests": proposal.requests,
        "prefix_lost_chars": proposal.prefix_lost,
        "accepted_by": "a policy" if proposal.grade == "auto" else "a person",
    }


def recent_rows(entries: Iterable[LedgerEntry]) -> list[dict[str, Any]]:
    """Return the latest requests, newest first."""
    return [
        {
            "request_id": entry.request_id,
            "at": entry.at,
            "route": entry.route,
            "replica": entry.replica,
            "status": entry.status,
            "outcome": entry.outcome,
            "mode": entry.canon,
            "edits": entry.edits,
            "prompt_tokens": entry.prompt_tokens,
            "cached_tokens": entry.delivered_tokens,
            "output_tokens": entry.completion_tokens,
            "ttft_ms": _ms(entry.ttft_s),
        }
        for entry in entries
    ]


def state(
    *,
    policy: Policy,
    source: str,
    path: Path | None,
    admin_url: str,
    pools: Mapping[str, PoolState],
    index: PrefixIndex,
    ledger: Ledger,
    metrics: Metrics,
    pins: PinKeeper,
    canon: Sequence[Mapping[str, Any]],
    started: float,
) -> dict[str, Any]:
    """Return everything the page draws.

    `path` is the file that the policy in force is in, `canon` what `CanonService.state` says of its routes,
    `started` Unix seconds.
    """
    entries = ledger.recent(2000)
    ttfts = sorted(entry.ttft_s for entry in entries if entry.ttft_s is not None)
    now = time.time()
    return {
        "now": now,
        "uptime_s": now - started,
        "policy": {"version": policy.version, "source": source},
        "routes": route_rows(policy, canon, path, admin_url),
        "totals": totals(metrics),
        "series": series(ledger),
        "ttft": {
            "count": len(ttfts),
            "p50_ms": _ms(percentile(ttfts, 0.5)),
            "p95_ms": _ms(percentile(ttfts, 0.95)),
            "parts": part_means_ms(metrics.ttft_part),
        },
        "replicas": [
            replica_row(replica, index) for pool in pools.values() for replica in pool.replicas.values()
        ],
        "pins": pin_rows(pins, policy.pins),
        "prefixes": prefix_rows(entries, index),
        "recent": recent_rows(entries[:_RECENT]),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
