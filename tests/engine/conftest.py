"""Fixtures of the engine's tests: a replica as a process of its own, on a free port."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import pytest

from engine.model.store import models_dir

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 60.0
SMALL_MODEL = models_dir() / "smollm2-135m-instruct" / "model.safetensors"
collect_ignore = [] if SMALL_MODEL.exists() else ["test_front_real_model.py"]


@dataclass(frozen=True, slots=True)
class Replica:
    """A running front and where it listens."""

    url: str
    process: subprocess.Popen[str]


StartReplica = Callable[..., contextlib.AbstractContextManager[Replica]]


@pytest.fixture(scope="session")
def start_replica() -> StartReplica:
    """`with start_replica("--fake", ...) as replica:` runs `python -m engine serve` with these options."""
    return _replica


@contextlib.contextmanager
def _replica(*options: str, wait: bool = True) -> Iterator[Replica]:
    """A replica with extra command line `options`, stopped at the end."""
    command = [
        sys.executable,
        "-m",
        "engine",
        "serve",
        "--port",
        "0",
        "--threads",
        "1",
        "--grace-s",
        "2",
        *options,
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=ROOT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found is not None, f"no address in {line!r}"
        if wait:
            _wait_healthy(found[0])
        yield Replica(found[0], process)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _wait_healthy(url: str) -> None:
    """Return when `/health` answers 200."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except URLError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} did not become healthy") from error
            if hasattr(error, "close"):
                error.close()
        time.sleep(0.05)
