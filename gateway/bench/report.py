"""Turns measurements into percentiles, a table and the JSON every benchmark writes.

Always holds: `ok` of a row is computed from `ours` and `must`, never given; a figure that was not
measured is an error.
"""

from __future__ import annotations

import math
import operator
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gateway.bench.client import Measured
from gateway.bench.load import LoadResult

_OPERATORS = {">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt}


def percentile(values: Iterable[float], share: float) -> float:
    """Return the `share` (0..1) percentile by linear interpolation; NaN for no values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * share
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Row:
    """One claim: what was measured (`ours`), beside what (`peer`), against which bound (`must`: op and
    value).
    """

    name: str
    unit: str
    ours: float
    must: tuple[str, float] | None = None
    peer: float | None = None
    limit: float | None = None

    @property
    def ok(self) -> bool:
        """True when there is no bound or `ours` keeps it. NaN keeps no bound."""
        return self.must is None or bool(_OPERATORS[self.must[0]](self.ours, self.must[1]))

    def to_json(self) -> dict[str, Any]:
        """Return the row in the form every benchmark writes."""
        ratio = self.ours / self.peer if self.peer else None
        must = {"op": self.must[0], "value": self.must[1]} if self.must else None
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": self.ours,
            "peer": self.peer,
            "limit": self.limit,
            "ratio": ratio,
            "must": must,
            "ok": self.ok,
        }


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            name = next(
                (line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name
            )
    except OSError:
        pass
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def document(rows: Sequence[Row], **extra: Any) -> dict[str, Any]:
    """Return the JSON document of a benchmark run: machine, command, date and rows."""
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    command = " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
    return {
        "machine": machine(),
        "command": command,
        "date": date,
        "rows": [r.to_json() for r in rows],
        **extra,
    }


def summary(result: LoadResult) -> dict[str, Any]:
    """Return the figures of one load run; times in milliseconds, rates per second."""
    good = [item for item in result.requests if item.ok]
    prompt = sum(item.prompt_tokens for item in good)
    cached = sum(item.cached_tokens for item in good)
    output = sum(item.output_tokens for item in good)
    figures: dict[str, Any] = {
        "requests": len(result.requests),
        "failed": len(result.requests) - len(good),
        "wall_s": result.wall_s,
        "requests_per_s": len(good) / result.wall_s if result.wall_s else math.nan,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "prompt_tokens_computed": prompt - cached,
        "output_tokens": output,
        "output_tokens_per_s": output / result.wall_s if result.wall_s else math.nan,
        "hit_rate": cached / prompt if prompt else 0.0,
    }
    for name, values in _series(good).items():
        for label, share in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
            figures[f"{name}_{label}_ms"] = percentile(values, share) * 1000
        figures[f"{name}_mean_ms"] = (sum(values) / len(values) * 1000) if values else math.nan
    return figures


def _series(good: Sequence[Measured]) -> dict[str, list[float]]:
    return {
        "ttft": [item.ttft_s for item in good if item.ttft_s is not None],
        "tpot": [item.tpot_s for item in good if item.tpot_s is not None],
        "itl": [gap for item in good for gap in item.gaps_s],
        "e2e": [item.total_s for item in good if item.total_s is not None],
    }


def percentile_table(figures: Mapping[str, Any]) -> str:
    """Return the percentile table of a load run as text."""
    lines = [f"{'':24}{'mean':>10}{'p50':>10}{'p90':>10}{'p95':>10}{'p99':>10}"]
    names = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2e", "end to end"))
    for key, label in names:
        values = [figures[f"{key}_{part}_ms"] for part in ("mean", "p50", "p90", "p95", "p99")]
        cells = "".join(f"{'-':>10}" if math.isnan(value) else f"{value:>10.1f}" for value in values)
        lines.append(f"{label + ' (ms)':24}{cells}")
    lines.append(
        f"{figures['requests']} requests, {figures['failed']} failed, {figures['wall_s']:.1f} s, "
        f"{figures['requests_per_s']:.2f} requests/s, {figures['output_tokens_per_s']:.1f} output tokens/s"
    )
    lines.append(
        f"prefix hit rate {figures['hit_rate']:.1%} "
        f"({figures['cached_tokens']:,} of {figures['prompt_tokens']:,} prompt tokens)"
    )
    return "\n".join(lines)


def claims_table(rows: Sequence[Row], *, peer_title: str = "peer") -> str:
    """Return the rows as a text table: name, ours, what it stands beside (`peer_title`), must, ok."""
    lines = [f"{'':52}{'ours':>14}{peer_title:>14}{'must':>16}  ok"]
    for row in rows:
        peer = f"{row.peer:,.4g}" if row.peer is not None else ""
        must = f"{row.must[0]} {row.must[1]:,.4g}" if row.must else ""
        mark = ("yes" if row.ok else "NO") if row.must else ""
        lines.append(f"{row.name:52}{row.ours:>10,.4g} {row.unit:<3}{peer:>14}{must:>16}  {mark}")
    return "\n".join(lines)
