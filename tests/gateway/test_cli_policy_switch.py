"""Which file `policy enforce` changes when a gateway runs, what it says of the kill switch, and `reload`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stub_admin import NOWHERE, StubAdmin, stub_admin

from gateway.canon.kill_switch import KillSwitch
from gateway.cli.main import main

TEXT = "version: 1\nroutes:\n  - name: chat\n    canon: {mode: observe}\n"


@pytest.fixture
def admin() -> Iterator[StubAdmin]:
    with stub_admin() as server:
        yield server


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a policy in the usual place and another one, and an empty home."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("WARMFRONT_POLICY", raising=False)
    monkeypatch.setenv("WARMFRONT_HOME", str(tmp_path / "home"))
    for name in ("warmfront.yaml", "served.yaml"):
        (folder / name).write_text(TEXT)
    return folder


def serves(admin: StubAdmin, source: str, path: Path | None) -> None:
    """The stub runs this policy, and takes every change."""
    given: dict[str, Any] = {"version": "v1", "source": source, "path": None if path is None else str(path)}
    admin.answers["GET /admin/policy"] = (200, given)
    admin.answers["GET /admin/state"] = (200, {"routes": []})
    changed = {"version": "v2", "source": source, "before": "observe", "after": "enforce"}
    admin.answers["POST /admin/policy/mode"] = (200, changed)
    digest = hashlib.sha256(TEXT.replace("observe", "enforce").encode()).hexdigest()
    admin.answers["POST /admin/policy/reload"] = (200, {**given, "text_sha256": digest})


def enforce(*words: str) -> int:
    return main(["policy", "enforce", "chat", *words])


def test_the_file_that_the_gateway_serves_is_changed_by_it_and_named(
    here: Path, admin: StubAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    serves(admin, "served.yaml", here / "served.yaml")
    assert enforce("--admin", admin.url) == 0
    assert admin.posted == [("/admin/policy/mode", {"route": "chat", "mode": "enforce"})]
    assert (here / "warmfront.yaml").read_text() == TEXT
    assert capsys.readouterr().out.splitlines() == [
        "route chat: observe -> enforce",
        f"file: {here / 'served.yaml'} (version v2)",
        "note: that gateway does not serve warmfront.yaml, which was left alone",
        f"gateway: {admin.url} changed",
        f"to go back: warmfront policy observe chat --admin {admin.url}",
    ]


def test_a_named_file_that_the_gateway_serves_is_edited_and_reloaded(
    here: Path, admin: StubAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    serves(admin, "served.yaml", here / "served.yaml")
    assert enforce("--policy", "./served.yaml", "--admin", admin.url) == 0
    assert admin.posted == [("/admin/policy/reload", {})]
    assert "mode: enforce" in (here / "served.yaml").read_text()
    assert f"gateway: {admin.url} reloaded" in capsys.readouterr().out


@pytest.mark.parametrize("in_file", [True, False])
def test_a_named_file_that_the_gateway_does_not_serve_is_edited_and_that_is_said(
    here: Path, admin: StubAdmin, capsys: pytest.CaptureFixture[str], in_file: bool
) -> None:
    serves(admin, "served.yaml" if in_file else "benchmark", here / "served.yaml")
    words = ("--policy", "warmfront.yaml", "--admin", admin.url)
    assert enforce(*words) == 2
    assert admin.posted == []
    assert "mode: enforce" in (here / "warmfront.yaml").read_text()
    out = capsys.readouterr().out
    what = str(here / "served.yaml") if in_file else "a policy that is in no file (benchmark)"
    assert f"gateway: {admin.url} serves {what} and was not changed" in out
    assert "file: warmfront.yaml" in out and "to go back: warmfront policy observe chat --policy" in out
    assert enforce(*words, "--json") == 2
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_a_policy_that_is_in_no_file_is_changed_where_it_runs(
    here: Path, admin: StubAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    serves(admin, "default policy", None)
    assert enforce("--admin", admin.url) == 0
    assert (here / "warmfront.yaml").read_text() == TEXT
    assert "file: none changed; default policy is in no file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "note"),
    [
        ([("chat", "switched off"), ("rest", "switched off")], "for all routes (kill switch)"),
        ([("chat", "switched off"), ("rest", "")], "for route chat (kill switch)"),
        ([("chat", ""), ("rest", "switched off")], None),
    ],
)
def test_under_the_kill_switch_enforce_says_so(
    here: Path,
    admin: StubAdmin,
    capsys: pytest.CaptureFixture[str],
    rows: list[tuple[str, str]],
    note: str | None,
) -> None:
    serves(admin, "served.yaml", here / "served.yaml")
    routes = [{"name": name, "lowered": lowered} for name, lowered in rows]
    admin.answers["GET /admin/state"] = (200, {"routes": routes})
    assert enforce("--admin", admin.url) == 0
    out = capsys.readouterr().out
    assert ("kill switch" in out) == (note is not None)
    assert note is None or note in out
    lift = "" if note is not None and "all" in note else " --route chat"
    assert (f"      warmfront canon on{lift} --admin {admin.url}" in out) == (note is not None)


def test_without_a_gateway_the_usual_kill_switch_is_looked_at(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert enforce("--admin", NOWHERE) == 0
    assert "kill switch" not in capsys.readouterr().out
    KillSwitch(tmp_path / "home" / "run").set_off(None)
    assert enforce("--admin", NOWHERE) == 0
    assert "for all routes (kill switch)" in capsys.readouterr().out


def test_reload_prints_version_and_file(
    here: Path, admin: StubAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    serves(admin, "served.yaml", here / "served.yaml")
    assert main(["policy", "reload", "--admin", admin.url]) == 0
    assert admin.posted == [("/admin/policy/reload", {})]
    assert capsys.readouterr().out == f"{admin.url}: version v1 in force, from {here / 'served.yaml'}\n"
    assert main(["policy", "reload", "--admin", admin.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == str(here / "served.yaml")
    serves(admin, "default policy", None)
    assert main(["policy", "reload", "--admin", admin.url]) == 0
    assert "from default policy (in no file" in capsys.readouterr().out


def test_a_reload_that_is_refused_or_unheard_ends_with_2(
    here: Path, admin: StubAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    serves(admin, "served.yaml", here / "served.yaml")
    admin.answers["POST /admin/policy/reload"] = (400, {"error": {"message": "served.yaml:3: routes: wrong"}})
    assert main(["policy", "reload", "--admin", admin.url]) == 2
    assert "served.yaml:3: routes: wrong" in capsys.readouterr().err
    assert main(["policy", "reload", "--admin", NOWHERE]) == 2
    assert "no answer" in capsys.readouterr().err
