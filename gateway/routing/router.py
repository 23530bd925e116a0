"""Router: where one request goes, and the `Dispatch` that accounts for it until it ends.

`choose` is pure reading (index, replicas, policy) and costs tens of microseconds; `dispatch` is the only
place where work is promised to a replica, and `Dispatch.finish` the only place where it is taken back. A
dispatch is used as a context manager, so that every exit path (success, error, cancellation) releases it;
releasing twice does nothing.

Expected blocks: from its dispatch on, a request's uncached blocks count as held by its replica, so that
requests for one prefix that come at once go to one replica. They end 3 s after the first token (KV events
have confirmed the blocks by then), or at once when the request ends without one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from gateway.routing.cost import Candidate, CostWeights, Demand, costs_of
from gateway.routing.index import Expectation, PrefixIndex
from gateway.routing.pool import PoolState
from gateway.routing.replica import Replica, Timings

Outcome = Literal["ok", "error", "aborted", "retried"]

CONFIRM_S = 3.0


class NoReplica(Exception):
    """No replica of the pool can take the request now."""

    def __init__(self, pool: str, *, known: int, excluded: int) -> None:
        self.pool = pool
        self.known = known
        self.excluded = excluded
        tried = f", {excluded} tried already" if excluded else ""
        super().__init__(f"no replica of pool {pool!r} is ready ({known} known{tried})")


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What routing needs to know of a request.

    tokens: prompt length. hashes: chain hashes of its full blocks of `block_size` tokens (empty: no
    affinity). priority: 0 is highest. max_tokens: output bound, for the blocks it may need.
    """

    tokens: int
    hashes: Sequence[bytes] = ()
    block_size: int = 16
    priority: int = 2
    max_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes and why.

    cached_tokens: prompt tokens expected in the chosen replica's cache, those being computed now
    included. captured_tokens: the part of them that is held already. available_tokens: the most that any
    ready replica of the pool holds. candidates: every replica that was considered, with its cost.
    """

    replica: Replica
    cached_tokens: int
    captured_tokens: int
    available_tokens: int
    candidates: tuple[Candidate, ...]
    policy: str


class Router:
    """Chooses replicas and keeps account of what was sent to them. One per event loop."""

    def __init__(
        self,
        index: PrefixIndex,
        *,
        weights: CostWeights | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self.weights = weights or CostWeights()
        self._clock = clock

    def choose(self, pool: PoolState, query: RouteQuery, exclude: frozenset[str] = frozenset()) -> Decision:
        """The replica for `query`, as the pool's policy says; raises NoReplica when none is ready.

        `exclude` names replicas that this request has tried already.
        """
        ready = pool.ready(exclude)
        if not ready:
            raise NoReplica(pool.name, known=len(pool.replicas), excluded=len(exclude))
        tokens, block_size = query.tokens, query.block_size
        # The last prompt token is always computed, so a block that ends with it cannot be reused.
        usable = (tokens - 1) // block_size
        held = self.index.longest(query.hashes, usable)
        expected = self.index.longest_expected(query.hashes, held, usable)
        candidates = costs_of(
            ready,
            Demand(tokens, query.max_tokens, block_size),
            expected,
            now=self._clock(),
            fallback_rate=pool.fallback_rate(),
            weights=self.weights,
        )
        chosen = pool.routing.pick(candidates, query.hashes)
        return Decision(
            replica=pool.replicas[chosen.replica_id],
            cached_tokens=chosen.cached_tokens,
            captured_tokens=held.get(chosen.replica_id, 0) * block_size,
            available_tokens=max([held.get(replica.id, 0) for replica in ready]) * block_size if held else 0,
            candidates=candidates,
            policy=pool.routing.name,
        )

    def dispatch(self, decision: Decision, query: RouteQuery) -> Dispatch:
        """Promise the request's work to the chosen replica. The caller must end the result on every path."""
        return Dispatch(self, decision, query)

    def now(self) -> float:
        """The router's clock, in seconds."""
        return self._clock()


class Dispatch:
    """One request on its way: `first_token` when its first token came, `finish` when it ended. Both
    idempotent.
    """

    __slots__ = ("_computed", "_expectation", "_index", "_now", "_work", "decision", "outcome", "query")

    def __init__(self, router: Router, decision: Decision, query: RouteQuery) -> None:
        replica = decision.replica
        self.decision = decision
        self.query = query
        self.outcome: Outcome | None = None
        uncached = max(1, query.tokens - decision.cached_tokens)
        blocks = -(-(uncached + min(query.max_tokens, 256)) // query.block_size)
        self._work = replica.promise(uncached, blocks)
        self._index = router.index
        self._now = router.now
        self._computed = False
        fresh = query.hashes[decision.captured_tokens // query.block_size :]
        self._expectation: Expectation | None = router.index.expect(replica.id, fresh) if fresh else None

    @property
    def replica(self) -> Replica:
        return self.decision.replica

    def first_token(self, timings: Timings | None = None) -> None:
        """The replica's first token came: its prefill is done."""
        alive = self._work in self.replica.outstanding
        self.replica.first_token_of(self._work)
        self.report(timings)
        expectation, self._expectation = self._expectation, None
        if self.replica.approximate is None:
            if expectation is not None:
                asyncio.get_running_loop().call_later(CONFIRM_S, self._index.settle, expectation)
            return
        if expectation is not None:
            self._index.settle(expectation)
        if alive and not self._computed:
            self.replica.approximate.insert(self.query.hashes, self._now())
        self._computed = True

    def report(self, timings: Timings | None) -> None:
        """Learn from what the replica says about this request (at its end, in a stream)."""
        if timings is not None:
            self.replica.learn(timings)

    def finish(self, outcome: Outcome = "ok", timings: Timings | None = None) -> None:
        """The request ended. Whatever was still promised is released; the first call decides the outcome."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        if outcome == "ok":
            self.first_token()
        self.report(timings)
        self.replica.release(self._work)
        if self._expectation is not None:
            self._index.settle(self._expectation)
            self._expectation = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish("ok")
        elif issubclass(kind, Exception):
            self.finish("error")
        else:
            self.finish("aborted")
