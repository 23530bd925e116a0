"""Weights of a model directory: safetensors, one file or sharded, mapped into memory and laid out for the
decoder.

Owns the reading order and every name of the checkpoint. A missing file or tensor, a wrong shape or a
truncated file is a `ModelError` that names the file and the tensor. Everything is copied into the layout of
`linear`, so the mapping is gone when loading ends and a replica holds its weights once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.linear import Linear, head_linear, layer_linear
from engine.model.rope import interleave_pairs
from engine.model.store import ModelError

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `qkv` gives q heads, k heads, v heads side by side; `gate_up` the gate, then the up half."""

    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights, in the compute type. `embedding` is [vocab, hidden]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear


class Checkpoint:
    """The tensors of a directory by name, opened lazily. `take` checks shapes and casts."""

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._files = tensor_files(model_dir)
        self._open: dict[Path, Any] = {}
        self._dir = model_dir

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor called `name`, of exactly `shape`, in the compute type (a view of the file when it has
        it).
        """
        path = self._files.get(name)
        if path is None:
            raise ModelError(f"{self._dir}: tensor {name} is missing; download or convert the model again")
        try:
            tensor = self._handle(path).get_tensor(name)
        except (SafetensorError, RuntimeError) as error:
            raise ModelError(f"{path}: tensor {name} cannot be read ({error})") from error
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{path}: tensor {name} has shape {list(tensor.shape)}; config.json asks for {list(shape)}"
            )
        if not tensor.is_floating_point():
            raise ModelError(f"{path}: tensor {name} is {tensor.dtype}; fp32, fp16 or bf16 is needed")
        return tensor.to(self._dtype)

    def optional(self, name: str, *shape: int) -> Tensor | None:
        """`take`, or None where the checkpoint has no such tensor."""
        return self.take(name, *shape) if name in self else None

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = _open(path)
        return self._open[path]


def tensor_files(model_dir: Path) -> Mapping[str, Path]:
    """Tensor name -> file, of a sharded (`model.safetensors.index.json`) or whole (`*.safetensors`)
    checkpoint.
    """
    index = model_dir / INDEX
    if index.exists():
        try:
            shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{index}: not a safetensors index ({error})") from error
        missing = sorted({name for name in shards.values() if not (model_dir / name).exists()})
        if missing:
            raise ModelError(f"{model_dir}: {', '.join(missing)} named by {INDEX} is missing")
        return {name: model_dir / shard for name, shard in shards.items()}
    paths = sorted(model_dir.glob("*.safetensors"))
    if not paths:
        raise ModelError(
            f"{model_dir}: no .safetensors file here; `warmfront model pull` fetches or converts one"
        )
    named: dict[str, Path] = {}
    for path in paths:
        names = _open(path).keys()
        named.update(dict.fromkeys(names, path))
    return named


def load_weights(model_dir: Path, config: ModelConfig, *, dtype: torch.dtype, mode: str) -> ModelWeights:
    """Reads every weight and lays it out for the CPU; see the file's head for memory and errors."""
    checkpoint = Checkpoint(model_dir, dtype)
    embedding = checkpoint.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    head = embedding
    if not config.tied_embeddings and "lm_head.weight" in checkpoint:
        head = checkpoint.take("lm_head.weight", config.vocab_size, config.hidden_size)
    return ModelWeights(
        embedding=embedding.clone(),
        layers=tuple(
            _layer(checkpoint, f"model.layers.{index}.", config) for index in range(config.num_layers)
        ),
        norm=checkpoint.take("model.norm.weight", config.hidden_size).clone(),
        head=head_linear(head, mode),
    )


def _layer(checkpoint: Checkpoint, prefix: str, config: ModelConfig) -> LayerWeights:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    widths = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}
    rows: list[Tensor] = []
    biases: list[Tensor] = []
    for part, width in widths.items():
        weight = checkpoint.take(f"{attention}{part}_proj.weight", width, hidden)
        bias = checkpoint.optional(f"{attention}{part}_proj.bias", width)
        rows.append(weight if part == "v" else interleave_pairs(weight, dim))
        if bias is not None:
            biases.append(bias if part == "v" else interleave_pairs(bias, dim))
    if len(biases) not in (0, 3):
        raise ModelError(f"tensors {attention}*_proj.bias: {len(biases)} of 3 are present")
    gate_up = [checkpoint.take(f"{mlp}{part}_proj.weight", inner, hidden) for part in ("gate", "up")]
    for part in ("gate", "up", "down"):
        if f"{mlp}{part}_proj.bias" in checkpoint:
            raise ModelError(f"tensor {mlp}{part}_proj.bias: a bias in the MLP is not supported")

    def norm(name: str, width: int) -> Tensor:
        return checkpoint.take(name, width).clone()

    def head_norm(name: str) -> Tensor | None:
        return interleave_pairs(norm(attention + name, dim), dim) if config.qk_norm else None

    return LayerWeights(
        attention_norm=norm(prefix + "input_layernorm.weight", hidden),
        qkv=layer_linear(torch.cat(rows), torch.cat(biases) if biases else None),
        q_norm=head_norm("q_norm.weight"),
        k_norm=head_norm("k_norm.weight"),
        output=layer_linear(
            checkpoint.take(attention + "o_proj.weight", hidden, config.q_size),
            checkpoint.optional(attention + "o_proj.bias", hidden),
        ),
        mlp_norm=norm(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=layer_linear(torch.cat(gate_up)),
        down=layer_linear(checkpoint.take(mlp + "down_proj.weight", hidden, inner)),
    )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path}: not a whole safetensors file ({error}); download or convert it again"
        ) from error
