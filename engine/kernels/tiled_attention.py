"""Attention for `exact` mode: a row's output has the same bits however the step was cut.

Keys are taken in tiles of 64 at fixed absolute positions. The maximum of a row is exact in any order; the sum
of its weights and its output are accumulated tile after tile, so tiles that lie wholly beyond a row add exact
zeros, and neither the chunk, nor the batch, nor the cached part changes a bit. That needs matrix products
whose rows do not depend on each other (MKL_CBWR=...,STRICT, see `engine.config.step_environment`);
`rows_are_independent` checks it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.batch import AttentionBatch, Span

TILE = 64
ROWS_AT_ONCE = 256  # bounds the score matrix: rows * group * length * 4 bytes for each key head


def tiled_attention(queries: Tensor, cache: Tensor, batch: AttentionBatch) -> Tensor:
    """Same contract as `paged_attention`, bit for bit independent of the other rows of the step; fp32
    inside.
    """
    outputs: list[Tensor] = []
    for span in batch.spans:
        keys, values = _tiles(cache, span)
        for first in range(0, span.count, ROWS_AT_ONCE):
            rows = min(ROWS_AT_ONCE, span.count - first)
            part = queries[span.row + first : span.row + first + rows]
            outputs.append(_attend(part, keys, values, span.context + first))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _tiles(cache: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """Keys [kv_heads, head_dim, padded] and values [kv_heads, padded, head_dim], zero beyond the span's
    length.
    """
    padded = -(-span.length // TILE) * TILE
    tokens = torch.zeros((padded, *cache.shape[2:]), dtype=torch.float32)
    tokens[: span.length] = _gathered(cache, span)
    keys, values = tokens.unbind(1)
    return keys.permute(1, 2, 0), values.transpose(0, 1)


def _gathered(cache: Tensor, span: Span) -> Tensor:
    if span.first_slot is not None:
        return cache.flatten(0, 1)[span.first_slot : span.first_slot + span.length]
    return cache.index_select(0, span.blocks).flatten(0, 1)[: span.length]


def _attend(queries: Tensor, keys: Tensor, values: Tensor, context: int) -> Tensor:
    """Rows at positions context, context + 1, ... -> [rows, heads * head_dim]."""
    rows, heads, dim = queries.shape
    kv_heads = keys.shape[0]
    groups = heads // kv_heads
    length = -(-(context + rows) // TILE) * TILE
    scaled = queries.float() * dim**-0.5
    folded = (
        scaled.view(rows, kv_heads, groups, dim).permute(1, 0, 2, 3).reshape(kv_heads, rows * groups, dim)
    )
    scores = torch.bmm(folded, keys[:, :, :length])
    edge = context // TILE * TILE  # no row is masked before this position
    position = torch.arange(context, context + rows).view(rows, 1, 1)
    beyond = torch.arange(edge, length) > position
    scores.view(kv_heads, rows, groups, length)[..., edge:].masked_fill_(beyond, -torch.inf)
    scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    total = scores.unflatten(-1, (-1, TILE)).sum(-1).cumsum(-1)[..., -1:]
    output = torch.zeros(kv_heads, rows * groups, dim)
    for tile in range(0, length, TILE):
        output.baddbmm_(scores[:, :, tile : tile + TILE], values[:, tile : tile + TILE])
    output.div_(total)
    return output.view(kv_heads, rows, groups, dim).permute(1, 0, 2, 3).reshape(rows, -1).to(queries.dtype)


def rows_are_independent() -> bool:
    """Whether this process multiplies matrices so that a row's bits do not depend on the number of rows."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(33, 1536, generator=generator)
    weight = torch.randn(1536, 64, generator=generator)
    whole = torch.mm(rows, weight)
    return all(torch.equal(torch.mm(rows[:count], weight), whole[:count]) for count in (1, 2, 7, 17))
