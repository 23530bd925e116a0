"""The `engine` command."""

from __future__ import annotations

import pytest

from engine.__main__ import main


def test_an_interrupted_command_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.model.cli._run_list", interrupted)
    assert main(["model", "list"]) == 130
    assert capsys.readouterr().err == ""
