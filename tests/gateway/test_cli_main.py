"""The `warmfront` command: help everywhere, fast and light, and the exit codes 0 and 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

from gateway.cli import main as cli

_PROBE = """
import json, resource, sys
from gateway.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
usage = resource.getrusage(resource.RUSAGE_SELF)
heavy = sorted({"torch", "transformers", "aiohttp"} & set(sys.modules))
print(json.dumps([code or 0, usage.ru_utime + usage.ru_stime, heavy]), file=sys.stderr)
"""

GATEWAY_HELP = [
    ("serve",),
    ("gateway",),
    ("policy",),
    ("policy", "lint"),
    ("policy", "explain"),
    ("policy", "show"),
    ("policy", "enforce"),
    ("policy", "observe"),
    ("policy", "off"),
    ("policy", "reload"),
    ("canon",),
    ("canon", "diff"),
    ("canon", "learn"),
    ("canon", "apply"),
    ("canon", "off"),
    ("canon", "on"),
    ("pins",),
    ("bench",),
    ("bench", "run"),
    ("bench", "demo"),
]


def probe(*words: str) -> tuple[str, list[Any]]:
    """Run `warmfront` in a process of its own: stdout, and [exit code, CPU seconds, heavy modules]."""
    command = [sys.executable, "-c", _PROBE, *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return ended.stdout, json.loads(ended.stderr.splitlines()[-1])


@pytest.mark.parametrize("words", [(), *GATEWAY_HELP], ids=" ".join)
def test_help_is_quick_light_and_shows_an_example(words: tuple[str, ...]) -> None:
    out, (code, seconds, heavy) = probe(*words, "--help")
    assert code == 0
    assert out.startswith("usage: warmfront")
    assert "example" in out or len(words) == 1, "a group's actions have examples of their own"
    assert heavy == []
    assert seconds < 0.3, "processor time; wall time says more about the machine's other work"


@pytest.mark.parametrize(
    "words", [("engine",), ("engine", "serve"), ("model",), ("model", "pull")], ids=" ".join
)
def test_help_of_engine_commands_comes_from_the_engine_and_is_light(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "gateway", *words, "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout.startswith(f"usage: warmfront {' '.join(words)} ")
    assert "example" in ended.stdout and "python -m engine" not in ended.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in ended.stderr.splitlines()}
    assert imported.isdisjoint({"torch", "transformers", "aiohttp"}), "checked across the exec"


def test_the_list_of_commands_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2, "no command is wrong use"
    listed = capsys.readouterr().out
    for name in ("serve", "gateway", "policy", "canon", "pins", "bench", "engine", "model"):
        assert f"\n    {name} " in listed


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--port", "99999"],
        ["nonsense"],
        ["policy"],
        ["pins", "--nonsense"],
        ["serve", "--port", "x"],
    ],
)
def test_wrong_use_ends_with_2_and_says_what_is_wrong(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_the_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"warmfront {version('warmfront')}\n"


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("gateway.cli.pins._pins", interrupted)
    assert cli.main(["pins"]) == 130


def test_a_reader_that_left_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [
        sys.executable,
        "-c",
        "import sys; from gateway.cli.main import main; sys.exit(main(['policy', 'show']))",
    ]
    try:
        ended = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, timeout=30, check=False)
    finally:
        os.close(write_end)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_full_disk_is_said_in_one_line(tmp_path: Any) -> None:
    request = {"messages": [{"role": "user", "content": "hi"}]}
    (tmp_path / "request.json").write_text(json.dumps(request))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "gateway", "canon", "diff", "request.json"],
            stdout=full,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=env,
            text=True,
            timeout=30,
            check=False,
        )
    assert ended.returncode == 2
    assert ended.stderr == "warmfront: the output can't be written: No space left on device\n"
