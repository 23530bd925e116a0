"""`python -m engine`: serve one replica, or look after models.

Owns the command line. Always holds: `--help` imports nothing heavy; every setting of a replica is an option
here and nowhere else (an `EngineConfig` for the engine, a `FrontSettings` for the HTTP side).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields

from engine.config import ConfigError, EngineConfig
from engine.model.cli import register as register_model

_SERVE_EXAMPLES = """examples:
  {program} serve --model ~/.cache/warmfront/models/smollm2-135m-instruct --port 8001
  {program} serve --fake --port 8001       a replica without weights, for tests of what stands in front
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    raw = argparse.RawDescriptionHelpFormatter
    program = os.environ.get("WARMFRONT_PROGRAM", "python -m engine")  # as the person who typed it knows it
    parser = argparse.ArgumentParser(
        prog=program,
        description="Warmfront's bundled inference engine.",
        epilog=f"example: {program} serve --model DIR --port 8001",
        formatter_class=raw,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve one replica",
        epilog=_SERVE_EXAMPLES.format(program=program),
        formatter_class=raw,
    )
    _add_serve_options(serve)
    serve.set_defaults(run=_serve)
    register_model(commands)
    return parser


def _add_serve_options(serve: argparse.ArgumentParser) -> None:
    default = {field.name: field.default for field in fields(EngineConfig)}
    add = serve.add_argument
    add(
        "--model",
        dest="model_dir",
        default="",
        metavar="DIR",
        help="model directory (safetensors, tokenizer.json)",
    )
    add("--fake", action="store_true", help="no weights: tokens are a hash of the earlier ones")
    add("--host", default=default["host"], help="address to listen on (%(default)s)")
    add("--port", type=int, default=8001, help="port to listen on, 0 picks one (%(default)s)")
    add("--name", default=default["name"], help="the replica's name (%(default)s)")
    add(
        "--served-model-name", default="", metavar="NAME", help="model name in the API (the directory's name)"
    )
    add(
        "--private",
        action="store_true",
        help="honour the gateway's 'warmfront' object; never on a public address",
    )
    add(
        "--runtime-dir",
        default="",
        metavar="DIR",
        help="directory for sockets, made private (a temporary one)",
    )
    add("--parent-pid", type=int, metavar="PID", help="stop when this process has ended")
    engine = serve.add_argument_group("engine")
    add = engine.add_argument
    add(
        "--dtype",
        default=default["dtype"],
        choices=("auto", "fp32", "bf16"),
        help="weights and KV (%(default)s)",
    )
    add(
        "--mode",
        default=default["mode"],
        choices=("fast", "exact"),
        help="exact: same bits in any batch (%(default)s)",
    )
    add("--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="cores / replicas (all cores)")
    add(
        "--kv-tokens",
        type=int,
        default=default["kv_tokens"],
        metavar="N",
        help="size of the KV pool (%(default)s)",
    )
    add(
        "--block-size",
        type=int,
        default=default["block_size"],
        metavar="N",
        help="tokens in a block (%(default)s)",
    )
    add(
        "--max-seqs",
        type=int,
        default=default["max_seqs"],
        metavar="N",
        help="sequences at a time (%(default)s)",
    )
    add("--max-step-tokens", type=int, default=default["max_step_tokens"], metavar="N", help="(%(default)s)")
    add("--target-step-ms", type=float, default=default["target_step_ms"], metavar="MS", help="(%(default)s)")
    add("--context-length", type=int, metavar="N", help="shorten the model's context")
    add(
        "--pin-budget",
        type=float,
        default=default["pin_budget"],
        metavar="SHARE",
        help="of the pool (%(default)s)",
    )
    add(
        "--queue-limit",
        type=int,
        default=default["queue_limit"],
        metavar="N",
        help="waiting requests (%(default)s)",
    )
    add(
        "--events",
        default="auto",
        metavar="URL",
        help="KV events: ipc://, tcp://, auto or '' for none (%(default)s)",
    )
    add("--events-replay", default="", metavar="URL", help="replay socket (next to --events)")
    front = serve.add_argument_group("HTTP")
    add = front.add_argument
    add(
        "--max-body-bytes", type=int, default=32 * 1024 * 1024, metavar="N", help="413 above it (%(default)s)"
    )
    add(
        "--default-max-tokens",
        type=int,
        default=1024,
        metavar="N",
        help="chat output if not asked for (%(default)s)",
    )
    add(
        "--ping-s",
        type=float,
        default=5.0,
        metavar="S",
        help="keep-alive before the first token, 0: none (%(default)s)",
    )
    add(
        "--write-timeout-s",
        type=float,
        default=60.0,
        metavar="S",
        help="cut a client that reads nothing (%(default)s)",
    )
    add(
        "--body-timeout-s",
        type=float,
        default=60.0,
        metavar="S",
        help="408 for a stalled upload (%(default)s)",
    )
    add(
        "--grace-s",
        type=float,
        default=30.0,
        metavar="S",
        help="time for streams to end on SIGTERM (%(default)s)",
    )
    add(
        "--stall-s",
        type=float,
        default=10.0,
        metavar="S",
        help="silence of the step process that /health calls stalled (%(default)s)",
    )
    fake = serve.add_argument_group("fake model (with --fake)")
    add = fake.add_argument
    add(
        "--fake-context-length",
        type=int,
        default=default["fake_context_length"],
        metavar="N",
        help="(%(default)s)",
    )
    add(
        "--fake-prefill-tokens-per-s",
        type=float,
        default=0.0,
        metavar="R",
        help="pretended speed, 0: at once",
    )
    add("--fake-decode-ms", type=float, default=0.0, metavar="MS", help="pretended time of a decode step")
    add("--fake-mean-output", type=int, default=0, metavar="N", help="mean reply length, 0: until max_tokens")


def _serve(args: argparse.Namespace) -> int:
    if not args.model_dir and not args.fake:
        print("error: --model DIR is needed (or --fake)", file=sys.stderr)
        return 2
    names = {field.name for field in fields(EngineConfig)}
    try:
        config = EngineConfig(**{name: value for name, value in vars(args).items() if name in names})
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from engine.worker.front.serve import run
    from engine.worker.front.service import FrontSettings

    settings = FrontSettings(
        max_body_bytes=args.max_body_bytes,
        default_max_tokens=args.default_max_tokens,
        ping_s=args.ping_s,
        write_timeout_s=args.write_timeout_s,
        body_timeout_s=args.body_timeout_s,
        grace_s=args.grace_s,
        stall_s=args.stall_s,
    )
    return run(config, settings, parent_pid=args.parent_pid)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; the exit code (2: used wrongly, 130: interrupted)."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
