"""Replica: accounts return to zero on every path, and state changes void what was known."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.replica import Replica, Timings


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def replica(clock):
    replica = Replica("r0", pool="default", base_url="http://127.0.0.1:1/", clock=clock)
    replica.mark_ready()
    return replica


def test_base_url_has_no_trailing_slash(replica):
    assert replica.base_url == "http://127.0.0.1:1"


def test_promise_first_token_release(replica, clock):
    work = replica.promise(1_000, 70)
    assert (replica.inflight, replica.promised_tokens, replica.decoding) == (1, 1_000, 0)
    replica.first_token_of(work)
    replica.first_token_of(work)
    assert (replica.inflight, replica.promised_tokens, replica.decoding) == (1, 0, 1)
    clock.now += 3.0
    replica.release(work)
    replica.release(work)
    assert (replica.inflight, replica.promised_tokens, replica.decoding) == (0, 0, 0)
    assert replica.service_s == pytest.approx(3.0)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["promise", "first", "release", "down"]), st.integers(0, 9)), max_size=60
    )
)
def test_accounts_are_sums_over_what_is_outstanding(steps):
    clock = Clock()
    replica = Replica("r0", pool="p", base_url="http://x", clock=clock)
    works: list = []
    waiting: set = set()
    decoding: set = set()
    for kind, number in steps:
        clock.now += 0.1
        if kind == "promise":
            work = replica.promise(0.1 + number, number)
            works.append(work)
            waiting.add(work)
        elif kind == "down":
            replica.mark_down("killed")
            replica.mark_starting()
            waiting.clear()
            decoding.clear()
        elif works:
            work = works[number % len(works)]
            if kind == "first":
                replica.first_token_of(work)
                if work in waiting:
                    waiting.discard(work)
                    decoding.add(work)
            else:
                replica.release(work)
                waiting.discard(work)
                decoding.discard(work)
        assert replica.inflight == len(waiting) + len(decoding) == len(replica.outstanding)
        assert replica.decoding == len(decoding)
        assert replica.promised_tokens == pytest.approx(sum(w.tokens for w in waiting), abs=1e-6)
        assert replica.queued_tokens(10.0, clock.now) >= -1e-6
    for work in works:
        replica.release(work)
    assert (replica.inflight, replica.promised_tokens, replica.decoding) == (0, 0.0, 0)


def test_elapsed_time_counts_as_progress_of_the_running_prefill_only(replica, clock):
    first = replica.promise(1_000, 1)
    replica.promise(500, 1)
    assert replica.queued_tokens(100.0, clock.now) == 1_500
    clock.now += 5.0
    assert replica.queued_tokens(100.0, clock.now) == pytest.approx(1_000)
    clock.now += 60.0  # late: the first token has not come, so a tenth is still taken to be ahead
    assert replica.queued_tokens(100.0, clock.now) == pytest.approx(600)
    replica.first_token_of(first)
    assert replica.queued_tokens(100.0, clock.now) == pytest.approx(500)


def test_work_of_others_comes_from_the_load_report(replica, clock):
    replica.promise(300, 1)
    replica.report_load({"prefill_tokens_pending": 1_000, "running": 3, "waiting": 1})
    assert replica.queued_tokens(100.0, clock.now) == pytest.approx(1_000)
    clock.now += 2.0
    assert replica.queued_tokens(100.0, clock.now) == pytest.approx(100 + 500)


def test_slots_and_blocks(replica):
    assert replica.free_blocks is None
    replica.info = {"max_seqs": 4}
    replica.report_load({"free": 10, "cached": 30, "used": 60, "pinned": 20, "running": 2, "waiting": 0})
    assert replica.free_blocks == 40
    assert replica.slot_wait_s == 0.0
    work = replica.promise(100, 15)
    assert replica.free_blocks == 25
    replica.promise(100, 5)
    assert replica.slot_wait_s > 0.0  # two of ours and two of others: full
    replica.release(work)
    assert replica.slot_wait_s == 0.0
    assert replica.free_blocks == 35


def test_down_voids_everything_and_late_releases_change_nothing(replica):
    heard: list[str] = []
    replica.listen(lambda r: heard.append(r.state))
    work = replica.promise(100, 1)
    replica.report_load({"free": 1})
    replica.mark_down("SIGKILL")
    replica.mark_down("again")
    assert heard == ["down"]
    assert (replica.inflight, replica.promised_tokens, replica.load) == (0, 0, {})
    assert replica.reason == "SIGKILL"
    epoch = replica.epoch
    replica.mark_starting("loading")
    replica.mark_ready()
    assert replica.epoch > epoch
    other = replica.promise(7, 1)
    replica.first_token_of(work)
    replica.release(work)
    assert (replica.inflight, replica.promised_tokens) == (1, 7)
    replica.release(other)
    assert heard == ["down", "starting", "ready"]


def test_lost_cache_is_told_and_counted(replica):
    heard: list[int] = []

    def listener(changed: Replica) -> None:
        heard.append(changed.epoch)

    replica.listen(listener)
    replica.mark_cache_lost()
    replica.unlisten(listener)
    replica.mark_cache_lost()
    assert heard == [1]
    assert replica.epoch == 2


def test_rate_is_learned_from_reports(replica):
    assert replica.prefill_rate is None
    replica.learn(Timings(prefill_tokens=1_000, prefill_s=0.5))
    assert replica.prefill_rate == pytest.approx(2_000)


def test_timings_from_a_usage_chunk():
    extension = {"timings": {"queue_s": 0.1, "prefill_s": 0.2, "first_sample_s": 0.01}, "prefill_tokens": 64}
    assert Timings.from_usage(extension) == Timings(0.1, 0.2, 0.01, 64)
    assert Timings.from_usage(None) is None
    assert Timings.from_usage({"timings": {"queue_s": "x"}}) is None
    assert Timings.from_usage({}) == Timings()


def test_snapshot_is_plain_and_holds_no_key(clock):
    replica = Replica("r0", pool="p", base_url="http://x", api_key="secret", clock=clock)
    assert "secret" not in repr(replica.snapshot())
    assert "r0" in repr(replica)
