"""Percentiles, rows and tables: a bound is judged by the figure, and a missing figure keeps no bound."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.bench.client import Measured
from gateway.bench.load import LoadResult
from gateway.bench.report import Row, claims_table, document, percentile, percentile_table, summary


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_percentile_stays_within_the_values(values: list[float], share: float) -> None:
    assert min(values) - 1e-6 <= percentile(values, share) <= max(values) + 1e-6


def test_percentile_interpolates() -> None:
    assert percentile([1, 2, 3, 4], 0.5) == 2.5
    assert percentile([5], 0.99) == 5
    assert math.isnan(percentile([], 0.5))


@pytest.mark.parametrize(
    ("ours", "must", "ok"),
    [
        (1.0, (">=", 1.0), True),
        (0.9, (">=", 1.0), False),
        (0.2, ("<=", 0.3), True),
        (math.nan, ("<=", 1), False),
    ],
)
def test_row_ok_is_computed(ours: float, must: tuple[str, float], ok: bool) -> None:
    row = Row("name", "x", ours, must, peer=2.0)
    assert row.ok is ok and row.to_json()["ok"] is ok
    assert ("yes" if ok else "NO") in claims_table([row])


def _measured(ttft: float, cached: int) -> Measured:
    result = Measured("c", 0, 0.0, status=200, ttft_s=ttft, total_s=ttft + 0.3)
    result.prompt_tokens, result.cached_tokens, result.output_tokens = 100, cached, 4
    result.gaps_s = [0.1, 0.1, 0.1]
    return result


def test_summary_weights_the_hit_rate_by_tokens_and_leaves_failures_out() -> None:
    failed = Measured("c", 0, 0.0, error="HTTP 500")
    figures = summary(LoadResult((_measured(0.1, 90), _measured(0.3, 70), failed), 2.0))
    assert (figures["requests"], figures["failed"]) == (3, 1)
    assert figures["hit_rate"] == pytest.approx(0.8)
    assert figures["prompt_tokens_computed"] == 40
    assert figures["ttft_p50_ms"] == pytest.approx(200)
    assert figures["tpot_mean_ms"] == pytest.approx(100)
    assert figures["itl_p99_ms"] == pytest.approx(100)
    table = percentile_table(figures)
    assert "80.0%" in table and "1 failed" in table


def test_a_figure_that_no_request_gave_is_a_dash() -> None:
    lone = _measured(0.1, 0)
    lone.gaps_s, lone.output_tokens = [], 1
    table = percentile_table(summary(LoadResult((lone,), 1.0)))
    assert "nan" not in table
    assert [line.split()[2:] for line in table.splitlines() if line.startswith("TPOT")] == [["-"] * 5]


def test_the_claims_name_what_they_stand_beside() -> None:
    table = claims_table([Row("a", "ms", 1.0, peer=2.0)], peer_title="(a)")
    assert table.splitlines()[0].split() == ["ours", "(a)", "must", "ok"]


def test_document_is_json_with_machine_command_and_date() -> None:
    value = json.loads(json.dumps(document([Row("a", "ms", 1.0)], extra=1)))
    assert set(value) == {"machine", "command", "date", "rows", "extra"}
    assert value["rows"][0]["must"] is None and value["rows"][0]["ok"] is True
    assert value["machine"]["cores"] >= 1
