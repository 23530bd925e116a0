"""The policy source: a draft changes nothing, `take` changes everything, and what it returns undoes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.policy_source import PolicySource
from policies import PolicyError

TEXT = """\
version: 1  # ours
pools: {p: {model: m, upstreams: [{url: "http://127.0.0.1:1"}]}}
routes:
  - name: chat
    pool: p
    canon:
      mode: observe  # for now
"""
OTHER = TEXT.replace("name: chat", "name: talk")
ENFORCED = TEXT.replace("mode: observe", "mode: enforce")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(TEXT)
    return path


def modes(source: PolicySource) -> dict[str, str]:
    return {route.name: route.canon.mode for route in source.policy.routes}


def test_a_policy_without_a_file_is_named_default_and_changes_in_memory() -> None:
    source = PolicySource(None, TEXT)
    assert (source.name, source.path, source.in_file) == ("default policy", None, False)
    undo = source.take(source.with_mode("chat", "enforce"))
    assert modes(source) == {"chat": "enforce"}
    assert source.text == ENFORCED
    source.take(undo)
    assert (modes(source), source.text) == ({"chat": "observe"}, TEXT)
    assert source.reloaded().policy is source.policy


def test_a_draft_changes_nothing_until_it_is_taken(path: Path) -> None:
    source = PolicySource.from_file(path)
    policy = source.policy
    source.replaced(OTHER, "request")
    source.with_mode("chat", "enforce")
    assert source.policy is policy
    assert (source.text, source.name, path.read_text()) == (TEXT, str(path), TEXT)


def test_a_mode_is_written_to_the_file_with_its_comments_and_undone_there(path: Path) -> None:
    source = PolicySource.from_file(path)
    undo = source.take(source.with_mode("chat", "enforce"))
    assert path.read_text() == source.text == ENFORCED
    source.take(undo)
    assert path.read_text() == source.text == TEXT
    assert modes(source) == {"chat": "observe"}


def test_a_mode_that_holds_already_does_not_touch_the_file(path: Path) -> None:
    source = PolicySource.from_file(path)
    before = path.stat().st_mtime_ns
    source.take(source.with_mode("chat", "observe"))
    assert path.stat().st_mtime_ns == before


def test_undo_gives_back_a_file_that_had_changes_of_its_own(path: Path) -> None:
    source = PolicySource.from_file(path)
    edited = TEXT + "# edited since\n"
    path.write_text(edited)
    undo = source.take(source.with_mode("chat", "enforce"))
    assert path.read_text() == ENFORCED + "# edited since\n"
    source.take(undo)
    assert path.read_text() == edited
    assert source.text == TEXT


def test_a_file_that_changed_after_the_draft_is_neither_written_nor_taken(path: Path) -> None:
    source = PolicySource.from_file(path)
    draft = source.with_mode("chat", "enforce")
    path.write_text(OTHER)
    with pytest.raises(OSError, match="changed while it was being edited"):
        source.take(draft)
    assert path.read_text() == OTHER
    assert modes(source) == {"chat": "observe"}


def test_a_replaced_policy_leaves_the_file_alone_until_it_is_read_again(path: Path) -> None:
    source = PolicySource.from_file(path)
    source.take(source.replaced(OTHER, "request"))
    assert (source.name, source.in_file, modes(source)) == ("request", False, {"talk": "observe"})
    source.take(source.with_mode("talk", "off"))
    assert modes(source) == {"talk": "off"}
    assert path.read_text() == TEXT
    source.take(source.reloaded())
    assert (source.name, source.in_file, modes(source)) == (str(path), True, {"chat": "observe"})


def test_problems_name_where_the_text_came_from(path: Path) -> None:
    source = PolicySource.from_file(path)
    with pytest.raises(PolicyError, match=r"^request:2: "):
        source.replaced("version: 1\nroutes: 3\n", "request")
    with pytest.raises(PolicyError, match=r"policy\.yaml:4: .*there is no route"):
        source.with_mode("nope", "enforce")
    path.write_text("version: 1\nroutes: 3\n")
    with pytest.raises(PolicyError, match=r"policy\.yaml:2: "):
        source.reloaded()
    assert modes(source) == {"chat": "observe"}


def test_the_path_stays_right_when_the_process_moves(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    source = PolicySource.from_file(Path("policy.yaml"))
    monkeypatch.chdir("/")
    assert source.path == path
    source.take(source.with_mode("chat", "enforce"))
    assert path.read_text() == ENFORCED
