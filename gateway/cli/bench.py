"""`warmfront bench`: `run` loads an OpenAI-compatible server and prints percentiles; `demo` runs the demo."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any


def register(subparsers: Any) -> None:
    """Add the `bench` command to the command line."""
    parser = subparsers.add_parser("bench", help="measure TTFT, TPOT, ITL and hit rate; run the demo")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    run = actions.add_parser(
        "run",
        help="load a server and print percentiles",
        epilog="example: warmfront bench run --concurrency 4 --groups 4 --each 8 --json result.json",
    )
    run.add_argument(
        "--base-url", default="http://127.0.0.1:8080/v1", help="server to load (default: %(default)s)"
    )
    run.add_argument(
        "--model", default="smollm2-135m-instruct", help="model name to ask for (default: %(default)s)"
    )
    run.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    run.add_argument("--concurrency", type=_positive, help="closed loop: requests in flight (default: 2)")
    run.add_argument(
        "--rate",
        type=_positive_float,
        help="open loop: conversations started per second; not with --concurrency",
    )
    run.add_argument(
        "--arrivals", choices=("poisson", "constant"), default="poisson", help="open loop arrivals"
    )
    run.add_argument("--requests", metavar="FILE", help="JSONL of chat bodies to send, one request a line")
    run.add_argument("--chat", action="store_true", help="send the demo's multi-turn conversations")
    run.add_argument(
        "--groups", type=_positive, default=4, help="generated: distinct system prompts (default: 4)"
    )
    run.add_argument(
        "--each", type=_positive, default=8, help="generated: requests per system prompt (default: 8)"
    )
    run.add_argument("--prefix-words", type=_positive, default=400, help="generated: words per system prompt")
    run.add_argument(
        "--max-tokens", type=_positive, default=32, help="output tokens per request (default: 32)"
    )
    run.add_argument("--seed", type=int, default=7, help="same seed, same requests (default: 7)")
    run.add_argument(
        "--timeout", type=_positive_float, default=600.0, help="seconds per request (default: 600)"
    )
    run.add_argument("--json", metavar="FILE", help="write all figures to FILE ('-' for standard output)")
    run.set_defaults(handler=_run)
    demo = actions.add_parser(
        "demo",
        help="measure round robin, cost routing and the full pipeline side by side",
        epilog="example: DEMO_EXIT=1 warmfront bench demo",
    )
    demo.add_argument(
        "--folder", default=".demo", help="where result.json and the log go (default: %(default)s)"
    )
    demo.add_argument("--port", type=_positive, default=8080, help="data plane port (default: %(default)s)")
    demo.add_argument(
        "--admin-port", type=_positive, default=9090, help="admin plane port (default: %(default)s)"
    )
    demo.add_argument("--exit", action="store_true", help="end the server afterwards (also DEMO_EXIT=1)")
    demo.set_defaults(handler=_demo)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a finite number above 0")
    return value


def _run(arguments: argparse.Namespace) -> int:
    import asyncio

    from gateway.bench import load, report, workload
    from gateway.bench.progress import ProgressBar

    if arguments.rate is not None and arguments.concurrency is not None:
        print("bench: --rate (open loop) and --concurrency (closed loop) exclude each other", file=sys.stderr)
        return 2
    try:
        if arguments.requests:
            text = Path(arguments.requests).read_text(encoding="utf-8")
            conversations = workload.from_jsonl(text.splitlines(), arguments.requests)
        elif arguments.chat:
            conversations = workload.chat_tenants(max_tokens=arguments.max_tokens, seed=arguments.seed)
        else:
            conversations = workload.shared_prefix(
                groups=arguments.groups,
                each=arguments.each,
                prefix_words=arguments.prefix_words,
                max_tokens=arguments.max_tokens,
                seed=arguments.seed,
            )
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        print(f"bench: {arguments.requests}: {reason or error}", file=sys.stderr)
        return 2
    except workload.WorkloadError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    options = load.LoadOptions(
        arguments.base_url,
        arguments.model,
        concurrency=arguments.concurrency or 2,
        rate_per_s=arguments.rate,
        arrivals=arguments.arrivals,
        api_key=arguments.api_key,
        timeout_s=arguments.timeout,
        seed=arguments.seed,
    )
    result = asyncio.run(load.run_load(conversations, options, ProgressBar("requests")))
    errors = [item.error for item in result.requests if item.error]
    if len(errors) == len(result.requests):
        print(
            f"bench: all {len(errors)} requests to {arguments.base_url} failed; first: {errors[0]}",
            file=sys.stderr,
        )
        return 2
    figures = report.summary(result)
    if arguments.json != "-":
        print(report.percentile_table(figures))
    if errors:
        print(f"bench: {len(errors)} of {len(result.requests)} failed; first: {errors[0]}", file=sys.stderr)
    if arguments.json:
        payload = json.dumps(report.document([], figures=figures), indent=1)
        if arguments.json == "-":
            print(payload)
        else:
            Path(arguments.json).write_text(payload + "\n", encoding="utf-8")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from gateway.bench import demo

    leave = arguments.exit or os.environ.get("DEMO_EXIT") == "1"
    return demo.main(arguments.folder, arguments.port, arguments.admin_port, leave)
