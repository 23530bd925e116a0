"""The policy file on disk: found, read, and replaced in one step.

Owns all file access for policies (the `policies` package does none). Must always hold: at any moment, even
after a power cut, the file is either the whole old text or the whole new one, with the mode and owner that it
had; a file that changed while it was being edited is left alone.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies import Policy

DEFAULT_NAME = "warmfront.yaml"
VARIABLE = "WARMFRONT_POLICY"
_MAX_BYTES = 16 * 1024 * 1024


class NotText(UnicodeDecodeError):
    """A file is not UTF-8; the message names it and the line of the first wrong byte."""

    def __init__(self, path: Path, error: UnicodeDecodeError) -> None:
        super().__init__(error.encoding, error.object, error.start, error.end, error.reason)
        self.path = path
        self.line = error.object.count(b"\n", 0, error.start) + 1

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: is not UTF-8 text (byte 0x{self.object[self.start]:02x})"


def find_policy_file(explicit: str | None, env: Mapping[str, str]) -> Path | None:
    """The file that was named, or that WARMFRONT_POLICY names, or ./warmfront.yaml where it exists; else
    None.
    """
    if explicit:
        return Path(explicit)
    if env.get(VARIABLE):
        return Path(env[VARIABLE])
    here = Path(DEFAULT_NAME)
    return here if here.is_file() else None


def read_text(path: Path) -> str:
    """The file's text, line ends as they are. Raises OSError, NotText."""
    with path.open("rb") as file:
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise OSError(27, f"is larger than {_MAX_BYTES:,} bytes", str(path))
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotText(path, error) from None


def read_beside(path: Path) -> Callable[[str], str]:
    """What `load_policy` reads a `system_file` with: paths are relative to the folder of the policy file."""
    return lambda name: read_text(path.parent / name)


def load_policy_file(path: Path, env: Mapping[str, str] | None = None) -> Policy:
    """The policy in the file. Raises PolicyError, OSError, NotText."""
    from policies import load_policy  # here, so that `--help` need not wait for it

    return load_policy(read_text(path), source=str(path), read_file=read_beside(path), env=env)


def replace_text(path: Path, old: str, new: str) -> None:
    """Replace the file's content in one step, behind a symbolic link too. Raises OSError, which names this
    file, also when the content is no longer `old`.
    """
    try:
        _replace(path, old, new)
    except OSError as error:  # the file that a person knows, not the draft beside it
        raise OSError(error.errno, error.strerror, str(path)) from None


def _replace(path: Path, old: str, new: str) -> None:
    target = path.resolve(strict=True)
    status = target.stat()
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(new.encode("utf-8"))
            file.flush()
            if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(file.fileno(), status.st_uid, status.st_gid)
            os.fchmod(file.fileno(), status.st_mode & 0o7777)
            os.fsync(file.fileno())
        if read_text(target) != old:
            raise OSError(16, "changed while it was being edited; nothing was written", str(path))
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
