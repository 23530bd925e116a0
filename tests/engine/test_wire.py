"""Wire messages: what goes in comes out, and nothing malformed gets through."""

import msgpack
import pytest

from engine.core.pins import PinSpec
from engine.core.request import Request, SamplingParams
from engine.core.sequence import Timings, TokenLogprob, TokenOutput
from engine.worker import wire

FULL = Request(
    "r1",
    (1, 2, 70_000),
    b"s" * 16,
    SamplingParams(
        max_tokens=9,
        temperature=0.5,
        seed=3,
        stop_token_ids=frozenset({2, 5}),
        logit_bias=((4, -100.0),),
        logprobs=3,
        prompt_logprobs=0,
    ),
    priority=0,
    tenant="acme",
    deadline_ms=250,
)


def add(**fields: object) -> bytes:
    return msgpack.packb(
        ["add", {"request_id": "r", "token_ids": [1], "seed": b"s" * 16, "params": {}, **fields}]
    )


@pytest.mark.parametrize(
    "command",
    [
        wire.Add(FULL),
        wire.Add(Request("r2", (5,), b"t" * 16, SamplingParams())),
        wire.Abort("r1"),
        wire.PinPrefix(PinSpec("p", (1, 2, 3), b"s" * 16, 60.0, "acme")),
        wire.PinPrefix(PinSpec("p", (), b"s" * 16)),
        wire.Unpin("p"),
        wire.ClearCache(),
        wire.QueryStats(),
        wire.Shutdown(),
    ],
)
def test_commands_survive_the_trip(command):
    assert wire.decode_command(wire.encode_command(command)) == command


@pytest.mark.parametrize(
    "report",
    [
        wire.Ready({"context_length": 8192, "eos_ids": [2]}),
        wire.Tokens(
            (
                TokenOutput("a", 5),
                TokenOutput(
                    "b",
                    7,
                    "stop",
                    TokenLogprob(-0.25, ((7, -0.25), (9, -2.0))),
                    (None, TokenLogprob(-1.0, ())),
                    Timings(0.5, 0.25, 16, 4),
                ),
                TokenOutput("c", None, "length", None, (None,)),
                TokenOutput("d", None, "error", message="the step failed"),
            )
        ),
        wire.Stats({"free": 3}),
        wire.Stats({"free": 3}, answer=True),
        wire.Pins(({"id": "p", "state": "warming"},)),
        wire.Failed("r", "too long", "context_length_exceeded"),
        wire.Failed(None, "unknown command", "bad_message"),
    ],
)
def test_reports_survive_the_trip(report):
    assert wire.decode_report(wire.encode_report(report)) == report


def test_token_ids_may_come_as_a_list():
    request = {"request_id": "r", "token_ids": [1, 2], "seed": b"s" * 16, "params": {"max_tokens": 1}}
    command = wire.decode_command(msgpack.packb(["add", request]))
    assert command == wire.Add(Request("r", (1, 2), b"s" * 16, SamplingParams(max_tokens=1)))


@pytest.mark.parametrize(
    ("message", "says", "request_id"),
    [
        (b"\xc1", "not a msgpack message", None),
        (b"", "not a msgpack message", None),
        (msgpack.packb({}), "starts with its name", None),
        (msgpack.packb([]), "starts with its name", None),
        (msgpack.packb(["fly", 1]), "unknown command 'fly'", None),
        (msgpack.packb(["abort"]), "'abort' with 0 fields", None),
        (msgpack.packb(["abort", 3]), "request id must be a non-empty string", None),
        (msgpack.packb(["unpin", ""]), "pin id must be", None),
        (msgpack.packb(["add", 5]), "a map of request fields", None),
        (msgpack.packb(["pin", 5]), "a map of pin fields", None),
        (msgpack.packb(["add", {"request_id": "r"}]), "'params' is missing", "r"),
        (msgpack.packb(["add", {"request_id": "r", "params": {"heat": 1}}]), "'token_ids' is missing", "r"),
        (add(params={"heat": 1}), "malformed request: .*heat", "r"),
        (add(params={"max_tokens": "5"}), "max_tokens is '5'", "r"),
        (add(params={"temperature": None}), "temperature is None", "r"),
        (add(params={"logit_bias": 3}), "malformed request", "r"),
        (add(deadline_ms="soon"), "malformed request", "r"),
        (msgpack.packb(["add", {"request_id": "r", "params": {}, "token_ids": b"123"}]), "malformed", "r"),
        (msgpack.packb(["add", {"request_id": "r", "params": {}, "token_ids": "1"}]), "int32", "r"),
        (msgpack.packb(["add", {"request_id": "r", "params": {}, "token_ids": [2**40]}]), "malformed", "r"),
        (
            msgpack.packb(["add", {"request_id": "r", "params": {}, "token_ids": [1], "seed": b"x"}]),
            "seed must be 16 bytes",
            "r",
        ),
        (msgpack.packb(["pin", {"token_ids": [1]}]), "pin field 'id' is missing", None),
        (msgpack.packb(["pin", {"id": "p", "token_ids": 4}]), "malformed pin", None),
    ],
)
def test_malformed_commands_say_what_is_wrong(message, says, request_id):
    with pytest.raises(wire.WireError, match=says) as error:
        wire.decode_command(message)
    assert error.value.request_id == request_id


@pytest.mark.parametrize(
    "message",
    [
        ["tokens", [["a"]]],
        ["tokens"],
        ["stats", 4],
        ["stats", {}],
        ["error", None],
        ["hello"],
        ["ready", [1]],
    ],
)
def test_malformed_reports_are_wire_errors(message):
    with pytest.raises(wire.WireError):
        wire.decode_report(msgpack.packb(message))
