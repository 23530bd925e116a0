"""GGUF to Hugging Face's layout: names, shapes, the order of Q and K rows, and files that are not whole."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file

from engine.model.gguf_convert import convert, interleaved_to_halves, model_config
from engine.model.gguf_reading import GgufError, open_gguf

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 64, 4, 2, 16, 96, 32
Array = npt.NDArray[np.float32]


def weights(arch: str, tied: bool) -> dict[str, Array]:
    """Random tensors of a one-layer model, by GGUF name, rows of Q and K in Hugging Face's order."""
    rng = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    if arch == "qwen2":
        shapes |= {"blk.0.attn_q.bias": (HEADS * HEAD_DIM,), "blk.0.attn_k.bias": (KV_HEADS * HEAD_DIM,)}
        shapes |= {"blk.0.attn_v.bias": (KV_HEADS * HEAD_DIM,)}
    if arch == "qwen3":
        shapes |= {"blk.0.attn_q_norm.weight": (HEAD_DIM,), "blk.0.attn_k_norm.weight": (HEAD_DIM,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def interleave(weight: Array, heads: int) -> Array:
    """What llama.cpp's converter does to Q and K: each head's first and second half of rows alternate."""
    rows = [
        weight[head * HEAD_DIM + half * HEAD_DIM // 2 + pair]
        for head in range(heads)
        for pair in range(HEAD_DIM // 2)
        for half in range(2)
    ]
    return np.stack(rows)


def write_gguf(
    path: Path,
    arch: str = "llama",
    tied: bool = True,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    tensors: dict[str, Array] | None = None,
    **metadata: Any,
) -> dict[str, Array]:
    """Write a small model; returns what each tensor holds after its quantisation, in Hugging Face's order."""
    writer = GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{number}" for number in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(2)
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value)
    expected = {}
    for name, values in (weights(arch, tied) if tensors is None else tensors).items():
        heads = {"blk.0.attn_q.weight": HEADS, "blk.0.attn_k.weight": KV_HEADS}.get(name)
        stored = values if values.ndim == 1 else dequantize(quantize(values, kind), kind)
        expected[name] = stored
        if arch == "llama" and heads:
            values = interleave(values, heads)
        if values.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def converted(path: Path, out: Path) -> tuple[dict[str, Array], dict[str, Any], list[tuple[int, int]]]:
    out.mkdir()
    steps: list[tuple[int, int]] = []
    sums = convert(path, out, lambda what, done, total: steps.append((done, total)))
    assert set(sums) == {file.name for file in out.iterdir()}
    return load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text()), steps


KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


@pytest.mark.parametrize("kind", KINDS)
def test_every_readable_type_comes_out_as_it_was_stored(tmp_path: Path, kind: str) -> None:
    stored = write_gguf(tmp_path / "m.gguf", kind=GGMLQuantizationType[kind])
    found, config, steps = converted(tmp_path / "m.gguf", tmp_path / "out")
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
        "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
        "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
        "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
        "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    }
    assert set(found) == set(names.values())
    for source, target in names.items():
        np.testing.assert_array_equal(found[target], stored[source], err_msg=target)
    assert config["tie_word_embeddings"] is True and config["vocab_size"] == VOCAB
    assert steps[-1][0] == steps[-1][1] == sum(values.nbytes for values in stored.values())


@pytest.mark.parametrize(("arch", "name"), [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")])
def test_the_qwen_family_keeps_its_rows_and_its_own_tensors(tmp_path: Path, arch: str, name: str) -> None:
    stored = write_gguf(tmp_path / "m.gguf", arch, tied=False)
    found, config, _ = converted(tmp_path / "m.gguf", tmp_path / "out")
    assert config["architectures"] == [name] and config["tie_word_embeddings"] is False
    attention = "model.layers.0.self_attn"
    np.testing.assert_array_equal(found[f"{attention}.q_proj.weight"], stored["blk.0.attn_q.weight"])
    np.testing.assert_array_equal(found["lm_head.weight"], stored["output.weight"])
    extra = ("k_proj.bias", "attn_k.bias") if arch == "qwen2" else ("k_norm.weight", "attn_k_norm.weight")
    np.testing.assert_array_equal(found[f"{attention}.{extra[0]}"], stored[f"blk.0.{extra[1]}"])


def test_interleaving_is_undone_for_any_number_of_heads() -> None:
    for heads in (1, 3, 9):
        weight = np.arange(heads * HEAD_DIM * 5, dtype=np.float32).reshape(-1, 5)
        np.testing.assert_array_equal(interleaved_to_halves(interleave(weight, heads), heads), weight)


def test_the_config_says_what_the_metadata_says(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    config = model_config(open_gguf(tmp_path / "m.gguf"))
    expected = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-05,
        "rope_theta": 50000.0,
        "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
        "eos_token_id": 2,
        "bos_token_id": None,
        "attention_bias": False,
    }
    assert {key: config[key] for key in expected} == expected


def test_a_truncated_file_names_itself_and_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    data = path.read_bytes()
    path.write_bytes(data[:-1000])
    with pytest.raises(GgufError, match=r"m\.gguf: tensor '.+' ends at byte .* truncated"):
        open_gguf(path)
    for size in (0, 3, 20, 100, 500):
        path.write_bytes(data[:size])
        with pytest.raises(GgufError, match=r"m\.gguf: "):
            open_gguf(path)


def test_files_that_are_no_gguf_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(GgufError, match="no such file"):
        open_gguf(path)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(GgufError, match="not a readable GGUF file"):
        open_gguf(path)


def test_a_tensor_with_an_infinite_value_is_named(tmp_path: Path) -> None:
    tensors = weights("llama", True)
    tensors["blk.0.ffn_up.weight"][3, 4] = np.inf
    write_gguf(tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(GgufError, match=r"m\.gguf: tensor 'blk\.0\.ffn_up\.weight' holds NaN or infinity"):
        converted(tmp_path / "m.gguf", tmp_path / "out")


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    tensors = weights("llama", True)
    lost = tensors.pop("blk.0.attn_v.weight")
    write_gguf(tmp_path / "lost.gguf", tensors=tensors)
    with pytest.raises(GgufError, match=r"tensor 'blk\.0\.attn_v\.weight' is missing"):
        converted(tmp_path / "lost.gguf", tmp_path / "out1")
    write_gguf(
        tmp_path / "more.gguf", tensors={**tensors, "blk.0.attn_v.weight": lost, "rope_freqs.weight": lost}
    )
    with pytest.raises(GgufError, match=r"tensor 'rope_freqs\.weight' is not known for architecture 'llama'"):
        converted(tmp_path / "more.gguf", tmp_path / "out2")


def test_what_is_not_supported_says_so(tmp_path: Path) -> None:
    write_gguf(tmp_path / "arch.gguf", "falcon", tensors=weights("llama", True))
    with pytest.raises(GgufError, match=r"'falcon' is not supported \(supported: llama, qwen2, qwen3\)"):
        converted(tmp_path / "arch.gguf", tmp_path / "out1")
    write_gguf(tmp_path / "rope.gguf", llama__rope__scaling__type="yarn")
    with pytest.raises(GgufError, match="rope scaling 'yarn'"):
        converted(tmp_path / "rope.gguf", tmp_path / "out2")
    file = open_gguf(tmp_path / "rope.gguf")
    with pytest.raises(GgufError, match=r"metadata key 'llama\.mood' is missing"):
        file.get("llama.mood")
