"""The gateway's secret: what keys the fence words and the replay memory.

Owns one file, `secret` in the runtime directory (mode 0600), and the variable that takes its place. Always
holds: the same secret after every restart, else the fence words would change and every conversation would
cool down; the file appears whole or not at all, and of two gateways that start at once both get the same;
the secret is in no message.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "WARMFRONT_SECRET"
FILE_NAME = "secret"
_MIN_BYTES = 16
_NEW_BYTES = 32
_HEX = re.compile(r"(?:[0-9a-fA-F]{2}){16,}\Z")


def load_secret(runtime_dir: Path, env: Mapping[str, str]) -> bytes:
    """The secret of `$WARMFRONT_SECRET`, or of the file, which is made at first use.

    Hexadecimal text of at least 32 digits counts as the bytes it spells, any other as its UTF-8 bytes.
    Raises ValueError when what is there is shorter than 16 bytes, OSError when the file can't be had.
    """
    given = env.get(VARIABLE)
    if given:
        return _parsed(given, f"${VARIABLE}")
    path = runtime_dir / FILE_NAME
    try:
        return _read(path)
    except FileNotFoundError:
        _create(path)
        return _read(path)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            os.fchmod(file.fileno(), 0o600)
        text = file.read(4096).decode("utf-8", "replace")
    return _parsed(text, str(path))


def _parsed(text: str, where: str) -> bytes:
    text = text.strip()
    value = bytes.fromhex(text) if _HEX.match(text) else text.encode("utf-8", "surrogateescape")
    if len(value) < _MIN_BYTES:
        raise ValueError(f"{where}: the gateway's secret needs at least {_MIN_BYTES} bytes")
    return value


def _create(path: Path) -> None:
    """Write a new secret under `path` unless another process was faster."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(prefix=f".{FILE_NAME}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(_NEW_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        os.unlink(draft)
