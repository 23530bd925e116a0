"""Reading a model directory: configs of each family, sharded and whole files, and every way to be broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.config import config_from, read_config
from engine.model.loader import INDEX, load_weights, tensor_files
from engine.model.random_model import Shape, write_random_model
from engine.model.rope import frequencies
from engine.model.store import ModelError

SMALL = Shape(vocab_size=40, num_layers=1)


def load(directory: Path, mode: str = "fast") -> Any:
    return load_weights(directory, read_config(directory), dtype=torch.float32, mode=mode)


def change(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def rewrite(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces (or, for None, removes) tensors, named with "__" for "."."""
    path = directory / "model.safetensors"
    held = {**load_file(path), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    save_file({name: tensor.clone() for name, tensor in held.items() if tensor is not None}, path)


def test_sharded_and_whole_give_the_same_products(tmp_path: Path) -> None:
    write_random_model(tmp_path / "whole", SMALL, seed=4)
    write_random_model(tmp_path / "sharded", SMALL, seed=4, shards=3)
    assert len(set(tensor_files(tmp_path / "sharded").values())) == 3
    x = torch.randn(3, SMALL.hidden_size)
    with torch.inference_mode():
        for mode in ("fast", "exact"):
            whole, sharded = load(tmp_path / "whole", mode), load(tmp_path / "sharded", mode)
            assert torch.equal(whole.embedding, sharded.embedding)
            assert torch.equal(whole.layers[0].qkv(x), sharded.layers[0].qkv(x))
            torch.testing.assert_close(whole.head(x), x @ whole.embedding.t(), atol=1e-5, rtol=1e-5)


def test_linears_add_to_the_residual_with_their_bias(tmp_path: Path) -> None:
    write_random_model(tmp_path, Shape(num_layers=1, qkv_bias=True), seed=4)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.0.self_attn.o_proj"
    x, residual = torch.randn(5, 192), torch.randn(5, 96)
    expected = residual + torch.nn.functional.linear(
        x, tensors[prefix + ".weight"], tensors[prefix + ".bias"]
    )
    layer = load(tmp_path).layers[0]
    with torch.inference_mode():
        layer.output.add_to(residual, x)
    torch.testing.assert_close(residual, expected, atol=1e-5, rtol=1e-5)


def test_bf16_files_are_read_in_the_compute_type(tmp_path: Path) -> None:
    write_random_model(tmp_path, SMALL, dtype=torch.bfloat16)
    weights = load(tmp_path)
    assert weights.embedding.dtype == torch.float32
    assert weights.layers[0].attention_norm.dtype == torch.float32


def test_eos_ids_come_from_both_configs(tmp_path: Path) -> None:
    write_random_model(tmp_path, SMALL)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert read_config(tmp_path).eos_ids == {2, 7}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architecture MambaForCausalLM is not supported; supported are L",
        ),
        ({"architectures": []}, r"architecture \(none\)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"hidden_size": "96"}, "hidden_size is '96'; it must be a positive integer"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_key_value_heads": 4}, "6 attention heads cannot share 4"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write_random_model(tmp_path, SMALL)
    change(tmp_path, **fields)
    with pytest.raises(ModelError, match=message) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_sliding_window_limits_the_context() -> None:
    raw = {
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
    }
    assert config_from(raw, eos_ids=frozenset()).context_length == 4096
    assert config_from({**raw, "sliding_window": None}, eos_ids=frozenset()).context_length == 32_768
    qwen = {**raw, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
    assert config_from(qwen, eos_ids=frozenset()).context_length == 32_768


def test_newer_rope_parameters_are_read() -> None:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "linear", "factor": 4.0},
    }
    rope = config_from(raw, eos_ids=frozenset()).rope
    assert (rope.theta, rope.kind, rope.factor) == (500_000.0, "linear", 4.0)
    assert frequencies(rope, 64)[0] == 0.25


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_unreadable_config(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


def test_missing_misshapen_and_integer_tensors_are_named(tmp_path: Path) -> None:
    name = "model__layers__0__mlp__down_proj__weight"
    for tensor, message in [
        (None, r"down_proj\.weight is missing"),
        (torch.zeros(96, 191), r"down_proj\.weight has shape \[96, 191\]; config\.json asks for \[96, 192\]"),
        (torch.zeros(96, 192, dtype=torch.int8), r"down_proj\.weight is torch\.int8"),
    ]:
        write_random_model(tmp_path, SMALL)
        rewrite(tmp_path, **{name: tensor})
        with pytest.raises(ModelError, match=message):
            load(tmp_path)


def test_partial_qkv_bias_and_mlp_bias_are_refused(tmp_path: Path) -> None:
    write_random_model(tmp_path, SMALL)
    rewrite(tmp_path, model__layers__0__self_attn__k_proj__bias=torch.zeros(64))
    with pytest.raises(ModelError, match="1 of 3 are present"):
        load(tmp_path)
    write_random_model(tmp_path, SMALL)
    rewrite(tmp_path, model__layers__0__mlp__up_proj__bias=torch.zeros(192))
    with pytest.raises(ModelError, match="bias in the MLP"):
        load(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write_random_model(tmp_path, SMALL)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a whole safetensors file"):
        load(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    write_random_model(tmp_path, SMALL, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors named by"):
        load(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(ModelError, match="not a safetensors index"):
        load(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors file here"):
        load(tmp_path)
