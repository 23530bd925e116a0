"""The gateway's secret: the same after a restart, private, and never guessed at."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from gateway.secret import load_secret


def test_the_first_call_makes_a_private_file_and_later_calls_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    secret = load_secret(folder, {})
    assert len(secret) == 32
    assert load_secret(folder, {}) == secret
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == ["secret"], "no draft is left behind"


def test_a_file_that_others_can_read_is_made_private(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a long enough text\n")
    (tmp_path / "secret").chmod(0o644)
    assert load_secret(tmp_path, {}) == b"a long enough text"
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_gateways_that_start_at_once_get_the_same_secret(tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(load_secret(tmp_path, {}))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("given", "secret"),
    [("ab" * 16, b"\xab" * 16), ("correct horse battery", b"correct horse battery"), ("zz" * 8, b"zz" * 8)],
)
def test_the_variable_takes_the_place_of_the_file(tmp_path: Path, given: str, secret: bytes) -> None:
    assert load_secret(tmp_path, {"WARMFRONT_SECRET": given}) == secret
    assert not list(tmp_path.iterdir())


def test_a_short_secret_is_refused_without_being_shown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\$WARMFRONT_SECRET: .* at least 16 bytes") as refused:
        load_secret(tmp_path, {"WARMFRONT_SECRET": "hunter2"})
    assert "hunter2" not in str(refused.value)
    (tmp_path / "secret").write_text("")
    with pytest.raises(ValueError, match="secret: .* at least 16 bytes"):
        load_secret(tmp_path, {})


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        load_secret(tmp_path / "file" / "run", {})
