"""Converting a GGUF file to a model directory in Hugging Face's layout, fp32.

Owns the meaning of GGUF tensor names and shapes for the Llama/Mistral and Qwen families. What must hold: the
directory loads in `transformers` as it is and computes what the GGUF file says. llama.cpp stores the rows of
Q and K of the `llama` architecture interleaved for its own rotary layout; they are put back in halves here.
Weights are written one tensor at a time, so memory stays at one tensor however large the model is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.model.gguf_reading import GgufError, GgufFile, open_gguf
from engine.model.gguf_tokenizer import tokenizer_files

Progress = Callable[[str, int, int], None]  # (what, done bytes, total bytes)

_PER_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}


@dataclass(frozen=True, slots=True)
class Placed:
    """One tensor's way: its name in the GGUF file, its Hugging Face name, and the heads to un-permute by."""

    source: str
    target: str
    heads: int | None


def interleaved_to_halves(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's row permutation of Q and K: rows (head, pair, half) -> rows (head, half, pair).

    `weight` has shape [heads * head_dim, ...]. The inverse of `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    rows = weight.shape[0]
    split = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))


def placements(file: GgufFile) -> list[Placed]:
    """Where each tensor of `file` goes; raises `GgufError` for a tensor that no supported model has."""
    arch = _architecture(file)
    q_heads = int(file.get(f"{arch}.attention.head_count"))
    kv_heads = int(file.metadata.get(f"{arch}.attention.head_count_kv", q_heads))
    placed = []
    for name in file.tensors:
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        target = _TOP.get(name)
        heads = None
        if match and match[2] in _PER_LAYER:
            target = f"model.layers.{match[1]}.{_PER_LAYER[match[2]]}"
            if arch == "llama" and match[2].startswith(("attn_q.", "attn_k.")):
                heads = q_heads if match[2].startswith("attn_q.") else kv_heads
        if target is None:
            raise GgufError(f"{file.path}: tensor {name!r} is not known for architecture {arch!r}")
        placed.append(Placed(name, target, heads))
    _require_complete(file, int(file.get(f"{arch}.block_count")), arch)
    return sorted(placed, key=lambda item: item.target)


def _architecture(file: GgufFile) -> str:
    arch = file.get("general.architecture")
    if arch not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise GgufError(f"{file.path}: architecture {arch!r} is not supported (supported: {known})")
    return str(arch)


def _require_complete(file: GgufFile, layers: int, arch: str) -> None:
    """Raise for a layer tensor that the architecture can't do without."""
    optional = ("attn_q_norm.weight", "attn_k_norm.weight") if arch != "qwen3" else ()
    needed = [name for name in _PER_LAYER if name.endswith(".weight") and name not in optional]
    names = ["token_embd.weight", "output_norm.weight"]
    names += [f"blk.{layer}.{name}" for layer in range(layers) for name in needed]
    for name in names:
        file.shape(name)


def model_config(file: GgufFile) -> dict[str, Any]:
    """The config.json of `file`: what `transformers` needs to build the same network."""
    arch = _architecture(file)
    model_type, class_name = _ARCHITECTURES[arch]
    metadata = file.metadata
    hidden = int(file.get(f"{arch}.embedding_length"))
    heads = int(file.get(f"{arch}.attention.head_count"))
    head_dim = int(metadata.get(f"{arch}.attention.key_length", hidden // heads))
    rotary = int(metadata.get(f"{arch}.rope.dimension_count", head_dim))
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    if rotary != head_dim or scaling != "none":
        raise GgufError(f"{file.path}: rope scaling {scaling!r} over {rotary} of {head_dim} is not supported")
    theta = float(metadata.get(f"{arch}.rope.freq_base", 10000.0))
    return {
        "architectures": [class_name],
        "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "attention_dropout": 0.0,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": int(file.get(f"{arch}.feed_forward_length")),
        "max_position_embeddings": int(file.get(f"{arch}.context_length")),
        "mlp_bias": False,
        "model_type": model_type,
        "num_attention_heads": heads,
        "num_hidden_layers": int(file.get(f"{arch}.block_count")),
        "num_key_value_heads": int(metadata.get(f"{arch}.attention.head_count_kv", heads)),
        "rms_norm_eps": _short_float(float(file.get(f"{arch}.attention.layer_norm_rms_epsilon"))),
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": file.shape("token_embd.weight")[0],
    }


def _short_float(value: float) -> float:
    """The shortest decimal that is the same fp32 number: 9.999999747378752e-06 was written as 1e-05."""
    return float(np.format_float_scientific(np.float32(value), unique=True))


def write_safetensors(file: GgufFile, path: Path, progress: Progress) -> str:
    """Write every tensor of `file` to `path` as fp32 under Hugging Face names; returns its sha256."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    placed = placements(file)
    total = 0
    for item in placed:
        shape = file.shape(item.source)
        size = int(np.prod(shape)) * 4
        header[item.target] = {"dtype": "F32", "shape": list(shape), "data_offsets": [total, total + size]}
        total += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    digest = hashlib.sha256()
    done = 0
    with path.open("wb") as out:
        for piece in (len(head).to_bytes(8, "little"), head):
            digest.update(piece)
            out.write(piece)
        for item in placed:
            values = file.array(item.source)
            if item.heads is not None:
                values = interleaved_to_halves(values, item.heads)
            data = values.astype("<f4", copy=False).tobytes()
            digest.update(data)
            out.write(data)
            done += len(data)
            progress("convert", done, total)
        out.flush()
    return digest.hexdigest()


def convert(source: Path, target: Path, progress: Progress) -> dict[str, str]:
    """Convert the GGUF file `source` into the existing empty directory `target`; raises `GgufError`.

    Returns the sha256 of every file written, by name.
    """
    file = open_gguf(source)
    documents: dict[str, Any] = {"config.json": model_config(file), **tokenizer_files(file)}
    sums = {"model.safetensors": write_safetensors(file, target / "model.safetensors", progress)}
    for filename, document in documents.items():
        data = json.dumps(document, ensure_ascii=False, indent=1).encode()
        (target / filename).write_bytes(data)
        sums[filename] = hashlib.sha256(data).hexdigest()
    return sums
