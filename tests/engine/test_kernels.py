"""Paged attention and cache writes against plain float64 attention, on random shapes and scrambled blocks."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from engine.kernels import attention_batch, attention_for, new_cache, write_cache

SHAPES = [(6, 2, 32), (4, 4, 16), (8, 1, 64)]


def plain_attention(queries: Tensor, keys: Tensor, values: Tensor, context: int) -> Tensor:
    """[rows, heads, dim] over [length, kv_heads, dim], float64, one head and one row at a time."""
    rows, heads, dim = queries.shape
    groups = heads // keys.shape[1]
    output = torch.empty(rows, heads, dim, dtype=torch.float64)
    for row in range(rows):
        seen = context + row + 1
        for head in range(heads):
            scores = keys[:seen, head // groups].double() @ queries[row, head].double() * dim**-0.5
            output[row, head] = torch.softmax(scores, 0) @ values[:seen, head // groups].double()
    return output.view(rows, heads * dim)


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_attention_equals_float64(mode: str, heads: int, kv_heads: int, dim: int) -> None:
    rng = random.Random(heads)
    torch.manual_seed(heads)
    block_size = 8
    cache = torch.randn(64, block_size, 2, kv_heads, dim)
    blocks = rng.sample(range(64), 64)
    items = []
    for context, count in [(0, 1), (37, 1), (63, 1), (0, 20), (64, 3), (51, 30), (130, 2)]:
        needed = -(-(context + count) // block_size)
        table, blocks = blocks[:needed], blocks[needed:]
        items.append((table or [0], context, count))
    items.append((list(range(10, 20)), 60, 9))  # consecutive blocks are read in place
    batch = attention_batch(items, block_size)
    queries = torch.randn(len(batch.slots), heads, dim)
    output = attention_for(torch.device("cpu"), mode)(queries, cache, batch)
    assert output.shape == (len(queries), heads * dim)
    for span, (table, context, count) in zip(batch.spans, items, strict=True):
        tokens = cache[table].flatten(0, 1)[: context + count]
        part = queries[span.row : span.row + count]
        expected = plain_attention(part, tokens[:, 0], tokens[:, 1], context)
        actual = output[span.row : span.row + count].double()
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)


def test_exact_attention_ignores_what_lies_beyond_a_sequence() -> None:
    attention = attention_for(torch.device("cpu"), "exact")
    cache = torch.randn(8, 8, 2, 2, 16)
    batch = attention_batch([([5, 2], 9, 1)], 8)
    queries = torch.randn(1, 4, 16)
    clean = attention(queries, cache, batch)
    cache[2, 2:] = torch.nan  # positions 10 and later
    assert torch.equal(attention(queries, cache, batch), clean)


def test_a_long_chunk_is_cut_without_changing_a_row() -> None:
    attention = attention_for(torch.device("cpu"), "exact")
    cache = torch.randn(40, 16, 2, 1, 16)
    queries = torch.randn(600, 2, 16)
    whole = attention(queries, cache, attention_batch([(list(range(40)), 0, 600)], 16))
    expected = plain_attention(queries[590:], *cache.flatten(0, 1)[:600].unbind(1), 590)
    torch.testing.assert_close(whole[590:].double(), expected, atol=2e-6, rtol=1e-5)


def test_batch_lays_out_rows_positions_and_slots() -> None:
    batch = attention_batch([([7], 2, 1), ([3, 9], 3, 3), ([4, 5, 6], 0, 9)], 4)
    assert batch.positions.tolist() == [2, 3, 4, 5, *range(9)]
    assert batch.slots.tolist() == [30, 15, 36, 37, *range(16, 25)]
    assert [(span.row, span.count, span.context) for span in batch.spans] == [(0, 1, 2), (1, 3, 3), (4, 9, 0)]
    assert [span.first_slot for span in batch.spans] == [28, None, 16]


def test_batch_refuses_a_short_block_table() -> None:
    with pytest.raises(ValueError, match="9 positions need 3 blocks of 4; the table has 2"):
        attention_batch([([1, 2], 8, 1)], 4)


def test_narrowed_batch_keeps_the_chosen_rows() -> None:
    batch = attention_batch([([7], 2, 1), ([3, 9], 3, 3), ([4], 0, 2)], 4)
    narrow = batch.narrowed([0, 3, 5])
    assert [(span.row, span.count, span.context) for span in narrow.spans] == [
        (0, 1, 2),
        (1, 1, 5),
        (2, 1, 1),
    ]
    assert narrow.positions.tolist() == [2, 5, 1]
    assert narrow.slots.tolist() == [30, 37, 17]
    with pytest.raises(IndexError, match="row 6"):
        batch.narrowed([6])


def test_cache_write_puts_keys_before_values() -> None:
    (cache,) = new_cache(1, 3, 2, 2, 4, torch.float32)
    assert not cache.any()
    rows = torch.randn(2, 16)
    write_cache(cache, torch.tensor([5, 0]), rows)
    assert torch.equal(cache[2, 1, 0].flatten(), rows[0, :8])
    assert torch.equal(cache[2, 1, 1].flatten(), rows[0, 8:])
    assert torch.equal(cache[0, 0].flatten(), rows[1])
    assert not cache[1].any()


def test_no_kernels_for_other_devices() -> None:
    with pytest.raises(ValueError, match="device cuda"):
        attention_for(torch.device("cuda"), "fast")
