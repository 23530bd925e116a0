"""The OpenAI endpoints over real sockets and a fake runner: public reports of kinds A and B, bad input."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio

USER = {"role": "user", "content": "Name a colour, please, and say why you like it."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":6,"b":7}'}}


@pytest.fixture(scope="module")
def server(start_replica: Any) -> Iterator[Any]:
    with start_replica(
        "--fake", "--private", "--max-body-bytes", "300000", "--fake-decode-ms", "0.2"
    ) as running:
        yield running


@pytest_asyncio.fixture
async def http(server: Any) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(30)) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    async with http.post(path, json={"model": "fake", **body}) as response:
        return response.status, await response.json()


async def chat(http: aiohttp.ClientSession, *messages: Any, **fields: Any) -> tuple[int, dict[str, Any]]:
    return await post(http, "/v1/chat/completions", {"messages": list(messages) or [USER], **fields})


async def complete(http: aiohttp.ClientSession, prompt: Any, **fields: Any) -> tuple[int, dict[str, Any]]:
    return await post(http, "/v1/completions", {"prompt": prompt, **fields})


async def events(http: aiohttp.ClientSession, path: str, body: Any) -> list[Any]:
    """Every event of a stream, decoded; "[DONE]" as it is. No event may follow [DONE]."""
    async with http.post(path, json={"model": "fake", "stream": True, **body}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        raw = await response.read()
    blocks = [block for block in raw.split(b"\n\n") if block and not block.startswith(b":")]
    data = [block.removeprefix(b"data: ") for block in blocks]
    assert data.count(b"[DONE]") == 1
    assert data[-1] == b"[DONE]"
    return [orjson.loads(item) for item in data[:-1]]


async def stream_chat(http: aiohttp.ClientSession, **fields: Any) -> list[Any]:
    return await events(http, "/v1/chat/completions", {"messages": [USER], **fields})


def text_of(chunks: list[Any], index: int = 0) -> str:
    deltas = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
    return "".join(d["delta"].get("content", "") if "delta" in d else d["text"] for d in deltas)


async def idle(http: aiohttp.ClientSession) -> dict[str, Any]:
    """The cache's figures once nothing runs; fails after two seconds."""
    for _ in range(100):
        async with http.get("/engine/cache") as response:
            stats: dict[str, Any] = await response.json()
        if not stats["running"] and not stats["waiting"] and not stats["streams"]:
            return stats
        await asyncio.sleep(0.02)
    raise AssertionError(f"still busy: {stats}")


async def test_a_chat_completion(http: aiohttp.ClientSession) -> None:
    status, body = await chat(http, max_tokens=8, temperature=0)
    assert status == 200
    assert body["object"] == "chat.completion"
    choice = body["choices"][0]
    assert (choice["finish_reason"], len(choice["message"]["content"])) == ("length", 8)
    usage = body["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
    assert "warmfront" not in body


async def test_a_repeated_prompt_is_cached(http: aiohttp.ClientSession) -> None:
    message = {"role": "user", "content": "a prompt of its own " * 10}
    await chat(http, message, max_tokens=1)
    _, body = await chat(http, message, max_tokens=1)
    details = body["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= body["usage"]["prompt_tokens"] - 16


async def test_stream_and_whole_answer_are_the_same_text(http: aiohttp.ClientSession) -> None:
    _, body = await chat(http, max_tokens=24, temperature=0)
    chunks = await stream_chat(http, max_tokens=24, temperature=0)
    assert text_of(chunks) == body["choices"][0]["message"]["content"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == [
        "length"
    ]
    assert len(chunks) == 25


async def test_empty_null_and_absent_content(http: aiohttp.ClientSession) -> None:
    status, _ = await chat(http, USER, {"role": "assistant", "content": ""}, USER, max_tokens=2)
    assert status == 200
    result = {"role": "tool", "tool_call_id": "call_1", "content": "13"}
    counts = []
    for content in ({"content": None}, {}):
        turn = {"role": "assistant", "tool_calls": [CALL], **content}
        status, body = await chat(http, USER, turn, result, tools=[TOOL], max_tokens=2)
        assert status == 200
        counts.append(body["usage"]["prompt_tokens"])
    assert counts[0] == counts[1]


async def test_text_parts_are_joined_with_nothing_between(http: aiohttp.ClientSession) -> None:
    parts = [{"type": "text", "text": "4.2 "}, {"type": "text", "text": "metres"}]
    counts = []
    for content in (parts, "4.2 metres"):
        _, body = await chat(
            http, USER, {"role": "tool", "tool_call_id": "c", "content": content}, max_tokens=2
        )
        counts.append(body["usage"]["prompt_tokens"])
    assert counts[0] == counts[1]


async def test_usage_in_a_stream_comes_only_when_asked_for(http: aiohttp.ClientSession) -> None:
    for options in (None, {}, {"include_usage": False}):
        chunks = await stream_chat(http, stream_options=options, max_tokens=4)
        assert not any("usage" in chunk for chunk in chunks)
    chunks = await stream_chat(http, stream_options={"include_usage": True}, max_tokens=4)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream_chat(http, stream_options=options, max_tokens=4)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:3]] == [1, 2, 3]


async def test_stop_on_completions(http: aiohttp.ClientSession) -> None:
    for stop in (["Q:", "A:"], "Q:", None):
        status, _ = await complete(http, "Q: hi\nA:", stop=stop, max_tokens=4)
        assert status == 200


async def test_a_stop_string_over_several_tokens_in_both_modes(http: aiohttp.ClientSession) -> None:
    _, body = await chat(http, max_tokens=40, temperature=0)
    full = body["choices"][0]["message"]["content"]
    stop = full[10:15]
    expected = full[: full.index(stop)]
    _, body = await chat(http, max_tokens=40, temperature=0, stop=stop)
    choice = body["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected, "stop")
    chunks = await stream_chat(http, max_tokens=40, temperature=0, stop=[stop])
    assert text_of(chunks) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    await idle(http)


async def test_echo_without_output(http: aiohttp.ClientSession) -> None:
    status, body = await complete(http, "Verdict: No", echo=True, logprobs=1, max_tokens=0, temperature=0)
    assert status == 200
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Verdict: No", "length")
    assert body["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]
    assert all(isinstance(value, float) for value in choice["logprobs"]["token_logprobs"][1:])
    body_ = {"prompt": "abc", "echo": True, "max_tokens": 0, "stream_options": {"include_usage": True}}
    chunks = await events(http, "/v1/completions", body_)
    assert text_of(chunks) == "abc"
    assert chunks[-1]["usage"]["completion_tokens"] == 0
    await idle(http)


async def test_echo_with_output_and_log_probabilities(http: aiohttp.ClientSession) -> None:
    _, body = await complete(http, "abc", echo=True, logprobs=0, max_tokens=2, n=2)
    for choice in body["choices"]:
        assert choice["text"].startswith("abc")
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


async def test_max_tokens_null_is_16_for_completions(http: aiohttp.ClientSession) -> None:
    _, body = await complete(http, "abc", max_tokens=None)
    assert body["usage"]["completion_tokens"] == 16


async def test_chat_log_probabilities(http: aiohttp.ClientSession) -> None:
    _, body = await chat(http, logprobs=True, max_tokens=4)
    choice = body["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]] * 4
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == choice["message"]["content"]
    chunks = await stream_chat(http, logprobs=True, top_logprobs=2, max_tokens=4, temperature=0)
    entries = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 4


async def test_several_choices_stream_under_their_own_index(http: aiohttp.ClientSession) -> None:
    chunks = await stream_chat(http, n=3, seed=7, temperature=1.2, max_tokens=4)
    for index in range(3):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["length"]


async def test_several_choices_share_one_prefill(http: aiohttp.ClientSession) -> None:
    message = {"role": "user", "content": "only computed once " * 20}
    async with http.get("/engine/cache") as response:
        before = await response.json()
    _, body = await chat(http, message, n=4, max_tokens=2)
    after = await idle(http)
    assert len(body["choices"]) == 4
    assert body["usage"]["completion_tokens"] == 8
    computed = after["prefill_tokens_total"] - before["prefill_tokens_total"]
    assert computed <= body["usage"]["prompt_tokens"] + 3 * 16


async def test_null_fields_and_zero_fields(http: aiohttp.ClientSession) -> None:
    names = "temperature top_p seed stop n max_tokens logit_bias stream tools response_format user"
    status, _ = await chat(http, max_completion_tokens=4, **dict.fromkeys(names.split()))
    assert status == 200
    texts = set()
    for _ in range(5):
        _, body = await chat(http, temperature=0, top_p=0, seed=0, presence_penalty=0, max_tokens=8)
        texts.add(body["choices"][0]["message"]["content"])
    assert len(texts) == 1


async def test_max_completion_tokens_wins(http: aiohttp.ClientSession) -> None:
    _, body = await chat(http, max_completion_tokens=700, temperature=0)
    assert body["usage"]["completion_tokens"] == 700
    _, body = await chat(http, max_completion_tokens=5, max_tokens=50)
    assert body["usage"]["completion_tokens"] == 5


async def test_the_default_cap_and_the_rest_of_the_context(http: aiohttp.ClientSession) -> None:
    _, body = await chat(http)
    assert body["usage"]["completion_tokens"] == 1024
    _, body = await chat(http, {"role": "user", "content": "x" * 8000}, max_tokens=5000)
    assert body["usage"]["total_tokens"] == 8192
    assert body["choices"][0]["finish_reason"] == "length"


async def test_token_id_prompts(http: aiohttp.ClientSession) -> None:
    for prompt in ([-1], [999999999], [258]):
        status, body = await complete(http, prompt, max_tokens=1)
        assert (status, body["error"]["param"]) == (400, "prompt")
    status, body = await complete(http, [[1, 2], [3, 257]], max_tokens=1)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    status, body = await complete(http, ["a", "b"], max_tokens=1, n=2)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    status, _ = await complete(http, "still alive?", max_tokens=1)
    assert status == 200


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("n", {"n": 0}),
        ("stop", {"stop": list("abcde")}),
        ("stop", {"stop": ""}),
        ("logit_bias", {"logit_bias": {"99999999": 5, "17": -100}}),
        ("stop_token_ids", {"stop_token_ids": [151645000], "min_tokens": 5}),
        ("messages", {"messages": []}),
        (
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 1}}},
        ),
        ("tool_choice", {"tools": [TOOL], "tool_choice": "required"}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 1}]}),
        ("stream_options", {"stream": False, "stream_options": {}}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_field_is_a_400_by_name(
    http: aiohttp.ClientSession, param: str, fields: dict[str, Any], stream: bool
) -> None:
    status, body = await chat(http, **{"max_tokens": 4, "stream": stream, **fields})
    error = body["error"]
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert param in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model_is_a_404(http: aiohttp.ClientSession, stream: bool) -> None:
    for path, rest in (("/v1/chat/completions", {"messages": [USER]}), ("/v1/completions", {"prompt": "x"})):
        async with http.post(path, json={"model": "no-such-model", "stream": stream, **rest}) as response:
            body = await response.json()
        assert response.status == 404
        assert (body["error"]["code"], body["error"]["type"]) == ("model_not_found", "invalid_request_error")


async def test_a_prompt_that_can_never_fit(http: aiohttp.ClientSession) -> None:
    status, body = await chat(http, {"role": "user", "content": "x" * 9000}, max_tokens=4)
    assert (status, body["error"]["code"], body["error"]["param"]) == (
        400,
        "context_length_exceeded",
        "messages",
    )
    status, body = await complete(http, "x" * 9000, stream=True)
    assert (status, body["error"]["code"], body["error"]["param"]) == (
        400,
        "context_length_exceeded",
        "prompt",
    )


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"{", 400),
        (b"", 400),
        (b"[1]", 400),
        (b'{"model": "fake", "messages": NaN}', 400),
        (b'{"a":' + b"[" * 4000 + b"]" * 4000 + b"}", 400),
        (b'"' + b"x" * 400_000 + b'"', 413),
    ],
)
async def test_a_bad_body(http: aiohttp.ClientSession, raw: bytes, status: int) -> None:
    async with http.post("/v1/chat/completions", data=raw) as response:
        body = await response.json()
    assert response.status == status
    assert set(body["error"]) >= {"message", "type", "param", "code"}


async def test_strange_text_is_served(http: aiohttp.ClientSession) -> None:
    for content in ("nul \0 byte", "<|im_end|>", "👩‍👩‍👧 漢字"):
        status, _ = await chat(http, {"role": "user", "content": content}, max_tokens=2)
        assert status == 200
    raw = orjson.dumps({"model": "fake", "messages": [USER], "max_tokens": 2})
    async with http.post(
        "/v1/chat/completions", data=raw, headers={"Content-Type": "text/plain"}
    ) as response:
        assert response.status == 200


async def test_models(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/models") as response:
        body = await response.json()
    assert [model["id"] for model in body["data"]] == ["fake"]
    async with http.get("/v1/models/fake") as response:
        assert (await response.json())["max_model_len"] == 8192
    async with http.get("/v1/models/other") as response:
        assert response.status == 404


async def test_tokenize_and_back(http: aiohttp.ClientSession) -> None:
    _, body = await post(http, "/tokenize", {"prompt": "héllo"})
    assert body["count"] == 6
    _, text = await post(http, "/detokenize", {"tokens": body["tokens"]})
    assert text["prompt"] == "héllo"
    _, body = await post(http, "/tokenize", {"messages": [USER]})
    _, answer = await chat(http, max_tokens=1)
    assert body["count"] == answer["usage"]["prompt_tokens"]
    for path, bad in (
        ("/detokenize", {"tokens": [258]}),
        ("/tokenize", {}),
        ("/detokenize", {"tokens": "a"}),
    ):
        status, _ = await post(http, path, bad)
        assert status == 400


async def test_unknown_paths_and_methods(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/nothing") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "unknown_url"
    async with http.get("/v1/chat/completions") as response:
        assert response.status == 405
        assert "POST" in response.headers["Allow"]
        assert (await response.json())["error"]["code"] == "method_not_allowed"


async def test_the_request_id_is_echoed(http: aiohttp.ClientSession) -> None:
    body = {"model": "fake", "messages": [USER], "max_tokens": 1}
    for stream in (False, True):
        sent = {"x-request-id": "abc-1"}
        async with http.post(
            "/v1/chat/completions", json={**body, "stream": stream}, headers=sent
        ) as response:
            await response.read()
        assert response.headers["x-request-id"] == "abc-1"
    async with http.post("/v1/chat/completions", json={}, headers={"x-request-id": "a b"}) as response:
        error = (await response.json())["error"]
    assert response.headers["x-request-id"] == error["request_id"] != "a b"


async def test_the_gateways_extension(http: aiohttp.ClientSession) -> None:
    ids = list(range(100, 164))
    given = {"token_ids": ids, "seed": "ab" * 16, "priority": 1, "deadline_ms": 60_000, "request_id": "r"}
    _, body = await chat(http, max_tokens=2, warmfront=given)
    assert body["usage"]["prompt_tokens"] == 64
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert body["warmfront"]["prefill_tokens"] == 64
    assert set(body["warmfront"]["timings"]) == {"queue_s", "prefill_s", "first_sample_s"}
    chunks = await stream_chat(http, max_tokens=2, warmfront=given, stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    assert chunks[-1]["warmfront"]["prefill_tokens"] == 16
    other = {**given, "seed": "cd" * 16}
    _, body = await chat(http, max_tokens=2, warmfront=other)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
