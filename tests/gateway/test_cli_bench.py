"""`warmfront bench run`: what it refuses, and what it says when nothing was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.cli.main import main

NOWHERE = "http://127.0.0.1:1"
FEW = ["--groups", "1", "--each", "2", "--prefix-words", "5"]


def test_when_all_fails_the_failure_is_printed_and_no_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.json"
    assert main(["bench", "run", "--base-url", NOWHERE, *FEW, "--json", str(result)]) == 2
    said = capsys.readouterr()
    assert f"bench: all 2 requests to {NOWHERE} failed; first: " in said.err
    assert said.out == "" and not result.exists()


def test_a_rate_and_a_concurrency_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "run", "--rate", "1", "--concurrency", "2", "--base-url", NOWHERE]) == 2
    assert "--rate (open loop) and --concurrency (closed loop) exclude each other" in capsys.readouterr().err


def test_files_that_cannot_be_used_are_named_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("binary").write_bytes(b"\xff\xff")
    Path("bad").write_text("{}\n")
    for name, says in [
        ("gone", "bench: gone: No such file or directory\n"),
        ("binary", "bench: binary: is not UTF-8 text\n"),
        ("bad", "bench: bad:1: expected an object"),
    ]:
        assert main(["bench", "run", "--requests", name]) == 2
        assert capsys.readouterr().err.startswith(says)


def test_the_help_says_what_the_demo_compares(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert "round robin, cost routing and the full pipeline" in " ".join(capsys.readouterr().out.split())
