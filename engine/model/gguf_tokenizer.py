"""Rebuilding a fast tokenizer from a GGUF file's vocabulary.

Owns the translation of `tokenizer.ggml.*` into tokenizer.json and its companions. What must hold: the ids are
llama.cpp's, string for string (a committed table made with llama.cpp is compared in the tests). The
pre-tokenizer is the part that decides this: GGUF names it (`tokenizer.ggml.pre`) and each name stands for one
split, written out below; a name that is not listed is refused, never guessed.
"""

from __future__ import annotations

from typing import Any

from engine.model.gguf_reading import GgufError, GgufFile

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's llama_token_type
_END_OF_TURN_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split_then_bytes(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(False)]


def pre_tokenizer(name: str) -> dict[str, Any]:
    """The pre-tokenizer that `tokenizer.ggml.pre` names; raises `GgufError` for a name not known here."""
    sequences = {
        "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(True)],
        "gpt-2": [_byte_level(True)],
        "llama-bpe": _split_then_bytes(_LLAMA3_SPLIT),
        "qwen2": _split_then_bytes(_QWEN2_SPLIT),
    }
    if name not in sequences:
        raise GgufError(f"pre-tokenizer {name!r} is not known (known: {', '.join(sorted(sequences))})")
    return {"type": "Sequence", "pretokenizers": sequences[name]}


def tokenizer_files(file: GgufFile) -> dict[str, dict[str, Any]]:
    """tokenizer.json, tokenizer_config.json and generation_config.json of `file`, as JSON values."""
    kind = file.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise GgufError(
            f"{file.path}: tokenizer {kind!r} can't be rebuilt (only byte-level BPE, 'gpt2'); "
            "use the model's Hugging Face directory instead"
        )
    tokens: list[str] = file.get("tokenizer.ggml.tokens")
    types: list[int] = file.get("tokenizer.ggml.token_type")
    if len(tokens) != len(types):
        raise GgufError(f"{file.path}: {len(tokens)} tokens but {len(types)} token types")
    try:
        split = pre_tokenizer(str(file.get("tokenizer.ggml.pre")))
    except GgufError as error:
        raise GgufError(f"{file.path}: {error}") from error
    return {
        "tokenizer.json": _tokenizer_json(file, tokens, types, split),
        "tokenizer_config.json": _tokenizer_config(file, tokens, types),
        "generation_config.json": _generation_config(file, tokens),
    }


def _tokenizer_json(
    file: GgufFile, tokens: list[str], types: list[int], split: dict[str, Any]
) -> dict[str, Any]:
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": file.get("tokenizer.ggml.pre") == "llama-bpe",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [_pair(merge) for merge in file.get("tokenizer.ggml.merges")],
        },
    }


def _pair(merge: str) -> list[str]:
    """Split a merge at its first space that leaves both sides non-empty, as llama.cpp does."""
    at = merge.index(" ", 1)
    return [merge[:at], merge[at + 1 :]]


def _token_text(file: GgufFile, tokens: list[str], role: str) -> str | None:
    index = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
    return None if index is None else tokens[int(index)]


def _tokenizer_config(file: GgufFile, tokens: list[str], types: list[int]) -> dict[str, Any]:
    arch = file.get("general.architecture")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(file.metadata.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(file.get(f"{arch}.context_length")),
        "additional_special_tokens": [
            token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL
        ],
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        text = _token_text(file, tokens, role)
        if text is not None:
            config[f"{key}_token"] = text
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config


def _generation_config(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """End-of-sequence ids: the one the file names, then the usual end-of-turn tokens that it has."""
    eos = file.metadata.get("tokenizer.ggml.eos_token_id")
    ends = [] if eos is None else [int(eos)]
    by_text = {token: index for index, token in enumerate(tokens)}
    ends += [by_text[text] for text in _END_OF_TURN_TEXTS if text in by_text and by_text[text] not in ends]
    config: dict[str, Any] = {"eos_token_id": ends}
    for role, key in (("bos", "bos"), ("padding", "pad")):
        index = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if index is not None:
            config[f"{key}_token_id"] = int(index)
    return config
