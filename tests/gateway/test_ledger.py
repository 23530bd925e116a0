"""Entries, buckets, and that they equal the counters."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.telemetry.ledger import Ledger, LedgerEntry, percentile
from gateway.telemetry.metrics import PARTS, Metrics


def entry(i: int = 0, **changes: Any) -> LedgerEntry:
    fields: dict[str, Any] = {
        "route": "chat",
        "class_": "batch",
        "pool": "p",
        "model": "m",
        "prompt_tokens": 100,
        "available_tokens": 90,
        "captured_tokens": 80,
        "delivered_tokens": 70,
        "completion_tokens": 5,
        "counted": True,
        "parts": [0.01 * (n + 1) for n in range(len(PARTS))],
        "ttft_s": sum(0.01 * (n + 1) for n in range(len(PARTS))),
        "status": 200,
        "outcome": "ok",
    }
    return LedgerEntry(f"r{i}", 1000.0, **{**fields, **changes})


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels or {"model": "m", "route": "chat"})


def test_counters_buckets_and_entries_agree(metrics: Metrics) -> None:
    ledger = Ledger(metrics)
    for i in range(10):
        ledger.record(entry(i), now=1000.0 + i / 4)
    series = ledger.series(60, now=1010.0)
    assert series["t"] == [1000, 1001, 1002]
    assert series["requests"] == [4, 4, 2]
    assert sum(series["prompt"]) == value(metrics, "warmfront_prompt_tokens_total") == 1000
    assert sum(series["delivered_tokens"]) == value(metrics, "warmfront_delivered_tokens_total") == 700
    assert series["delivered"] == [0.7] * 3
    assert series["captured"] == [0.8] * 3
    assert series["available"] == [0.9] * 3
    assert value(metrics, "warmfront_ttft_seconds_count") == 10
    parts = sum(series[f"part_{part}"][0] for part in PARTS)
    assert parts == pytest.approx(series["ttft_p50"][0])
    assert sum(e.prompt_tokens for e in ledger.recent(100)) == 1000


def test_uncounted_requests_count_as_requests_alone(metrics: Metrics) -> None:
    ledger = Ledger(metrics)
    ledger.record(entry(status=404, outcome="refused", counted=False, ttft_s=None), now=5.0)
    series = ledger.series(60, now=5.0)
    assert series["requests"] == [1] and series["errors"] == [1]
    assert series["prompt"] == [0] and series["delivered"] == [None] and series["ttft_p50"] == [None]
    assert value(metrics, "warmfront_prompt_tokens_total") is None
    labels = {"route": "chat", "class": "batch", "pool": "p", "code": "404"}
    assert value(metrics, "warmfront_requests_total", **labels) == 1


def test_credits(metrics: Metrics) -> None:
    ledger = Ledger(metrics)
    one = entry()
    ledger.record(one, now=5.0)
    ledger.credit_recovered(one, 30, now=5.5)
    ledger.credit_recoverable(one, 20, now=6.0)
    assert (one.recovered_tokens, one.recoverable_tokens) == (30, 20)
    assert value(metrics, "warmfront_recovered_tokens_total") == 30
    assert value(metrics, "warmfront_recoverable_tokens_total") == 20
    series = ledger.series(60, step=10, now=6.0)
    assert series["recovered"] == [0.3] and series["recoverable"] == [0.2]


def test_hit_ratio_looks_back_a_minute(metrics: Metrics) -> None:
    ledger = Ledger(metrics)
    assert ledger.hit_ratio(now=5.0) == 0.0
    ledger.record(entry(delivered_tokens=0), now=5.0)
    ledger.record(entry(delivered_tokens=100), now=50.0)
    assert ledger.hit_ratio(60, now=51.0) == 0.5
    assert ledger.hit_ratio(10, now=51.0) == 1.0
    assert ledger.hit_ratio(60, now=500.0) == 0.0
    assert metrics.registry.get_sample_value("warmfront_prefix_hit_ratio") == 0.0


def test_rings_are_bounded(metrics: Metrics) -> None:
    ledger = Ledger(metrics, entries=3, seconds=2)
    for i in range(10):
        ledger.record(entry(i), now=float(i))
    assert [e.request_id for e in ledger.recent(100)] == ["r9", "r8", "r7"]
    assert ledger.recent(1)[0].request_id == "r9"
    assert ledger.recent(0) == []
    assert ledger.series(600, now=9.0)["t"] == [8, 9]
    assert ledger.find("r8") is not None and ledger.find("r1") is None


def test_a_clock_that_goes_back_keeps_the_order(metrics: Metrics) -> None:
    ledger = Ledger(metrics)
    ledger.record(entry(), now=10.0)
    ledger.record(entry(), now=9.0)
    assert ledger.series(60, now=10.0)["requests"] == [2]


def test_as_dict_is_plain(metrics: Metrics) -> None:
    plain = entry().as_dict()
    assert plain["class"] == "batch" and "class_" not in plain
    assert list(plain["parts"]) == list(PARTS)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2.0), (0.95, 4.0), (0.0, 1.0)])
def test_percentile(share: float, expected: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], share) == expected
    assert percentile([], share) is None


def test_a_series_asked_for_again_is_the_same_and_follows_what_comes(metrics: Metrics) -> None:
    ledger, fresh = Ledger(metrics), Ledger(metrics)
    for i in range(60):
        now = 100.0 + i / 2
        for each in (ledger, fresh):
            each.record(entry(i, delivered_tokens=i), now=now)
        ledger.series(20, step=5, now=now)
        ledger.series(10, step=5, now=now)
        if i % 3 == 0:
            for each in (ledger, fresh):
                each.credit_recovered(entry(), 7, now=now)
    for seconds in (20, 17, 10):
        for step in (1, 5):
            assert ledger.series(seconds, step, now=130.0) == fresh.series(seconds, step, now=130.0)
