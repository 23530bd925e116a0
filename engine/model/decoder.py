"""The decoder of the Llama family over one flat batch: rows of any number of sequences, next to each other.

Owns the order of operations of a layer and nothing else: weights come laid out from `loader`, attention and
cache writes from `engine.kernels`. Every operation but attention treats rows alike, so a row's sequence
doesn't matter. In the last layer only the rows that somebody will read go on past the cache write.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from engine.kernels import Attention, AttentionBatch, write_cache
from engine.model.config import ModelConfig
from engine.model.loader import LayerWeights, ModelWeights
from engine.model.rope import rotate_, rotation_table


class Decoder:
    """Forward pass over `weights`; stateless between calls, the caller owns the cache."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, attention: Attention) -> None:
        self.config = config
        self._weights = weights
        self._attention = attention
        self._rotations = rotation_table(config.rope, config.head_dim, config.context_length)

    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        cache: list[Tensor],
        wanted: AttentionBatch,
        rows: Tensor,
    ) -> Tensor:
        """Computes every row of `batch`, writes its keys and values, returns the hidden state of some.

        `token_ids` [rows] int64; `cache` as `new_cache` makes it; `rows` [n] int64 are the rows wanted and
        `wanted` the batch that describes just them (`AttentionBatch.narrowed`). Returns [n, hidden], before
        the final norm.
        """
        hidden = self._weights.embedding.index_select(0, token_ids)
        rotation = self._rotations.index_select(0, batch.positions)
        last = len(cache) - 1
        for index, (layer, layer_cache) in enumerate(zip(self._weights.layers, cache, strict=True)):
            queries = self._project(layer, hidden, rotation, layer_cache, batch.slots)
            if index == last and len(rows) < len(hidden):
                hidden, queries, batch = hidden.index_select(0, rows), queries.index_select(0, rows), wanted
                if not len(rows):
                    break
            layer.output.add_to(hidden, self._attention(queries, layer_cache, batch))
            self._feed_forward(layer, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [n, vocab] fp32 of hidden states [n, hidden] that `forward` returned."""
        return self._weights.head(self._norm(hidden, self._weights.norm)).float()

    def _project(
        self, layer: LayerWeights, hidden: Tensor, rotation: Tensor, layer_cache: Tensor, slots: Tensor
    ) -> Tensor:
        """Queries [rows, heads, head_dim] of a layer; its keys and values go into the cache."""
        config = self.config
        qkv = layer.qkv(self._norm(hidden, layer.attention_norm))
        heads = qkv[:, : config.q_size + config.kv_size].unflatten(1, (-1, config.head_dim))
        queries, keys = heads[:, : config.num_heads], heads[:, config.num_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            queries.copy_(self._norm(queries, layer.q_norm))
            keys.copy_(self._norm(keys, layer.k_norm))
        rotate_(heads, rotation)
        write_cache(layer_cache, slots, qkv[:, config.q_size :])
        return queries

    def _feed_forward(self, layer: LayerWeights, hidden: Tensor) -> None:
        gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=1)
        layer.down.add_to(hidden, silu(gate).mul_(up))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019), reduced in fp32.

        Written out because torch's own is a dozen dispatches on the CPU: 1.5x slower for one row and for 256.
        """
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = length.square_().mul_(1.0 / x.shape[-1]).add_(self.config.norm_eps).rsqrt_()
        return (x * scale).mul_(weight).to(x.dtype)
