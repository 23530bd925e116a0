"""Time of one routing decision: 64 replicas, a 32k-token prompt, a full prefix index; hashing not included.

    python tests/bench/router_decision.py [--blocks 5000000] [--json FILE]

The price depends on how many different lengths of the prompt the replicas hold. Scenes: `conversation`
(every replica holds the first quarter, eight hold further turns), `four holders` of all of it, `cold` (none
holds any), and `every length` (64 different random lengths: no traffic looks like this; bounded by its p99
alone). Also prints the index's memory per block.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gateway.routing import PoolState, PrefixIndex, Replica, RouteQuery, Router, Timings

BLOCK = 16
LIMITS_US = {"p50": 100.0, "p99": 500.0}


def resident_bytes() -> int:
    """Resident set size of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def make_pool(replicas: int, rng: random.Random) -> PoolState:
    """A pool in mid-traffic: rates learned, a few requests outstanding on each replica, loads reported."""
    pool = PoolState("bench", rng=rng)
    for number in range(replicas):
        replica = Replica(f"bench-r{number}", pool="bench", base_url="http://127.0.0.1:1")
        replica.info = {"max_seqs": 64}
        replica.report_load({"free": 90_000, "cached": 0, "pinned": 0, "running": 4, "waiting": 0})
        replica.learn(Timings(prefill_tokens=4_000, prefill_s=rng.uniform(0.9, 1.1)))
        for _ in range(4):
            work = replica.promise(rng.randint(50, 2_000), 40)
            if rng.random() < 0.5:
                replica.first_token_of(work)
        replica.mark_ready()
        pool.add(replica)
    return pool


def fill(index: PrefixIndex, blocks: int, replicas: int, rng: random.Random) -> float:
    """Fill the index with other prompts' blocks, one holder each; returns bytes per block."""
    gc.collect()
    before = resident_bytes()
    for number in range(-(-blocks // 1_000)):
        index.store(f"bench-r{number % replicas}", [rng.randbytes(16) for _ in range(1_000)])
    gc.collect()
    return (resident_bytes() - before) / max(1, len(index))


def measure(decide: Callable[[], object], runs: int) -> list[float]:
    """Microseconds of each of `runs` calls, sorted; the quietest of five rounds, for shared machines.

    Thread CPU time: a decision waits for nothing, so this is its wall-clock time on a core of its own.
    """
    rounds = []
    for _ in range(5):
        samples = []
        for _ in range(runs):
            began = time.thread_time_ns()
            decide()
            samples.append((time.thread_time_ns() - began) / 1_000)
        rounds.append(sorted(samples))
    return min(rounds, key=statistics.median)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--blocks", type=int, default=1_000_000, help="blocks in the index (default 1,000,000)"
    )
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--runs", type=int, default=2_000, help="decisions in a round")
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE")
    options = parser.parse_args()

    rng = random.Random(7)
    pool = make_pool(options.replicas, rng)
    index = PrefixIndex(max_blocks=options.blocks + 100_000)
    router = Router(index)
    per_block = fill(index, options.blocks, options.replicas, rng)
    gc.freeze()

    length, numbers = options.tokens // BLOCK, range(options.replicas)
    scenes: dict[str, dict[int, int]] = {
        "conversation": {n: length // 4 if n % 8 else rng.randint(length // 4, length) for n in numbers},
        "four holders": dict.fromkeys(range(min(4, options.replicas)), length),
        "cold": {},
        "every length": {n: rng.randint(1, length) for n in numbers},
    }
    rows: list[dict[str, object]] = []
    print(f"{options.replicas} replicas, {options.tokens:,}-token prompt, {len(index):,} blocks in the index")
    print(f"{'scene':<14} {'p50 us':>8} {'p99 us':>8} {'spread':>8}   limit 100 / 500")
    for scene, holders in scenes.items():
        hashes = tuple(rng.randbytes(16) for _ in range(length))
        for number, blocks in holders.items():
            index.store(f"bench-r{number}", hashes[:blocks])
        query = RouteQuery(tokens=options.tokens, hashes=hashes, block_size=BLOCK)
        samples = measure(functools.partial(router.choose, pool, query), options.runs)
        figures = {"p50": statistics.median(samples), "p99": samples[int(len(samples) * 0.99)]}
        quartiles = statistics.quantiles(samples, n=4)
        print(
            f"{scene:<14} {figures['p50']:>8.1f} {figures['p99']:>8.1f} {quartiles[2] - quartiles[0]:>8.1f}"
        )
        for name, value in figures.items():
            limit = LIMITS_US["p99" if scene == "every length" else name]
            rows.append(row(f"decision {name}, {scene}", "us", value, limit))
    print(f"index: {per_block:.0f} bytes a block (limit 320)")
    rows.append(row("index memory per block", "bytes", per_block, 320.0))
    failed = [str(r["name"]) for r in rows if not r["ok"]]
    for name in failed:
        print(f"over the limit: {name}")
    if options.json:
        result = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "command": " ".join(sys.argv),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "rows": rows,
        }
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 1 if failed else 0


def row(name: str, unit: str, value: float, limit: float) -> dict[str, object]:
    """One row of the result; `limit` is also the bar."""
    return {
        "name": name,
        "unit": unit,
        "ours": round(value, 2),
        "limit": limit,
        "ratio": round(value / limit, 4),
        "must": {"op": "<=", "value": limit},
        "ok": value <= limit,
    }


if __name__ == "__main__":
    raise SystemExit(main())
