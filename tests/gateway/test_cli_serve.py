"""`warmfront serve` and `gateway` from the outside: what they refuse, what they write, what they run with."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gateway.serving
from gateway.cli import serve as cli_serve
from gateway.cli.main import main
from gateway.config import GatewayConfig
from gateway.listen import check_ports
from gateway.policy_source import PolicySource
from policies import DEFAULT_POLICY_TEXT

POOL = "pools: {p: {model: m, upstreams: [{url: 'http://127.0.0.1:9'}]}}"
OPEN = f"version: 1\n{POOL}\nroutes: [{{name: chat, pool: p}}]\n"
BUNDLED = "version: 1\npools: {p: {model: tiny, bundled: {replicas: 1}}}\nroutes: [{name: chat, pool: p}]\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, a home for models and runtime files, no policy in the environment, and ports
    that are taken to be free, whatever else this machine runs.
    """
    monkeypatch.setattr("gateway.listen.check_ports", lambda *ports: None)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WARMFRONT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WARMFRONT_POLICY", raising=False)
    monkeypatch.delenv("WARMFRONT_SECRET", raising=False)
    (tmp_path / "home" / "models" / "smollm2-135m-instruct").mkdir(parents=True)
    (tmp_path / "home" / "models" / "smollm2-135m-instruct" / "config.json").write_text("{}")
    return tmp_path / "home"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GatewayConfig, PolicySource]]:
    """Serves nothing: what would have been served is kept here."""
    calls: list[tuple[GatewayConfig, PolicySource]] = []

    async def serve(config: GatewayConfig, source: PolicySource) -> int:
        calls.append((config, source))
        return 0

    monkeypatch.setattr(gateway.serving, "serve", serve)
    return calls


def test_a_first_start_writes_the_default_policy(
    home: Path, served: list[tuple[GatewayConfig, PolicySource]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve"]) == 0
    assert "writing warmfront.yaml" in capsys.readouterr().err
    assert Path("warmfront.yaml").read_text() == DEFAULT_POLICY_TEXT
    config, source = served[0]
    assert (config.host, config.port, config.admin_port) == ("127.0.0.1", 8080, 9090)
    assert (config.runtime_dir, config.models_dir) == (home / "run", home / "models")
    assert source.path == Path("warmfront.yaml").absolute()
    assert source.policy.route("default").canon.mode == "observe"


def test_a_taken_port_ends_it_before_a_policy_is_written(
    home: Path,
    served: list[tuple[GatewayConfig, PolicySource]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("gateway.listen.check_ports", check_ports)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port, "--admin-port", "0"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: --port {port}: 127.0.0.1:{port}: Address already in use")
        assert "make serve SERVE_ARGS='--port " in error
        assert not Path("warmfront.yaml").exists()
        Path("open.yaml").write_text(OPEN)
        assert main(["gateway", "--policy", "open.yaml", "--port", "0", "--admin-port", port]) == 2
        assert f"error: --admin-port {port}: " in capsys.readouterr().err
    assert served == []


def test_findings_of_lint_are_printed_and_no_key_is(
    home: Path, served: list[tuple[GatewayConfig, PolicySource]], capsys: pytest.CaptureFixture[str]
) -> None:
    tenants = "\n".join(f"  t{i}: {{keys: [{{plain: secret-{i}}}]}}" for i in range(25))
    Path("p.yaml").write_text(f"{OPEN}tenants:\n{tenants}\n")
    assert main(["serve", "--policy", "p.yaml"]) == 0
    error = capsys.readouterr().err
    warnings = [line for line in error.splitlines() if line.startswith("warning: ")]
    assert any(line.startswith("warning: p.yaml:2: pools.p.upstreams[0]: cache_scope") for line in warnings)
    assert warnings[1].startswith("warning: p.yaml:5: tenants.t0.keys: a key stands here in plain text")
    assert len(warnings) == 21 and warnings[-1].startswith("warning: p.yaml: 6 more")
    assert "secret-" not in error


def test_a_folder_that_cannot_be_written_gets_the_default_policy_in_memory(
    home: Path,
    served: list[tuple[GatewayConfig, PolicySource]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> int:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_text", refuse)
    assert main(["serve"]) == 0
    assert "warmfront.yaml: Permission denied; using the default policy" in capsys.readouterr().err
    assert served[0][1].path is None


def test_the_secret_is_the_same_after_a_restart_or_the_variables(
    home: Path, served: list[tuple[GatewayConfig, PolicySource]], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["serve"])
    main(["serve"])
    main(["serve", "--runtime-dir", str(home / "other")])
    monkeypatch.setenv("WARMFRONT_SECRET", "a secret of the whole fleet")
    main(["serve"])
    secrets = [config.secret for config, _ in served]
    assert secrets[0] == secrets[1] == bytes.fromhex((home / "run" / "secret").read_text().strip())
    assert secrets[2] != secrets[0]
    assert secrets[3] == b"a secret of the whole fleet"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["serve", "--policy", "nope.yaml"], "error: --policy nope.yaml: No such file or directory"),
        (["serve", "--policy", "."], "error: --policy .: Is a directory"),
        (["serve", "--policy", "broken.yaml"], "broken.yaml:2: "),
        (["serve", "--policy", "binary.yaml"], "error: binary.yaml:1: is not UTF-8 text"),
        (
            ["serve", "--policy", "open.yaml", "--host", "0.0.0.0"],
            "error: --host 0.0.0.0: without tenants in open.yaml",
        ),
        (
            ["serve", "--policy", "open.yaml", "--port", "9090"],
            "error: --port and --admin-port are both 9090",
        ),
        (
            ["serve", "--policy", "open.yaml", "--runtime-dir", "open.yaml/run"],
            "error: --runtime-dir open.yaml/run: ",
        ),
        (["gateway"], "error: no policy: name one with --policy FILE or $WARMFRONT_POLICY"),
        (["gateway", "--policy", "bundled.yaml"], "error: bundled.yaml: pool p has bundled replicas"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_served_ends_with_2_and_says_where(
    home: Path,
    served: list[tuple[GatewayConfig, PolicySource]],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    error: str,
) -> None:
    Path("broken.yaml").write_text("version: 1\nroutes: 3\n")
    Path("binary.yaml").write_bytes(b"\xff\xff")
    Path("open.yaml").write_text(OPEN)
    Path("bundled.yaml").write_text(BUNDLED)
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(error)
    assert served == []


def test_a_missing_file_that_the_variable_names_is_an_error(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARMFRONT_POLICY", "gone.yaml")
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == "error: $WARMFRONT_POLICY gone.yaml: No such file or directory\n"
    assert not Path("gone.yaml").exists()


def test_a_short_secret_is_an_error_that_does_not_show_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARMFRONT_SECRET", "hunter2")
    assert main(["serve"]) == 2
    error = capsys.readouterr().err
    assert "$WARMFRONT_SECRET: the gateway's secret needs at least 16 bytes" in error
    assert "hunter2" not in error


def test_models_that_are_not_there_are_fetched_first(
    home: Path,
    served: list[tuple[GatewayConfig, PolicySource]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    codes = [0, 2]
    commands: list[list[str]] = []

    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, codes[len(commands) - 1])

    monkeypatch.setattr(cli_serve.subprocess, "run", run)
    Path("bundled.yaml").write_text(BUNDLED)
    assert main(["serve", "--policy", "bundled.yaml"]) == 0
    assert main(["serve", "--policy", "bundled.yaml"]) == 2
    assert commands == [[sys.executable, "-m", "engine", "model", "pull", "tiny"]] * 2
    assert "error: model tiny: could not be fetched" in capsys.readouterr().err
    assert len(served) == 1


def test_a_fetch_that_is_interrupted_ends_the_start_quietly(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[bytes]:
        raise KeyboardInterrupt

    Path("bundled.yaml").write_text(BUNDLED)
    for run in (interrupted, lambda command, **_: subprocess.CompletedProcess(command, 130)):
        monkeypatch.setattr(cli_serve.subprocess, "run", run)
        assert main(["serve", "--policy", "bundled.yaml"]) == 130
        assert "stopped while model tiny was being fetched" in capsys.readouterr().err


def test_the_home_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli_serve.home({"WARMFRONT_HOME": "/w", "XDG_CACHE_HOME": "/x"}) == Path("/w")
    assert cli_serve.home({"XDG_CACHE_HOME": "/x"}) == Path("/x/warmfront")
    assert cli_serve.home({}) == Path.home() / ".cache" / "warmfront"
