"""Rotary position embedding as one complex multiplication.

The loader stores the rows of the q and k projections so that the two halves of a rotated pair (i, i + d/2 in
the checkpoint) lie next to each other. A head is then a row of d/2 complex numbers, and rotating every q and
k head of a step is one in-place product with `table[positions]`. Dot products of q and k don't notice a
common reordering.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.model.config import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair, float64 [head_dim / 2].

    "llama3" is the schedule of the Llama 3.1 release: wavelengths beyond `original_context / low_freq_factor`
    are stretched by `factor`, those below `original_context / high_freq_factor` kept, the rest blended.
    """
    base = rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_context * base / (2 * math.pi)
        kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(
            0.0, 1.0
        )
        return base * (kept + (1.0 - kept) / rope.factor)
    return base


def rotation_table(rope: RopeConfig, head_dim: int, length: int) -> Tensor:
    """cos + i sin of every position's angles, complex64 [length, 1, head_dim / 2] (1: broadcast over
    heads).
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies(rope, head_dim))
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).unsqueeze(1)


def rotate_(heads: Tensor, rotation: Tensor) -> None:
    """Turns `heads` [tokens, heads, head_dim] in place by `rotation` [tokens, 1, head_dim / 2].

    The last dimension must be contiguous and hold interleaved pairs. bf16 is turned in fp32 and rounded once.
    """
    if heads.dtype == torch.float32:
        torch.view_as_complex(heads.unflatten(-1, (-1, 2))).mul_(rotation)
    else:
        turned = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2))) * rotation
        heads.copy_(torch.view_as_real(turned).flatten(-2))


def interleave_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Reorders rows [heads * head_dim, ...] so that row pairs (i, i + head_dim / 2) of each head become
    neighbours.
    """
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(weight.shape)
