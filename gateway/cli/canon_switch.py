"""`warmfront canon off` and `on`: the kill switch of canonicalization.

Always holds: `off` works whether or not a gateway answers: without one, the file that the gateways of a
runtime directory watch is written, and it survives restarts. Exit code 0 means that a gateway confirmed it,
or that the directory was named; 2 that it may have reached nobody.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from gateway.cli.admin_call import USUAL_ADMIN, BadUrl, NoAnswer, Refusal, ask

_SUMMARIES = {
    "off": "send prompts as they come, at once, until `canon on` (the kill switch)",
    "on": "lift the kill switch: routes canonicalize as the policy says",
}


def register(actions: Any) -> None:
    """Add `off` and `on` to the actions of `canon`."""
    for name, text in _SUMMARIES.items():
        action = actions.add_parser(
            name,
            help=text,
            description=f"{text.capitalize()}.",
            epilog=f"example: warmfront canon {name} --route chat",
        )
        action.add_argument("--route", metavar="ROUTE", help="one route only (default: all)")
        action.add_argument(
            "--admin", metavar="URL", default=USUAL_ADMIN, help="admin plane (default: %(default)s)"
        )
        action.add_argument(
            "--runtime-dir",
            type=Path,
            metavar="DIR",
            help="the gateway's, if none answers (default: $WARMFRONT_HOME/run, ~/.cache/warmfront/run)",
        )
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(handler=_switch, switch=name)


def _switch(arguments: argparse.Namespace) -> int:
    from gateway.canon.kill_switch import FILE_NAME, KillSwitch

    route, directory = arguments.route, arguments.runtime_dir
    done = f"canonicalization {arguments.switch} for {route or 'all routes'}"
    try:
        answer = ask(arguments.admin, f"/admin/canon/{arguments.switch}", {"route": route})
        lines, code = [f"{arguments.admin}: {done}"], 0
    except (BadUrl, Refusal) as error:
        print(f"warmfront canon: {error}", file=sys.stderr)
        return 2
    except NoAnswer:
        folder = runtime_dir(directory)
        path = folder / FILE_NAME
        try:
            switch = KillSwitch(folder)
            (switch.set_off if arguments.switch == "off" else switch.set_on)(route)
        except OSError as failure:
            where = f"{failure.filename or path}: {failure.strerror or failure}"
            silence = f"no gateway answered at {arguments.admin}, and {where}; nothing was switched"
            print(f"warmfront canon: {silence}", file=sys.stderr)
            return 2
        still = [route] if arguments.switch == "on" and route is not None and switch.engaged(route) else []
        answer = {arguments.switch: route or "all routes", "file": str(path), "still_off": still}
        note = (
            f"no gateway answered at {arguments.admin}: "
            f"written to {path} for gateways with that runtime directory"
        )
        lines, code = [note, f"{path}: {done}"], 0 if directory is not None else 2
    if arguments.json:
        print(json.dumps({**answer, "confirmed": "file" not in answer}, indent=2))
        return code
    if arguments.switch == "off":
        lines.append(f"to go back: {_command(arguments, 'on', route)}")
    elif still_off := answer.get("still_off"):
        lines.append(
            f"still off: {', '.join(map(str, still_off))}; to lift it: {_command(arguments, 'on', None)}"
        )
    print("\n".join(lines))
    return code


def runtime_dir(given: Path | None) -> Path:
    """The runtime directory that a gateway has when it is told `given`."""
    from gateway.cli.serve import home

    return (given or home(os.environ) / "run").expanduser()


def _command(arguments: argparse.Namespace, switch: str, route: str | None) -> str:
    words = ["warmfront", "canon", switch]
    for flag, value in (("--route", route), ("--runtime-dir", arguments.runtime_dir)):
        words += [] if value is None else [flag, shlex.quote(str(value))]
    if arguments.admin != USUAL_ADMIN:
        words += ["--admin", shlex.quote(arguments.admin)]
    return " ".join(words)
