"""A tokenizer of 256 bytes and a ChatML template, made in code.

Owns the files of the model that `serve --fake` uses when no model directory is given, so that tests of the
gateway and of this front need no download. Ids 0 and 1 are `<|im_start|>` and `<|im_end|>`; the printable
ASCII characters have the last 95 ids, so that a fake runner which draws from those answers in readable
text.
"""

from __future__ import annotations

from typing import Any

import orjson

from canonicalizer.token_text import BYTE_OF_CHARACTER

VOCAB_ROWS = 258
END_ID = 1
FIRST_PRINTABLE_ID = VOCAB_ROWS - 95
_SPECIALS = ("<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_model_files() -> tuple[bytes, dict[str, Any]]:
    """(tokenizer.json, tokenizer_config.json) of the byte model."""
    printable_last = sorted(BYTE_OF_CHARACTER, key=lambda symbol: 0x20 <= BYTE_OF_CHARACTER[symbol] < 0x7F)
    vocab = {name: index for index, name in enumerate((*_SPECIALS, *printable_last))}
    added = [
        {
            "id": index,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, content in enumerate(_SPECIALS)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }
    config = {"chat_template": _TEMPLATE, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return orjson.dumps(tokenizer), config
