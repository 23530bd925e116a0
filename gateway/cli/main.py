"""The `warmfront` command: finds the subcommand, imports only that one, and returns its exit code.

Always holds: `--help` of every command answers without importing torch, transformers or aiohttp; exit
code 0 is success and 2 is wrong use; only commands that look for something (lint, doctor, compare) use 1
for "found something". `engine` and `model` live in the engine package, which the gateway never imports:
they run as their own process.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence

# name -> (module, one-line help). A module exposes register(subparsers), and its handler is set as `handler`.
_COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("gateway.cli.serve", "start the gateway with its bundled engine replicas"),
    "gateway": ("gateway.cli.serve", "start the gateway alone, in front of engines that run elsewhere"),
    "policy": ("gateway.cli.policy", "lint, explain and change policies"),
    "canon": ("gateway.cli.canon", "show what the canonicalizer does to a request; switch it off"),
    "pins": ("gateway.cli.pins", "list pinned system prompts and their state"),
    "bench": ("gateway.cli.bench", "measure TTFT, TPOT, ITL and hit rate; run the demo"),
}
_CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
_ENGINE_COMMANDS = {
    "engine": "run one engine replica by itself",
    "model": "fetch, convert, list and verify models",
}


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser; with `only`, just that command's own arguments are loaded."""
    parser = argparse.ArgumentParser(
        prog="warmfront",
        description="An OpenAI-compatible gateway that keeps LLM prompts warm.",
        epilog="example: warmfront serve     then point a client's base URL at http://127.0.0.1:8080/v1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module, summary) in _COMMANDS.items():
        if name == only:
            importlib.import_module(module).register(commands)
        elif name not in commands.choices:
            commands.add_parser(name, help=summary, add_help=False)
    for name, summary in _ENGINE_COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else None
    if command in _ENGINE_COMMANDS:
        rest = arguments[1:] if command == "engine" else arguments
        name = "warmfront engine" if command == "engine" else "warmfront"  # what its usage lines begin with
        env = {**os.environ, "WARMFRONT_PROGRAM": name}
        os.execve(sys.executable, [sys.executable, "-m", "engine", *rest], env)
    if command in ("-V", "--version"):
        from importlib.metadata import version

        print(f"warmfront {version('warmfront')}")
        return 0
    parser = build_parser(command if command in _COMMANDS else None)
    if command is None:
        parser.print_help()
        return 2
    parsed = parser.parse_args(arguments)
    handler = getattr(parsed, "handler", None)
    if handler is None:
        parser.print_help()
        return 2
    try:
        code = int(handler(parsed) or 0)
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()
        return 0
    except OSError as error:
        if error.errno not in _CANNOT_WRITE or error.filename is not None:
            raise
        _drop_output()
        print(f"warmfront: the output can't be written: {error.strerror}", file=sys.stderr)
        return 2


def _drop_output() -> None:
    """Let what is still buffered go nowhere: else the exit tries to write it again, and complains."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    raise SystemExit(main())
