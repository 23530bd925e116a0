"""All choices of one HTTP request, from prompts to pieces of text.

Owns how a request becomes engine requests: their ids, seeds and order. Always holds: with n > 1 the prompt is
computed once (the others start after the first choice's first token and find it in the prefix cache); every
choice finishes exactly once; after `close` the engine holds nothing of this request.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.core.request import PRIORITY_STANDARD, Request, SamplingParams
from engine.core.sequence import Timings, TokenOutput
from engine.worker.front.inbox import Inbox
from engine.worker.front.output import ChoiceOutput, Entry, Piece, TextDecoder
from engine.worker.front.validate import Options

SEED_RANGE = 2**63
SHARED_PROMPT_TOKENS = 32
"""Shorter prompts fill too few blocks to be worth waiting for the first choice."""


class Engine(Protocol):
    """What is needed of `StepClient`."""

    def submit(self, inbox: Inbox, index: int, request: Request) -> None: ...

    def abort(self, request_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt; `text` is what `echo` repeats."""

    token_ids: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one HTTP request: prompts once each, output over all choices.

    The seconds are those of the first prompt: waiting in the step process, computing the prompt up to its
    first token, and the rest of the way between the two processes.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prefill_tokens: int
    queue_s: float
    prefill_s: float
    first_sample_s: float

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def choice_seed(seed: int | None, choice: int) -> int:
    """A seed per choice: the first has the request's own, the others ones derived from it."""
    if seed is None:
        return secrets.randbits(63)
    if choice == 0:
        return seed % SEED_RANGE
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % SEED_RANGE


class Generation:
    """Runs every choice of `prompts` x `options.n`; choice index = prompt * n + i.

    `max_tokens[i]` is prompt i's limit, already cut to what fits. `prompt_logprobs` asks for the prompts' own
    log probabilities (`echo` with `logprobs`); they are in `prompt_entries` after a choice's first piece.
    """

    def __init__(
        self,
        engine: Engine,
        request_id: str,
        prompts: Sequence[Prompt],
        options: Options,
        *,
        max_tokens: Sequence[int],
        chain_seed: bytes,
        eos_ids: frozenset[int],
        new_decoder: Callable[[], TextDecoder],
        prompt_logprobs: bool = False,
    ) -> None:
        self._engine = engine
        self._id = request_id
        self._prompts = tuple(prompts)
        self._options = options
        self._max_tokens = tuple(max_tokens)
        self._chain_seed = chain_seed
        self._stop_ids = frozenset(options.stop_token_ids) | (frozenset() if options.ignore_eos else eos_ids)
        self._prompt_logprobs = prompt_logprobs
        self._inbox = Inbox()
        self._running: set[int] = set()
        self._timings: list[Timings | None] = [None] * len(self._prompts)
        self._submitted_s = [0.0] * len(self._prompts)
        self._first_token_s: float | None = None
        self.prompt_entries: list[tuple[Entry, ...] | None] = [None] * len(self._prompts)
        self._decoder = new_decoder
        self._choices = [
            ChoiceOutput(
                new_decoder(),
                options.stop,
                self._stop_ids,
                min_tokens=options.min_tokens,
                wants_logprobs=options.logprobs is not None,
            )
            for _ in range(len(self._prompts) * options.n)
        ]

    def __len__(self) -> int:
        return len(self._choices)

    def prompt_of(self, index: int) -> int:
        """The prompt that choice `index` continues."""
        return index // self._options.n

    async def batches(self) -> AsyncIterator[list[tuple[int, Piece]]]:
        """Pieces in arrival order, as many at a time as have come; ends when every choice has finished.

        With continuous usage one at a time, so that `usage` holds for each piece as it is taken.
        """
        if self._options.max_tokens == 0 and not self._prompt_logprobs:
            yield [(index, Piece("", (), "length")) for index in range(len(self._choices))]
            return
        unfinished = len(self._choices)
        for prompt in range(len(self._prompts)):
            first = prompt * self._options.n
            self._submit(first)
            if not self._shares_prefill(prompt):
                for index in range(first + 1, first + self._options.n):
                    self._submit(index)
        while unfinished:
            batch = []
            for index, output in await self._inbox.take():
                if index in self._running and (piece := self._step(index, output)) is not None:
                    batch.append((index, piece))
                    unfinished -= piece.finish_reason is not None
                    if self._options.continuous_usage:
                        yield batch
                        batch = []
            if batch:
                yield batch

    def usage(self) -> Usage:
        """Counts so far."""
        known = [timings for timings in self._timings if timings is not None]
        first_sample_s = 0.0
        if known and self._first_token_s is not None:
            first_sample_s = max(0.0, self._first_token_s - known[0].queue_s - known[0].prefill_s)
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self._prompts),
            completion_tokens=sum(choice.completion_tokens for choice in self._choices),
            cached_tokens=sum(timings.cached_tokens for timings in known),
            prefill_tokens=sum(timings.prefill_tokens for timings in known),
            queue_s=known[0].queue_s if known else 0.0,
            prefill_s=known[0].prefill_s if known else 0.0,
            first_sample_s=first_sample_s,
        )

    def close(self) -> None:
        """Abort whatever still runs. Called on every exit path; safe to call twice."""
        for index in self._running:
            self._engine.abort(self._request_id(index))
        self._running.clear()

    def _request_id(self, index: int) -> str:
        return f"{self._id}-{index}"

    def _shares_prefill(self, prompt: int) -> bool:
        tokens = len(self._prompts[prompt].token_ids)
        return self._options.n > 1 and (self._prompt_logprobs or tokens >= SHARED_PROMPT_TOKENS)

    def _submit(self, index: int) -> None:
        options = self._options
        prompt, choice = divmod(index, options.n)
        extension = options.extension
        limit = self._max_tokens[prompt]
        params = SamplingParams(
            max_tokens=limit,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            seed=choice_seed(options.seed, choice),
            stop_token_ids=self._stop_ids,
            ignore_eos=options.ignore_eos,
            min_tokens=min(options.min_tokens, limit),
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            repetition_penalty=options.repetition_penalty,
            logit_bias=options.logit_bias,
            logprobs=options.logprobs,
            prompt_logprobs=options.logprobs if self._prompt_logprobs and choice == 0 else None,
        )
        request = Request(
            request_id=self._request_id(index),
            token_ids=self._prompts[prompt].token_ids,
            seed=self._chain_seed,
            params=params,
            priority=PRIORITY_STANDARD if extension is None else extension.priority,
            deadline_ms=None if extension is None else extension.deadline_ms,
        )
        if choice == 0:
            self._submitted_s[prompt] = time.monotonic()
        self._running.add(index)
        self._engine.submit(self._inbox, index, request)

    def _step(self, index: int, output: TokenOutput) -> Piece | None:
        prompt, choice = divmod(index, self._options.n)
        if choice == 0 and output.first is not None:
            self._begin_prompt(prompt, output, output.first)
        piece = self._choices[index].push(output)
        if piece.finish_reason is not None:
            self._running.discard(index)
            if output.finish_reason is None:
                self._engine.abort(self._request_id(index))
        elif not piece.text and not piece.entries:
            return None
        return piece

    def _begin_prompt(self, prompt: int, output: TokenOutput, timings: Timings) -> None:
        self._timings[prompt] = timings
        if self._first_token_s is None:
            self._first_token_s = time.monotonic() - self._submitted_s[prompt]
        if self._prompt_logprobs:
            self.prompt_entries[prompt] = self._entries_of_prompt(prompt, output)
        if self._shares_prefill(prompt):
            first = prompt * self._options.n
            for index in range(first + 1, first + self._options.n):
                self._submit(index)

    def _entries_of_prompt(self, prompt: int, output: TokenOutput) -> tuple[Entry, ...]:
        decoder = self._decoder()
        offset = 0
        entries = []
        values = output.prompt_logprobs or ()
        for position, token_id in enumerate(self._prompts[prompt].token_ids):
            value = values[position] if position < len(values) else None
            logprob, top = (None, ()) if value is None else value
            entries.append(Entry(token_id, logprob, top, offset))
            offset += len(decoder.push(token_id))
        return tuple(entries)
