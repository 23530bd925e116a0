"""The demo's tables: columns that stand apart, and a word on the phase that sends less."""

from __future__ import annotations

import re
from typing import Any

from gateway.bench import demo

FIGURES: dict[str, Any] = {
    "requests": 48,
    "hit_rate": 0.5,
    "ttft_p50_ms": 1234.0,
    "ttft_p95_ms": 2345.0,
    "original_prompt_tokens": 51234,
    "prompt_tokens_computed": 5000,
    "warmup_tokens": 8512,
    "warmup_s": 12.3,
}
PHASES = dict.fromkeys(("a", "b", "c", "replay", "no_replay"), FIGURES)


def test_no_two_columns_run_together() -> None:
    for table in (demo.phase_table(PHASES), demo.replay_table(PHASES)):
        rows = [re.split(r" {3,}", line.strip()) for line in table.splitlines() if not line.startswith("(b)")]
        assert {len(row) for row in rows[1:]} == {len(rows[1])}
        assert len(rows[0]) in (len(rows[1]), len(rows[1]) - 1), "the first heading may be empty"
    assert "(b) sends a third of the list" in demo.phase_table(PHASES)


def test_the_claims_stand_beside_phase_a() -> None:
    a, c = {**FIGURES, "hit_rate": 0.1}, {**FIGURES, "hit_rate": 0.9}
    row = demo.claims({**PHASES, "a": a, "c": c})[0]
    assert (row.ours, row.peer, row.ok) == (0.9, 0.1, True)
