"""The paged cache's storage, and the write of a step's keys and values into it.

Storage is anonymous memory: zero when first read (no stale number can ever be a NaN), and resident only once
written, so a pool larger than today's traffic costs nothing. Keys and values of a slot lie side by side, in
the order in which the fused projection yields them, so that one indexed copy writes both and one gather reads
both.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def new_cache(
    num_layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """One tensor of zeros [num_blocks, block_size, 2, kv_heads, head_dim] for each layer."""
    shape = (num_blocks, block_size, 2, kv_heads, head_dim)
    size = math.prod(shape) * dtype.itemsize
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return [
        torch.frombuffer(mmap.mmap(-1, size, flags=private), dtype=dtype).view(shape)
        for _ in range(num_layers)
    ]


def write_cache(cache: Tensor, slots: Tensor, keys_values: Tensor) -> None:
    """Copies row i of `keys_values` [rows, 2 * kv_heads * head_dim] into slot `slots[i]` of one layer's
    cache.
    """
    cache.view(-1, keys_values.shape[1]).index_copy_(0, slots, keys_values)
