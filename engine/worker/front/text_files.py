"""A model directory's text files to a TextModel.

Owns the file names. Always holds: only JSON and template text is read here, never weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from canonicalizer.tokens import TextModel
from engine.worker.front.bytemodel import byte_model_files


class ModelFilesError(Exception):
    """A needed file is missing or broken; the text names it."""


def load_text_model(model_dir: str) -> TextModel:
    """Tokenizer and template of `model_dir`; the built-in byte model for ""."""
    if not model_dir:
        tokenizer, config = byte_model_files()
        return TextModel.from_files(tokenizer, config)
    folder = Path(model_dir)
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ModelFilesError(f"{tokenizer_file} does not exist; is this a model directory?")
    config = _json(folder / "tokenizer_config.json")
    template = folder / "chat_template.jinja"
    if "chat_template" not in config and template.is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    generation = _json(folder / "generation_config.json")
    return TextModel.from_files(tokenizer_file.read_bytes(), config, generation or None)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ModelFilesError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path}: not a JSON object")
    return value
