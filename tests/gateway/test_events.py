"""KvEventSubscriber over real sockets: order, gaps, replay, restarts, silence."""

import asyncio
import random

import msgpack
import pytest
import zmq
import zmq.asyncio

from gateway.routing.events import KvEventSubscriber
from gateway.routing.index import PrefixIndex
from gateway.routing.replica import Replica

BLOCKS = [n.to_bytes(16, "big") for n in range(200)]


class Publisher:
    """PUB and ROUTER sockets as vLLM and the bundled engine have them; a batch can be lost on purpose."""

    def __init__(
        self, context: zmq.asyncio.Context, folder: str, *, buffer: int = 1_000, replay: bool = True
    ) -> None:
        self.endpoint = f"ipc://{folder}/events"
        self.replay_endpoint = f"ipc://{folder}/replay"
        self._pub = context.socket(zmq.PUB)
        self._pub.bind(self.endpoint)
        self._router = context.socket(zmq.ROUTER)
        self._router.bind(self.replay_endpoint)
        self.batches: list[tuple[int, bytes]] = []
        self.buffer = buffer
        self.seq = 0
        self.requests = 0
        self.answers = replay
        self._task = asyncio.create_task(self._serve())

    async def publish(self, *events: object, lose: bool = False, raw: bytes | None = None) -> None:
        payload = raw if raw is not None else msgpack.packb([0.0, list(events), None])
        self.batches = [*self.batches, (self.seq, payload)][-self.buffer :]
        if not lose:
            await self._pub.send_multipart([b"kv-events", self.seq.to_bytes(8, "big"), payload])
        self.seq += 1

    async def _serve(self) -> None:
        while True:
            identity, _, start = await self._router.recv_multipart()
            self.requests += 1
            if not self.answers:
                continue
            for seq, payload in self.batches:
                if seq >= int.from_bytes(start, "big"):
                    await self._router.send_multipart([identity, b"", seq.to_bytes(8, "big"), payload])
            await self._router.send_multipart([identity, b"", (-1).to_bytes(8, "big", signed=True), b""])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._pub.close(linger=0)
        self._router.close(linger=0)


def stored(*numbers: int) -> list[object]:
    return ["BlockStored", [BLOCKS[n] for n in numbers], None, [], 16, None, "cpu", None]


def removed(*numbers: int) -> list[object]:
    return ["BlockRemoved", [BLOCKS[n] for n in numbers], "cpu"]


async def until(condition, timeout_s: float = 3.0) -> None:
    for _ in range(int(timeout_s / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition never held")


@pytest.fixture
async def context():
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def publisher(context, tmp_path):
    publisher = Publisher(context, str(tmp_path))
    yield publisher
    await publisher.close()


class Followed:
    def __init__(self, context, publisher, **options) -> None:
        self.index = PrefixIndex()
        self.replica = Replica("r0", pool="p", base_url="http://x")
        self.notices = 0
        self.subscriber = KvEventSubscriber(
            self.replica,
            publisher.endpoint,
            publisher.replay_endpoint,
            self.index,
            context=context,
            on_cleared=self.notice,
            replay_timeout_s=0.3,
            **options,
        )

    def notice(self) -> None:
        self.notices += 1

    @property
    def held(self) -> set[int]:
        return {n for n, block in enumerate(BLOCKS) if self.index.holds("r0", [block])}


@pytest.fixture
async def followed(context, publisher):
    followed = Followed(context, publisher)
    yield followed
    await followed.subscriber.stop()


async def test_history_comes_through_the_replay(publisher, followed):
    await publisher.publish(stored(0, 1, 2))
    await publisher.publish(removed(2))
    followed.subscriber.start()
    assert await followed.subscriber.synced(2.0)
    assert followed.held == {0, 1}


async def test_live_events_have_set_semantics(publisher, followed):
    followed.subscriber.start()
    await followed.subscriber.synced(2.0)
    await publisher.publish(stored(0, 1), stored(0), removed(1), removed(5))
    await publisher.publish(stored(3))
    await until(lambda: followed.subscriber.last_seq == 1)
    assert followed.held == {0, 3}
    assert followed.index.blocks("r0") == 2
    await publisher.publish(["AllBlocksCleared"], stored(7))
    await until(lambda: followed.subscriber.last_seq == 2)
    assert followed.held == {7}
    assert followed.notices == 1


async def test_a_gap_is_filled_from_the_replay(publisher, followed):
    followed.subscriber.start()
    await followed.subscriber.synced(2.0)
    await publisher.publish(stored(0))
    await publisher.publish(stored(1), lose=True)
    await publisher.publish(removed(0), lose=True)
    await publisher.publish(stored(2))
    await until(lambda: followed.subscriber.last_seq == 3)
    assert followed.held == {1, 2}
    assert followed.subscriber.gaps == 0


async def test_a_gap_beyond_the_replay_buffer_clears(publisher, followed):
    publisher.buffer = 2
    followed.subscriber.start()
    await followed.subscriber.synced(2.0)
    await publisher.publish(stored(0))
    await until(lambda: followed.subscriber.last_seq == 0)
    for n in range(1, 6):
        await publisher.publish(stored(n), lose=True)
    await publisher.publish(stored(6))
    await until(lambda: followed.subscriber.last_seq == 6)
    assert followed.held == {5, 6}
    assert followed.subscriber.gaps == 1
    assert followed.notices == 0


async def test_a_gap_without_an_answer_clears(publisher, followed):
    followed.subscriber.start()
    await followed.subscriber.synced(2.0)
    await publisher.publish(stored(0))
    await until(lambda: followed.subscriber.last_seq == 0)
    publisher.answers = False
    await publisher.publish(stored(1), lose=True)
    await publisher.publish(stored(2))
    await until(lambda: followed.subscriber.last_seq == 2)
    assert followed.held == {2}
    assert followed.subscriber.gaps == 1


async def test_the_last_event_before_a_silence_is_recovered(context, publisher):
    followed = Followed(context, publisher, idle_check_s=0.05)
    followed.subscriber.start()
    await followed.subscriber.synced(2.0)
    await publisher.publish(stored(0))
    await publisher.publish(removed(0), lose=True)
    await until(lambda: followed.subscriber.last_seq == 1)
    assert followed.held == set()
    await followed.subscriber.stop()


async def test_catch_up_applies_what_was_published(publisher, followed):
    followed.subscriber.start()
    await followed.subscriber.synced(2.0)
    await publisher.publish(stored(0, 1), lose=True)
    assert await followed.subscriber.catch_up()
    assert followed.held == {0, 1}


async def test_a_restarted_publisher_clears(publisher, followed):
    followed.subscriber.start()
    await followed.subscriber.synced(2.0)
    for n in range(3):
        await publisher.publish(stored(n))
    await until(lambda: followed.subscriber.last_seq == 2)
    publisher.seq, publisher.batches = 0, []
    await publisher.publish(stored(9))
    await until(lambda: followed.held == {9})
    assert followed.notices == 1
    assert followed.subscriber.last_seq == 0


async def test_a_malformed_batch_costs_this_replicas_entries_only(publisher, followed):
    followed.index.store("other", BLOCKS[:3])
    followed.subscriber.start()
    await followed.subscriber.synced(2.0)
    await publisher.publish(stored(0))
    await publisher.publish(raw=b"\xc1")
    await publisher.publish(stored(1))
    await until(lambda: followed.subscriber.last_seq == 2)
    assert followed.held == {1}
    assert followed.index.blocks("other") == 3
    assert followed.subscriber.errors == 1


async def test_events_of_another_medium_do_not_count(publisher, followed):
    followed.subscriber.start()
    await followed.subscriber.synced(2.0)
    await publisher.publish(stored(0))
    await publisher.publish(
        ["BlockRemoved", [BLOCKS[0]], "DISK"], ["BlockStored", [BLOCKS[1]], None, [], 16, None, "CPU"]
    )
    await until(lambda: followed.subscriber.last_seq == 1)
    assert followed.held == {0}


async def test_without_replay_a_stream_is_joined_where_it_is(context, publisher):
    followed = Followed(context, publisher)
    followed.subscriber._replay_endpoint = None
    publisher.seq = 500
    followed.subscriber.start()
    assert await followed.subscriber.synced(1.0)
    assert not await followed.subscriber.catch_up()
    async with asyncio.timeout(3):
        while followed.subscriber.last_seq < 0:  # a subscription takes a moment to reach the publisher
            await publisher.publish(stored(4))
            await asyncio.sleep(0.01)
    assert followed.held == {4}
    assert followed.subscriber.gaps == 0
    await followed.subscriber.stop()


async def test_random_losses_never_leave_a_wrong_entry(publisher, followed):
    rng = random.Random(3)
    publisher.buffer = 4
    followed.subscriber.start()
    await followed.subscriber.synced(2.0)
    truth: set[int] = set()
    for _ in range(200):
        numbers = rng.sample(range(50), 3)
        if rng.random() < 0.6:
            truth.update(numbers)
            await publisher.publish(stored(*numbers), lose=rng.random() < 0.3)
        else:
            truth.difference_update(numbers)
            await publisher.publish(removed(*numbers), lose=rng.random() < 0.3)
    await publisher.publish(stored(60))
    await until(lambda: followed.subscriber.last_seq == publisher.seq - 1)
    assert followed.held <= truth | {60}
    assert 60 in followed.held
    followed.index.check()


async def test_nothing_is_applied_after_cancel(publisher, followed):
    followed.subscriber.start()
    await followed.subscriber.synced(2.0)
    followed.subscriber.cancel()
    await publisher.publish(stored(0))
    await followed.subscriber.catch_up()
    assert followed.held == set()


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.5:5557", "tcp://example.org:5557", "udp://127.0.0.1:1"])
async def test_remote_endpoints_are_refused(context, endpoint):
    replica = Replica("r0", pool="p", base_url="http://x")
    with pytest.raises(ValueError, match="neither ipc nor loopback"):
        KvEventSubscriber(replica, endpoint, None, PrefixIndex(), context=context)


async def test_loopback_is_accepted(context):
    replica = Replica("r0", pool="p", base_url="http://x")
    KvEventSubscriber(replica, "tcp://127.0.0.1:5557", "tcp://[::1]:5558", PrefixIndex(), context=context)
