"""`warmfront canon off` and `on`: what they say and write, with a gateway and without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from stub_admin import NOWHERE, StubAdmin, stub_admin

from gateway.canon.kill_switch import KillSwitch
from gateway.cli.main import main


@pytest.fixture
def admin() -> Iterator[StubAdmin]:
    with stub_admin() as server:
        yield server


def test_the_gateways_own_words_are_passed_on(admin: StubAdmin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.usual = (400, {"error": {"message": "route: no route"}})
    assert main(["canon", "off", "--route", "nope", "--admin", admin.url]) == 2
    assert "route: no route" in capsys.readouterr().err


def test_the_kill_switch_asks_the_gateway_and_says_the_way_back(
    admin: StubAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.usual = (200, {"off": "chat"})
    assert main(["canon", "off", "--route", "chat", "--admin", admin.url]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{admin.url}: canonicalization off for chat",
        f"to go back: warmfront canon on --route chat --admin {admin.url}",
    ]
    admin.usual = (200, {"on": "all routes", "still_off": []})
    assert main(["canon", "on", "--json", "--admin", admin.url]) == 0
    assert json.loads(capsys.readouterr().out) == {"on": "all routes", "still_off": [], "confirmed": True}
    assert admin.posted == [
        ("/admin/canon/off", {"route": "chat"}),
        ("/admin/canon/on", {"route": None}),
    ]


def test_a_route_that_stays_off_is_told(admin: StubAdmin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.usual = (200, {"on": "chat", "still_off": ["chat", "rest"]})
    assert main(["canon", "on", "--route", "chat", "--admin", admin.url]) == 0
    out = capsys.readouterr().out
    assert f"still off: chat, rest; to lift it: warmfront canon on --admin {admin.url}" in out


def test_without_a_gateway_the_named_directory_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    where = ["--admin", NOWHERE, "--runtime-dir", str(run)]
    assert main(["canon", "off", *where]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"no gateway answered at {NOWHERE}: "
        f"written to {run}/canon-off.json for gateways with that runtime directory",
        f"{run}/canon-off.json: canonicalization off for all routes",
        f"to go back: warmfront canon on --runtime-dir {run} --admin {NOWHERE}",
    ]
    assert KillSwitch(run).everything
    assert main(["canon", "on", "--route", "chat", *where]) == 0
    assert "still off: chat; to lift it: warmfront canon on --runtime-dir" in capsys.readouterr().out
    assert main(["canon", "on", *where]) == 0
    assert not KillSwitch(run).everything
    capsys.readouterr()
    assert main(["canon", "off", "--route", "chat", *where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["confirmed"] is False
    assert KillSwitch(run).engaged("chat")


def test_without_a_gateway_or_a_directory_it_is_not_called_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARMFRONT_HOME", str(tmp_path))
    assert main(["canon", "off", "--admin", NOWHERE]) == 2
    out = capsys.readouterr().out
    file = tmp_path / "run" / "canon-off.json"
    assert (
        f"no gateway answered at {NOWHERE}: written to {file} for gateways with that runtime directory" in out
    )
    assert KillSwitch(tmp_path / "run").everything
    assert main(["canon", "on", "--admin", NOWHERE]) == 2


def test_what_cannot_be_written_or_asked_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["canon", "off", "--admin", NOWHERE, "--runtime-dir", str(tmp_path / "file" / "run")]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "file") in error and "nothing was switched" in error
    assert main(["canon", "off", "--admin", "ftp://x", "--runtime-dir", str(tmp_path / "run")]) == 2
    assert "--admin wants a URL" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
