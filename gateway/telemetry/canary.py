"""The loop-delay canary: how late the event loop runs a timer.

Owns one task. A delay means that something held the loop: parsing, tokenizing, a busy machine. Always
holds: it measures every `interval_s` seconds and never reports less than zero.
"""

from __future__ import annotations

import asyncio

from gateway.telemetry.metrics import Metrics


async def watch_loop(metrics: Metrics, interval_s: float = 0.05) -> None:
    """Observe the event loop's delay until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        metrics.loop_delay.observe(max(0.0, loop.time() - due))
