"""The registry: names, labels, formats."""

from __future__ import annotations

from gateway.telemetry.metrics import PARTS, Metrics

NAMES = (
    "warmfront_requests_total",
    "warmfront_prompt_tokens_total",
    "warmfront_available_tokens_total",
    "warmfront_captured_tokens_total",
    "warmfront_delivered_tokens_total",
    "warmfront_recovered_tokens_total",
    "warmfront_recoverable_tokens_total",
    "warmfront_prefix_hit_ratio",
    "warmfront_ttft_seconds_bucket",
    "warmfront_ttft_part_seconds_bucket",
    "warmfront_canon_bypass_total",
    "warmfront_canon_edits_total",
    "warmfront_replica_up",
    "warmfront_replica_inflight",
    "warmfront_replica_resident_blocks",
    "warmfront_pin_state",
    "warmfront_loop_delay_seconds_bucket",
    "warmfront_template_mismatch_total",
    "warmfront_upstream_retries_total",
)


def test_every_name_is_exposed() -> None:
    metrics = Metrics()
    bound = metrics.for_route("m", "r")
    for counter in (bound.prompt, bound.available, bound.captured, bound.delivered, bound.recovered):
        counter.inc()
    bound.recoverable.inc(0)
    bound.ttft.observe(0.1)
    metrics.count_request("r", "batch", "p", 200)
    metrics.canon_bypass.labels("budget").inc()
    metrics.canon_edits.labels("r", "clock").inc()
    metrics.replica_up.labels("p", "p-r0").set(1)
    metrics.replica_inflight.labels("p", "p-r0").set(0)
    metrics.replica_blocks.labels("p", "p-r0").set(5)
    metrics.pin_state.labels("pin", "p-r0", "resident").set(1)
    metrics.template_mismatch.labels("p").inc()
    metrics.retries.labels("broken").inc()
    text = metrics.exposition()[0].decode()
    for name in NAMES:
        assert f"\n{name}{{" in text or f"\n{name} " in text, name
    for part in PARTS:
        assert f'warmfront_ttft_part_seconds_bucket{{le="0.0001",part="{part}"}}' in text


def test_children_are_bound_once() -> None:
    metrics = Metrics()
    assert metrics.for_route("m", "r") is metrics.for_route("m", "r")
    metrics.count_request("r", "c", "p", 200)
    metrics.count_request("r", "c", "p", 200)
    labels = {"route": "r", "class": "c", "pool": "p", "code": "200"}
    assert metrics.registry.get_sample_value("warmfront_requests_total", labels) == 2


def test_formats() -> None:
    metrics = Metrics()
    assert metrics.exposition()[1].startswith("text/plain")
    body, kind = metrics.exposition("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_two_gateways_do_not_share_a_registry() -> None:
    first, second = Metrics(), Metrics()
    first.for_route("m", "r").prompt.inc()
    labels = {"model": "m", "route": "r"}
    assert second.registry.get_sample_value("warmfront_prompt_tokens_total", labels) is None
