"""The policy file: found in the right order, replaced in one step."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gateway import policy_file
from policies import PolicyError

POOL = "pools: {p: {model: m, upstreams: [{url: 'http://127.0.0.1:1'}]}}"
TEXT = f"version: 1\n{POOL}\nroutes: [{{name: chat, pool: p}}]\n"


def test_a_named_file_comes_before_the_variable_and_that_before_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert policy_file.find_policy_file(None, {}) is None
    (tmp_path / "warmfront.yaml").write_text(TEXT)
    assert policy_file.find_policy_file(None, {}) == Path("warmfront.yaml")
    assert policy_file.find_policy_file(None, {"WARMFRONT_POLICY": "/b.yaml"}) == Path("/b.yaml")
    assert policy_file.find_policy_file("a.yaml", {"WARMFRONT_POLICY": "/b.yaml"}) == Path("a.yaml")


def test_a_policy_is_loaded_with_the_files_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    (tmp_path / "system.txt").write_text("Be brief.")
    path.write_text(TEXT + "pins: [{name: a, pool: p, route: chat, system_file: system.txt}]\n")
    assert policy_file.load_policy_file(path).pins[0].system == "Be brief."
    path.write_text("version: 1\nroutes: 3\n")
    with pytest.raises(PolicyError, match=r"policy\.yaml:2: "):
        policy_file.load_policy_file(path)


def test_a_file_that_is_too_large_or_no_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UnicodeDecodeError) as refused:
        policy_file.read_text(path)
    assert str(refused.value) == f"{path}:1: is not UTF-8 text (byte 0xff)"
    path.write_bytes(b"a: 1\nb: caf\xe9\n")
    with pytest.raises(policy_file.NotText, match=r"policy\.yaml:2: is not UTF-8 text \(byte 0xe9\)"):
        policy_file.read_text(path)
    monkeypatch.setattr(policy_file, "_MAX_BYTES", 10)
    path.write_text("x" * 11)
    with pytest.raises(OSError, match="larger than 10 bytes"):
        policy_file.read_text(path)


def test_a_replaced_file_keeps_its_mode_its_link_and_its_line_ends(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    real.write_bytes(b"a: 1\r\n")
    real.chmod(0o640)
    link.symlink_to(real)
    policy_file.replace_text(link, "a: 1\r\n", "a: 2\r\n")
    assert link.is_symlink()
    assert real.read_bytes() == b"a: 2\r\n"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_file_that_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("theirs")
    with pytest.raises(OSError, match="changed while it was being edited"):
        policy_file.replace_text(path, "what we read", "ours")
    assert path.read_text() == "theirs"
    assert os.listdir(tmp_path) == ["policy.yaml"], "no draft is left behind"


def test_what_can_not_be_written_is_named_itself_and_not_its_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("a: 1")

    def read_only(*args: object, **kwargs: object) -> object:
        raise PermissionError(13, "Permission denied", str(tmp_path / ".policy.yaml.x7"))

    monkeypatch.setattr(policy_file.tempfile, "mkstemp", read_only)
    with pytest.raises(PermissionError) as refused:
        policy_file.replace_text(path, "a: 1", "a: 2")
    assert refused.value.filename == str(path)
    assert path.read_text() == "a: 1"
