"""Executes step plans: the one object through which the step loop touches the model.

Owns the weights, the paged cache and the thread settings of its process. A step is one forward pass over all
rows of its plan: 1. gather token ids, positions and slots; 2. run the decoder, which writes the cache; 3.
compute logits for the rows that are sampled or scored, and no others; 4. sample. Nothing of a step outlives
it but the cache, and the last hidden row of a half-computed prompt whose log-probabilities were asked for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engine.config import cpu_flags
from engine.core.request import Request, SamplingParams
from engine.core.sequence import SampledToken, SequenceStep, Status, StepPlan, TokenLogprob
from engine.core.sequence import Sequence as EngineSequence
from engine.kernels import attention_batch, attention_for, new_cache
from engine.kernels.tiled_attention import rows_are_independent
from engine.model.config import read_config
from engine.model.decoder import Decoder
from engine.model.loader import load_weights
from engine.model.sampling import sample, token_logprob
from engine.model.store import ModelError, model_fingerprint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SCORED_ROWS = 32  # logits of scored prompt rows are made this many at a time: rows * vocab * 4 bytes


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which rows of a step are read: all `wanted`, ascending; for each item its range of them."""

    wanted: list[int]
    ranges: list[range]


class Runner:
    """A model ready to execute plans on the CPU.

    `dtype` "auto" is bf16 on a CPU with bf16 matrix instructions and fp32 elsewhere; `exact` mode is always
    fp32. `num_blocks` * `block_size` positions of cache are allocated at once (`kv_bytes_per_block` each
    block). Raises ModelError when the directory cannot be used, and when `exact` is asked of a process
    started without `engine.config.step_environment`.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        dtype: Literal["auto", "fp32", "bf16"] = "auto",
        mode: Literal["fast", "exact"] = "fast",
        num_blocks: int,
        block_size: int = 16,
        threads: int = 1,
        max_tokens_per_step: int = 256,
    ) -> None:
        _set_threads(threads, mode)
        if mode == "exact" and not rows_are_independent():
            raise ModelError(
                "exact mode needs MKL_CBWR=AVX512,STRICT (or AVX2,STRICT) set before torch is loaded"
            )
        directory = Path(model_dir)
        self.config = read_config(directory)
        self.mode = mode
        self.dtype = resolve_dtype(dtype, mode)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_tokens_per_step = max_tokens_per_step
        self.vocab_size = self.config.vocab_size
        self.context_length = self.config.context_length
        self.eos_ids = self.config.eos_ids
        self.fingerprint = f"{model_fingerprint(directory)}-{self.dtype}"
        torch_dtype = DTYPES[self.dtype]
        with torch.inference_mode():
            weights = load_weights(directory, self.config, dtype=torch_dtype, mode=mode)
            self._decoder = Decoder(self.config, weights, attention_for(torch.device("cpu"), mode))
            self._cache = new_cache(
                self.config.num_layers,
                num_blocks,
                block_size,
                self.config.num_kv_heads,
                self.config.head_dim,
                torch_dtype,
            )
        self._secret = os.urandom(16)
        self._tails: dict[str, tuple[EngineSequence, Tensor]] = {}

    @property
    def kv_bytes_per_block(self) -> int:
        """Bytes of cache that one block takes over all layers."""
        layer = self._cache[0]
        return len(self._cache) * layer[0].numel() * layer.element_size()

    def warm_up(self) -> None:
        """Runs the largest step, a full decode step and the scoring path once, so that nothing is first met
        in service.

        Call before the first plan: it writes into the cache's first blocks.
        """
        room = min(self.num_blocks * self.block_size, self.context_length)
        params = SamplingParams(temperature=0.7, top_p=0.9, seed=0, logprobs=20, prompt_logprobs=20)
        count = min(self.max_tokens_per_step, room)
        probe = EngineSequence(
            Request("warm-up", (0,) * count, b"\0" * 16, params), rank=0, order=0, arrival_s=0.0, limit=room
        )
        probe.block_table = list(range(-(-count // self.block_size)))
        self.execute(StepPlan((SequenceStep(probe, 0, count, True),), count, 0))
        decodes = tuple(SequenceStep(probe, count - 1, 1, True) for _ in range(min(16, count)))
        self.execute(StepPlan(decodes, len(decodes), len(decodes)))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[SampledToken | None]:
        """Computes the plan's rows; one result for each item, aligned with `plan.items`.

        An item that samples yields its token, or `token_id` -1 when its logits were not finite. An item that
        does not yields None, or its prompt's scores with `token_id` -1 where they were asked for. ValueError
        when a token id is outside the vocabulary or a position beyond the context or the block table.
        """
        items = plan.items
        token_ids = self._token_ids(items)
        batch = attention_batch(
            [(item.seq.block_table, item.start, item.count) for item in items], self.block_size
        )
        rows = _rows_read(items)
        if len(rows.wanted) == len(token_ids):
            hidden = self._decoder.forward(token_ids, batch, self._cache, batch, batch.positions)
        else:
            chosen = torch.tensor(rows.wanted, dtype=torch.int64)
            hidden = self._decoder.forward(token_ids, batch, self._cache, batch.narrowed(rows.wanted), chosen)
        sampling = [index for index, item in enumerate(items) if item.samples]
        results: list[SampledToken | None] = [None] * len(items)
        if sampling:
            last_rows = [rows.ranges[index][-1] for index in sampling]
            logits = self._decoder.logits(hidden if len(last_rows) == len(hidden) else hidden[last_rows])
            tokens = sample(logits, [items[index] for index in sampling], self._secret)
            for index, token in zip(sampling, tokens, strict=True):
                results[index] = token
        for index, item in enumerate(items):
            if _scores_prompt(item):
                read = rows.ranges[index]
                scores = tuple(self._prompt_scores(item, hidden[read.start : read.stop]))
                token = results[index] or SampledToken(-1)
                results[index] = SampledToken(token.token_id, token.logprob, token.top, scores)
        return results

    def _token_ids(self, items: tuple[SequenceStep, ...]) -> Tensor:
        flat: list[int] = []
        for item in items:
            seq, start, count = item.seq, item.start, item.count
            part = seq.tokens[start : start + count]
            if len(part) != count or start + count > self.context_length:
                raise ValueError(
                    f"request {seq.request_id}: rows {start} to {start + count - 1} go beyond its "
                    f"{len(seq.tokens)} tokens or the model's {self.context_length} positions"
                )
            flat.extend(part)
        token_ids = np.array(flat, dtype=np.int64)
        if token_ids.min() < 0 or token_ids.max() >= self.vocab_size:
            raise ValueError(_first_bad_id(items, self.vocab_size))
        return torch.from_numpy(token_ids)

    def _prompt_scores(self, item: SequenceStep, hidden: Tensor) -> Iterator[TokenLogprob | None]:
        """Entries of the item's prompt positions; `hidden` [count, hidden] are its rows.

        A position is scored by the row before it, so the last row of an unfinished prompt is kept for the
        next chunk.
        """
        seq, start, count = item.seq, item.start, item.count
        alternatives = seq.request.params.prompt_logprobs or 0
        end = min(start + count, seq.prompt_len)
        kept = self._tails.pop(seq.request_id, None)
        if start == 0:
            yield None
        else:
            yield (
                None
                if kept is None
                else self._scored(kept[1], seq.tokens[start : start + 1], alternatives)[0]
            )
        for first in range(start, end - 1, _SCORED_ROWS):
            stop = min(first + _SCORED_ROWS, end - 1)
            yield from self._scored(
                hidden[first - start : stop - start], seq.tokens[first + 1 : stop + 1], alternatives
            )
        if end < seq.prompt_len:
            self._tails = {
                key: tail for key, tail in self._tails.items() if tail[0].status is not Status.FINISHED
            }
            self._tails[seq.request_id] = (seq, hidden[-1:].clone())

    def _scored(self, hidden: Tensor, token_ids: list[int], alternatives: int) -> list[TokenLogprob]:
        logprobs = self._decoder.logits(hidden).log_softmax(-1)
        return [
            token_logprob(row, token_id, alternatives)
            for row, token_id in zip(logprobs, token_ids, strict=True)
        ]


def resolve_dtype(dtype: str, mode: str) -> str:
    """ "fp32" or "bf16" for a setting of "auto", "fp32" or "bf16"; ModelError for bf16 in `exact` mode."""
    if mode == "exact":
        if dtype == "bf16":
            raise ModelError("exact mode computes in fp32; start the replica with --dtype fp32 or auto")
        return "fp32"
    if dtype == "auto":
        return "bf16" if cpu_flags() & {"avx512_bf16", "amx_bf16"} else "fp32"
    return dtype


def _first_bad_id(items: tuple[SequenceStep, ...], vocab_size: int) -> str:
    for item in items:
        for position in range(item.start, item.start + item.count):
            token_id = item.seq.tokens[position]
            if not 0 <= token_id < vocab_size:
                where = f"request {item.seq.request_id}: token id {token_id} at position {position}"
                return f"{where} is outside the vocabulary (0 to {vocab_size - 1})"
    return "no token id is outside the vocabulary"


def _scores_prompt(item: SequenceStep) -> bool:
    return item.seq.request.params.prompt_logprobs is not None and item.start < item.seq.prompt_len


def _rows_read(items: tuple[SequenceStep, ...]) -> _Rows:
    wanted: list[int] = []
    ranges: list[range] = []
    row = 0
    for item in items:
        first = len(wanted)
        if _scores_prompt(item):
            wanted.extend(range(row, row + item.count))
        elif item.samples:
            wanted.append(row + item.count - 1)
        ranges.append(range(first, len(wanted)))
        row += item.count
    return _Rows(wanted, ranges)


def _set_threads(threads: int, mode: str) -> None:
    """`exact` rounds down to a power of two, so that work is cut at multiples of the vector width."""
    torch.set_num_threads(1 << (threads.bit_length() - 1) if mode == "exact" else threads)
    with contextlib.suppress(RuntimeError):  # set once per process, before the first parallel region
        torch.set_num_interop_threads(1)
    torch.set_flush_denormal(True)
