"""The native decoder against `transformers`: every family, logits of every position, whole and chunked."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kernels import attention_batch, attention_for, new_cache
from engine.model.config import read_config
from engine.model.decoder import Decoder
from engine.model.loader import load_weights
from engine.model.random_model import Shape, write_random_model

BLOCK_SIZE = 4
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "smollm2": Shape(),
    "llama-untied-bias": Shape(tied=False, qkv_bias=True),
    "llama3-rope": Shape(extra={"rope_scaling": LLAMA3_ROPE}),
    "llama-linear-rope": Shape(extra={"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-no-gqa": Shape(num_heads=3, num_kv_heads=3),
    "mistral": Shape("MistralForCausalLM", extra={"sliding_window": None}, tied=False),
    "qwen2": Shape("Qwen2ForCausalLM", qkv_bias=True, extra={"use_sliding_window": False}),
    "qwen3": Shape("Qwen3ForCausalLM", head_dim=16, extra={"attention_bias": False}),
}


class Session:
    """One sequence computed chunk by chunk through a scrambled block table."""

    def __init__(self, directory: Path, mode: str, dtype: torch.dtype = torch.float32) -> None:
        config = read_config(directory)
        weights = load_weights(directory, config, dtype=dtype, mode=mode)
        self.decoder = Decoder(config, weights, attention_for(torch.device("cpu"), mode))
        self.cache = new_cache(config.num_layers, 64, BLOCK_SIZE, config.num_kv_heads, config.head_dim, dtype)
        self.table = torch.randperm(64, generator=torch.Generator().manual_seed(5)).tolist()

    def logits(self, token_ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """Logits of every position, computed in chunks of these sizes."""
        outputs: list[Tensor] = []
        start = 0
        with torch.inference_mode():
            for count in chunks:
                batch = attention_batch([(self.table, start, count)], BLOCK_SIZE)
                ids = torch.tensor(token_ids[start : start + count])
                hidden = self.decoder.forward(ids, batch, self.cache, batch, torch.arange(count))
                outputs.append(self.decoder.logits(hidden))
                start += count
        return torch.cat(outputs)


def reference_logits(directory: Path, token_ids: Sequence[int]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.inference_mode():
            logits = model(torch.tensor([token_ids])).logits[0]
        del model
        gc.collect()
    return logits


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    return torch.randint(0, 512, (150,), generator=torch.Generator().manual_seed(9)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path, token_ids: list[int]) -> None:
    write_random_model(tmp_path, FAMILIES[family], seed=1)
    expected = reference_logits(tmp_path, token_ids)
    assert expected.std() > 0.5  # random, but not flat
    for mode in ("fast", "exact"):
        session = Session(tmp_path, mode)
        for chunks in ([150], [70, 1, 1, 78]):
            torch.testing.assert_close(session.logits(token_ids, chunks), expected, atol=5e-5, rtol=1e-4)


def test_bf16_agrees_with_fp32_on_most_tokens(tmp_path: Path, token_ids: list[int]) -> None:
    write_random_model(tmp_path, FAMILIES["qwen3"], seed=1)
    full = Session(tmp_path, "fast").logits(token_ids, [150])
    half = Session(tmp_path, "fast", torch.bfloat16).logits(token_ids, [100, 50])
    assert half.dtype == torch.float32
    assert (full.argmax(-1) == half.argmax(-1)).float().mean() > 0.9
    assert (full - half).abs().mean() < 0.05 * full.std()


def test_only_the_wanted_rows_come_back(tmp_path: Path, token_ids: list[int]) -> None:
    write_random_model(tmp_path, FAMILIES["smollm2"], seed=1)
    session = Session(tmp_path, "fast")
    everything = session.logits(token_ids, [150])
    batch = attention_batch([(session.table, 0, 150)], BLOCK_SIZE)
    with torch.inference_mode():
        for rows in ([], [149], [3, 77, 149]):
            chosen = torch.tensor(rows, dtype=torch.int64)
            ids = torch.tensor(token_ids)
            hidden = session.decoder.forward(ids, batch, session.cache, batch.narrowed(rows), chosen)
            assert hidden.shape[0] == len(rows)
            if rows:
                torch.testing.assert_close(
                    session.decoder.logits(hidden), everything[rows], atol=1e-5, rtol=1e-4
                )
