"""Lines to paste: the right caller, the right quotes, and no key."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from gateway import hints
from policies import load_policy

POOLS = 'pools: {p: {model: m, upstreams: [{url: "http://127.0.0.1:1"}]}, q: {model: n, upstreams: [{url: "http://127.0.0.1:2"}]}}'


def tried(text: str) -> str:
    text = f"version: 1\n{POOLS}\n{text}"
    return hints.first_request(load_policy(text, env={"B": "b-key"}), text, "http://h/v1")


def test_without_tenants_no_key_is_asked_for() -> None:
    line = tried("routes: [{name: a, pool: p}]")
    assert line.startswith("curl -N http://h/v1/chat/completions")
    assert "Authorization" not in line
    assert '"model":"m"' in line


def test_the_caller_is_one_that_a_route_lets_through() -> None:
    text = """
tenants: {a: {keys: [{plain: a-key}]}, b: {keys: [{env: B}]}}
routes: [{name: only, match: {tenants: [b], models: [n]}, pool: q}]
"""
    line = tried(text)
    assert '-H "Authorization: Bearer $B"' in line
    assert '"model":"n"' in line
    assert "read -r" not in line
    assert "b-key" not in line


def test_a_key_that_no_variable_holds_is_asked_for() -> None:
    line = tried("tenants: {a: {keys: [{plain: a-key}]}}\nroutes: [{name: r, pool: p}]")
    assert line.startswith("printf 'key of tenant a: '; read -r KEY; curl")
    assert "a-key" not in line


def test_some_line_is_printed_even_where_no_plain_request_gets_through() -> None:
    line = tried("routes: [{name: r, match: {headers: {x-app: [chat]}}, pool: p}]")
    assert '"model":"m"' in line


def test_a_switch_names_the_file_and_an_unusual_admin_plane_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "program", lambda: "warmfront")
    usual = "http://127.0.0.1:9090"
    assert hints.switch_command("r", "off", path=None, admin_url=usual) == "warmfront policy off r"
    line = hints.switch_command("r", "enforce", path=Path("/a b/p.yaml"), admin_url="http://127.0.0.1:1")
    assert shlex.split(line)[2:] == [
        "enforce",
        "r",
        "--policy",
        "/a b/p.yaml",
        "--admin",
        "http://127.0.0.1:1",
    ]


def test_the_kill_switch_is_lifted_for_a_route_or_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "program", lambda: "warmfront")
    assert hints.canon_on_command(None, admin_url="http://127.0.0.1:9090") == "warmfront canon on"
    line = hints.canon_on_command("a", admin_url="http://127.0.0.1:1")
    assert line == "warmfront canon on --route a --admin http://127.0.0.1:1"


def test_the_program_is_called_by_name_only_where_the_name_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "my venv"
    folder.mkdir()
    own = folder / "warmfront"
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert hints.program() == f"'{folder}/python' -m gateway"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert hints.program() == f"'{own}'"
    monkeypatch.setenv("PATH", str(folder))
    assert hints.program() == "warmfront"
