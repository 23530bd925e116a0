"""KV events on real sockets: live batches, replay, and the exact bytes that a router reads."""

import os
import stat

import msgpack
import pytest
import zmq

from engine.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from engine.worker.events import END_OF_REPLAY, REPLAY_BATCHES, NoEvents, ZmqEvents

STORED = BlockStored((b"a" * 16, b"b" * 16), b"p" * 16, tuple(range(32)), 16)
REMOVED = BlockRemoved((b"b" * 16,))


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def endpoints(tmp_path):
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/events-replay"


@pytest.fixture
def publisher(context, endpoints):
    publisher = ZmqEvents(context, *endpoints, clock=lambda: 12.5)
    yield publisher
    publisher.close()


@pytest.fixture
def connect(context):
    """Connect a peer; all are closed at the end."""
    peers = []

    def connected(kind, endpoint):
        peer = context.socket(kind)
        peers.append(peer)
        peer.setsockopt(zmq.RCVTIMEO, 3000)
        if kind == zmq.SUB:
            peer.setsockopt(zmq.SUBSCRIBE, b"kv-events")
        peer.connect(endpoint)
        return peer

    yield connected
    for peer in peers:
        peer.close(0)


def first_batch(subscriber, publisher):
    """Subscribing takes a moment: publish until a batch comes through."""
    for _ in range(300):
        publisher.publish([AllBlocksCleared()])
        if subscriber.poll(10):
            return subscriber.recv_multipart()
    raise AssertionError("no batch arrived")


def replayed(publisher, peer, start, envelope=(b"",)):
    peer.send_multipart([*envelope, start.to_bytes(8, "big")])
    assert publisher.sockets[0].poll(3000)
    publisher.serve_replays()
    frames = []
    while True:
        *lead, number, payload = peer.recv_multipart()
        assert tuple(lead) == envelope
        if number == END_OF_REPLAY:
            assert payload == b""
            return frames
        frames.append((int.from_bytes(number, "big"), payload))


def test_a_subscriber_reads_numbered_batches_of_tagged_arrays(connect, endpoints, publisher):
    subscriber = connect(zmq.SUB, endpoints[0])
    _, number, _ = first_batch(subscriber, publisher)
    while subscriber.poll(50):
        _, number, _ = subscriber.recv_multipart()
    publisher.publish([STORED, REMOVED, AllBlocksCleared()])
    topic, following, payload = subscriber.recv_multipart()
    assert topic == b"kv-events"
    assert int.from_bytes(following, "big") == int.from_bytes(number, "big") + 1
    assert msgpack.unpackb(payload) == [
        12.5,
        [
            ["BlockStored", [b"a" * 16, b"b" * 16], b"p" * 16, list(range(32)), 16, None, "cpu", None],
            ["BlockRemoved", [b"b" * 16], "cpu"],
            ["AllBlocksCleared"],
        ],
        None,
    ]


@pytest.mark.parametrize("envelope", [(b"",), ()])
def test_a_replay_repeats_what_was_missed_and_ends(connect, endpoints, publisher, envelope):
    for i in range(5):
        publisher.publish([BlockRemoved((bytes([i]) * 16,))])
    peer = connect(zmq.DEALER, endpoints[1])
    frames = replayed(publisher, peer, 2, envelope)
    assert [number for number, _ in frames] == [2, 3, 4]
    assert msgpack.unpackb(frames[0][1])[1] == [["BlockRemoved", [b"\x02" * 16], "cpu"]]
    assert replayed(publisher, peer, 5, envelope) == []


def test_the_buffer_keeps_the_newest_batches(connect, endpoints, publisher):
    for _ in range(REPLAY_BATCHES + 3):
        publisher.publish([AllBlocksCleared()])
    peer = connect(zmq.DEALER, endpoints[1])
    frames = replayed(publisher, peer, 0)
    assert len(frames) == REPLAY_BATCHES
    assert (frames[0][0], frames[-1][0]) == (3, REPLAY_BATCHES + 2)


def test_a_malformed_replay_request_gets_the_end_mark(connect, endpoints, publisher):
    publisher.publish([AllBlocksCleared()])
    peer = connect(zmq.DEALER, endpoints[1])
    peer.send_multipart([b"", b"xy"])
    assert publisher.sockets[0].poll(3000)
    publisher.serve_replays()
    assert peer.recv_multipart() == [b"", END_OF_REPLAY, b""]


def test_an_empty_batch_is_not_sent(connect, endpoints, publisher):
    publisher.publish([])
    publisher.publish([REMOVED])
    peer = connect(zmq.DEALER, endpoints[1])
    assert [number for number, _ in replayed(publisher, peer, 0)] == [0]


def test_ipc_sockets_belong_to_their_owner(endpoints, publisher):
    for endpoint in endpoints:
        mode = os.stat(endpoint.removeprefix("ipc://")).st_mode
        assert stat.S_IMODE(mode) == 0o600


def test_no_events_accepts_everything():
    silent = NoEvents()
    silent.publish([REMOVED])
    silent.serve_replays()
    silent.close()
    assert silent.sockets == ()
