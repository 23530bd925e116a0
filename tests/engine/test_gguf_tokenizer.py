"""The tokenizer rebuilt from GGUF gives llama.cpp's ids (a table made with it lies in fixtures/)."""

import gzip
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from canonicalizer.detokenizer import Detokenizer
from canonicalizer.special import Segment
from canonicalizer.tokens import TextModel, bytes_to_ids
from engine.model.gguf_reading import GgufError, GgufFile
from engine.model.gguf_tokenizer import pre_tokenizer, tokenizer_files
from engine.model.pull import DEFAULT_MODEL, pull

TABLE = Path(__file__).parent / "fixtures" / "llamacpp_ids.json.gz"
SYSTEM = {"role": "system", "content": "You answer in one word. Rules:\n1. Be kind.\n2. Be brief.  \n"}


@cache
def model() -> TextModel:
    folder = pull(DEFAULT_MODEL)
    config, generation = (
        json.loads((folder / name).read_text())
        for name in ("tokenizer_config.json", "generation_config.json")
    )
    return TextModel.from_files((folder / "tokenizer.json").read_bytes(), config, generation)


@cache
def rows() -> list[list[Any]]:
    found: list[list[Any]] = json.loads(gzip.decompress(TABLE.read_bytes()))["rows"]
    return found


def test_the_table_covers_what_it_must() -> None:
    texts = [row[0] for row in rows()]
    assert len(set(texts)) == 3000
    for sample in (
        "\u200d",
        "مر",
        "天",
        "def f",
        "\r\n",
        "\t",
        " " * 17,
        "\n7",
        "\u0303",
        "<|im_end|>",
        "\x00",
    ):
        assert any(sample in text for text in texts), sample


def test_ids_are_those_of_llamacpp_with_special_tokens_as_text() -> None:
    wrong = [
        row[0] for row in rows() if bytes_to_ids(model().encode_segments([Segment(row[0], False)])) != row[1]
    ]
    assert wrong == []


def test_ids_are_those_of_llamacpp_with_special_tokens_parsed() -> None:
    wrong = [row[0] for row in rows() if bytes_to_ids(model().encode_text(row[0])) != row[-1]]
    assert wrong == []
    assert sum(len(row) == 3 for row in rows()) > 300


def test_every_text_comes_back_whole_and_in_pieces() -> None:
    for text, ids, *_ in rows():
        stream = Detokenizer(model())
        pieces = [stream.push(token) for token in ids]
        assert "".join(pieces) + stream.flush() == text == model().decode(ids)
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_the_default_models_text_side() -> None:
    text = model()
    assert text.segmented and text.byte_level
    assert text.template.template_class == "append-only"
    assert (text.vocab_size, text.bos_id, text.eos_ids) == (49152, 1, (2, 0))
    assert len(text.special_ids) == 17


def test_prompts_by_segment_equal_prompts_as_a_whole() -> None:
    rng = random.Random(7)
    texts = [row[0] for row in rows() if len(row) == 2]
    for _ in range(150):
        turns = [{"role": rng.choice(("user", "assistant")), "content": rng.choice(texts)} for _ in range(3)]
        segments = model().render_chat([SYSTEM, *turns])
        whole = model().encode_text("".join(segment.text for segment in segments))
        assert model().encode_segments(segments) == whole
    prefix = model().system_prefix([SYSTEM])
    assert model().decode(bytes_to_ids(prefix)) == f"system\n{SYSTEM['content']}\nuser\n"


def test_an_unknown_pre_tokenizer_is_refused() -> None:
    with pytest.raises(GgufError, match=r"'mystery' is not known \(known: gpt-2, llama-bpe, qwen2, smollm\)"):
        pre_tokenizer("mystery")


def small_file(**changes: Any) -> GgufFile:
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<|eot_id|>", "a", "b", "ab", "Ġ", "  "],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 3,
        **{f"tokenizer.{key}".replace("__", "."): value for key, value in changes.items()},
    }
    return GgufFile(Path("small.gguf"), metadata, {})


def test_files_follow_the_metadata() -> None:
    files = tokenizer_files(small_file(chat_template="{{ x }}", ggml__bos_token_id=1))
    added = files["tokenizer.json"]["added_tokens"]
    assert [(token["content"], token["special"]) for token in added] == [("<|eot_id|>", True), ("  ", False)]
    assert files["generation_config.json"] == {"eos_token_id": [3, 0], "bos_token_id": 1}
    config = files["tokenizer_config.json"]
    assert (config["chat_template"], config["bos_token"], config["eos_token"]) == ("{{ x }}", "a", "ab")
    assert config["model_max_length"] == 64 and config["clean_up_tokenization_spaces"] is False
    text = TextModel.from_files(json.dumps(files["tokenizer.json"]), config, files["generation_config.json"])
    assert bytes_to_ids(text.encode_text("ab<|eot_id|>  a")) == [3, 0, 5, 1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ggml__model": "llama"}, "small.gguf: tokenizer 'llama' can't be rebuilt"),
        ({"ggml__pre": "mystery"}, "small.gguf: pre-tokenizer 'mystery'"),
        ({"ggml__token_type": [3]}, "small.gguf: 6 tokens but 1 token types"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(GgufError, match=said):
        tokenizer_files(small_file(**changes))


def test_a_file_without_template_or_end_token() -> None:
    file = small_file()
    metadata = {key: value for key, value in file.metadata.items() if "eos" not in key}
    files = tokenizer_files(GgufFile(file.path, metadata, {}))
    assert files["generation_config.json"] == {"eos_token_id": [0]}
    assert "chat_template" not in files["tokenizer_config.json"]
