"""Router: affinity, spill, concurrency on one prefix, exclusion, and accounts that return to zero."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing import (
    NoReplica,
    PoolState,
    PrefixIndex,
    Replica,
    RouteQuery,
    Router,
    Timings,
)
from gateway.routing.approximate import ApproximateBlocks
from gateway.routing.router import CONFIRM_S


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Fleet:
    """A pool of ready replicas that compute 1,000 tokens per second, on a clock of its own."""

    def __init__(self, count: int = 2, routing: str = "cost", seed: int = 1) -> None:
        self.clock = Clock()
        self.index = PrefixIndex()
        self.router = Router(self.index, clock=self.clock)
        self.replicas = []
        for number in range(count):
            replica = Replica(f"r{number}", pool="p", base_url="http://x", clock=self.clock)
            replica.learn(Timings(prefill_tokens=1_000, prefill_s=1.0))
            replica.mark_ready()
            self.replicas.append(replica)
        self.pool = PoolState("p", self.replicas, routing=routing, rng=random.Random(seed))

    def choose(self, query: RouteQuery, exclude: frozenset[str] = frozenset()):
        return self.router.choose(self.pool, query, exclude)

    def dispatch(self, query: RouteQuery):
        return self.router.dispatch(self.choose(query), query)


def prompt(name: int, tokens: int = 1_008) -> RouteQuery:
    hashes = tuple(name.to_bytes(4, "big") + n.to_bytes(12, "big") for n in range(tokens // 16))
    return RouteQuery(tokens=tokens, hashes=hashes)


def test_the_holder_is_chosen_and_the_figures_say_why():
    fleet = Fleet()
    query = prompt(1)
    fleet.index.store("r1", query.hashes[:60])
    fleet.index.store("r0", query.hashes[:10])
    decision = fleet.choose(query)
    assert decision.replica.id == "r1"
    assert (decision.cached_tokens, decision.captured_tokens, decision.available_tokens) == (960, 960, 960)
    assert decision.policy == "cost"
    costs = {candidate.replica_id: candidate for candidate in decision.candidates}
    assert costs["r0"].cached_tokens == 160
    assert costs["r1"].cost_s == pytest.approx(1.25 * 0.048)
    assert costs["r0"].cost_s == pytest.approx(1.25 * 0.848)


def test_the_block_with_the_last_token_is_always_computed():
    fleet = Fleet()
    query = prompt(1, tokens=160)
    fleet.index.store("r0", query.hashes)
    assert fleet.choose(query).cached_tokens == 144


def test_affinity_outweighs_a_small_load_difference():
    fleet = Fleet()
    query = prompt(1)
    fleet.index.store("r0", query.hashes)
    for other in range(2, 6):  # four short requests ahead, none elsewhere
        work = fleet.replicas[0].promise(60, 4)
        if other % 2:
            fleet.replicas[0].first_token_of(work)
    assert fleet.choose(query).replica.id == "r0"


def test_a_hot_holder_spills_when_its_queue_costs_more_than_a_prefill():
    fleet = Fleet()
    query = prompt(1)
    fleet.index.store("r0", query.hashes)
    fleet.replicas[0].promise(1_000, 64)
    assert fleet.choose(query).replica.id == "r0"
    fleet.replicas[0].promise(1_000, 64)
    decision = fleet.choose(query)
    assert decision.replica.id == "r1"
    assert (decision.cached_tokens, decision.captured_tokens, decision.available_tokens) == (0, 0, 992)


async def test_concurrent_first_requests_for_one_prefix_go_to_one_replica():
    fleet = Fleet(count=4)
    dispatches = [fleet.dispatch(prompt(1)) for _ in range(3)]
    assert len({dispatch.replica.id for dispatch in dispatches}) == 1
    assert [dispatch.decision.cached_tokens for dispatch in dispatches] == [0, 992, 992]
    assert [dispatch.decision.captured_tokens for dispatch in dispatches] == [0, 0, 0]
    assert dispatches[0].replica.promised_tokens == 1_008 + 16 + 16
    for dispatch in dispatches:
        dispatch.finish("error")
    assert fleet.choose(prompt(1)).cached_tokens == 0  # nothing was computed, nothing is expected
    fleet.index.check()


def test_cold_prefixes_agree_across_gateways_and_spread():
    first, second = Fleet(count=4, seed=1), Fleet(count=4, seed=2)
    chosen = [first.choose(prompt(n)).replica.id for n in range(80)]
    assert chosen == [second.choose(prompt(n)).replica.id for n in range(80)]
    assert all(10 <= chosen.count(f"r{n}") <= 32 for n in range(4))


def test_a_cold_prefix_leaves_its_rendezvous_replica_when_that_is_busy():
    fleet = Fleet()
    home = fleet.choose(prompt(1)).replica
    home.promise(1_000, 64)
    assert fleet.choose(prompt(1)).replica is not home


def test_ties_are_broken_at_random():
    fleet = Fleet()
    query = prompt(1)
    for replica in fleet.replicas:
        fleet.index.store(replica.id, query.hashes)
    chosen = [fleet.choose(query).replica.id for _ in range(60)]
    assert 15 <= chosen.count("r0") <= 45
    short = RouteQuery(tokens=9)
    assert {fleet.choose(short).replica.id for _ in range(60)} == {"r0", "r1"}


def test_excluded_and_unready_replicas_are_never_chosen():
    fleet = Fleet(count=3)
    query = prompt(1)
    fleet.index.store("r0", query.hashes)
    fleet.replicas[1].mark_down("gone")
    decision = fleet.choose(query, exclude=frozenset({"r0"}))
    assert decision.replica.id == "r2"
    assert decision.available_tokens == 0
    with pytest.raises(NoReplica, match=r"no replica of pool 'p' is ready \(3 known, 2 tried already\)"):
        fleet.choose(query, exclude=frozenset({"r0", "r2"}))
    with pytest.raises(NoReplica):
        Fleet(count=0).choose(query)


def test_a_full_replica_is_avoided():
    fleet = Fleet()
    query = prompt(1, tokens=64)
    fleet.index.store("r0", query.hashes)
    fleet.replicas[0].info = {"max_seqs": 1}
    work = fleet.replicas[0].promise(1, 1)
    fleet.replicas[0].first_token_of(work)
    assert fleet.choose(query).replica.id == "r1"
    fleet.replicas[0].release(work)
    assert fleet.choose(query).replica.id == "r0"


def test_a_replica_without_blocks_is_avoided():
    fleet = Fleet()
    fleet.replicas[0].report_load({"free": 3, "cached": 0, "pinned": 0})
    for name in range(20):
        assert fleet.choose(prompt(name)).replica.id == "r1"


def test_a_new_replica_borrows_the_median_rate():
    fleet = Fleet(count=3)
    fleet.replicas[1].learn(Timings(prefill_tokens=100_000, prefill_s=20.0))
    newcomer = Replica("r9", pool="p", base_url="http://x", clock=fleet.clock)
    newcomer.mark_ready()
    fleet.pool.add(newcomer)
    costs = {c.replica_id: c.cost_s for c in fleet.choose(prompt(1)).candidates}
    assert costs["r9"] == pytest.approx(costs["r0"])
    assert costs["r1"] < costs["r0"] / 3


def test_round_trip_is_part_of_the_cost():
    fleet = Fleet()
    fleet.replicas[0].round_trip_s = 0.5
    for name in range(20):
        assert fleet.choose(prompt(name, tokens=320)).replica.id == "r1"


async def test_expected_blocks_end_some_time_after_the_first_token(monkeypatch):
    fleet = Fleet()
    query = prompt(1)
    calls: list[tuple] = []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda *args: calls.append(args))
    dispatch = fleet.dispatch(query)
    dispatch.first_token()
    dispatch.first_token()
    dispatch.finish("ok", Timings(prefill_tokens=1_008, prefill_s=0.5))
    assert fleet.choose(query).cached_tokens == 992
    ((delay, settle, expectation),) = calls
    assert delay == CONFIRM_S
    settle(expectation)
    assert fleet.choose(query).cached_tokens == 0
    assert dispatch.replica.prefill_rate > 1_000


async def test_engines_without_events_are_taken_to_hold_what_was_sent():
    fleet = Fleet()
    for replica in fleet.replicas:
        replica.approximate = ApproximateBlocks(replica.id, fleet.index)
    query = prompt(1)
    with fleet.dispatch(query) as dispatch:
        dispatch.first_token()
    decision = fleet.choose(query)
    assert decision.replica is dispatch.replica
    assert (decision.cached_tokens, decision.available_tokens) == (992, 992)
    failed = prompt(2)
    fleet.dispatch(failed).finish("error")
    assert fleet.choose(failed).cached_tokens == 0
    fleet.index.check()


async def test_late_news_of_a_dead_replica_leaves_no_trace():
    fleet = Fleet(count=1)
    (replica,) = fleet.replicas
    replica.approximate = ApproximateBlocks(replica.id, fleet.index)
    dispatch = fleet.dispatch(prompt(1))
    replica.mark_down("SIGKILL")
    fleet.index.clear(replica.id)
    dispatch.first_token()
    dispatch.finish("ok")
    assert fleet.index.blocks("r0") == 0
    assert (replica.inflight, replica.promised_tokens, replica.decoding) == (0, 0, 0)
    fleet.index.check()


@pytest.mark.parametrize("error", [None, ValueError, asyncio.CancelledError, KeyboardInterrupt])
async def test_every_exit_path_releases(error):
    fleet = Fleet()
    query = prompt(1)
    outcomes = {
        None: "ok",
        ValueError: "error",
        asyncio.CancelledError: "aborted",
        KeyboardInterrupt: "aborted",
    }
    with pytest.raises(error) if error else fleet.dispatch(prompt(2)), fleet.dispatch(query) as dispatch:
        if error:
            raise error
    assert dispatch.outcome == outcomes[error]
    dispatch.finish("retried")
    assert dispatch.outcome == outcomes[error]
    assert all(r.inflight == 0 and r.promised_tokens == 0 for r in fleet.replicas)


steps = st.lists(
    st.tuples(st.sampled_from(["dispatch", "first", "ok", "error", "retried", "down"]), st.integers(0, 30)),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(steps, st.sampled_from(["cost", "round-robin", "least-load", "random"]))
def test_whatever_happens_nothing_stays_outstanding(steps, routing):
    async def scenario() -> None:
        fleet = Fleet(count=3, routing=routing)
        dispatches = []
        for kind, number in steps:
            fleet.clock.now += 0.05
            if kind == "dispatch":
                dispatches.append(fleet.dispatch(prompt(number % 4, tokens=16 * (number + 1))))
            elif kind == "down":
                replica = fleet.replicas[number % 3]
                replica.mark_down("killed")
                fleet.index.clear(replica.id)
                replica.mark_ready()
            elif dispatches:
                dispatch = dispatches[number % len(dispatches)]
                if kind == "first":
                    dispatch.first_token()
                else:
                    dispatch.finish(kind)
        fleet.index.check()
        for dispatch in dispatches:
            dispatch.finish("aborted")
        fleet.index.check()
        for replica in fleet.replicas:
            assert (replica.inflight, replica.promised_tokens, replica.decoding) == (0, 0.0, 0)

    asyncio.run(scenario())


def test_a_simulated_closed_loop_keeps_tenants_at_home_and_both_replicas_busy():
    """Eight tenants of 1,000 tokens, two requests in flight: each prefix is computed about once."""

    async def scenario() -> tuple[int, list[int]]:
        fleet = Fleet()
        rng = random.Random(5)
        computed, sent, open_ = 0, [0, 0], []
        for _ in range(200):
            tenant = rng.randrange(8)
            shared = prompt(tenant, 960).hashes
            own = tuple(rng.randbytes(16) for _ in range(4))
            query = RouteQuery(tokens=1_030, hashes=shared + own)
            dispatch = fleet.dispatch(query)
            computed += query.tokens - dispatch.decision.cached_tokens
            sent[int(dispatch.replica.id[1:])] += 1
            open_.append((dispatch, query))
            if len(open_) == 2:
                done, its_query = open_.pop(0)
                fleet.clock.now += (its_query.tokens - done.decision.cached_tokens) / 1_000
                done.first_token()
                fleet.index.store(done.replica.id, its_query.hashes)
                done.finish("ok")
        return computed, sent

    computed, sent = asyncio.run(scenario())
    assert computed < 200 * 70 + 12 * 960
    assert min(sent) > 40
