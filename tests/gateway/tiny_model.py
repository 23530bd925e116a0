"""A model directory with a byte-level tokenizer and a ChatML template: text side only, no weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(directory: Path, corpus: str | None = None) -> Path:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json; returns the directory.

    Without a `corpus` every byte is a token; with one, merges are learned from it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if corpus is not None:
        learned = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator([corpus], learned)
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    eos = tokenizer.token_to_id("<|im_end|>")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    return directory
