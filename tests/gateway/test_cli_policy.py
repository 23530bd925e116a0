"""`warmfront policy`: what it prints, what it leaves in the file, what it asks of the running gateway."""

from __future__ import annotations

import json
import os
import shlex
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gateway import policy_file
from gateway.cli.main import main
from policies import DEFAULT_POLICY_TEXT, load_policy

TEXT = """\
version: 1  # ours
tenants: {acme: {keys: [{env: ACME_KEY}]}}
models: {"*": smollm2-135m-instruct}
routes:
  - name: chat
    match: {tenants: [acme]}
    canon:
      mode: observe  # for now
  - name: rest
"""


class Admin(ThreadingHTTPServer):
    """An admin plane that answers with what the test put in `answers`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[tuple[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Admin

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, json.loads(body)))
        status, answer = self.server.answers.get(self.path, (200, b"{}"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def admin() -> Iterator[Admin]:
    with Admin() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a policy file in the default place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WARMFRONT_POLICY", raising=False)
    monkeypatch.setenv("ACME_KEY", "k-1")
    (tmp_path / "warmfront.yaml").write_text(TEXT)
    return tmp_path


NOBODY = "http://127.0.0.1:9"


def run(*argv: str) -> int:
    return main(["policy", *argv])


def test_enforce_edits_the_file_and_reloads_the_gateway(
    here: Path, admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    path = here / "warmfront.yaml"
    path.chmod(0o640)
    expected = TEXT.replace("mode: observe", "mode: enforce")
    version = load_policy(expected).version
    admin.answers["/admin/policy/reload"] = (200, json.dumps({"version": version}).encode())
    assert run("enforce", "chat", "--admin", admin.url) == 0
    assert path.read_text() == expected
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert admin.asked == [("/admin/policy/reload", {})]
    assert capsys.readouterr().out.splitlines() == [
        "route chat: observe -> enforce",
        f"file: warmfront.yaml (version {version})",
        f"gateway: {admin.url} reloaded",
        f"to go back: warmfront policy observe chat --admin {admin.url}",
    ]
    assert os.listdir(here) == ["warmfront.yaml"]


def test_the_printed_way_back_leads_back(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("off", "chat", "--admin", NOBODY) == 0
    out = capsys.readouterr().out
    assert f"none answers at {NOBODY}; the new mode holds when it starts" in out
    back = out.splitlines()[-1].removeprefix("to go back: warmfront ").split()
    assert main(back) == 0
    assert (here / "warmfront.yaml").read_text() == TEXT


def test_nothing_to_change_still_reloads(
    here: Path, admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (here / "warmfront.yaml").stat().st_ino
    assert run("observe", "chat", "--admin", admin.url) == 0
    assert (here / "warmfront.yaml").stat().st_ino == before
    assert "is in observe already" in capsys.readouterr().out and len(admin.asked) == 1


def test_json_output_of_a_switch(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("enforce", "rest", "--json", "--admin", NOBODY) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["before"], report["after"], report["reloaded"]) == (
        True,
        "observe",
        "enforce",
        False,
    )


def test_a_refused_reload_puts_the_old_text_back(
    here: Path, admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    for answer, says in [
        (b'{"error": {"message": "p.yaml:3: models: is wrong"}}', "p.yaml:3"),
        (b'{"error": "no"}', "no"),
        (b"[1]", "HTTP 400"),
        (b"oops", "HTTP 400"),
    ]:
        admin.answers["/admin/policy/reload"] = (400, answer)
        assert run("enforce", "chat", "--admin", admin.url) == 2
        assert (here / "warmfront.yaml").read_text() == TEXT
        error = capsys.readouterr().err
        assert says in error and "the file is unchanged" in error


def test_a_gateway_that_runs_another_file_is_noticed(
    here: Path, admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.answers["/admin/policy/reload"] = (200, b'{"version": "other"}')
    assert run("enforce", "chat", "--admin", admin.url) == 0
    assert "runs another policy (version other)" in capsys.readouterr().out


def test_a_symbolic_link_stays_one(here: Path) -> None:
    (here / "real").mkdir()
    (here / "warmfront.yaml").rename(here / "real" / "p.yaml")
    (here / "warmfront.yaml").symlink_to("real/p.yaml")
    assert run("enforce", "chat", "--policy", "warmfront.yaml", "--admin", NOBODY) == 0
    assert (here / "warmfront.yaml").is_symlink()
    assert "mode: enforce" in (here / "real" / "p.yaml").read_text()


def test_a_file_that_changed_meanwhile_is_left_alone(here: Path) -> None:
    path = here / "warmfront.yaml"
    with pytest.raises(OSError, match="changed while it was being edited"):
        policy_file.replace_text(path, "something else", "new")
    assert path.read_text() == TEXT and os.listdir(here) == ["warmfront.yaml"]


def test_line_ends_and_the_owner_stay(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = here / "warmfront.yaml"
    path.write_bytes(TEXT.replace("\n", "\r\n").encode())
    owners: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    monkeypatch.setattr(os, "fchown", lambda _, uid, gid: owners.append((uid, gid)))
    assert run("enforce", "chat", "--admin", NOBODY) == 0
    assert path.read_bytes() == TEXT.replace("\n", "\r\n").replace("observe", "enforce").encode()
    assert owners == [(path.stat().st_uid, path.stat().st_gid)]


def test_the_variable_goes_before_the_file_that_lies_here(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = here / "other.yaml"
    other.write_text("version: 1\nroutes: [{name: only}]\n")
    monkeypatch.setenv("WARMFRONT_POLICY", str(other))
    assert run("show", "--json") == 0
    assert [route["name"] for route in json.loads(capsys.readouterr().out)["routes"]] == ["only"]


def test_without_a_file_the_running_gateway_is_asked(
    here: Path, admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "warmfront.yaml").unlink()
    admin.answers["/admin/policy/mode"] = (200, b'{"before": "observe", "version": "v2"}')
    assert run("enforce", "default", "--admin", admin.url) == 0
    assert admin.asked == [("/admin/policy/mode", {"route": "default", "mode": "enforce"})]
    out = capsys.readouterr().out
    assert "observe -> enforce" in out and "to go back: warmfront policy observe default" in out
    admin.answers["/admin/policy/mode"] = (404, b'{"error": {"message": "no route chatt"}}')
    assert run("enforce", "chatt", "--admin", admin.url, "--json") == 2
    assert "no route chatt" in json.loads(capsys.readouterr().out)["error"]
    assert run("enforce", "default", "--admin", NOBODY) == 2
    assert "no gateway answers" in capsys.readouterr().err
    assert run("enforce", "default", "--admin", "ftp://x") == 2
    assert "--admin wants a URL" in capsys.readouterr().err


def test_wrong_use_is_told_with_file_and_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("enforce", "chatt", "--admin", NOBODY) == 2
    assert (
        'warmfront.yaml:5: routes: there is no route "chatt" (did you mean chat?)' in capsys.readouterr().err
    )
    (here / "warmfront.yaml").write_text(TEXT.replace("observe", "on"))
    assert run("enforce", "chat") == 2
    assert "warmfront.yaml:8: routes[0].canon.mode" in capsys.readouterr().err
    assert run("lint", "--json") == 2
    assert json.loads(capsys.readouterr().out)["problems"][0]["line"] == 8
    assert run("lint", "missing.yaml") == 2
    assert "missing.yaml: No such file" in capsys.readouterr().err
    (here / "warmfront.yaml").write_bytes(b"\xff\xfe")
    assert run("lint") == 2
    assert "not UTF-8" in capsys.readouterr().err
    (here / "warmfront.yaml").write_bytes(b" " * (16 * 1024 * 1024 + 1))
    assert run("lint") == 2
    assert "larger than" in capsys.readouterr().err
    (here / "warmfront.yaml").unlink()
    assert run("lint") == 2
    assert "no policy file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as usage:
        run("enforce")
    assert usage.value.code == 2


def test_lint(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("lint", "warmfront.yaml") == 0
    assert "warmfront.yaml: no findings; version " in capsys.readouterr().out
    monkeypatch.delenv("ACME_KEY")
    assert run("lint") == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("warmfront.yaml:2: tenants.acme.keys: environment variable ACME_KEY is not set")
    assert out[1].startswith("warmfront.yaml: 1 finding; version ")
    assert run("lint", "--json") == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["code"] == "unset-env"


def test_explain(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "warmfront.yaml", "--model", "gpt", "--header", "x-a: b") == 0
    out = capsys.readouterr().out
    assert "not chat (warmfront.yaml:5): the request has no tenant, not acme" in out
    assert "route rest (warmfront.yaml:9)" in out
    assert run("explain") == 0
    out = capsys.readouterr().out
    assert "  model  no --model given: any" in out and "refused" not in out
    assert run("explain", "--tenant", "acme", "--json") == 0
    assert json.loads(capsys.readouterr().out)["route"] == "chat"
    assert run("explain", "--tenant", "acmee") == 2
    assert run("explain", "--header", "nocolon") == 2


def test_show(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "sys.txt").write_text("You are A.")
    text = TEXT + "pins: [{name: p, tenant: acme, system_file: sys.txt, ttl: 1h}]\n"
    (here / "warmfront.yaml").write_text(text)
    assert run("show") == 0
    out = capsys.readouterr().out
    assert "from warmfront.yaml" in out and "k-1" not in out and "You are A." not in out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith(("chat", "acme", "p "))] == [
        ["chat", "acme"],
        ["acme", "1"],
        ["p", "acme"],
    ]
    (here / "warmfront.yaml").unlink()
    assert run("show") == 0
    assert "built-in default" in capsys.readouterr().out


def test_the_example_of_explain_works_on_the_default_policy(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "warmfront.yaml").write_text(DEFAULT_POLICY_TEXT)
    with pytest.raises(SystemExit):
        run("explain", "--help")
    words = shlex.split(capsys.readouterr().out.split("example: warmfront ")[1])
    assert main(words) == 0
    assert "route default" in capsys.readouterr().out


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("lint", "explain", "show", "reload", "enforce", "observe", "off"):
        with pytest.raises(SystemExit) as stop:
            run(action, "--help")
        assert stop.value.code == 0
        assert f"example: warmfront policy {action}" in capsys.readouterr().out
