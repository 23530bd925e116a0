"""`warmfront policy enforce | observe | off | reload`: a route's mode, in the file and in the gateway.

Owns which file is changed. Must always hold: where a gateway answers, no file but the one that it serves is
changed, unless `--policy` names it, and then the exit code says that the gateway does not serve it; a file
that does not load is never written; when the gateway refuses a change, the file gets its old text back; the
file that was changed is named, and so is the command that undoes it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway import policy_file
from gateway.cli.admin_call import USUAL_ADMIN, NoAnswer, Refusal, ask


class NotDone(Exception):
    """Nothing was changed; the message says why."""


@dataclass(frozen=True, slots=True)
class _Served:
    """What the gateway at `--admin` runs. `path` None: a policy that is in no file of its own."""

    source: str
    path: Path | None

    def is_file(self, path: Path) -> bool:
        """Whether that is the file which this gateway serves."""
        return self.path is not None and os.path.realpath(self.path) == os.path.realpath(path)

    def __str__(self) -> str:
        return str(self.path) if self.path is not None else f"a policy that is in no file ({self.source})"


def switch(args: argparse.Namespace) -> int:
    """Put a route in another mode. Raises NotDone, PolicyError, OSError and what `ask` raises."""
    served = _served(args.admin)
    if served is None:
        path = policy_file.find_policy_file(args.policy, os.environ)
        report = _by_gateway(args, None) if path is None else _in_file(args, path, reload=True)
    elif args.policy is None:
        report = _by_gateway(args, served)
        here = policy_file.find_policy_file(None, os.environ)
        report["left_alone"] = None if here is None or served.is_file(here) else str(here)
    else:
        path = Path(args.policy)
        own = served.is_file(path)
        report = _in_file(args, path, reload=own)
        if not own:
            report["ok"] = False
            report["gateway"] = f"{args.admin} serves {served} and was not changed"
    report["switched_off"] = killed = _killed(args)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(args, report, killed)
    return 0 if report["ok"] else 2


def reload(args: argparse.Namespace) -> int:
    """Have the gateway read its file again. Raises what `ask` raises."""
    served = _served(args.admin)
    answer = ask(args.admin, "/admin/policy/reload", {})
    version, source = answer.get("version"), answer.get("source")
    file = None if served is None or served.path is None else str(served.path)
    if args.json:
        print(json.dumps({"ok": True, "version": version, "file": file, "source": source}, indent=2))
    else:
        from_where = (
            file or f"{source or 'the policy in force'} (in no file: there was nothing to read again)"
        )
        print(f"{args.admin}: version {version} in force, from {from_where}")
    return 0


def _print(args: argparse.Namespace, report: dict[str, Any], killed: list[str]) -> None:
    before, after = report["before"], report["after"]
    if before == after:
        print(f"route {args.route}: is in {after} already; nothing changed")
    else:
        print(f"route {args.route}: {before or 'another mode'} -> {after}")
    if report["file"] is not None:
        print(f"file: {report['file']} (version {report['version']})")
    else:
        print(f"file: none changed; {report['source']} is in no file, the change ends with the gateway")
    if report.get("left_alone"):
        print(f"note: that gateway does not serve {report['left_alone']}, which was left alone")
    print(f"gateway: {report['gateway']}")
    admin = f" --admin {args.admin}" if args.admin != USUAL_ADMIN else ""
    if killed and after == "enforce":
        which = "all routes" if killed == ["all routes"] else f"route {args.route}"
        lift = "" if killed == ["all routes"] else f" --route {shlex.quote(args.route)}"
        print(f"note: canonicalization is switched off for {which} (kill switch): no prompt is changed until")
        print(f"      warmfront canon on{lift}{admin}")
    if before not in (after, None):
        named = f" --policy {shlex.quote(args.policy)}" if args.policy else ""
        print(f"to go back: warmfront policy {before} {shlex.quote(args.route)}{named}{admin}")


def _served(admin: str) -> _Served | None:
    """What runs there; None when nothing answers, or something that does not say. Raises BadUrl."""
    try:
        answer = ask(admin, "/admin/policy")
    except (NoAnswer, Refusal):
        return None
    source, path = answer.get("source"), answer.get("path")
    if not isinstance(source, str):
        return None
    # The gateway keeps its file's path when a policy is sent to it; only `source` tells that it runs another.
    if isinstance(path, str) and (path == source or path.endswith(f"/{source}")):
        return _Served(source, Path(path))
    return _Served(source, None)


def _in_file(args: argparse.Namespace, path: Path, *, reload: bool) -> dict[str, Any]:
    """Edit the file; with `reload`, have the gateway read it, and put the old text back where it refuses."""
    from policies import load_policy, set_canon_mode

    text = policy_file.read_text(path)
    read_file = policy_file.read_beside(path)
    old = load_policy(text, source=str(path), read_file=read_file)
    changed = set_canon_mode(text, args.route, args.mode, source=str(path))
    new = load_policy(changed, source=str(path), read_file=read_file)
    if changed != text:
        policy_file.replace_text(path, text, changed)
    gateway, reloaded = f"{args.admin} reloaded", reload
    try:
        answer = ask(args.admin, "/admin/policy/reload", {}) if reload else {}
    except NoAnswer:
        reloaded = False
        gateway = f"none answers at {args.admin}; the new mode holds when it starts"
    except Refusal as error:
        if changed != text:
            policy_file.replace_text(path, changed, text)
        raise NotDone(
            f"the gateway at {args.admin} refused it ({error.reason}); the file is unchanged"
        ) from None
    else:
        same = answer.get("text_sha256") == hashlib.sha256(changed.encode()).hexdigest()
        # Versions may differ where the text does not: keys come from each process's environment.
        if not same and answer.get("version") not in (None, new.version):
            gateway += f", but runs another policy (version {answer['version']})"
    return {
        "ok": True,
        "route": args.route,
        "before": old.route(args.route).canon.mode,
        "after": args.mode,
        "file": str(path),
        "version": new.version,
        "gateway": gateway,
        "reloaded": reloaded,
    }


def _by_gateway(args: argparse.Namespace, served: _Served | None) -> dict[str, Any]:
    """Ask the running gateway, which edits its own file where it has one."""
    try:
        answer = ask(args.admin, "/admin/policy/mode", {"route": args.route, "mode": args.mode})
    except NoAnswer:
        raise NotDone(
            f"no policy file here, and no gateway answers at {args.admin}; use --policy FILE or --admin URL"
        ) from None
    except Refusal as error:
        raise NotDone(f"the gateway at {args.admin} refused: {error.reason}") from None
    before = answer.get("before")
    return {
        "ok": True,
        "route": args.route,
        "before": before if isinstance(before, str) else None,
        "after": args.mode,
        "file": str(served.path) if served is not None and served.path is not None else None,
        "source": served.source if served is not None else "its policy",
        "version": answer.get("version"),
        "gateway": f"{args.admin} {'has it in force' if before == args.mode else 'changed'}",
        "reloaded": True,
    }


def _killed(args: argparse.Namespace) -> list[str]:
    """Whom the kill switch holds back of what was asked: nobody, the route, or all routes. The gateway is
    asked; where none answers, the usual runtime directory.
    """
    try:
        rows = ask(args.admin, "/admin/state").get("routes")
    except NoAnswer:
        from gateway.canon.kill_switch import KillSwitch
        from gateway.cli.canon_switch import runtime_dir

        switch = KillSwitch(runtime_dir(None))
        return ["all routes"] if switch.everything else [args.route] if switch.engaged(args.route) else []
    except Refusal:
        return []
    routes = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    killed = [row.get("name") for row in routes if row.get("lowered") == "switched off"]
    if killed and len(killed) == len(routes):
        return ["all routes"]
    return [args.route] if args.route in killed else []
