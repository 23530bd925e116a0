"""Commands to paste: a first request, and how to change a route's mode.

Always holds: a line printed here works as it stands from any folder and in any POSIX shell, quotes included;
no line holds a key, only the name of what holds one.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import orjson

from policies import Policy
from policies.yaml_nodes import parse, plain

_CHAT = "/v1/chat/completions"
_USUAL_ADMIN = "http://127.0.0.1:9090"


def program() -> str:
    """How this installation's command is called from a shell: by name where the name finds it."""
    own = Path(sys.executable).parent / "warmfront"
    if not own.exists():
        return f"{shlex.quote(sys.executable)} -m gateway"
    found = shutil.which("warmfront")
    return "warmfront" if found and Path(found).absolute() == own else shlex.quote(str(own))


def switch_command(route: str, mode: str, *, path: Path | None, admin_url: str) -> str:
    """The command that puts a route in another mode; `path` is the policy file, where there is one."""
    words = [program(), "policy", mode, shlex.quote(route)]
    if path is not None:
        words += ["--policy", shlex.quote(str(path))]
    if admin_url != _USUAL_ADMIN:
        words += ["--admin", admin_url]
    return " ".join(words)


def canon_on_command(route: str | None, *, admin_url: str) -> str:
    """The command that lifts the kill switch, of one route or (None) entirely."""
    words = [program(), "canon", "on"]
    if route is not None:
        words += ["--route", shlex.quote(route)]
    if admin_url != _USUAL_ADMIN:
        words += ["--admin", admin_url]
    return " ".join(words)


def first_request(policy: Policy, text: str, base_url: str) -> str:
    """A curl command for a streamed chat that the policy lets through; it asks for the key where one is
    needed and no environment variable holds it. `base_url` ends in `/v1`; `text` is the policy's YAML.
    """
    tenant, model = _caller(policy)
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    command = f"curl -N {base_url}/chat/completions -H 'Content-Type: application/json'"
    if tenant is not None:
        variable = _key_variable(text, tenant)
        if variable is None:
            command = f"printf 'key of tenant {tenant}: '; read -r KEY; {command}"
        command += f' -H "Authorization: Bearer ${variable or "KEY"}"'
    return f"{command} -d {shlex.quote(orjson.dumps(body).decode())}"


def _caller(policy: Policy) -> tuple[str | None, str]:
    """A tenant (None where there are none) and a model name that some route serves a plain chat of."""
    callers: list[str | None] = [name for name, tenant in policy.tenants.items() if tenant.key_hashes] or [
        *policy.tenants
    ]
    models = [
        *(pool.model for pool in policy.pools.values()),
        *(name for name in policy.models if name != "*"),
    ]
    if not callers:
        callers = [None]
    for tenant in callers:
        for model in models:
            route = policy.route_for(tenant, _CHAT, model, {})
            if route is not None and policy.model_for(model, route.pool) is not None:
                return tenant, model
    return callers[0], models[0]


def _key_variable(text: str, tenant: str) -> str | None:
    """The environment variable that holds a key of the tenant, if its policy names one."""
    tenants = plain(parse(text)).get("tenants")
    item = tenants.get(tenant) if isinstance(tenants, dict) else None
    keys = item.get("keys") if isinstance(item, dict) else None
    named = [key["env"] for key in keys or () if isinstance(key, dict) and isinstance(key.get("env"), str)]
    return named[0] if named else None
