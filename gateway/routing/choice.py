"""Routing policies: which of the costed candidates a request goes to.

One interface, `RoutingPolicy.pick`, for every policy, so that a decision always records every candidate's
cost whichever policy made it. Ties are broken at random, never by position; a cold prefix goes where
rendezvous hashing of its first blocks says, so that two gateways, or two requests at once, agree without
talking.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

import xxhash

from gateway.routing.cost import Candidate

_RENDEZVOUS_BLOCKS = 4  # the first 64 tokens say whose prompt it is
_TIE_S = 0.005
_TIE_SHARE = 0.05
_COLD_SHARE = 0.25  # how much dearer than the cheapest the rendezvous choice of a cold prefix may be


class RoutingPolicy(Protocol):
    """Chooses one candidate. `hashes` is the prompt's block chain; implementations may keep state per
    pool.
    """

    name: str

    def pick(self, candidates: Sequence[Candidate], hashes: Sequence[bytes]) -> Candidate:
        """One of `candidates`, which is never empty."""


def rendezvous_order(key: bytes, replica_ids: Sequence[str]) -> list[str]:
    """Replica ids by highest random weight for `key`: stable when other replicas come and go."""
    return sorted(replica_ids, key=lambda id: _weight(key, id), reverse=True)


def _weight(key: bytes, replica_id: str) -> int:
    return xxhash.xxh3_64_intdigest(key + replica_id.encode())


def rendezvous_key(hashes: Sequence[bytes]) -> bytes | None:
    """The block hash that stands for a prompt's first tokens; None for a prompt shorter than one block."""
    return hashes[min(len(hashes), _RENDEZVOUS_BLOCKS) - 1] if hashes else None


class CostPolicy:
    """Lowest cost; among the nearly equal the one that holds most; a cold prefix by rendezvous; then at
    random.
    """

    name = "cost"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Sequence[Candidate], hashes: Sequence[bytes]) -> Candidate:
        lowest = min([candidate[1] for candidate in candidates])
        limit = lowest + max(_TIE_S, lowest * _TIE_SHARE)
        near = [candidate for candidate in candidates if candidate[1] <= limit]
        warmest = max([candidate[2] for candidate in candidates])
        if warmest == 0:
            key = rendezvous_key(hashes)
            if key is None:
                return self._rng.choice(near)
            limit = lowest + max(_TIE_S, lowest * _COLD_SHARE)
            near = [candidate for candidate in candidates if candidate[1] <= limit]
            return max(near, key=lambda candidate: _weight(key, candidate[0]))
        warmest = max([candidate[2] for candidate in near])
        return self._rng.choice([candidate for candidate in near if candidate[2] == warmest])


class RoundRobinPolicy:
    """Each replica in turn, whatever it holds."""

    name = "round-robin"

    def __init__(self, rng: random.Random) -> None:
        self._last = ""

    def pick(self, candidates: Sequence[Candidate], hashes: Sequence[bytes]) -> Candidate:
        in_order = sorted(candidates, key=lambda candidate: candidate.replica_id)
        chosen = next((c for c in in_order if c.replica_id > self._last), in_order[0])
        self._last = chosen.replica_id
        return chosen


class LeastLoadPolicy:
    """Shortest queue (promised prefill and admission wait); ties at random."""

    name = "least-load"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Sequence[Candidate], hashes: Sequence[bytes]) -> Candidate:
        shortest = min(candidate.queue_s for candidate in candidates)
        return self._rng.choice([c for c in candidates if c.queue_s <= shortest + 1e-9])


class RandomPolicy:
    """Any replica, uniformly."""

    name = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Sequence[Candidate], hashes: Sequence[bytes]) -> Candidate:
        return self._rng.choice(candidates)


_POLICIES: dict[str, Callable[[random.Random], RoutingPolicy]] = {
    "cost": CostPolicy,
    "round-robin": RoundRobinPolicy,
    "least-load": LeastLoadPolicy,
    "random": RandomPolicy,
}
POLICY_NAMES = tuple(_POLICIES)


def make_policy(name: str, rng: random.Random) -> RoutingPolicy:
    """The routing policy of that name; ValueError lists the known ones."""
    if name not in _POLICIES:
        raise ValueError(f"unknown routing policy {name!r}; known: {', '.join(POLICY_NAMES)}")
    return _POLICIES[name](rng)
