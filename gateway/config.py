"""Settings of one gateway process: listeners, limits, timeouts.

Owns `GatewayConfig`, a frozen value made once by the command line and never changed; what may change while
the process runs (routes, tenants, pools, rules) is in `policies.Policy` instead. Every time is in seconds,
every size in bytes.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from gateway.loopback import is_loopback


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """All settings, with the defaults that `warmfront serve` uses."""

    host: str = "127.0.0.1"
    port: int = 8080
    admin_host: str = "127.0.0.1"
    admin_port: int = 9090
    runtime_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "warmfront" / "run")
    """Sockets, kill switch and secret of this gateway; mode 0700."""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    """Keys the fence words and the replay memory; give the same one to every gateway of a fleet."""
    expose_headers: bool | None = None
    """Whether answers carry `x-warmfront-*`; None: exactly when `host` is a loopback address."""

    models_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "warmfront" / "models")
    """Where a bundled pool's model name is looked up; a model that is a path is taken as it is."""
    engine_command: tuple[str, ...] | None = None
    """How a bundled replica is started; None: `python -m engine serve` of this interpreter."""
    engine_arguments: tuple[str, ...] = ()

    max_body_bytes: int = 32 * 1024 * 1024
    body_timeout_s: float = 60.0
    client_keepalive_s: float = 75.0
    write_timeout_s: float = 30.0
    """How long a client may leave a full send buffer unread before its stream is cut."""
    drain_timeout_s: float = 10.0

    ping_interval_s: float = 5.0
    """Silence towards a streaming client, before its first data, after which `: ping` is sent; 0 turns
    it off.
    """
    commit_after_s: float = 5.0
    """A stream's status is decided by its first event; after this much silence 200 is committed
    regardless.
    """

    connect_timeout_s: float = 3.0
    upstream_idle_s: float = 600.0
    """Longest silence of an upstream, comments included, before the attempt counts as broken."""
    pool_idle_s: float = 4.0
    """Idle upstream connections are dropped after this; below the 5 s that common servers use."""
    max_response_bytes: int = 64 * 1024 * 1024
    max_attempts: int = 3
    retry_ratio: float = 0.2
    """Retries allowed per request on average, beside a burst of `retry_burst`."""
    retry_burst: float = 10.0

    default_slots: int = 256
    """Concurrent requests per replica when it does not report `max_seqs`."""
    inline_chars: int = 2048
    """Uncached text up to this length is tokenized on the event loop, longer text in a thread."""
    segment_cache_bytes: int = 64 * 1024 * 1024
    index_blocks: int = 1_000_000
    ledger_entries: int = 2000
    shadow_rate: float = 1.0
    """Share of conversations that the shadow index follows."""
    shadow_per_s: float = 200.0
    shadow_blocks: int = 200_000
    shadow_ttl_s: float = 3600.0
    poll_interval_s: float = 1.0
    memory_ttl_s: int = 24 * 3600
    bypass_limit: int = 5
    """Bypasses of one route within a minute that put it in `observe`."""

    @property
    def loopback(self) -> bool:
        """True when the data plane can be reached from this machine only."""
        return is_loopback(self.host)

    @property
    def headers_exposed(self) -> bool:
        """Whether answers carry the `x-warmfront-*` headers."""
        return self.loopback if self.expose_headers is None else self.expose_headers
