"""`warmfront policy`: the command line, and the actions that only read: lint, explain, show.

Owns the words that a person reads about a policy, and how faults become messages; what changes something
is in `policy_switch`. Must always hold: no key and no prompt is printed. Exit codes: 0 done, 1 `lint` found
something, 2 used wrongly or not done.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway import policy_file
from gateway.cli import policy_switch
from gateway.cli.admin_call import USUAL_ADMIN, BadUrl, NoAnswer, Refusal

if TYPE_CHECKING:
    from policies import Policy

_EXAMPLES = {
    "lint": "example: warmfront policy lint warmfront.yaml",
    "explain": "example: warmfront policy explain --model smollm2-135m-instruct --header 'x-app: chat'",
    "enforce": "example: warmfront policy enforce chat",
    "observe": "example: warmfront policy observe chat",
    "off": "example: warmfront policy off chat",
    "reload": "example: warmfront policy reload --admin http://127.0.0.1:9090",
    "show": "example: warmfront policy show --json",
}
_SUMMARIES = {
    "lint": "check a policy file",
    "explain": "say which route a request takes and why",
    "enforce": "canonicalize the requests of a route",
    "observe": "forward a route's requests untouched and measure what could be recovered",
    "off": "switch canonicalization of a route off",
    "reload": "have the running gateway read its policy file again",
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
    explain_parser.add_argument("--model", help="model name that the client sends (none: any)")
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
    reload_parser = add("reload", policy_switch.reload)
    switches = [add(mode, policy_switch.switch) for mode in ("enforce", "observe", "off")]
    for mode, parser in zip(("enforce", "observe", "off"), switches, strict=True):
        parser.set_defaults(mode=mode)
        parser.add_argument("route", metavar="ROUTE", help="name of the route")
        parser.add_argument(
            "--policy",
            metavar="FILE",
            help="policy file (default: what the gateway serves; without one, as for `lint`)",
        )
    for parser in (reload_parser, *switches):
        parser.add_argument(
            "--admin", metavar="URL", default=USUAL_ADMIN, help="admin plane of the gateway (%(default)s)"
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
        except (_Failure, BadUrl, NoAnswer, Refusal, policy_switch.NotDone, UnicodeDecodeError) as error:
            message = str(error)
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
