"""The folder of pulled models: where it is, what a whole model directory is, locks and fingerprints.

    MODELS/NAME/            a model in Hugging Face's layout (or a link to one); warmfront.json if made here
    MODELS/.downloads/      files fetched, kept so that an interrupted pull goes on where it stopped
    MODELS/.staging/NAME/   being built; renamed to MODELS/NAME in one step when it is whole
    MODELS/.locks/NAME      held while NAME is being pulled

What must hold: MODELS/NAME is either absent or whole. Nothing here imports torch, transformers or gguf.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD = "warmfront.json"
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
_SMALL_FILE = 64 << 20


class ModelError(Exception):
    """A model can't be pulled, found or used; the message says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One entry of `list_models`. `size` in bytes of files; `source` says where it came from."""

    name: str
    path: Path
    architecture: str
    size: int
    source: str


def models_dir(environ: Mapping[str, str] | None = None) -> Path:
    """$WARMFRONT_HOME/models, else $XDG_CACHE_HOME/warmfront/models, else ~/.cache/warmfront/models."""
    env = os.environ if environ is None else environ
    if env.get("WARMFRONT_HOME"):
        return Path(env["WARMFRONT_HOME"]).expanduser() / "models"
    cache = Path(env["XDG_CACHE_HOME"]) if env.get("XDG_CACHE_HOME") else Path.home() / ".cache"
    return cache.expanduser() / "warmfront" / "models"


def slug(text: str) -> str:
    """A directory name made of `text`: lower case, letters, digits, dot, dash and underscore."""
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-.")
    if not name:
        raise ModelError(f"no model name can be made from {text!r}: give one with --name")
    return name


def check_model_dir(path: Path) -> dict[str, Any]:
    """The parsed config.json of a usable model directory; raises `ModelError` that names the missing file."""
    if not path.is_dir():
        raise ModelError(f"{path}: no such directory")
    config = read_json(path / "config.json")
    if not config.get("architectures"):
        raise ModelError(f"{path / 'config.json'}: no 'architectures': not a causal language model's config")
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"{path}: tokenizer.json is missing (a fast tokenizer is required)")
    index = path / "model.safetensors.index.json"
    shards = sorted(set(read_json(index).get("weight_map", {}).values())) if index.is_file() else []
    missing = [name for name in shards or ["model.safetensors"] if not (path / name).is_file()]
    if missing:
        raise ModelError(f"{path}: weights are missing: {', '.join(missing)}")
    return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; raises `ModelError` when it is absent or isn't one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def is_whole(path: Path, format_version: int) -> bool:
    """Whether this version's writer finished `path`: its record is there, every file has its size."""
    try:
        record = read_json(path / RECORD)
        return record.get("format") == format_version and all(
            (path / name).stat().st_size == entry["bytes"] for name, entry in record["files"].items()
        )
    except (ModelError, OSError, KeyError, TypeError, AttributeError):
        return False


def verify(path: Path, progress: Callable[[str, int, int], None]) -> list[str]:
    """Problems of a model directory; where it has a record, every file's sha256 is compared."""
    try:
        check_model_dir(path)
    except ModelError as error:
        return [str(error)]
    if not (path / RECORD).is_file():
        return []
    problems = []
    for name, entry in read_json(path / RECORD).get("files", {}).items():
        file = path / name
        if not file.is_file():
            problems.append(f"{file}: missing")
        elif sha256(file, progress) != entry["sha256"]:
            problems.append(f"{file}: sha256 is not the recorded one: the file was changed or is damaged")
    return problems


def sha256(path: Path, progress: Callable[[str, int, int], None] | None = None) -> str:
    """The file's sha256 in hex."""
    digest = hashlib.sha256()
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            done += len(chunk)
            if progress and total > 10_000_000:
                progress(f"verify {path.name}", done, total)
    return digest.hexdigest()


def model_fingerprint(path: Path) -> str:
    """32 hex digits that differ when weights, tokenizer or template differ: the recorded ones, if any.

    Without a record, small files are hashed whole; weights by size, both ends and 64 samples of 64 KiB (a few
    milliseconds for any size). Equal on every machine that holds the same files.
    """
    if (path / RECORD).is_file():
        recorded = read_json(path / RECORD).get("fingerprint")
        if isinstance(recorded, str):
            return recorded
    digest = hashlib.sha256()
    patterns = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model")
    for file in sorted({found for pattern in patterns for found in path.glob(pattern)}):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as data:
            if size <= _SMALL_FILE and file.suffix != ".safetensors":
                digest.update(data.read())
                continue
            for step in range(_SAMPLES + 1):
                data.seek(max(0, size - _SAMPLE_BYTES) * step // _SAMPLES)
                digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def resolve(model: str, root: Path | None = None) -> Path:
    """The directory of `model`: a path to one, or the name of a pulled model; raises `ModelError`."""
    pulled = (root or models_dir()) / model
    for path in (Path(model).expanduser(), pulled):
        if (path / "config.json").is_file():
            check_model_dir(path)
            return path.resolve()
    raise ModelError(
        f"model {model!r} is neither a model directory nor pulled: run `warmfront model pull {model}`"
    )


def list_models(root: Path) -> list[ModelInfo]:
    """The usable models under `root`, by name."""
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.name.startswith(".") or not path.is_dir():
            continue
        try:
            config = check_model_dir(path)
            record = read_json(path / RECORD) if (path / RECORD).is_file() else {}
        except ModelError:
            continue
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        source = f"link to {path.resolve()}" if path.is_symlink() else _source_text(record)
        found.append(ModelInfo(path.name, path, config["architectures"][0], size, source))
    return found


def _source_text(record: Mapping[str, Any]) -> str:
    source = record.get("source", {})
    return str(source.get("package") or source.get("hub") or source.get("file") or "unknown")


@contextmanager
def locked(root: Path, name: str, note: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of model `name`; waits for another process that has it, and says so."""
    folder = root / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(f"another process is pulling {name}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def staged(root: Path, name: str) -> Iterator[Path]:
    """An empty directory that replaces root/name when the block ends well, and is removed otherwise."""
    staging = root / ".staging" / name
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        replace(staging, root / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def replace(built: Path, target: Path) -> None:
    """Rename `built` to `target`; what stood there before is moved aside first and then removed."""
    old = built.with_name(built.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.is_symlink():
        target.unlink()
    elif target.exists():
        target.rename(old)
    built.rename(target)
    shutil.rmtree(old, ignore_errors=True)
