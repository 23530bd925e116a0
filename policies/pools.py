"""Reads the sections `pools` and `models`.

Owns the checks of addresses: an upstream is an http(s) URL with a valid port and no credentials in it, an
event endpoint a ZeroMQ tcp or ipc address. Must always hold: every pool that is returned has a model and at
least one source of replicas, and every alias leads to a model that some pool serves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, cast, get_args
from urllib.parse import urlsplit

from policies.fields import Complaints, Fields, Item
from policies.model import Bundled, DialectName, Pool, Routing, Upstream
from policies.problems import did_you_mean, quoted
from policies.yaml_nodes import Mapping_, Scalar

DEFAULT_POOL = Pool(
    name="default",
    model="smollm2-135m-instruct",
    bundled=Bundled(replicas=2, model="smollm2-135m-instruct"),
)

_POOL_KEYS = ("model", "routing", "upstreams", "bundled")
_UPSTREAM_KEYS = ("url", "dialect", "api_key_env", "events", "events_replay")
_BUNDLED_KEYS = ("replicas", "model", "mode", "dtype", "threads", "kv_tokens", "max_seqs", "pin_budget")
_MAX_PIN_BUDGET = 0.9  # the engine's own bound
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}\Z")
_ENDPOINT = re.compile(r"(?:ipc://.+|tcp://(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\]):([0-9]{1,5}))\Z")


def read_pools(top: Fields) -> dict[str, Pool]:
    """All pools, or the built-in one when the section is missing."""
    if not top.has("pools"):
        return {DEFAULT_POOL.name: DEFAULT_POOL}
    pools = {name: _pool(top.complaints, name, item) for name, item in top.named("pools")}
    if not pools:
        top.fault("pools", "names no pool; leave the section away to get the built-in one")
    return pools


def read_models(top: Fields, pools: Mapping[str, Pool]) -> dict[str, str]:
    """Alias -> model of a pool."""
    item = top.item("models")
    if item is None:
        return {}
    reader = Fields(top.complaints, item, None)
    served = sorted({pool.model for pool in pools.values()})
    aliases: dict[str, str] = {}
    if isinstance(item.node, Mapping_):
        for entry in item.node.entries:
            alias = entry.key.text
            if not alias.strip() or ("*" in alias and alias != "*"):
                message = f"{quoted(alias)} is no alias: write a model's name, or * alone for any name"
                reader.complaints.add(entry.key, reader.path, message)
            target = reader.text(alias)
            if target and target not in served:
                message = f"no pool serves a model {quoted(target)}{did_you_mean(target, served)}"
                reader.fault(alias, message)
            aliases[alias] = target
    return aliases


def environment_name(fields: Fields, key: str) -> str | None:
    """The name of an environment variable. The value is not quoted: a key may stand there by mistake."""
    value = fields.text_or_none(key)
    if value is not None and not _VARIABLE.match(value):
        fields.fault(key, "must be the name of an environment variable, such as VLLM_API_KEY")
        return None
    return value


def _pool(complaints: Complaints, name: str, item: Item) -> Pool:
    fields = Fields(complaints, item, _POOL_KEYS)
    bundled_item = fields.item("bundled")
    bundled_fields = None if bundled_item is None else Fields(complaints, bundled_item, _BUNDLED_KEYS)
    bundled_model = "" if bundled_fields is None else bundled_fields.text("model")
    model = fields.text("model", bundled_model)
    if not model:
        fields.required("model")
    upstreams = [_upstream(complaints, each) for each in fields.items("upstreams")]
    seen: set[str] = set()
    for position, upstream in enumerate(upstreams):
        if upstream.url and upstream.url in seen:
            fields.fault("upstreams", f"upstream {position} has the same url as an earlier one of this pool")
        seen.add(upstream.url)
    if isinstance(fields.node, Mapping_) and not upstreams and bundled_fields is None:
        complaints.add(fields.node, fields.path, "needs `upstreams` or `bundled`: nothing serves this pool")
    return Pool(
        name=name,
        model=model,
        routing=cast(Routing, fields.choice("routing", get_args(Routing), "cost")),
        upstreams=tuple(upstreams),
        bundled=None if bundled_fields is None else _bundled(bundled_fields, bundled_model or model),
    )


def _bundled(fields: Fields, model: str) -> Bundled:
    pin_budget = fields.share("pin_budget", 0.5)
    if pin_budget > _MAX_PIN_BUDGET:
        fields.fault("pin_budget", f"may be {_MAX_PIN_BUDGET:.0%} at most, so that other prompts find room")
    return Bundled(
        replicas=fields.integer("replicas", 1, 1, 256),
        model=model,
        dtype=cast(Literal["auto", "fp32", "bf16"], fields.choice("dtype", ("auto", "fp32", "bf16"), "auto")),
        mode=cast(Literal["fast", "exact"], fields.choice("mode", ("fast", "exact"), "fast")),
        threads=fields.integer_or_none("threads", 1, 1024),
        kv_tokens=fields.integer_or_none("kv_tokens", 256, 1_000_000_000),
        max_seqs=fields.integer_or_none("max_seqs", 1, 65_536),
        pin_budget=pin_budget,
    )


def _upstream(complaints: Complaints, item: Item) -> Upstream:
    if isinstance(item.node, Scalar):
        message = "must be a mapping such as {url: http://10.0.0.5:8000, dialect: vllm}"
        complaints.add(item.node, item.path, message)
        return Upstream("")
    fields = Fields(complaints, item, _UPSTREAM_KEYS)
    fields.required("url")
    return Upstream(
        url=_url(fields),
        dialect=cast(DialectName, fields.choice("dialect", get_args(DialectName), "openai")),
        api_key_env=environment_name(fields, "api_key_env"),
        events=_endpoint(fields, "events"),
        events_replay=_endpoint(fields, "events_replay"),
    )


def _url(fields: Fields) -> str:
    """`scheme://host[:port][/path]` without a final slash or `/v1`; "" after a fault."""
    text = fields.text_or_none("url")
    if text is None:
        return ""
    fault = _url_fault(text)
    if fault:
        fields.fault("url", fault)
        return ""
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def _url_fault(text: str) -> str:
    if not text.isascii() or not text.isprintable() or " " in text:
        return "must be a plain ASCII URL without blanks"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return "has no valid port or host; a port is a number from 1 to 65535"
    if parts.scheme not in ("http", "https"):
        return "must begin with http:// or https://"
    if parts.username is not None or parts.password is not None:
        return "must not hold credentials; name their variable in api_key_env"
    if not parts.hostname or not _HOST.match(parts.hostname):
        return "has no valid host"
    if port == 0:
        return "has no valid port or host; a port is a number from 1 to 65535"
    if parts.query or parts.fragment or "?" in text or "#" in text:
        return "must end with the path; leave away everything from ? or # on"
    return ""


def _endpoint(fields: Fields, key: str) -> str | None:
    value = fields.text_or_none(key)
    if value is None:
        return None
    found = _ENDPOINT.match(value) if value.isprintable() else None
    if found is None or (found[1] is not None and not 1 <= int(found[1]) <= 65535):
        fields.fault(key, "must be a ZeroMQ endpoint such as tcp://10.0.0.5:5557 or ipc:///run/engine/events")
        return None
    return value
