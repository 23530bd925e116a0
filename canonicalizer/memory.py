"""Replay memory: which context block was appended to which turn of which conversation.

`canonicalize` only reads it (`get`) and returns what to add; the gateway owns one memory per tenant and
calls `store` with its own clock. Bounded in bytes and in age, forgettable. Keys are HMACs, so a memory
holds no prompt text beyond the stated values themselves. Invariant: `bytes_used` is the sum of the costs of
all held entries, and never exceeds `max_bytes` after `store`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from canonicalizer.shapes import Kind

DAY_S = 86_400
_ENTRY_OVERHEAD = 200
_CANDIDATES = 4
_VOLATILE = ("clock", "id", "counter")


@dataclass(frozen=True, slots=True)
class Stated:
    """A value as a context block states it; `precision` is that of the rule which moved it."""

    label: str
    kind: Kind
    value: str
    precision: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """The exact text that was appended to one turn, and the values in it."""

    block: str
    values: tuple[Stated, ...]

    @property
    def lasting(self) -> frozenset[tuple[str, str]]:
        """The values that are neither clock, id nor counter: what two candidates must agree in to be
        replayed."""
        return frozenset((value.label, value.value) for value in self.values if value.kind not in _VOLATILE)

    @property
    def cost(self) -> int:
        """Bytes that this entry is charged with."""
        stated = sum(len(value.label) + len(value.value) for value in self.values)
        return 4 * (len(self.block) + stated) + _ENTRY_OVERHEAD


class ReplayMemory:
    """One tenant's blocks: key -> at most four candidates, newest first; least recently used go first."""

    __slots__ = ("_entries", "_used", "max_bytes", "ttl_s")

    def __init__(self, max_bytes: int = 4 << 20, ttl_s: int = DAY_S) -> None:
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self._entries: OrderedDict[bytes, tuple[int, tuple[Entry, ...]]] = OrderedDict()
        self._used = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes_used(self) -> int:
        """Bytes charged for all held entries."""
        return self._used

    def get(self, key: bytes) -> tuple[Entry, ...]:
        """Candidates for the turn with this key, newest first; empty when nothing is known."""
        held = self._entries.get(key)
        return held[1] if held else ()

    def store(self, remember: Iterable[tuple[bytes, Entry]], now_s: int) -> None:
        """Add what `canonicalize` returned (a known entry is refreshed), then drop what is too old or too
        much."""
        for key, entry in remember:
            kept = tuple(other for other in self.get(key) if other != entry)
            self._drop(key)
            candidates = (entry, *kept)[:_CANDIDATES]
            self._entries[key] = (now_s, candidates)
            self._used += sum(candidate.cost for candidate in candidates)
        while self._entries:
            key, (stored_s, _) = next(iter(self._entries.items()))
            if self._used <= self.max_bytes and now_s - stored_s <= self.ttl_s:
                break
            self._drop(key)

    def forget(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self._used = 0

    def check(self) -> None:
        """Raise AssertionError where the byte count and the entries disagree."""
        held = sum(entry.cost for _, candidates in self._entries.values() for entry in candidates)
        if held != self._used:
            raise AssertionError(f"replay memory counts {self._used} bytes but holds {held}")

    def _drop(self, key: bytes) -> None:
        held = self._entries.pop(key, None)
        if held:
            self._used -= sum(entry.cost for entry in held[1])


def replayable(candidates: tuple[Entry, ...]) -> Entry | None:
    """The newest candidate, or None where candidates differ in more than clock, id or counter."""
    if not candidates or any(other.lasting != candidates[0].lasting for other in candidates[1:]):
        return None
    return candidates[0]
