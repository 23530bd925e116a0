"""Every setting of one replica, as one frozen value, and the environment its step process must start in.

The front process parses the command line into an `EngineConfig`, and hands it to the step process as JSON;
both read the same fields, so the two can never disagree. No torch here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

DType = Literal["auto", "fp32", "bf16"]
Mode = Literal["fast", "exact"]


class ConfigError(ValueError):
    """A setting is out of range or unknown; the text names it."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one replica. Sizes are in tokens, times in the unit that the name says.

    `kv_tokens` is the size of the paged KV pool; `max_step_tokens` caps one step (decodes and prefill chunk
    together), `target_step_ms` sizes the chunk below that cap while other sequences decode. `pin_budget`
    and `watermark` are shares of the pool. `context_length` None takes the model's. `events` is the
    endpoint of the KV-event publisher ("" turns it off), `events_replay` its replay socket ("" derives one
    from `events`).
    """

    model_dir: str = ""
    name: str = "r0"
    served_model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    dtype: DType = "auto"
    mode: Mode = "fast"
    threads: int = 1
    kv_tokens: int = 32_768
    block_size: int = 16
    max_seqs: int = 16
    max_step_tokens: int = 256
    target_step_ms: float = 200.0
    context_length: int | None = None
    watermark: float = 0.05
    pin_budget: float = 0.20
    queue_limit: int = 512
    expected_output: int = 256
    events: str = ""
    events_replay: str = ""
    runtime_dir: str = ""
    private: bool = False
    fake: bool = False
    fake_vocab_size: int = 1024
    fake_first_token: int = 0
    fake_context_length: int = 8192
    fake_prefill_tokens_per_s: float = 0.0
    fake_decode_ms: float = 0.0
    fake_mean_output: int = 0
    fake_eos_id: int = -1

    def __post_init__(self) -> None:
        self._require("threads", self.threads >= 1, "at least 1")
        self._require("block_size", self.block_size >= 1, "at least 1")
        self._require("max_seqs", self.max_seqs >= 1, "at least 1")
        self._require("kv_tokens", self.kv_tokens >= 4 * self.block_size, "at least four blocks")
        smallest_step = self.max_seqs + self.block_size
        self._require("max_step_tokens", self.max_step_tokens >= smallest_step, f"at least {smallest_step}")
        self._require("target_step_ms", self.target_step_ms > 0, "above 0")
        self._require("watermark", 0 <= self.watermark < 0.5, "in [0, 0.5)")
        self._require("pin_budget", 0 <= self.pin_budget <= 0.9, "in [0, 0.9]")
        self._require("queue_limit", self.queue_limit >= 1, "at least 1")
        self._require("dtype", self.dtype in ("auto", "fp32", "bf16"), "auto, fp32 or bf16")
        self._require("mode", self.mode in ("fast", "exact"), "fast or exact")

    def _require(self, field: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ConfigError(f"{field} is {getattr(self, field)!r}; it must be {wanted}")

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV pool, the size rounded up."""
        return -(-self.kv_tokens // self.block_size)

    @property
    def command_endpoint(self) -> str:
        """Socket between the front (binds) and the step process (connects)."""
        return f"ipc://{Path(self.runtime_dir) / f'{self.name}-step.sock'}"

    @property
    def replay_endpoint(self) -> str:
        """Where subscribers ask for missed KV events; "" when events are off."""
        if self.events_replay or not self.events:
            return self.events_replay
        if self.events.startswith("tcp://"):
            address, _, port = self.events.rpartition(":")
            return f"{address}:{int(port) + 1}"
        return f"{self.events}-replay"

    def to_json(self) -> str:
        """The form that the step process is started with."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        """Inverse of `to_json`; ConfigError names an unknown field."""
        values: dict[str, Any] = json.loads(text)
        unknown = sorted(values.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise ConfigError(f"unknown setting {', '.join(unknown)}")
        return cls(**values)


def step_environment(
    config: EngineConfig, base: Mapping[str, str] | None = None, flags: frozenset[str] | None = None
) -> dict[str, str]:
    """Environment for the step process: `base` (default: this process's) with what torch must find.

    `flags` are the CPU's (default: read from the system).

    Threads wait passively, so that several replicas can share a machine. `exact` pins MKL to one code path
    (AVX-512 where the CPU has it, else AVX2), so that a product never depends on alignment or batch shape.
    """
    threads = str(config.threads)
    env = dict(os.environ if base is None else base)
    env.update(
        OMP_NUM_THREADS=threads,
        MKL_NUM_THREADS=threads,
        OMP_WAIT_POLICY="PASSIVE",
        KMP_BLOCKTIME="0",
        OMP_DYNAMIC="FALSE",
        TOKENIZERS_PARALLELISM="false",
        PYTHONUNBUFFERED="1",
    )
    env.pop("MKL_CBWR", None)
    if config.mode == "exact":
        env["MKL_CBWR"] = (
            "AVX512,STRICT" if "avx512f" in (cpu_flags() if flags is None else flags) else "AVX2,STRICT"
        )
    return env


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Instruction-set flags of the first CPU; empty where the file does not exist."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()
