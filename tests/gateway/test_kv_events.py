"""Decoding of KV-event batches: arrays and maps, bytes and integer hashes, missing and extra fields."""

import contextlib

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.kv_events import Cleared, EventError, Removed, Stored, decode_batch

A, B = b"a" * 16, b"b" * 16


def pack(*events: object) -> bytes:
    return msgpack.packb([1.5, list(events), None])


def test_arrays_as_the_bundled_engine_sends_them():
    payload = pack(
        ["BlockStored", [A, B], None, list(range(32)), 16, None, "cpu", None],
        ["BlockRemoved", [B], "cpu"],
        ["AllBlocksCleared"],
    )
    assert decode_batch(payload) == [
        Stored((A, B), None, tuple(range(32)), 16, "cpu"),
        Removed((B,), "cpu"),
        Cleared(),
    ]


def test_trailing_fields_may_be_missing_or_new():
    payload = msgpack.packb(
        [1.5, [["BlockStored", [7], 6, [1, 2], 2], ["BlockRemoved", [7], None, "new", 5]]]
    )
    assert decode_batch(payload) == [Stored((7,), 6, (1, 2), 2), Removed((7,))]


def test_maps():
    events = [
        {
            "type": "BlockStored",
            "block_hashes": [2**63],
            "parent_block_hash": None,
            "token_ids": [1],
            "block_size": 1,
        },
        {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"},
        {"type": "AllBlocksCleared"},
    ]
    assert decode_batch(msgpack.packb({"ts": 1.0, "events": events})) == [
        Stored((2**63,), None, (1,), 1),
        Removed((3,), "GPU"),
        Cleared(),
    ]


def test_the_salt_is_the_string_among_the_first_blocks_extra_keys():
    stored = ["BlockStored", [1], None, [1], 1, None, "GPU", None, [["tenant-salt"]]]
    (event,) = decode_batch(pack(stored))
    assert isinstance(event, Stored)
    assert event.salt == "tenant-salt"
    stored[8] = [[5, None]]
    (event,) = decode_batch(pack(stored))
    assert isinstance(event, Stored)
    assert event.salt is None


def test_unknown_kinds_are_skipped():
    assert decode_batch(pack(["BlockMoved", [1]], ["AllBlocksCleared"])) == [Cleared()]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb(5),
        msgpack.packb([1.0, 7, None]),
        msgpack.packb({"ts": 1}),
        pack("text"),
        pack(["BlockStored", ["text"], None, [1], 1]),
        pack(["BlockStored", [1], None, [1], None]),
        pack(["BlockRemoved", None]),
        pack(["BlockRemoved"]),
        pack(["BlockStored", [True], None, [1], 1]),
    ],
)
def test_malformed_batches_are_refused(payload):
    with pytest.raises(EventError):
        decode_batch(payload)


def test_an_oversized_batch_is_refused():
    with pytest.raises(EventError, match="bytes"):
        decode_batch(bytes(64 * 1024 * 1024 + 1))


def test_a_map_keyed_by_a_list_is_an_error():
    with pytest.raises(EventError):
        decode_batch(b"\x82\x00\x00\x90\x00")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_events_or_an_event_error(payload):
    with contextlib.suppress(EventError):
        assert isinstance(decode_batch(payload), list)
