"""`warmfront serve` and `warmfront gateway`: start everything on this machine, or the gateway alone.

Owns start-up order and what the operator sees of it: policy, models, replicas, then listeners; one line
per step, and the banner when the first request can be sent. Always holds: a start that can't succeed
ends with exit code 2 and says which flag, field or file:line is at fault, and has written no policy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.policy_source import PolicySource


_MAX_WARNINGS = 20
_INTERRUPTED = 130


class _Refused(Exception):
    """Ends the command with exit code 2 and this message."""


def register(subparsers: Any) -> None:
    """Add `serve` or `gateway` (whichever is not there yet) to the command line."""
    for name, text in (
        ("serve", "start the gateway with its bundled engine replicas"),
        ("gateway", "start the gateway alone, in front of engines that run elsewhere"),
    ):
        if name in subparsers.choices:
            continue
        missing = "written if missing" if name == "serve" else "needed"
        parser = subparsers.add_parser(
            name,
            help=text,
            description=f"{text.capitalize()}.",
            epilog=f"example: warmfront {name} --policy FILE",
        )
        parser.add_argument(
            "--policy",
            type=Path,
            metavar="FILE",
            help=f"policy file (default: $WARMFRONT_POLICY, else ./warmfront.yaml, {missing})",
        )
        parser.add_argument("--host", default="127.0.0.1", help="data plane address (default: %(default)s)")
        parser.add_argument(
            "--port", type=_port, default=8080, help="data plane port, 0 picks one (default: %(default)s)"
        )
        parser.add_argument(
            "--admin-port",
            type=_port,
            default=9090,
            help="admin plane port, 0 picks one (default: %(default)s)",
        )
        parser.add_argument(
            "--runtime-dir",
            type=Path,
            metavar="DIR",
            help="kill switch and secret (default: $WARMFRONT_HOME/run, else ~/.cache/warmfront/run)",
        )
        parser.set_defaults(handler=_serve, alone=name == "gateway")


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError("must be a number from 0 to 65535")
    return int(text)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _serve(arguments: argparse.Namespace) -> int:
    from policies import PolicyError

    try:
        if arguments.port and arguments.port == arguments.admin_port:
            raise _Refused(f"--port and --admin-port are both {arguments.port}")
        source = _policy_source(arguments)
        _check(arguments, source)
        _check_ports(arguments)
    except PolicyError as error:
        _say(str(error))
        return 2
    except _Refused as error:
        _say(f"error: {error}")
        return 2

    _warn(source)
    import uvloop

    from gateway.config import GatewayConfig
    from gateway.secret import load_secret
    from gateway.serving import serve

    listeners = {"host": arguments.host, "port": arguments.port, "admin_port": arguments.admin_port}
    base = home(os.environ)
    runtime_dir = (arguments.runtime_dir or base / "run").expanduser()
    try:
        secret = load_secret(runtime_dir, os.environ)
    except OSError as error:
        _say(f"error: --runtime-dir {runtime_dir}: {error.strerror or error}")
        return 2
    except ValueError as error:
        _say(f"error: {error}")
        return 2
    for model in _missing_models(source, base / "models"):
        command = [sys.executable, "-m", "engine", "model", "pull", model]
        try:
            code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
        except KeyboardInterrupt:  # the command got it too, and has ended
            code = _INTERRUPTED
        if code == _INTERRUPTED:
            _say(f"stopped while model {model} was being fetched; the next start goes on from there")
            return code
        if code:  # stderr has it all
            _say(f"error: model {model}: could not be fetched")
            return 2
    config = GatewayConfig(runtime_dir=runtime_dir, models_dir=base / "models", secret=secret, **listeners)
    try:
        return uvloop.run(serve(config, source))
    except KeyboardInterrupt:
        return 0


def home(env: Mapping[str, str]) -> Path:
    """Where models and the runtime directory are kept, as the engine's `model` command has it."""
    if env.get("WARMFRONT_HOME"):
        return Path(env["WARMFRONT_HOME"]).expanduser()
    cache = env.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "warmfront"


def _missing_models(source: PolicySource, models_dir: Path) -> list[str]:
    """Models of bundled pools that are in no folder yet, in the policy's order."""
    named = dict.fromkeys(
        pool.bundled.model for pool in source.policy.pools.values() if pool.bundled is not None
    )
    return [
        model
        for model in named
        if not Path(model).expanduser().is_dir() and not (models_dir / model / "config.json").is_file()
    ]


def _check(arguments: argparse.Namespace, source: PolicySource) -> None:
    """Raises _Refused for what the policy and the flags can't have together."""
    policy = source.policy
    bundled = [pool.name for pool in policy.pools.values() if pool.bundled is not None]
    if arguments.alone and bundled:
        names = ", ".join(bundled)
        raise _Refused(
            f"{source.name}: pool {names} has bundled replicas; use `warmfront serve`, or give it upstreams"
        )
    from gateway.loopback import is_loopback

    host = arguments.host
    if not is_loopback(host) and not policy.requires_key:
        raise _Refused(f"--host {host}: without tenants in {source.name} only loopback addresses are bound")


def _check_ports(arguments: argparse.Namespace) -> None:
    """Raises _Refused when a listener can't be bound."""
    from gateway import listen

    try:
        listen.check_ports(arguments.host, arguments.port, arguments.admin_port)
    except listen.PortUnavailable as error:
        raise _Refused(str(error)) from None


def _warn(source: PolicySource) -> None:
    """Say what `policy lint` finds, a line each."""
    from policies import lint

    findings = lint(source.policy)
    for finding in findings[:_MAX_WARNINGS]:
        _say(f"warning: {finding}")
    if len(findings) > _MAX_WARNINGS:
        _say(f"warning: {source.name}: {len(findings) - _MAX_WARNINGS} more; see `warmfront policy lint`")


def _policy_source(arguments: argparse.Namespace) -> PolicySource:
    """The named policy, ./warmfront.yaml, or the default (written there for the next time).

    Raises PolicyError, _Refused.
    """
    from gateway.policy_file import DEFAULT_NAME, VARIABLE
    from gateway.policy_source import PolicySource
    from policies import DEFAULT_POLICY_TEXT

    path: Path | None = arguments.policy
    variable = os.environ.get(VARIABLE)
    flag = "--policy" if path else f"${VARIABLE}"
    named = path or (Path(variable) if variable else None)
    file = named or Path(DEFAULT_NAME)
    if named is None and not file.exists():
        if arguments.alone:
            raise _Refused(
                f"no policy: name one with --policy FILE or ${VARIABLE}, or write ./{DEFAULT_NAME}"
            )
        _check_ports(arguments)
        _say(f"writing {file} (observe: no prompt is changed)")
        try:
            file.write_text(DEFAULT_POLICY_TEXT, encoding="utf-8")
        except OSError as error:
            _say(f"{file}: {error.strerror}; using the default policy, changes of it end with this process")
            return PolicySource(None, DEFAULT_POLICY_TEXT)
    try:
        return PolicySource.from_file(file)
    except UnicodeDecodeError as error:  # its message names file and line
        raise _Refused(str(error)) from None
    except OSError as error:
        where = f"{flag} {file}" if named else str(file)
        raise _Refused(f"{where}: {error.strerror or error}") from None
