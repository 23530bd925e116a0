"""Kernels over the paged KV cache, chosen by device and mode; this file is the only door to them.

A kernel set turns one step's rows of queries into attention outputs, and writes the step's keys and values
into their slots. The torch versions below serve the CPU and are what later device kernels are compared with.

    one layer's cache: [num_blocks, block_size, 2, kv_heads, head_dim], keys at [:, :, 0], values at [:, :, 1]
    a slot           : block * block_size + position % block_size, a row of the first two dimensions flattened
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.kernels.batch import AttentionBatch, Span, attention_batch
from engine.kernels.cache_write import new_cache, write_cache
from engine.kernels.paged_attention import paged_attention
from engine.kernels.tiled_attention import tiled_attention

__all__ = [
    "Attention",
    "AttentionBatch",
    "Span",
    "attention_batch",
    "attention_for",
    "new_cache",
    "paged_attention",
    "tiled_attention",
    "write_cache",
]

#: (queries [rows, heads, head_dim], one layer's cache, batch) -> [rows, heads * head_dim]
Attention = Callable[[Tensor, Tensor, AttentionBatch], Tensor]


def attention_for(device: torch.device, mode: str) -> Attention:
    """The attention for `mode` "fast" or "exact" on `device`; ValueError where there is none."""
    if device.type != "cpu":
        raise ValueError(f"no attention kernels for device {device.type}")
    return tiled_attention if mode == "exact" else paged_attention
