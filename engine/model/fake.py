"""A runner without a model: the next token is a hash of all earlier tokens, read through the block table.

Owns a fake KV array of token ids, laid out as the real one is laid out (block, slot). Because an answer is
read from those slots and not from the sequence's own list, a wrong block table, a block handed out twice or
a block evicted while in use changes the answer, and a test that compares answers sees it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence

import xxhash

from engine.core.scheduler import Scheduler
from engine.core.sequence import SampledToken, SequenceStep, StepPlan, TokenLogprob, TokenOutput


class FakeRunner:
    """Stands in for `engine.model.runner.Runner`; same methods, no torch.

    Tokens come from [first_token, vocab_size). A sequence ends by itself (first of `eos_ids`) after about
    `mean_output` tokens, depending on its content, or never when that is 0. `prefill_tokens_per_s` and
    `decode_ms` (per step with at least one decode) make a step last as long as a real one would.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 16,
        vocab_size: int = 1024,
        first_token: int = 0,
        context_length: int = 8192,
        eos_ids: frozenset[int] = frozenset(),
        mean_output: int = 0,
        prefill_tokens_per_s: float = 0.0,
        decode_ms: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.eos_ids = eos_ids
        self.kv_bytes_per_block = 4 * block_size
        self.fingerprint = f"fake-{vocab_size}-{first_token}-{mean_output}"
        self._first_token = first_token
        self._mean_output = mean_output
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._decode_ms = decode_ms
        self._sleep = sleep
        self._kv = [bytearray(self.kv_bytes_per_block) for _ in range(num_blocks)]

    def warm_up(self) -> None:
        """Nothing to compile or touch."""

    def execute(self, plan: StepPlan) -> list[SampledToken | None]:
        """Write the items' tokens into their slots, then sample for those that ask for it."""
        for item in plan.items:
            self._write(item)
        prefill = plan.num_tokens - plan.num_decodes
        pause = 0.001 * self._decode_ms if plan.num_decodes else 0.0
        if prefill and self._prefill_tokens_per_s:
            pause += prefill / self._prefill_tokens_per_s
        if pause:
            self._sleep(pause)
        return [self._sample(item) for item in plan.items]

    def answer(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that follow a prompt, worked out from the tokens alone, without any block."""
        tokens = list(token_ids)
        for _ in range(count):
            tokens.append(self._token_after(struct.pack(f"<{len(tokens)}i", *tokens)))
        return tokens[len(token_ids) :]

    def _write(self, item: SequenceStep) -> None:
        seq, start, count = item.seq, item.start, item.count
        size = self.block_size
        for position in range(start, start + count):
            block = self._kv[seq.block_table[position // size]]
            struct.pack_into("<i", block, 4 * (position % size), seq.tokens[position])

    def _sample(self, item: SequenceStep) -> SampledToken | None:
        seq, start, count = item.seq, item.start, item.count
        params = seq.request.params
        scores = None
        if params.prompt_logprobs is not None and start < seq.prompt_len:
            positions = range(start, min(start + count, seq.prompt_len))
            scores = tuple(
                None if p == 0 else TokenLogprob(-1.0, ((seq.tokens[p], -1.0),)) for p in positions
            )
        if not item.samples:
            return None if scores is None else SampledToken(-1, prompt_logprobs=scores)
        length = start + count
        token = self._token_after(self._read(seq.block_table, length))
        if params.logprobs is None:
            return SampledToken(token, prompt_logprobs=scores)
        top = tuple((token + i, -0.5 - i) for i in range(params.logprobs))
        return SampledToken(token, -0.5, top, scores)

    def _read(self, table: list[int], length: int) -> bytes:
        blocks = -(-length // self.block_size)
        if len(table) < blocks:
            raise IndexError(f"{length} tokens need {blocks} blocks, the table has {len(table)}")
        return b"".join([bytes(self._kv[block]) for block in table[:blocks]])[: 4 * length]

    def _token_after(self, context: bytes) -> int:
        token = self._first_token + xxhash.xxh3_64_intdigest(context) % (self.vocab_size - self._first_token)
        if self._mean_output and self.eos_ids and token % self._mean_output == 0:
            return min(self.eos_ids)
        return token


def generate(scheduler: Scheduler, runner: FakeRunner, step_s: float = 0.01) -> dict[str, list[TokenOutput]]:
    """Step until nothing is left to compute; the outputs of each request that produced any."""
    outputs: dict[str, list[TokenOutput]] = {}
    while (plan := scheduler.plan()) is not None:
        for output in scheduler.commit(plan, runner.execute(plan), step_s):
            outputs.setdefault(output.request_id, []).append(output)
    return outputs
