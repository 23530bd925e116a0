"""Messages between a replica's front process and its step process: msgpack arrays on one ZeroMQ PAIR socket.

Owns both directions. A message is `[name, field, ...]`; token ids travel as int32 little-endian bytes.
Decoding checks every field it uses: a malformed message raises `WireError` (with the request id where one
could be read) and never reaches the scheduler. The front imports this file, so it must not import torch.

    front -> step   ["add", {..}] ["abort", id] ["pin", {..}] ["unpin", id] ["clear"] ["stats"] ["shutdown"]
    step -> front   ["ready", {..}] ["tokens", [row, ..]] ["stats", {..}, answer] ["pins", [{..}, ..]]
                    ["error", id | nil, message, code]
    row             [request_id, token_id | nil, finish_reason | nil, lp | nil, timings | nil, message | nil]
    lp              [logprob | nil, [[id, logprob], ..], [entry, ..] | nil]
    entry           nil (first position) | [logprob, [[id, logprob], ..]]
    timings         [queue_s, prefill_s, cached_tokens, prefill_tokens]
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields
from typing import Any

import msgpack

from engine.core.pins import PinSpec
from engine.core.request import Request, SamplingParams
from engine.core.sequence import Timings, TokenLogprob, TokenOutput, token_bytes


class WireError(ValueError):
    """A message could not be decoded; `request_id` says whose it was, where that is known."""

    def __init__(self, message: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget a request and free its blocks."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PinPrefix:
    """Create or refresh a pin."""

    spec: PinSpec


@dataclass(frozen=True, slots=True)
class Unpin:
    """Release a pin."""

    pin_id: str


@dataclass(frozen=True, slots=True)
class ClearCache:
    """Drop every cached block."""


@dataclass(frozen=True, slots=True)
class QueryStats:
    """Report the stats now."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Leave the step loop."""


Command = Add | Abort | PinPrefix | Unpin | ClearCache | QueryStats | Shutdown


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded; `info` describes it (see `engine.worker.step.describe`)."""

    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The outputs of one step."""

    outputs: tuple[TokenOutput, ...]


@dataclass(frozen=True, slots=True)
class Stats:
    """The fields of `CacheStats`. `answer`: to a `QueryStats`, one each and in their order; else unasked."""

    values: dict[str, Any]
    answer: bool = False


@dataclass(frozen=True, slots=True)
class Pins:
    """Every pin, as dicts of `PinStatus`."""

    pins: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A command was refused: `code` as in `RequestRefused`, or `bad_message`, `step_failed`."""

    request_id: str | None
    message: str
    code: str


Report = Ready | Tokens | Stats | Pins | Failed

_PARAM_FIELDS = tuple(field.name for field in fields(SamplingParams))
_DEFAULTS = {name: getattr(SamplingParams(), name) for name in _PARAM_FIELDS}
_PARAM_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("max_tokens", "top_k", "min_tokens"), (int,)),
    **dict.fromkeys(("seed", "logprobs", "prompt_logprobs"), (int, type(None))),
    **dict.fromkeys(("temperature", "top_p", "min_p"), (int, float)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), (int, float)),
}
_PLAIN_COMMANDS: dict[type[object], str] = {ClearCache: "clear", QueryStats: "stats", Shutdown: "shutdown"}


def encode_command(command: Command) -> bytes:
    """Bytes for the step process."""
    message: list[Any]
    match command:
        case Add(request):
            message = ["add", _request_fields(request)]
        case Abort(request_id):
            message = ["abort", request_id]
        case PinPrefix(spec):
            fields_ = {"id": spec.pin_id, "seed": spec.seed, "ttl_s": spec.ttl_s, "tenant": spec.tenant}
            message = ["pin", {**fields_, "token_ids": token_bytes(spec.token_ids)}]
        case Unpin(pin_id):
            message = ["unpin", pin_id]
        case _:
            message = [_PLAIN_COMMANDS[type(command)]]
    return _pack(message)


def decode_command(data: bytes) -> Command:
    """Inverse of `encode_command`; WireError on anything else."""
    name, args = _unpack(data)
    plain: dict[str, Command] = {"clear": ClearCache(), "stats": QueryStats(), "shutdown": Shutdown()}
    if name in plain and not args:
        return plain[name]
    if len(args) != 1:
        raise WireError(f"unknown command {name!r} with {len(args)} fields")
    (value,) = args
    match name:
        case "add":
            return Add(_request(value))
        case "abort":
            return Abort(_text(value, "request id"))
        case "pin":
            return PinPrefix(_pin_spec(value))
        case "unpin":
            return Unpin(_text(value, "pin id"))
    raise WireError(f"unknown command {name!r}")


def encode_report(report: Report) -> bytes:
    """Bytes for the front process."""
    match report:
        case Tokens(outputs):
            return _pack(["tokens", [_row(output) for output in outputs]])
        case Ready(info):
            return _pack(["ready", info])
        case Stats(values, answer):
            return _pack(["stats", values, answer])
        case Pins(pins):
            return _pack(["pins", pins])
        case Failed(request_id, message, code):
            return _pack(["error", request_id, message, code])


def decode_report(data: bytes) -> Report:
    """Inverse of `encode_report`; WireError on anything else."""
    name, args = _unpack(data)
    try:
        match name:
            case "tokens":
                return Tokens(tuple(_output(row) for row in args[0]))
            case "ready":
                return Ready(dict(args[0]))
            case "stats":
                return Stats(dict(args[0]), bool(args[1]))
            case "pins":
                return Pins(tuple(dict(pin) for pin in args[0]))
            case "error":
                return Failed(args[0], str(args[1]), str(args[2]))
    except (IndexError, TypeError, ValueError) as error:
        raise WireError(f"malformed {name!r} report: {error}") from error
    raise WireError(f"unknown report {name!r}")


def _request_fields(request: Request) -> dict[str, Any]:
    params = {name: getattr(request.params, name) for name in _PARAM_FIELDS}
    params["stop_token_ids"] = sorted(request.params.stop_token_ids)
    return {
        "request_id": request.request_id,
        "token_ids": token_bytes(request.token_ids),
        "seed": request.seed,
        "params": params,
        "priority": request.priority,
        "tenant": request.tenant,
        "deadline_ms": request.deadline_ms,
    }


def _request(value: object) -> Request:
    if not isinstance(value, dict):
        raise WireError("an add command carries a map of request fields")
    request_id = value.get("request_id")
    known = request_id if isinstance(request_id, str) else None
    try:
        params = dict(value["params"])
        params["stop_token_ids"] = frozenset(params.get("stop_token_ids", ()))
        params["logit_bias"] = tuple((int(i), float(b)) for i, b in params.get("logit_bias", ()))
        for name, kinds in _PARAM_KINDS.items():
            if not isinstance(params.get(name, _DEFAULTS[name]), kinds):
                raise TypeError(f"{name} is {params[name]!r}")
        return Request(
            request_id=_text(request_id, "request id"),
            token_ids=_token_ids(value["token_ids"]),
            seed=_seed(value["seed"]),
            params=SamplingParams(**params),
            priority=int(value.get("priority", 2)),
            tenant=str(value.get("tenant", "")),
            deadline_ms=None if value.get("deadline_ms") is None else int(value["deadline_ms"]),
        )
    except KeyError as error:
        raise WireError(f"request field {error} is missing", known) from error
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"malformed request: {error}", known) from error


def _pin_spec(value: object) -> PinSpec:
    if not isinstance(value, dict):
        raise WireError("a pin command carries a map of pin fields")
    try:
        ttl_s = value.get("ttl_s")
        return PinSpec(
            pin_id=_text(value["id"], "pin id"),
            token_ids=_token_ids(value["token_ids"]),
            seed=_seed(value["seed"]),
            ttl_s=None if ttl_s is None else float(ttl_s),
            tenant=str(value.get("tenant", "")),
        )
    except KeyError as error:
        raise WireError(f"pin field {error} is missing") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"malformed pin: {error}") from error


def _token_ids(value: object) -> tuple[int, ...]:
    ids = array("i")
    if isinstance(value, bytes):
        ids.frombytes(value)
    elif isinstance(value, list):
        ids.extend(value)
    else:
        raise TypeError("token_ids must be int32 bytes or a list of integers")
    return tuple(ids)


def _seed(value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) != 16:
        raise ValueError("seed must be 16 bytes")
    return value


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise WireError(f"{what} must be a non-empty string, not {value!r}")
    return value


def _row(output: TokenOutput) -> list[Any]:
    first = output.first
    logprobs = None
    if output.logprob is not None or output.prompt_logprobs is not None:
        logprob, top = output.logprob or (None, ())
        logprobs = [logprob, top, output.prompt_logprobs]
    timings = None
    if first is not None:
        timings = [first.queue_s, first.prefill_s, first.cached_tokens, first.prefill_tokens]
    return [output.request_id, output.token_id, output.finish_reason, logprobs, timings, output.message]


def _output(row: list[Any]) -> TokenOutput:
    request_id, token_id, finish_reason, logprobs, timings, message = row
    logprob = prompt_logprobs = None
    if logprobs is not None:
        value, top, prompt = logprobs
        logprob = None if value is None else _scored(value, top)
        prompt_logprobs = (
            None if prompt is None else tuple(None if p is None else _scored(*p) for p in prompt)
        )
    first = None if timings is None else Timings(*timings)
    return TokenOutput(request_id, token_id, finish_reason, logprob, prompt_logprobs, first, message)


def _scored(logprob: float, top: list[list[Any]]) -> TokenLogprob:
    return TokenLogprob(logprob, tuple((int(i), float(value)) for i, value in top))


def _pack(message: list[Any]) -> bytes:
    packed: bytes = msgpack.packb(message, use_bin_type=True)
    return packed


def _unpack(data: bytes) -> tuple[str, list[Any]]:
    try:
        message = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"not a msgpack message: {error}") from error
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise WireError("a message is an array that starts with its name")
    return message[0], message[1:]
