"""Replica: one engine process as the gateway sees it, and the work that was promised to it.

A mutable record on one event loop. It owns the accounting of a replica: every dispatched request is one
`Dispatch` in `outstanding`, so that in-flight requests and promised prefill tokens are sums over live
objects and never counters that an exit path could forget. Releasing a dispatch twice, or after its
replica died, changes nothing.

Must always hold: inflight == len(outstanding); promised_tokens >= 0, and 0 when nothing is outstanding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gateway.routing.approximate import ApproximateBlocks
from gateway.routing.rates import PrefillRate

State = Literal["starting", "ready", "down"]
Clock = Callable[[], float]
Listener = Callable[["Replica"], None]

_PROGRESS_CEILING = 0.9  # share of the running prefill that elapsed time alone may declare done
_SERVICE_S = 2.0  # assumed duration of a request before one has ended
_SERVICE_WEIGHT = 0.2  # EWMA weight of one finished request's duration


@dataclass(frozen=True, slots=True)
class Timings:
    """What a replica reported about one request: seconds, and prompt tokens that it really computed."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_sample_s: float = 0.0
    prefill_tokens: int = 0

    @classmethod
    def from_usage(cls, extension: Mapping[str, Any] | None) -> Timings | None:
        """From the `warmfront` object of a usage chunk; None when it is absent or malformed."""
        if not isinstance(extension, Mapping):
            return None
        timings = extension.get("timings")
        try:
            seconds = dict(timings) if isinstance(timings, Mapping) else {}
            return cls(
                queue_s=float(seconds.get("queue_s") or 0.0),
                prefill_s=float(seconds.get("prefill_s") or 0.0),
                first_sample_s=float(seconds.get("first_sample_s") or 0.0),
                prefill_tokens=int(extension.get("prefill_tokens") or 0),
            )
        except (TypeError, ValueError):
            return None


class Work:
    """One dispatched request's claim on a replica: prompt tokens still to be computed, blocks, and its
    phase.
    """

    __slots__ = ("blocks", "started", "tokens")

    def __init__(self, tokens: float, blocks: int, started: float) -> None:
        self.tokens = tokens
        self.blocks = blocks
        self.started = started


class Replica:
    """One engine: where it is, how it is, and what it owes."""

    def __init__(
        self,
        id: str,
        *,
        pool: str,
        base_url: str,
        dialect: str = "bundled",
        model: str = "",
        api_key: str | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.id = id
        self.pool = pool
        self.base_url = base_url.rstrip("/")
        self.dialect = dialect
        self.model = model
        self.api_key = api_key
        self.state: State = "starting"
        self.stalled = False  # down, but its process lives and keeps its cache
        self.reason = ""  # why it is down or still starting, for people
        self.info: dict[str, Any] = {}
        self.load: dict[str, Any] = {}
        self.epoch = 0  # grows whenever the cache's content was lost (restart, clear)
        self.prefill_rate: float | None = (
            None  # learned prompt tokens per second; None before the first report
        )
        self.round_trip_s = 0.0
        self.approximate: ApproximateBlocks | None = None  # set where the engine sends no KV events
        self.service_s = 0.0  # EWMA of a request's whole duration
        self.outstanding: dict[Work, None] = {}
        self.decoding = 0
        self.promised_tokens = 0.0  # prompt tokens dispatched to it whose first token has not come
        self.slot_wait_s = 0.0  # wait of a new request for a free slot, as things stand
        self.free_blocks: int | None = None  # free or evictable, less what was promised; None if not reported
        self._waiting: dict[Work, None] = {}  # outstanding and not decoding; the first is the running prefill
        self._promised_blocks = 0
        self._head_since = 0.0  # when the running prefill came to the head
        self._head_ceiling = 0.0  # tokens of it that elapsed time alone may declare done
        self._foreign_tokens = 0.0  # prefill work of others, as of the last load report
        self._foreign_requests = 0
        self._blocks_at_load = 0
        self._load_at = 0.0
        self._rate = PrefillRate()
        self._clock = clock
        self._listeners: list[Listener] = []

    def __repr__(self) -> str:
        return f"Replica({self.id}, {self.state}, inflight={self.inflight})"

    # ---- state ----

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def listen(self, listener: Listener) -> None:
        """Call `listener(replica)` after every change of state and every loss of its cache."""
        self._listeners.append(listener)

    def unlisten(self, listener: Listener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def mark_ready(self) -> None:
        """Weights are loaded: requests may be sent."""
        if self.state != "ready":
            self.state, self.reason, self.stalled = "ready", "", False
            self._tell()

    def mark_starting(self, reason: str = "") -> None:
        """The process runs but does not serve yet."""
        if self.state != "starting":
            self._lose_everything()
            self.state = "starting"
            self.reason = reason
            self._tell()

    def mark_down(self, reason: str) -> None:
        """Gone, or not answering: nothing is outstanding there any more and its cache is taken for lost."""
        if self.state != "down" or self.stalled:
            self._lose_everything()
            self.state = "down"
            self.reason = reason
            self._tell()

    def mark_stalled(self) -> None:
        """It answers but computes nothing: down, its work is taken for lost; its cache is not."""
        if self.state == "ready":
            self._lose_work()
            self.state, self.reason, self.stalled = "down", "stalled", True
            self._tell()

    def mark_cache_lost(self) -> None:
        """The replica serves on, but its cache was emptied."""
        self.epoch += 1
        self._tell()

    def _lose_everything(self) -> None:
        self.epoch += 1
        self.stalled = False
        self._lose_work()

    def _lose_work(self) -> None:
        self.outstanding.clear()
        self._waiting.clear()
        self.promised_tokens, self._promised_blocks, self.decoding = 0.0, 0, 0
        self.load, self._foreign_tokens, self._foreign_requests = {}, 0.0, 0
        self._update()

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener(self)

    # ---- accounting ----

    @property
    def inflight(self) -> int:
        """Requests dispatched by this gateway that have not ended."""
        return len(self.outstanding)

    def promise(self, tokens: float, blocks: int) -> Work:
        """Account for one dispatched request; the result goes to `first_token_of` and `release`."""
        work = Work(tokens, blocks, self._clock())
        self.outstanding[work] = None
        self._waiting[work] = None
        self.promised_tokens += tokens
        self._promised_blocks += blocks
        if len(self._waiting) == 1:
            self._head_since = work.started
        self._update()
        return work

    def first_token_of(self, work: Work) -> None:
        """Its prefill is done: the promise is kept, decoding begins. Idempotent."""
        if work in self._waiting:
            self.decoding += 1
            self._fulfil(work)
            self._update()

    def release(self, work: Work) -> None:
        """The request ended, however it ended. Idempotent."""
        if work not in self.outstanding:
            return
        del self.outstanding[work]
        self._promised_blocks -= work.blocks
        if work in self._waiting:
            self._fulfil(work)
        else:
            self.decoding -= 1
            elapsed = self._clock() - work.started
            self.service_s += (elapsed - self.service_s) * (_SERVICE_WEIGHT if self.service_s else 1.0)
        self._update()

    def learn(self, timings: Timings) -> None:
        """Take over what it reported about one request."""
        self._rate.learn(timings.prefill_tokens, timings.prefill_s)
        self.prefill_rate = self._rate.tokens_per_s

    def report_load(self, load: Mapping[str, Any]) -> None:
        """Take over a load report (`/engine/cache`)."""
        self.load = dict(load)
        self._load_at = self._clock()
        self._foreign_tokens = max(0.0, _integer(load, "prefill_tokens_pending") - self.promised_tokens)
        reported = _integer(load, "running") + _integer(load, "waiting")
        self._foreign_requests = max(0, reported - self.inflight)
        self._blocks_at_load = self._promised_blocks
        self._update()

    def queued_tokens(self, rate: float, now: float) -> float:
        """Prefill tokens ahead of a new request; elapsed time counts as progress of the running prefill.

        `rate` is in tokens per second. Work that others sent is taken from the replica's last load report.
        """
        ahead = self.promised_tokens
        if ahead:
            progress = (now - self._head_since) * rate
            ahead -= progress if progress < self._head_ceiling else self._head_ceiling
        if self._foreign_tokens:
            ahead += max(0.0, self._foreign_tokens - (now - self._load_at) * rate)
        return ahead

    @property
    def block_wait_s(self) -> float:
        """Wait until blocks come free: until the next of the decoding requests ends."""
        return (self.service_s or _SERVICE_S) / max(1, self.decoding)

    def _fulfil(self, work: Work) -> None:
        """`work` leaves the prefill queue."""
        was_head = next(iter(self._waiting)) is work
        del self._waiting[work]
        # The sum is exact where it matters: nothing waits, nothing is promised.
        self.promised_tokens = self.promised_tokens - work.tokens if self._waiting else 0.0
        if was_head:
            self._head_since = self._clock()

    def _update(self) -> None:
        """Derive what decisions read from the accounts; called after every change of them."""
        head = next(iter(self._waiting), None)
        self._head_ceiling = head.tokens * _PROGRESS_CEILING if head is not None else 0.0
        slots = _integer(self.info, "max_seqs")
        missing = 1 + self.inflight + self._foreign_requests - slots if slots else 0
        self.slot_wait_s = (self.service_s or _SERVICE_S) * missing / slots if missing > 0 else 0.0
        self.free_blocks = None
        if "free" in self.load:
            since = max(0, self._promised_blocks - self._blocks_at_load)
            self.free_blocks = _integer(self.load, "free") + _integer(self.load, "cached") - since

    def snapshot(self) -> dict[str, Any]:
        """For the admin plane: plain values only, no key."""
        return {
            "id": self.id,
            "pool": self.pool,
            "base_url": self.base_url,
            "dialect": self.dialect,
            "state": self.state,
            "reason": self.reason,
            "epoch": self.epoch,
            "inflight": self.inflight,
            "decoding": self.decoding,
            "promised_tokens": round(self.promised_tokens),
            "prefill_rate": self.prefill_rate,
            "round_trip_s": self.round_trip_s,
            "load": self.load,
            "info": self.info,
        }


def _integer(report: Mapping[str, Any], key: str) -> int:
    """A count out of a report; 0 where it is absent or not a number."""
    value = report.get(key)
    return int(value) if isinstance(value, int | float) else 0
