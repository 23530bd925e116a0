"""Attention over the paged cache for `fast` mode, built on torch's CPU flash kernel.

Each sequence is attended on its own: on a CPU the weights dominate a step, and a loop keeps one sequence's
keys and values in the core's cache. Query heads that share a key head become extra rows, so keys are never
repeated. A chunk behind cached context is two calls, one over the context (no mask) and one over itself
(causal), merged by their log-sum-exp; so no mask is ever built and nothing above the diagonal is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.batch import AttentionBatch, Span

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def paged_attention(queries: Tensor, cache: Tensor, batch: AttentionBatch) -> Tensor:
    """Causal attention of `queries` [rows, heads, head_dim] -> [rows, heads * head_dim], scale head_dim **
    -0.5.

    `cache` is one layer [num_blocks, block_size, 2, kv_heads, head_dim] that already holds the rows' own
    keys.
    """
    rows, heads, dim = queries.shape
    kv_heads = cache.shape[3]
    split = queries.view(rows, kv_heads, heads // kv_heads, dim)
    outputs = [_attend(split[span.row : span.row + span.count], cache, span) for span in batch.spans]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(queries: Tensor, cache: Tensor, span: Span) -> Tensor:
    """One span's queries [rows, kv_heads, group, head_dim] -> [rows, heads * head_dim]."""
    keys, values = keys_and_values(cache, span)
    if span.count == 1:
        return _flash(queries, keys, values)[0].reshape(1, -1)
    if span.context == 0:
        own, _ = _attend_causal(queries, keys, values)
        return own.permute(2, 1, 0, 3).reshape(span.count, -1)
    context, groups = span.context, queries.shape[2]
    own, own_weight = _attend_causal(queries, keys[:, :, context:], values[:, :, context:])
    past, past_weight = _attend_all(queries, keys[:, :, :context], values[:, :, :context])
    past = past.unflatten(2, (span.count, groups))[0].transpose(0, 1)
    past_weight = past_weight.unflatten(2, (span.count, groups))[0].transpose(0, 1)
    share = torch.sigmoid(past_weight - own_weight.permute(2, 1, 0)).unsqueeze(-1).to(own.dtype)
    return torch.lerp(own.permute(2, 1, 0, 3), past, share).view(span.count, -1)


def _attend_all(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Every query sees every key: outputs [1, kv_heads, rows * group, head_dim] and their log-sum-exp."""
    _, kv_heads, _, dim = queries.shape
    output, weight = _flash(queries.transpose(0, 1).reshape(1, kv_heads, -1, dim), keys, values)
    return output, weight


def _attend_causal(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Query i sees keys 0..i: outputs [group, kv_heads, rows, head_dim] and their log-sum-exp."""
    shared = (queries.shape[2], -1, -1, -1)
    output, weight = _flash(
        queries.permute(2, 1, 0, 3), keys.expand(shared), values.expand(shared), 0.0, True
    )
    return output, weight


def keys_and_values(cache: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """The span's keys and values, each [1, kv_heads, length, head_dim]: views of the cache where its blocks
    are consecutive, of a copy where they are not. One view each: this runs for every sequence and layer.
    """
    _, _, _, kv_heads, dim = cache.shape
    token = 2 * kv_heads * dim
    if span.first_slot is None:
        source, first = cache.index_select(0, span.blocks), 0
    else:
        source, first = cache, cache.storage_offset() + span.first_slot * token
    shape, stride = (1, kv_heads, span.length, dim), (token, dim, token, 1)
    return source.as_strided(shape, stride, first), source.as_strided(shape, stride, first + token // 2)
