"""`warmfront policy`: lint, explain, show, and switch one route between off, observe and enforce.

Owns the words that a person reads when changing a policy. Must always hold: a file that does not load is
never written; when the running gateway refuses the change, the file gets its old text back; every switch
prints the command that undoes it. Exit codes: 0 done, 1 `lint` found something, 2 used wrongly or not done.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway import policy_file

if TYPE_CHECKING:
    from policies import Policy

_ADMIN = "http://127.0.0.1:9090"
_TIMEOUT_S = 10.0
_EXAMPLES = {
    "lint": "example: warmfront policy lint warmfront.yaml",
    "explain": "example: warmfront policy explain warmfront.yaml --tenant acme --header 'x-app: chat'",
    "enforce": "example: warmfront policy enforce chat",
    "observe": "example: warmfront policy observe chat",
    "off": "example: warmfront policy off chat",
    "show": "example: warmfront policy show --json",
}
_SUMMARIES = {
    "lint": "check a policy file",
    "explain": "say which route a request takes and why",
    "enforce": "canonicalize the requests of a route",
    "observe": "forward a route's requests untouched and measure what could be recovered",
    "off": "switch canonicalization of a route off",
    "show": "print the policy in short",
}


class _Failure(Exception):
    """Ends the command with exit code 2 and this message."""


def register(subparsers: Any) -> None:
    """Add `policy` and its subcommands to the main parser; each sets `handler(args) -> exit code`."""
    parser = subparsers.add_parser("policy", help="lint, explain and change policies")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, handler: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        action: argparse.ArgumentParser = actions.add_parser(
            name,
            help=_SUMMARIES[name],
            description=_SUMMARIES[name].capitalize() + ".",
            epilog=_EXAMPLES[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(handler=_guarded(handler))
        return action

    found = "default: WARMFRONT_POLICY, else ./warmfront.yaml"
    lint_parser = add("lint", _lint)
    lint_parser.add_argument("file", nargs="?", metavar="FILE", help=f"policy file ({found})")
    explain_parser = add("explain", _explain)
    explain_parser.add_argument("file", nargs="?", metavar="FILE", help=f"policy file ({found})")
    explain_parser.add_argument("--tenant", help="name of the tenant (none: a request without a key)")
    explain_parser.add_argument("--path", default="/v1/chat/completions", help="request path (%(default)s)")
    explain_parser.add_argument("--model", default="", help="model name that the client sends")
    explain_parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="a request header; may be repeated",
    )
    show_parser = add("show", _show)
    show_parser.add_argument(
        "--policy", metavar="FILE", help=f"policy file ({found}, else the built-in policy)"
    )
    for mode in ("enforce", "observe", "off"):
        switch = add(mode, _switch)
        switch.set_defaults(mode=mode)
        switch.add_argument("route", metavar="ROUTE", help="name of the route")
        switch.add_argument(
            "--policy", metavar="FILE", help=f"policy file ({found}, else the running gateway)"
        )
        switch.add_argument(
            "--admin", metavar="URL", default=_ADMIN, help="admin listener of the gateway (%(default)s)"
        )


def _guarded(handler: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The handler, with the faults that a person can meet turned into a message and exit code 2."""

    def guarded(args: argparse.Namespace) -> int:
        from policies import PolicyError

        try:
            return handler(args)
        except PolicyError as error:
            problems = error.problems
            if args.json:
                print(json.dumps({"ok": False, "problems": [_problem(each) for each in problems]}, indent=2))
            for problem in () if args.json else problems:
                print(problem, file=sys.stderr)
            return 2
        except (_Failure, UnicodeDecodeError) as error:
            message = (
                "the policy file is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
            )
        except BrokenPipeError:
            raise
        except OSError as error:
            message = f"{error.filename or 'policy file'}: {error.strerror or error}"
        if args.json:
            print(json.dumps({"ok": False, "error": message}, indent=2))
        else:
            print(f"warmfront policy: {message}", file=sys.stderr)
        return 2

    return guarded


def _problem(problem: Any) -> dict[str, Any]:
    keys = ("file", "line", "column", "path", "message", "code")
    return {key: getattr(problem, key) for key in keys}


def _file(explicit: str | None) -> Path:
    path = policy_file.find_policy_file(explicit, os.environ)
    if path is None:
        raise _Failure("no policy file: name one, set WARMFRONT_POLICY, or go where warmfront.yaml is")
    return path


def _lint(args: argparse.Namespace) -> int:
    from policies import lint

    path = _file(args.file)
    policy = policy_file.load_policy_file(path)
    findings = lint(policy)
    if args.json:
        report = {
            "ok": not findings,
            "version": policy.version,
            "problems": [_problem(each) for each in findings],
        }
        print(json.dumps(report, indent=2))
    else:
        for finding in findings:
            print(finding)
        count = f"{len(findings)} finding{'' if len(findings) == 1 else 's'}"
        routes = f"{len(policy.routes)} route{'' if len(policy.routes) == 1 else 's'}"
        print(f"{path}: {count if findings else 'no findings'}; version {policy.version}, {routes}")
    return 1 if findings else 0


def _explain(args: argparse.Namespace) -> int:
    from policies import explain

    policy = policy_file.load_policy_file(_file(args.file))
    if args.tenant is not None and args.tenant not in policy.tenants:
        raise _Failure(f"there is no tenant {args.tenant}; known: {', '.join(policy.tenants) or 'none'}")
    headers: dict[str, str] = {}
    for header in args.header:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            raise _Failure(f"--header wants 'NAME: VALUE', not {header!r}")
        headers[name.strip()] = value.strip()
    found = explain(policy, tenant=args.tenant, path=args.path, model=args.model, headers=headers)
    print(json.dumps(found.to_dict(), indent=2) if args.json else found)
    return 0


def _show(args: argparse.Namespace) -> int:
    from policies import default_policy

    path = policy_file.find_policy_file(args.policy, os.environ)
    policy = default_policy() if path is None else policy_file.load_policy_file(path)
    report = _report(policy)
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    origin = policy.source if path else "the built-in default (no policy file here)"
    print(f"policy {policy.version} from {origin}")
    for section in ("routes", "pools", "tenants", "pins"):
        rows = report[section]
        if rows:
            print(f"\n{_table(section[:-1], rows)}")
    return 0


def _report(policy: Policy) -> dict[str, Any]:
    """The policy in short, without keys and prompts."""
    from policies.explain import canon_summary

    def asked(patterns: tuple[str, ...]) -> str:
        return ",".join(patterns) or "any"

    routes = []
    for route in policy.routes:
        canon = canon_summary(route)
        routes.append(
            {
                "name": route.name,
                "tenants": asked(route.match.tenants),
                "models": asked(route.match.models),
                "paths": asked(route.match.paths),
                "headers": asked(tuple(name for name, _ in route.match.headers)),
                "class": route.class_,
                "pool": route.pool,
                "canon": canon["mode"],
                "rules": canon["rules"],
                "replay": "on" if canon["replay"] else "off",
                "share": canon["share"],
            }
        )
    pools = [
        {
            "name": pool.name,
            "model": pool.model,
            "routing": pool.routing,
            "bundled": 0 if pool.bundled is None else pool.bundled.replicas,
            "upstreams": len(pool.upstreams),
        }
        for pool in policy.pools.values()
    ]
    tenants = [
        {"name": each.name, "keys": len(each.key_hashes), "cache_scope": each.cache_scope}
        for each in policy.tenants.values()
    ]
    pins = [
        {
            "name": pin.name,
            "tenant": pin.tenant or "-",
            "route": pin.route,
            "pool": pin.pool,
            "characters": len(pin.system),
            "ttl_s": "-" if pin.ttl_s is None else pin.ttl_s,
            "replicas": pin.replicas,
        }
        for pin in policy.pins
    ]
    return {"version": policy.version, "routes": routes, "pools": pools, "tenants": tenants, "pins": pins}


def _table(title: str, rows: list[dict[str, Any]]) -> str:
    heads = [title if key == "name" else key for key in rows[0]]
    cells = [
        heads,
        *(
            [f"{value:g}" if isinstance(value, float) else str(value) for value in row.values()]
            for row in rows
        ),
    ]
    widths = [min(40, max(len(line[i]) for line in cells)) for i in range(len(heads))]
    return "\n".join(
        "  ".join(f"{text[:40]:<{w}}" for text, w in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


# -- switching --


def _switch(args: argparse.Namespace) -> int:
    path = policy_file.find_policy_file(args.policy, os.environ)
    report = _switch_gateway(args) if path is None else _switch_file(args, path)
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    before, after = report["before"], report["after"]
    if before == after:
        print(f"route {args.route}: is in {after} already; nothing changed")
    else:
        print(f"route {args.route}: {before or 'another mode'} -> {after}")
    if path is not None:
        print(f"file: {path} (version {report['version']})")
    print(f"gateway: {report['gateway']}")
    if before not in (after, None):
        named = f" --policy {args.policy}" if args.policy else ""
        admin = f" --admin {args.admin}" if args.admin != _ADMIN else ""
        print(f"to go back: warmfront policy {before} {args.route}{named}{admin}")
    return 0


def _switch_file(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    from policies import load_policy, set_canon_mode

    text = policy_file.read_text(path)
    read_file = policy_file.read_beside(path)
    old = load_policy(text, source=str(path), read_file=read_file)
    changed = set_canon_mode(text, args.route, args.mode, source=str(path))
    new = load_policy(changed, source=str(path), read_file=read_file)
    if changed != text:
        policy_file.replace_text(path, text, changed)
    status, answer = _post(args.admin, "/admin/policy/reload", {})
    if status is None:
        gateway = f"none answers at {args.admin}; the new mode holds when it starts"
    elif status >= 400:
        if changed != text:
            policy_file.replace_text(path, changed, text)
        raise _Failure(
            f"the gateway at {args.admin} refused it ({_reason(status, answer)}); the file is unchanged"
        )
    elif answer.get("text_sha256") == hashlib.sha256(changed.encode()).hexdigest():
        gateway = f"{args.admin} reloaded"  # versions may differ: keys come from each process's environment
    elif answer.get("version") not in (None, new.version):
        gateway = f"{args.admin} reloaded, but runs another policy (version {answer['version']})"
    else:
        gateway = f"{args.admin} reloaded"
    return {
        "ok": True,
        "route": args.route,
        "before": old.route(args.route).canon.mode,
        "after": args.mode,
        "file": str(path),
        "version": new.version,
        "gateway": gateway,
        "reloaded": status is not None,
    }


def _switch_gateway(args: argparse.Namespace) -> dict[str, Any]:
    """Without a file here, the running gateway is asked; it edits its own file where it has one."""
    status, answer = _post(args.admin, "/admin/policy/mode", {"route": args.route, "mode": args.mode})
    if status is None:
        raise _Failure(
            f"no policy file here, and no gateway answers at {args.admin}; use --policy FILE or --admin URL"
        )
    if status >= 400:
        raise _Failure(f"the gateway at {args.admin} refused: {_reason(status, answer)}")
    before = next(
        (answer[key] for key in ("before", "previous", "old_mode") if isinstance(answer.get(key), str)), None
    )
    return {
        "ok": True,
        "route": args.route,
        "before": before,
        "after": args.mode,
        "file": None,
        "version": answer.get("version"),
        "gateway": f"{args.admin} changed",
        "reloaded": True,
    }


def _post(admin: str, path: str, body: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """(status, JSON answer); status None when nothing listens there."""
    url = admin.rstrip("/") + path
    if not url.startswith(("http://", "https://")):
        raise _Failure(f"--admin wants a URL like {_ADMIN}, not {admin}")
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            return response.status, _decoded(response.read(1_000_000))
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _decoded(error.read(1_000_000))
    except (http.client.HTTPException, OSError, ValueError):  # URLError is an OSError
        return None, {}


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(raw or b"{}")
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _reason(status: int, answer: dict[str, Any]) -> str:
    error = answer.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return str(message) if message else f"HTTP {status}"
