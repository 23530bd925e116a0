"""`warmfront pins`: what is pinned where, as the running gateway knows it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from gateway.cli.admin_call import USUAL_ADMIN, BadUrl, NoAnswer, Refusal, ask

_COLUMNS = ("name", "tenant", "replica", "state", "tokens", "computed_tokens")
_HEADS = ("pin", "tenant", "replica", "state", "tokens", "computed")


def register(subparsers: Any) -> None:
    """Add the `pins` command to the command line."""
    text = "list pinned system prompts and their state"
    parser = subparsers.add_parser(
        "pins", help=text, description=f"{text.capitalize()}.", epilog="example: warmfront pins --json"
    )
    parser.add_argument(
        "--admin", metavar="URL", default=USUAL_ADMIN, help="admin plane (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_pins)


def _pins(arguments: argparse.Namespace) -> int:
    try:
        state = ask(arguments.admin, "/admin/pins")
        table = [_HEADS, *(_row(pin) for pin in state["pins"])]
        warmed = f"warm-up: {state['warmup_tokens']:,} tokens in {state['warmup_s']:.1f} s"
    except (BadUrl, NoAnswer, Refusal) as error:
        print(f"warmfront pins: {error}", file=sys.stderr)
        return 2
    except (KeyError, TypeError, ValueError):
        print(f"warmfront pins: {arguments.admin} is not a gateway's admin plane", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(state, indent=2))
        return 0
    if len(table) == 1:
        print("no pins in the policy")
        return 0
    widths = [max(len(row[i]) for row in table) for i in range(len(_HEADS))]
    for row in table:
        left = [f"{text:<{width}}" for text, width in zip(row[:4], widths[:4], strict=True)]
        right = [f"{text:>{width}}" for text, width in zip(row[4:6], widths[4:], strict=True)]
        print("  ".join([*left, *right, *row[6:]]).rstrip())
    print(warmed)
    return 0


def _row(pin: dict[str, Any]) -> tuple[str, ...]:
    """The cells of one line; a pin that is not resident says why behind them."""
    cells = tuple(str(pin[key]) if pin[key] not in (None, "") else "-" for key in _COLUMNS)
    return (*cells, str(pin.get("reason") or ""))
