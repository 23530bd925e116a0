"""Faults that users of other servers reported about streaming and text, tried on the running stack.

Every test is named after its case; the comment cites the public report. Inputs are this project's own. Cases
that need a broken, slow or huge upstream are in `test_reports_upstreams.py`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from canonicalizer.detokenizer import Detokenizer
from canonicalizer.tokens import TextModel, bytes_to_ids
from tests.e2e.conftest import Stack
from tests.e2e.raw_http import (
    CHAT,
    COMPLETIONS,
    assert_serving,
    chat,
    completion,
    connect,
    exchange,
    get_json,
    post,
    replicas,
)

SCALARS = "Zeile: šť 漢字 🦔\n" * 3 + "Zeile:"
EMOJI = "ab: 👩‍👩‍👧 ñ 🏳️‍🌈\n" * 3 + "ab:"
COUNT = "30, 31, 32, 33, 34, 35,"
SPACED = "( a , b ) ; { c : d } !\n" * 4 + "( a"


# --- text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [(SCALARS, 12), (SCALARS, 11), (EMOJI, 14), (EMOJI, 10)],
    ids=["scalars", "scalars-cut", "joined", "joined-cut"],
)
def test_b01_characters_split_over_tokens(stack: Stack, prompt: str, tokens: int) -> None:
    # exo-explore/exo#1691, waybarrios/vllm-mlx#109
    body = completion(prompt=prompt, max_tokens=tokens)
    silent = post(stack.base_url, COMPLETIONS, body)
    streamed = post(stack.base_url, COMPLETIONS, {**body, "stream": True})
    assert streamed.text() == silent.text() and not silent.text().isascii()
    assert not any("\ufffd" in piece for piece in streamed.pieces()[:-1])
    assert "\ufffd" not in silent.text()[:-1], "only where the answer ended inside a character"


def test_b02_combining_marks_and_joiners(stack: Stack) -> None:  # ml-explore/mlx-swift-lm#612
    folder = Path(replicas(stack)[0]["model_dir"])
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    model = TextModel.from_files((folder / "tokenizer.json").read_bytes(), config)
    for text in ("o\u0308x", "e\u0301\u0323 z", "👩\u200d🚒", "✈\ufe0f!", "🇳🇴🇸🇪", "한\u1100\u1161"):
        detokenizer = Detokenizer(model)
        ids = [token for scalar in text for token in bytes_to_ids(model.encode_text(scalar))]
        pieces = [*(detokenizer.push(token) for token in ids), detokenizer.flush()]
        assert "".join(pieces) == text


@pytest.fixture(scope="module")
def unstopped(stack: Stack) -> Callable[[str, int], str]:
    """The greedy continuation of a prompt, asked for once."""
    known: dict[str, str] = {}

    def ask(prompt: str, tokens: int) -> str:
        if prompt not in known:
            body = completion(prompt=prompt, max_tokens=tokens, ignore_eos=True)
            known[prompt] = post(stack.base_url, COMPLETIONS, body).text()
        return known[prompt]

    return ask


@pytest.mark.parametrize("case", ["b04-stream", "b05-whole"])
@pytest.mark.parametrize(
    ("prompt", "stop"),
    [(COUNT, "7, 3"), (SCALARS, "ť 漢字"), (SCALARS, "漢字 🦔")],
    ids=["digits", "letters", "emoji"],
)
def test_b04_b05_a_stop_string_over_several_tokens(
    stack: Stack, unstopped: Callable[[str, int], str], prompt: str, stop: str, case: str
) -> None:  # vllm-project/vllm#3574, mzau/mlx-knife#68; ggml-org/llama.cpp#11538
    text = unstopped(prompt, 12)
    assert stop in text, "the model continues the pattern"
    streaming = case == "b04-stream"
    body = completion(prompt=prompt, max_tokens=16, stop=["never said", stop], stream=streaming)
    reply = post(stack.base_url, COMPLETIONS, body)
    assert reply.text() == text[: text.index(stop)], "nothing of the stop string, all before it"
    assert reply.finishes == ["stop"]


@pytest.mark.parametrize("case", ["b04-stream", "b05-whole"])
def test_b04_b05_a_held_beginning_that_does_not_complete_is_released(
    stack: Stack, unstopped: Callable[[str, int], str], case: str
) -> None:
    text = unstopped(COUNT, 12)
    stops = [text[2:7] + "never", text[5:9] + "\u2028", text[-3:] + "x"]
    body = completion(prompt=COUNT, max_tokens=12, ignore_eos=True, stop=stops, stream=case == "b04-stream")
    reply = post(stack.base_url, COMPLETIONS, body)
    assert reply.text() == text and reply.finishes == ["length"]


@pytest.mark.parametrize("stream", [False, True])
def test_b05_chat_stops_the_same(stack: Stack, stream: bool) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    reply = post(
        stack.base_url, CHAT, chat(messages=messages, max_tokens=12, stop="of France is", stream=stream)
    )
    assert reply.text() == "The capital " and reply.finishes == ["stop"]


def test_b07_spaces_before_punctuation_stay(stack: Stack) -> None:  # huggingface/transformers#32575
    body = completion(prompt=SPACED, max_tokens=12, logprobs=0, ignore_eos=True)
    choice = post(stack.base_url, COMPLETIONS, body).json["choices"][0]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"])
    assert any(mark in choice["text"] for mark in (" ,", " )", " ;", " :", " }")), choice["text"]
    source = "{'x' : 1 , 'y' : [ 2 ] } ?  do n't , a .b ! \t;\n"
    url = replicas(stack)[0]["base_url"]
    ids = post(url, "/tokenize", {"prompt": source}).json["tokens"]
    echoed = post(stack.base_url, COMPLETIONS, completion(prompt=ids, echo=True, max_tokens=0))
    assert echoed.text() == source


# --- clients that leave -------------------------------------------------------------------------------------


async def leave(stack: Stack, body: dict[str, Any], chunks: int) -> None:
    """Send a request, read `chunks` events (or wait a moment for an answer that is not streamed), hang up."""
    parts = urlsplit(stack.base_url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    raw = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer key-acme\r\nContent-Length: {len(raw)}\r\n"
    )
    writer.write(head.encode() + b"\r\n" + raw)
    if chunks:
        seen = 0
        while seen < chunks:
            seen += (await reader.readline()).startswith(b"data: ")
    else:
        await asyncio.sleep(0.3)
    writer.transport.abort()


def load_of(stack: Stack) -> dict[str, int]:
    """Requests and blocks in use over all replicas, from the engines themselves."""
    rows = [get_json(row["base_url"] + "/engine/cache") for row in replicas(stack)]
    for row in rows:
        assert row["free"] + row["cached"] + row["used"] == row["total"]
    return {name: sum(row[name] for row in rows) for name in ("running", "waiting", "used")}


@pytest.mark.parametrize("stream", [True, False])
async def test_b08_a_client_that_leaves_frees_its_blocks(stack: Stack, stream: bool) -> None:
    # sgl-project/sglang#36552, vllm-project/vllm#54947
    base = load_of(stack)
    assert base["running"] == base["waiting"] == 0
    body = chat(max_tokens=4000, ignore_eos=True, stream=stream)
    limit = asyncio.Semaphore(20)

    async def one(number: int) -> None:
        messages = [{"role": "user", "content": f"Tell the long tale of ship number {number}."}]
        async with limit:
            await leave(stack, {**body, "messages": messages}, 3 if stream else 0)

    await asyncio.gather(*(one(number) for number in range(40)))
    closed = time.monotonic()
    while (now := await asyncio.to_thread(load_of, stack)) != base:
        assert time.monotonic() - closed < 3, now
        await asyncio.sleep(0.1)
    entries = get_json(stack.admin_url + "/admin/requests")["requests"][:40]
    assert {entry["outcome"] for entry in entries} == {"client_gone"}
    assert all(row["inflight"] == 0 for row in replicas(stack))
    again = [{"role": "user", "content": "Tell the long tale of ship number 7."}]
    reply = await asyncio.to_thread(post, stack.base_url, CHAT, chat(messages=again))
    assert reply.status == 200
    assert_serving(stack)


async def test_b08_a_client_that_leaves_in_prefill_ends_it(stack: Stack) -> None:
    base = load_of(stack)
    computed = sum(
        get_json(row["base_url"] + "/engine/cache")["computed_tokens_total"] for row in replicas(stack)
    )
    messages = [{"role": "user", "content": "The log of the day. " + "Wind west, sea slight. " * 1100}]
    await leave(stack, chat(messages=messages, max_tokens=4000, ignore_eos=True), 0)
    closed = time.monotonic()
    while (now := await asyncio.to_thread(load_of, stack)) != base:
        assert time.monotonic() - closed < 5, now
        await asyncio.sleep(0.05)
    after = sum(
        get_json(row["base_url"] + "/engine/cache")["computed_tokens_total"] for row in replicas(stack)
    )
    assert after - computed < 4000, "the rest of the prompt was not computed"
    assert_serving(stack)


# --- refusals of streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", "2"),
        ("n", 129),
        ("temperature", 9),
        ("top_p", -1),
        ("seed", 1.5),
        ("stop", ""),
        ("logit_bias", {"x": 1}),
        ("stream_options", []),
        ("stream", "yes"),
        ("presence_penalty", 3),
        ("tools", {}),
    ],
)
def test_b17_a_bad_field_is_refused_before_any_event(stack: Stack, field: str, value: Any) -> None:
    # EricLBuehler/mistral.rs#1874
    connection = connect(stack.base_url)
    bodies: list[tuple[str, dict[str, Any]]] = [(CHAT, chat())]
    if field != "tools":
        bodies.append((COMPLETIONS, completion()))
    for path, body in bodies:
        started = time.monotonic()
        refused = exchange(connection, path, {**body, "stream": True, field: value})
        assert refused.status == 400 and refused.error["param"] == field
        socket = connection.sock
        silent = exchange(connection, path, {**body, "stream_options": None, field: value, "max_tokens": 1})
        if field != "stream_options":
            assert silent.status == 400 and silent.error["message"] == refused.error["message"]
        assert connection.sock is socket and socket is not None, "the connection is free at once"
        assert time.monotonic() - started < 10
    connection.close()
