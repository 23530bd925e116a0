"""What a caller asks of the engine: one prompt as token ids, and how to sample after it.

Owns the two values that cross from the front process into the core. Both are frozen: nothing downstream
changes a request, so a request can be re-admitted after a preemption exactly as it first came in.
Range checks that need no model live here; those that need the vocabulary or the pool live in admission.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Priorities that the gateway's default classes map to; any integer >= 0 is accepted, 0 is the most urgent.
PRIORITY_SYSTEM, PRIORITY_INTERACTIVE, PRIORITY_STANDARD, PRIORITY_BATCH = 0, 1, 2, 3


class RequestRefused(Exception):
    """The request cannot be accepted, now (queue full) or ever (too long, bad ids).

    `code` is one of `context_length_exceeded`, `queue_full`, `duplicate_request`, `invalid_request`,
    `deadline_exceeded`; `str()` says what was wrong and what to do, in one sentence.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    `max_tokens` 0 computes the prompt and samples nothing (prompt logprobs only). `stop_token_ids` holds the
    end-of-sequence ids too, unless the caller ignores them; they do not stop a sequence before `min_tokens`.
    `logprobs` is None (off) or the number of alternatives, 0 to 20. `prompt_logprobs` likewise, for each
    prompt position: such a request skips prefix-cache reads, because every position must be computed.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One generation request.

    `token_ids` is the whole prompt; `seed` (16 bytes) starts the block-hash chain, so two requests share
    blocks only under the same seed. `priority` 0 is the most urgent. `deadline_ms` counts from arrival: a
    request still waiting then is refused instead of being started.
    """

    request_id: str
    token_ids: tuple[int, ...]
    seed: bytes
    params: SamplingParams
    priority: int = PRIORITY_STANDARD
    tenant: str = ""
    deadline_ms: int | None = None
