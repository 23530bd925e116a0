"""Choices of one request: seeds, shared prefill, stops, abort on every way out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from canonicalizer.detokenizer import Detokenizer
from canonicalizer.tokens import bytes_to_ids
from engine.core.request import Request
from engine.core.sequence import Timings, TokenLogprob, TokenOutput
from engine.worker.front.bytemodel import END_ID
from engine.worker.front.errors import ApiError
from engine.worker.front.generate import Generation, Prompt, choice_seed
from engine.worker.front.inbox import Inbox
from engine.worker.front.text_files import load_text_model
from engine.worker.front.validate import completion_request

MODEL = load_text_model("")


class ScriptedEngine:
    """Records what is submitted; `answer` plays the step process."""

    def __init__(self) -> None:
        self.requests: dict[str, tuple[Inbox, int, Request]] = {}
        self.aborted: list[str] = []

    def submit(self, inbox: Inbox, index: int, request: Request) -> None:
        self.requests[request.request_id] = (inbox, index, request)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def answer(self, name: str, text: str, *, end: bool = True, first: bool = True, **extra: Any) -> None:
        inbox, index, _ = self.requests[name]
        tokens = bytes_to_ids(MODEL.encode_text(text))
        for position, token in enumerate(tokens):
            last = end and position == len(tokens) - 1
            timings = Timings(0.1, 0.2, 16, 4) if first and position == 0 else None
            inbox.put(index, TokenOutput(name, token, "length" if last else None, first=timings, **extra))


def ids(text: str) -> tuple[int, ...]:
    return tuple(bytes_to_ids(MODEL.encode_text(text)))


def generation(engine: ScriptedEngine, *prompts: str, **fields: Any) -> Generation:
    options = completion_request({"model": "m", "prompt": "x", **fields}, 258, private=False).options
    return Generation(
        engine,
        "id",
        [Prompt(ids(prompt), prompt) for prompt in prompts],
        options,
        max_tokens=[options.max_tokens or 0] * len(prompts),
        chain_seed=bytes(16),
        eos_ids=frozenset({END_ID}),
        new_decoder=lambda: Detokenizer(MODEL),
        prompt_logprobs=bool(fields.get("echo")) and options.logprobs is not None,
    )


async def texts(run: Generation) -> dict[int, str]:
    found: dict[int, str] = {}
    async for batch in run.batches():
        for index, piece in batch:
            found[index] = found.get(index, "") + piece.text
    return found


async def started(run: Generation) -> asyncio.Task[dict[int, str]]:
    task = asyncio.create_task(texts(run))
    await asyncio.sleep(0)
    return task


def test_each_choice_has_its_own_seed() -> None:
    assert choice_seed(7, 0) == 7
    assert len({choice_seed(7, choice) for choice in range(20)}) == 20
    assert choice_seed(7, 3) == choice_seed(7, 3)
    assert choice_seed(-1, 0) == 2**63 - 1
    assert choice_seed(None, 0) != choice_seed(None, 0)


async def test_choices_of_a_long_prompt_wait_for_the_first_token() -> None:
    engine = ScriptedEngine()
    run = generation(engine, "x" * 40, n=3, seed=5)
    task = await started(run)
    assert list(engine.requests) == ["id-0"]
    engine.answer("id-0", "a", end=False)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert list(engine.requests) == ["id-0", "id-1", "id-2"]
    engine.answer("id-0", "b", first=False)
    engine.answer("id-1", "cd")
    engine.answer("id-2", "ef")
    assert await task == {0: "ab", 1: "cd", 2: "ef"}
    usage = run.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (40, 6, 16)
    assert usage.as_dict()["prompt_tokens_details"] == {"cached_tokens": 16}
    assert (usage.queue_s, usage.prefill_s, usage.prefill_tokens) == (0.1, 0.2, 4)
    assert len({request.params.seed for _, _, request in engine.requests.values()}) == 3


async def test_choices_of_a_short_prompt_start_together() -> None:
    engine = ScriptedEngine()
    task = await started(generation(engine, "x", n=2))
    assert list(engine.requests) == ["id-0", "id-1"]
    engine.answer("id-0", "a")
    engine.answer("id-1", "b")
    assert await task == {0: "a", 1: "b"}


async def test_several_prompts_number_their_choices_in_order() -> None:
    engine = ScriptedEngine()
    run = generation(engine, "x", "y", n=2)
    task = await started(run)
    for index in range(4):
        engine.answer(f"id-{index}", str(index))
    assert await task == {0: "0", 1: "1", 2: "2", 3: "3"}
    assert [run.prompt_of(index) for index in range(4)] == [0, 0, 1, 1]
    assert run.usage().prompt_tokens == 2


async def test_a_stop_string_aborts_the_engine_request() -> None:
    engine = ScriptedEngine()
    run = generation(engine, "x", stop="cd")
    task = await started(run)
    engine.answer("id-0", "abcdef", end=False)
    assert await task == {0: "ab"}
    assert engine.aborted == ["id-0"]
    run.close()
    assert engine.aborted == ["id-0"]


async def test_closing_aborts_what_still_runs() -> None:
    engine = ScriptedEngine()
    run = generation(engine, "x", n=2)
    task = await started(run)
    engine.answer("id-0", "done")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    run.close()
    run.close()
    assert engine.aborted == ["id-1"]


async def test_a_failure_comes_after_the_tokens_before_it() -> None:
    engine = ScriptedEngine()
    run = generation(engine, "x")
    pieces = []
    batches = run.batches()
    task = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    engine.answer("id-0", "ab", end=False)
    engine.requests["id-0"][0].fail(ApiError(500, "boom"))
    pieces += await task
    assert "".join(piece.text for _, piece in pieces) == "ab"
    with pytest.raises(ApiError, match="boom"):
        await anext(batches)


async def test_no_tokens_at_all_needs_no_engine() -> None:
    engine = ScriptedEngine()
    run = generation(engine, "x", max_tokens=0, n=2)
    assert await texts(run) == {0: "", 1: ""}
    assert not engine.requests
    assert run.usage().completion_tokens == 0


async def test_prompt_log_probabilities_come_with_the_first_output() -> None:
    engine = ScriptedEngine()
    run = generation(engine, "héy", max_tokens=0, logprobs=1, echo=True)
    task = await started(run)
    inbox, index, request = engine.requests["id-0"]
    assert (request.params.max_tokens, request.params.prompt_logprobs) == (0, 1)
    scores = (None, *(TokenLogprob(-1.0, ()) for _ in range(3)))
    inbox.put(index, TokenOutput("id-0", None, "length", None, scores, Timings(0, 0, 0, 4)))
    assert await task == {0: ""}
    entries = run.prompt_entries[0]
    assert entries is not None
    assert [entry.logprob for entry in entries] == [None, -1.0, -1.0, -1.0]
    assert [entry.offset for entry in entries] == [0, 1, 1, 2]


@pytest.mark.parametrize(("ignore", "expected"), [(False, {5, END_ID}), (True, {5})])
async def test_end_tokens_stop_unless_ignored(ignore: bool, expected: set[int]) -> None:
    engine = ScriptedEngine()
    task = await started(generation(engine, "x", ignore_eos=ignore, stop_token_ids=[5]))
    assert engine.requests["id-0"][2].params.stop_token_ids == expected
    engine.answer("id-0", "a")
    await task
