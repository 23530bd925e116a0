"""`warmfront canon off` and `on`: the kill switch of canonicalization.

Always holds: `off` works whether or not a gateway answers: without one, the file that every gateway of this
machine watches is written, and it survives restarts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from gateway.cli.admin_call import USUAL_ADMIN, NoAnswer, Refusal, ask

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
    route = arguments.route
    try:
        answer = ask(arguments.admin, f"/admin/canon/{arguments.switch}", {"route": route})
        done = f"{arguments.admin}: canonicalization {arguments.switch} for {route or 'all routes'}"
    except Refusal as error:
        print(f"warmfront canon: {error}", file=sys.stderr)
        return 2
    except NoAnswer as error:
        try:
            path = _write(arguments)
        except OSError as failure:
            print(f"warmfront canon: {error}; {failure.filename}: {failure.strerror}", file=sys.stderr)
            return 2
        answer = {arguments.switch: route or "all routes", "file": str(path)}
        done = f"{error}\n{path}: canonicalization {arguments.switch} for {route or 'all routes'}"
    print(json.dumps(answer, indent=2) if arguments.json else done)
    return 0


def _write(arguments: argparse.Namespace) -> Path:
    from gateway.canon.kill_switch import FILE_NAME, KillSwitch
    from gateway.cli.serve import home

    directory: Path = (arguments.runtime_dir or home(os.environ) / "run").expanduser()
    switch = KillSwitch(directory)
    (switch.set_off if arguments.switch == "off" else switch.set_on)(arguments.route)
    return directory / FILE_NAME
