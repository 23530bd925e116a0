"""Waits for a condition that another task brings about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Return once `condition()` is true; AssertionError when it is not within `timeout_s`."""
    for _ in range(round(timeout_s / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true")
