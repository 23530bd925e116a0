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
from dataclasses import asdict, dataclass
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
        epilog="example: warmfront canon diff request.json -r rules.yaml",
    )
    diff.add_argument(
        "file", metavar="FILE", help="a request body (JSON) or a log of them (JSONL); - reads stdin"
    )
    diff.add_argument(
        "-r", "--rules", metavar="RULES", help="ruleset (YAML); default: what the file itself shows"
    )
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
    note = ""
    if args.rules:
        ruleset = _read_ruleset(args.rules)
    else:
        floor = 1 if len(requests) == 1 else 2
        proposals = _observed(requests).proposals(values=floor, requests=floor)
        ruleset = ruleset_from(proposals)
        note = (
            "One request holds no evidence: this could move once it is seen to vary, or named by a rule."
            if floor == 1
            else f"Rules learned from these {len(requests)} requests; -r applies a ruleset instead."
        )
    results = [(request, _canonical(request, ruleset, ReplayMemory())) for request in requests]
    if args.json:
        rows = [{"line": request.line, **_record(result)} for request, (result, _) in results]
        print(json.dumps({"ruleset": ruleset.to_dict(), "requests": rows}, ensure_ascii=False, indent=2))
        return 0
    colored = args.color == "always" or (
        args.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    )
    if note:
        print(_paint(note, _DIM, colored))
    for request, (result, _) in results:
        _print_diff(request, result, colored)
    return 0


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


def _canonical(request: _Request, ruleset: Ruleset, memory: ReplayMemory) -> tuple[Canonical, bytes]:
    """The canonical form and its bytes; the original where the edits can't be undone exactly."""
    context = Context(_TENANT, fence_key(_SECRET, _TENANT), _SECRET)
    result = canonicalize(request.body, ruleset, memory, context, include_observed=True)
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
    return {"edits": [asdict(edit) for edit in result.edits], "reason": result.reason}


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
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _InputError(f"{name}: cannot be read: {error}") from error
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
