"""What a Hugging Face `config.json` says about a decoder of the Llama family, checked and frozen.

Owns the list of architectures that `decoder` computes natively. Everything else is refused here, by name,
before a weight is read: a model is never loaded as "probably Llama-like". No torch in this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.model.store import ModelError

#: Architectures computed natively, and whether their q and k heads are normalised before the rotation.
ARCHITECTURES: Mapping[str, bool] = {
    "LlamaForCausalLM": False,
    "MistralForCausalLM": False,
    "Qwen2ForCausalLM": False,
    "Qwen3ForCausalLM": True,
}

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base `theta` and how its frequencies are stretched for long contexts.

    `factor` divides the frequencies ("linear": all, "llama3": those with a wavelength above
    `original_context / low_freq_factor`, blended up to `original_context / high_freq_factor`).
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder. Sizes are in elements, `context_length` in tokens.

    `num_heads` query heads share `num_kv_heads` key and value heads in equal groups, query head h using
    key head h // (num_heads // num_kv_heads).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    rope: RopeConfig
    qk_norm: bool
    tied_embeddings: bool
    eos_ids: frozenset[int]

    @property
    def group_size(self) -> int:
        """Query heads for each key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (and of all value heads)."""
        return self.num_kv_heads * self.head_dim


def read_config(model_dir: Path) -> ModelConfig:
    """`config.json` of a model directory; ModelError when it is missing, malformed or not of this family."""
    raw = _read_json(model_dir / "config.json")
    generation = model_dir / "generation_config.json"
    eos = _ids(raw.get("eos_token_id"))
    if generation.exists():
        eos |= _ids(_read_json(generation).get("eos_token_id"))
    return config_from(raw, eos_ids=eos, source=str(model_dir / "config.json"))


def config_from(
    raw: Mapping[str, Any], *, eos_ids: frozenset[int], source: str = "config.json"
) -> ModelConfig:
    """Checked `ModelConfig` of a decoded `config.json`; `source` is what errors name."""
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"{source}: architecture {architecture} is not supported; supported are {known}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{source}: hidden_act {raw['hidden_act']!r} is not supported; it must be 'silu'")
    if raw.get("quantization_config"):
        raise ModelError(
            f"{source}: quantised weights are not supported; convert the model to fp32, fp16 or bf16"
        )

    def size(name: str, default: int | None = None) -> int:
        value = raw.get(name, default)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{source}: {name} is {value!r}; it must be a positive integer")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads, head_dim = size("num_key_value_heads", heads), size("head_dim", max(1, hidden // heads))
    if heads % kv_heads:
        raise ModelError(f"{source}: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if head_dim % 2:
        raise ModelError(f"{source}: head_dim {head_dim} is odd; rotary embedding needs pairs")
    context = size("max_position_embeddings")
    window = raw.get("sliding_window")
    if isinstance(window, int) and raw.get("use_sliding_window", architecture == "MistralForCausalLM"):
        context = min(context, window)  # within one window, sliding attention is full attention
    return ModelConfig(
        architecture=architecture,
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        context_length=context,
        rope=_rope_from(raw, context, source),
        qk_norm=ARCHITECTURES[architecture],
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_ids=eos_ids,
    )


def _rope_from(raw: Mapping[str, Any], context: int, source: str) -> RopeConfig:
    """Reads both spellings: `rope_theta` + `rope_scaling`, and the newer `rope_parameters`."""
    scaling: Mapping[str, Any] = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = float(scaling.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    if kind not in ROPE_TYPES:
        raise ModelError(
            f"{source}: rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    if float(scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ModelError(f"{source}: partial_rotary_factor is not supported; it must be 1.0")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_context=int(scaling.get("original_max_position_embeddings", context)),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); is this a model directory?") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return value


def _ids(value: Any) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(item for item in values if isinstance(item, int))
