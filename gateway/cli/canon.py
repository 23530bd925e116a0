"""`warmfront canon`: show, learn and apply canonicalization by hand, on one request body or on a log of them.

Owns the words and colours a person sees. Must always hold: nothing is sent anywhere (`off` and `on`
of canon_switch.py excepted); `learn` writes labels
and shapes, never a value; `apply` changes only the edited strings of each body. Exit codes: 0 done, 2 used
wrongly. Imports no torch, transformers or aiohttp."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import yaml

from canonicalizer import (
    Canonical,
    Context,
    EditError,
    Learner,
    Proposal,
    ReplayMemory,
    Ruleset,
    RulesetError,
    apply_edits,
    canonicalize,
    fence_key,
    ruleset_from,
    undo,
)
from gateway.cli import canon_switch
from gateway.cli.canon_preview import NoPreview, preview_of
from gateway.policy_file import NotText, read_text

_SECRET = b"warmfront canon"
_TENANT = "cli"
_RED, _GREEN, _DIM, _BOLD, _PLAIN = "\x1b[31m", "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
_STEP = re.compile(r"([\w-]+)|\[(\d+)\]")


class _InputError(Exception):
    """A file can't be used; the message starts with file:line."""


@dataclass(frozen=True, slots=True)
class _Request:
    line: int
    raw: bytes
    body: Mapping[str, Any]


def register(subparsers: Any) -> None:
    """Add the `canon` command to the command line."""
    parser = subparsers.add_parser(
        "canon",
        help="show what the canonicalizer does to a request; learn and apply rules by hand",
        epilog="example: warmfront canon diff request.json",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    diff = actions.add_parser(
        "diff",
        help="show what would change in a request body, or in each request of a JSONL log",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Show what would change in a request body, or in each request of a JSONL log.\n"
        "With a policy it is what `enforce` on the route would do, but for the gateway's own words that\n"
        "mark the context block. Several requests share one tenant's replay memory, as in the gateway.",
        epilog="example: warmfront canon diff request.json --policy warmfront.yaml --route default",
    )
    diff.add_argument(
        "file", metavar="FILE", help="a request body (JSON) or a log of them (JSONL); - reads stdin"
    )
    diff.add_argument(
        "-r",
        "--rules",
        metavar="RULES",
        help="ruleset (YAML); without it and without a policy: what the file itself shows",
    )
    diff.add_argument(
        "--policy",
        metavar="POLICY",
        help="preview a route of this policy (default: WARMFRONT_POLICY, else ./warmfront.yaml)",
    )
    diff.add_argument("--route", metavar="ROUTE", help="the route (default: the policy's only one)")
    diff.add_argument("--json", action="store_true", help="print the edits as JSON")
    diff.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: auto")
    diff.set_defaults(handler=_guarded(_diff))
    learn = actions.add_parser(
        "learn",
        help="find what varies in a log and write a ruleset",
        epilog="example: warmfront canon learn requests.jsonl -o rules.yaml --accept",
    )
    learn.add_argument("log", metavar="LOG", help="request bodies, one JSON object a line")
    learn.add_argument("-o", "--output", metavar="RULES", required=True, help="ruleset file to write (YAML)")
    learn.add_argument(
        "--accept", action="store_true", help="write the rules as `enforce`; default: `observe`"
    )
    learn.add_argument(
        "--floor", type=_positive, default=2, metavar="N", help="different values needed (default: 2)"
    )
    learn.add_argument("--json", action="store_true", help="print the proposals as JSON")
    learn.set_defaults(handler=_guarded(_learn))
    apply = actions.add_parser(
        "apply",
        help="write the canonical bodies of a log to stdout, and the edits to stderr",
        epilog="example: warmfront canon apply -r rules.yaml requests.jsonl > canonical.jsonl",
    )
    apply.add_argument("log", metavar="LOG", help="request bodies, one JSON object a line")
    apply.add_argument("-r", "--rules", metavar="RULES", required=True, help="ruleset (YAML)")
    apply.set_defaults(handler=_guarded(_apply))
    canon_switch.register(actions)


def _diff(args: argparse.Namespace) -> int:
    requests = list(_read_requests(args.file))
    preview, note = None, ""
    if args.rules and (args.policy or args.route):
        raise _InputError("-r gives the rules; --policy and --route take them from a policy: use one of them")
    if not args.rules:
        try:
            preview, note = preview_of(args.policy, args.route)
        except NoPreview as error:
            raise _InputError(str(error)) from None
    if args.rules:
        ruleset = _read_ruleset(args.rules)
    elif preview is not None:
        ruleset, note = preview.ruleset, str(preview)
    else:
        floor = 1 if len(requests) == 1 else 2
        ruleset = ruleset_from(_observed(requests).proposals(values=floor, requests=floor))
    results = _in_order(requests, ruleset, observed=preview is None)
    edited = any(result.edits for _, result in results)
    if args.json:
        rows = [{"line": request.line, **_record(result)} for request, result in results]
        report = {"ruleset": ruleset.to_dict(), "requests": rows}
        if preview is not None:
            report |= {"policy": preview.policy, "route": preview.route, "mode": preview.mode}
        print(json.dumps(report, ensure_ascii=False, indent=2))
        return 0
    colored = args.color == "always" or (
        args.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    )
    notes = [note] if note else []
    if not args.rules and preview is None:
        notes.append(_evidence(len(requests), edited))
    for line in notes:
        print(_paint(line, _DIM, colored))
    for request, result in results:
        _print_diff(request, result, colored)
    if not edited and (args.rules or preview is not None):
        print(
            _paint("Nothing would change: none of the rules finds a value that it may move.", _DIM, colored)
        )
    return 0


def _evidence(count: int, edited: bool) -> str:
    """What the edits shown are worth when the rules come from the requests themselves."""
    if count > 1:
        return f"Rules learned from these {count} requests; -r or --policy applies others instead."
    if edited:
        return "One request holds no evidence: this could move once it is seen to vary, or named by a rule."
    return "Nothing in this request looks as if it varied. --policy and --route show what a route's rules do."


def _in_order(
    requests: list[_Request], ruleset: Ruleset, *, observed: bool
) -> list[tuple[_Request, Canonical]]:
    """The requests as one gateway would treat them one after another, with one tenant's replay memory.
    `observed`: rules in mode `observe` are applied too.
    """
    memory = ReplayMemory()
    results = []
    for request in requests:
        result, _ = _canonical(request, ruleset, memory, observed=observed)
        memory.store(result.remember, 0)
        results.append((request, result))
    return results


def _learn(args: argparse.Namespace) -> int:
    requests = list(_read_requests(args.log))
    proposals = _observed(requests).proposals(values=args.floor)
    ruleset = ruleset_from(proposals, mode="enforce" if args.accept else "observe")
    header = (
        f"# Learned from {len(requests)} requests: labels and shapes that were seen to vary, never a value.\n"
        f"# Try it: warmfront canon apply -r {args.output} {args.log}\n"
    )
    try:
        Path(args.output).write_text(
            header + yaml.safe_dump(ruleset.to_dict(), sort_keys=False, allow_unicode=True), encoding="utf-8"
        )
    except OSError as error:
        raise _InputError(f"{args.output}: cannot be written: {error.strerror}") from error
    if args.json:
        print(json.dumps([_proposal_row(proposal) for proposal in proposals], ensure_ascii=False, indent=2))
        return 0
    for proposal in proposals:
        row = _proposal_row(proposal)
        print(
            f"{row['label'] or row['stage']!s:40.40} {row['shape'] or 'stage':10} {row['values']:>5} values"
            f" {row['requests']:>6} requests {row['prefix_lost']:>8} characters behind it  {row['grade']}"
        )
    print(f"{len(ruleset.rules)} rules and {len(ruleset.stages)} stages written to {args.output}")
    return 0


def _apply(args: argparse.Namespace) -> int:
    ruleset = _read_ruleset(args.rules)
    memory = ReplayMemory()
    for request in _read_requests(args.log):
        result, raw = _canonical(request, ruleset, memory)
        memory.store(result.remember, 0)
        sys.stdout.buffer.write((orjson.dumps(result.body) if b"\n" in raw else raw) + b"\n")
        print(json.dumps({"line": request.line, **_record(result)}, ensure_ascii=False), file=sys.stderr)
    sys.stdout.buffer.flush()
    return 0


def _canonical(
    request: _Request, ruleset: Ruleset, memory: ReplayMemory, *, observed: bool = True
) -> tuple[Canonical, bytes]:
    """The canonical form and its bytes; the original where the edits can't be undone exactly."""
    context = Context(_TENANT, fence_key(_SECRET, _TENANT), _SECRET)
    result = canonicalize(request.body, ruleset, memory, context, include_observed=observed)
    try:
        raw = apply_edits(request.raw, result.edits)
        if undo(result.edits, raw) == request.raw:
            return result, raw
    except EditError:
        pass
    return Canonical(request.body, reason="not_exact"), request.raw


def _observed(requests: list[_Request]) -> Learner:
    learner = Learner()
    show = sys.stderr.isatty()
    for count, request in enumerate(requests, start=1):
        learner.observe(_TENANT, request.body)
        if show and (count % 100 == 0 or count == len(requests)):
            print(f"\rread {count}/{len(requests)} requests", end="", file=sys.stderr, flush=True)
    if show:
        print(file=sys.stderr)
    return learner


def _print_diff(request: _Request, result: Canonical, colored: bool) -> None:
    count = len(result.edits)
    heading = f"request {request.line}: {count} edit{'' if count == 1 else 's'}"
    print(_paint(heading + (f", nothing moved ({result.reason})" if result.reason else ""), _BOLD, colored))
    for edit in result.edits:
        where = "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in edit.path)
        value: Any = request.body
        for step in edit.path:
            value = value[step]
        line = value.count("\n", 0, edit.start) + 1 if isinstance(value, str) else 0
        place = where + (f" line {line}" if line else "")
        print(_paint(f"  {place}  {edit.rule}", _DIM, colored))
        lead = tail = ""
        if isinstance(value, str) and edit.before:
            lead = value[value.rfind("\n", 0, edit.start) + 1 : edit.start][-60:]
            tail = value[edit.end :].partition("\n")[0][:40]
        for text, mark, color in ((edit.before, "-", _RED), (edit.after, "+", _GREEN)):
            if text or edit.before:
                for row in (lead + text.strip("\n") + tail).split("\n"):
                    print(_paint(f"  {mark} {_visible(row)}", color, colored))


def _visible(row: str) -> str:
    """Control characters as escapes, so that a prompt can't steer the terminal."""
    return "".join(char if char.isprintable() or char == "\t" else ascii(char)[1:-1] for char in row)


def _paint(text: str, color: str, colored: bool) -> str:
    return f"{color}{text}{_PLAIN}" if colored else text


def _record(result: Canonical) -> dict[str, Any]:
    return {"edits": [edit._asdict() for edit in result.edits], "reason": result.reason}


def _proposal_row(proposal: Proposal) -> dict[str, Any]:
    rule = proposal.rule
    return {
        "label": rule.label if rule else None,
        "shape": rule.shape if rule else None,
        "stage": proposal.stage,
        "values": proposal.values,
        "requests": proposal.requests,
        "prefix_lost": proposal.prefix_lost,
        "grade": proposal.grade,
    }


def _read_requests(name: str) -> Iterator[_Request]:
    """Request bodies of a file: one JSON object, or one a line (a line may wrap it as {"body": ...})."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise _InputError(f"{name}: cannot be read: {error.strerror}") from error
    lines = [(number, line.strip()) for number, line in enumerate(data.splitlines(), start=1) if line.strip()]
    if not lines:
        raise _InputError(f"{name}:1: the file holds no request")
    whole = _decoded(data.strip()) if len(lines) > 1 and _decoded(lines[0][1]) is None else None
    if whole is not None:
        lines = [(lines[0][0], data.strip())]
    for number, raw in lines:
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise _InputError(f"{name}:{number}: not JSON: {error}") from error
        if isinstance(body, dict) and isinstance(body.get("body"), dict) and "messages" not in body:
            body = body["body"]
            raw = orjson.dumps(body)
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise _InputError(f"{name}:{number}: not a chat request: it has no `messages` list")
        yield _Request(number, raw, body)


def _decoded(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None


def _read_ruleset(name: str) -> Ruleset:
    try:
        text = read_text(Path(name))
    except NotText as error:
        raise _InputError(str(error)) from error
    except OSError as error:
        raise _InputError(f"{name}: cannot be read: {error.strerror}") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        raise _InputError(f"{name}:{mark.line + 1 if mark else 1}: not YAML: {problem}") from error
    try:
        return Ruleset.from_dict(data)
    except RulesetError as error:
        raise _InputError(f"{name}:{_line_of(text, error.path)}: {error}") from error


def _line_of(text: str, path: str) -> int:
    """Line of the YAML node at a path such as `rules[1].shape`; of the nearest one above it, if it is
    missing."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    line = 1
    for key, index in _STEP.findall(path):
        if isinstance(node, yaml.SequenceNode) and index and int(index) < len(node.value):
            node = node.value[int(index)]
        elif isinstance(node, yaml.MappingNode):
            pairs = [pair for pair in node.value if pair[0].value == key]
            if not pairs:
                break
            line = pairs[0][0].start_mark.line + 1
            node = pairs[0][1]
            continue
        else:
            break
        line = node.start_mark.line + 1
    return line


def _guarded(action: Any) -> Any:
    """The action with unusable input turned into a message on stderr and exit code 2."""

    def run(args: argparse.Namespace) -> int:
        try:
            return int(action(args))
        except _InputError as error:
            print(f"warmfront canon: {error}", file=sys.stderr)
            return 2
        except BrokenPipeError:
            sys.stderr.close()
            return 0

    return run


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
