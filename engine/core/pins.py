"""Pinned prefixes: chains of blocks that stay resident until their pin is released or runs out.

Owns the pins, their share of the pool, and the holds that keep their blocks from eviction. What must always
hold: the distinct blocks of all warming and resident pins fit the budget (shared ones count once); a
resident pin holds every full block of its tokens; a pin is never dropped silently, it is in one of three
states:

    warming ------ prefill done ------> resident         over_budget: waits for others to go, then warms
       ^------------ cache cleared --------'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.core.block_pool import BlockPool

PinState = Literal["warming", "resident", "over_budget"]


@dataclass(frozen=True, slots=True)
class PinSpec:
    """A prefix to keep: its token ids (only full blocks can be kept), the chain's seed, and for how long."""

    pin_id: str
    token_ids: tuple[int, ...]
    seed: bytes
    ttl_s: float | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class PinStatus:
    """What callers see of a pin: `tokens` asked for, `blocks` that hold them, tokens computed to warm it."""

    id: str
    state: PinState
    tokens: int
    blocks: int
    computed_tokens: int
    tenant: str
    expires_in_s: float | None


class Pin:
    """One pin. `hashes` are those of its full blocks, `blocks` is filled while resident."""

    __slots__ = ("blocks", "computed_tokens", "expires_s", "hashes", "retry_s", "spec", "state")

    def __init__(self, spec: PinSpec, hashes: tuple[bytes, ...], now_s: float) -> None:
        self.spec = spec
        self.hashes = hashes
        self.blocks: list[int] = []
        self.state: PinState = "over_budget"
        self.computed_tokens = 0
        self.retry_s = now_s
        self.expires_s: float | None = None
        self.refresh(spec.ttl_s, now_s)

    def refresh(self, ttl_s: float | None, now_s: float) -> None:
        """Start the time to live again."""
        self.expires_s = None if ttl_s is None else now_s + ttl_s

    def is_over(self, now_s: float) -> bool:
        """True once the time to live has passed."""
        return self.expires_s is not None and self.expires_s <= now_s

    def same_prefix(self, spec: PinSpec) -> bool:
        """True when `spec` names the same blocks."""
        return (self.spec.token_ids, self.spec.seed) == (spec.token_ids, spec.seed)

    def status(self, now_s: float) -> PinStatus:
        """This pin as callers see it."""
        left = None if self.expires_s is None else max(0.0, self.expires_s - now_s)
        tokens, blocks = len(self.spec.token_ids), len(self.hashes)
        return PinStatus(
            self.spec.pin_id, self.state, tokens, blocks, self.computed_tokens, self.spec.tenant, left
        )


class PinTable:
    """All pins of one engine, in the order they were made; at most `budget` distinct blocks are claimed."""

    def __init__(self, pool: BlockPool, budget: int) -> None:
        self.budget = budget
        self._pool = pool
        self._pins: dict[str, Pin] = {}
        self._claims: Counter[bytes] = Counter()

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def get(self, pin_id: str) -> Pin | None:
        """The pin of that id."""
        return self._pins.get(pin_id)

    @property
    def pinned_blocks(self) -> int:
        """Distinct blocks that resident pins hold."""
        return len({block for pin in self._pins.values() for block in pin.blocks})

    def add(self, pin: Pin) -> None:
        """Take in a pin whose id is new; it warms if the budget has room for its blocks."""
        self._pins[pin.spec.pin_id] = pin
        self._claim(pin)

    def drop(self, pin_id: str) -> Pin | None:
        """Release a pin and let those that now fit the budget warm. None when there is no such pin."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return None
        if pin.state != "over_budget":
            self._let_go(pin)
            self._claims.subtract(pin.hashes)
            self._claims = +self._claims
        for other in self._pins.values():
            self._claim(other)
        return pin

    def settle(self, pin: Pin, table: list[int]) -> None:
        """`table` holds the pin's blocks, computed: hold them for the pin."""
        for block in table:
            self._pool.hold(block)
        pin.blocks = list(table)
        pin.state = "resident"

    def rewarm(self, now_s: float) -> None:
        """The cache was emptied: every resident pin gives up its blocks and warms again."""
        for pin in self._pins.values():
            if pin.state != "over_budget":
                self._let_go(pin)
                pin.state = "warming"
                pin.retry_s = now_s

    def expired(self, now_s: float) -> list[str]:
        """Ids of pins whose time to live is over."""
        return [pin_id for pin_id, pin in self._pins.items() if pin.is_over(now_s)]

    def check(self) -> None:
        """Raise AssertionError unless claims fit the budget and residents hold all their blocks."""
        claimed = Counter(h for pin in self._pins.values() if pin.state != "over_budget" for h in pin.hashes)
        assert claimed == self._claims, "claims differ from the pins' blocks"
        assert len(claimed) <= self.budget, f"{len(claimed)} blocks claimed of a budget of {self.budget}"
        for pin in self._pins.values():
            wanted = len(pin.hashes) if pin.state == "resident" else 0
            assert len(pin.blocks) == wanted, (
                f"{pin.state} pin {pin.spec.pin_id} has {len(pin.blocks)} blocks"
            )

    def _claim(self, pin: Pin) -> None:
        if pin.state != "over_budget":
            return
        new = sum(block_hash not in self._claims for block_hash in pin.hashes)
        if len(self._claims) + new <= self.budget:
            self._claims.update(pin.hashes)
            pin.state = "warming"

    def _let_go(self, pin: Pin) -> None:
        for block in reversed(pin.blocks):
            self._pool.release(block)
        pin.blocks = []
