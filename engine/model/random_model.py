"""Model directories with random weights: any supported shape, without a download.

Benchmarks measure speed on them (a product takes as long whatever it multiplies), tests compare them with
`transformers`. Weights are scaled so that activations keep their size and logits spread over a few units; the
same arguments give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.model.config import ModelConfig, config_from
from engine.model.loader import INDEX

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What `write_random_model` makes; `extra` are further fields of `config.json`, `qkv_bias` adds their
    tensors.
    """

    architecture: str = "LlamaForCausalLM"
    vocab_size: int = 512
    hidden_size: int = 96
    intermediate_size: int = 192
    num_layers: int = 2
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    context_length: int = 1024
    tied: bool = True
    qkv_bias: bool = False
    extra: Mapping[str, Any] | None = None


def write_random_model(
    directory: Path, shape: Shape, *, seed: int = 0, shards: int = 1, dtype: torch.dtype = torch.float32
) -> ModelConfig:
    """Writes `config.json` and `shards` safetensors files (with an index when more than one) into
    `directory`.
    """
    raw = _config_json(shape, dtype)
    config = config_from(raw, eos_ids=frozenset({2}))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _random(name, size, generator).to(dtype)
        for name, size in _sizes(config, shape.qkv_bias).items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw, indent=1))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return config
    where = {name: f"model-{1 + i % shards:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(where.values())):
        part = {name: tensors[name] for name in names if where[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return config


def _config_json(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": [shape.architecture],
        "model_type": MODEL_TYPES[shape.architecture],
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **({"attention_bias": True} if shape.qkv_bias and shape.architecture == "LlamaForCausalLM" else {}),
        **(shape.extra or {}),
    }


def _sizes(config: ModelConfig, qkv_bias: bool) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        sizes["lm_head.weight"] = (config.vocab_size, hidden)
    widths = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        attention = layer + "self_attn."
        sizes[layer + "input_layernorm.weight"] = sizes[layer + "post_attention_layernorm.weight"] = (hidden,)
        for part, width in widths.items():
            sizes[f"{attention}{part}_proj.weight"] = (width, hidden)
            if qkv_bias:
                sizes[f"{attention}{part}_proj.bias"] = (width,)
        sizes[attention + "o_proj.weight"] = (hidden, config.q_size)
        if qkv_bias and config.architecture == "LlamaForCausalLM":
            sizes[attention + "o_proj.bias"] = (hidden,)
        if config.qk_norm:
            sizes[attention + "q_norm.weight"] = sizes[attention + "k_norm.weight"] = (config.head_dim,)
        sizes[layer + "mlp.gate_proj.weight"] = sizes[layer + "mlp.up_proj.weight"] = (inner, hidden)
        sizes[layer + "mlp.down_proj.weight"] = (hidden, inner)
    return sizes


def _random(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = torch.randn(size, generator=generator)
    if name.endswith("norm.weight"):
        return values.mul_(0.1).add_(1.0)
    if name.endswith("bias"):
        return values.mul_(0.2)
    if name.startswith(("model.embed", "lm_head")):
        return values.mul_(3.0 * size[-1] ** -0.5)
    return values.mul_(size[-1] ** -0.5)
