"""The application without processes: while loading, refusals of the step process, and unforeseen errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestClient, TestServer

from engine.config import EngineConfig
from engine.core.request import Request
from engine.worker.front.app import build_app
from engine.worker.front.errors import ApiError
from engine.worker.front.inbox import Inbox
from engine.worker.front.service import FrontSettings, Service
from engine.worker.front.step_client import refusal
from engine.worker.front.text_files import ModelFilesError, load_text_model

INFO = {"context_length": 512, "vocab_size": 258, "fingerprint": "f", "eos_ids": [1], "started": 0}
ASK = {"model": "m", "prompt": "x"}


class RefusingClient:
    """Stands in for the step process; every request fails with `error`."""

    def __init__(self) -> None:
        self.info: dict[str, Any] | None = None
        self.ready = asyncio.Event()
        self.failed = asyncio.Event()
        self.error: Exception = refusal("queue_full", "too many")

    def submit(self, inbox: Inbox, index: int, request: Request) -> None:
        if isinstance(self.error, ApiError):
            inbox.fail(self.error)
        else:
            raise self.error

    def silence_s(self) -> float:
        return 0.0

    def abort(self, request_id: str) -> None:
        """Nothing runs."""

    def load(self) -> None:
        self.info = INFO
        self.ready.set()


@pytest_asyncio.fixture
async def step() -> RefusingClient:
    return RefusingClient()


@pytest_asyncio.fixture
async def service(step: RefusingClient) -> AsyncIterator[Service]:
    with ThreadPoolExecutor(1) as executor:
        client: Any = step
        yield Service(EngineConfig(served_model_name="m"), FrontSettings(), client, executor)


@pytest_asyncio.fixture
async def http(service: Service) -> AsyncIterator[TestClient[Any, Any]]:
    async with TestClient(TestServer(build_app(service))) as client:
        yield client


async def test_while_loading_everything_is_503(
    http: TestClient[Any, Any], service: Service, step: RefusingClient
) -> None:
    for path in ("/v1/models", "/engine/info", "/engine/cache"):
        async with http.get(path) as response:
            body = await response.json()
        assert (response.status, body["error"]["code"]) == (503, "model_loading")
        assert response.headers["Retry-After"] == "1"
    async with http.post("/v1/completions", json=ASK) as response:
        assert response.status == 503
    async with http.get("/health") as response:
        assert (response.status, await response.json()) == (503, {"status": "loading"})
    async with http.get("/metrics") as response:
        assert response.status == 200
    service.set_text_model(load_text_model(""))
    async with http.get("/health") as response:
        assert response.status == 503
    step.load()
    async with http.get("/health") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})
    step.ready.clear()
    step.failed.set()
    async with http.get("/health") as response:
        assert (response.status, await response.json()) == (503, {"status": "failed"})
    async with http.post("/v1/completions", json=ASK) as response:
        assert (await response.json())["error"]["code"] == "engine_stopped"


@pytest.mark.parametrize(("warm_up_s", "limit_s"), [(0.0, 10.0), (1.0, 10.0), (5.0, 20.0), (100.0, 60.0)])
def test_slow_steps_stretch_the_silence_that_is_taken_for_a_stall(
    service: Service, step: RefusingClient, warm_up_s: float, limit_s: float
) -> None:
    step.info = {**INFO, "warm_up_s": warm_up_s}
    assert service.stall_limit_s == limit_s


@pytest.mark.parametrize(
    ("code", "status"),
    [("queue_full", 429), ("deadline_exceeded", 504), ("step_failed", 500), ("context_length_exceeded", 400)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_of_the_step_process_keep_their_status(
    http: TestClient[Any, Any], service: Service, step: RefusingClient, code: str, status: int, stream: bool
) -> None:
    service.set_text_model(load_text_model(""))
    step.load()
    step.error = refusal(code, "no")
    async with http.post("/v1/completions", json={**ASK, "stream": stream}) as response:
        body = await response.json()
    assert (response.status, body["error"]["code"], body["error"]["message"]) == (status, code, "no")
    assert service.streams == 0
    assert service.idle.is_set()


async def test_an_unforeseen_error_shows_no_internals(
    http: TestClient[Any, Any], service: Service, step: RefusingClient
) -> None:
    service.set_text_model(load_text_model(""))
    step.load()
    step.error = KeyError("secret")
    async with http.post("/v1/completions", json=ASK) as response:
        text = await response.text()
    assert response.status == 500
    assert "secret" not in text
    assert "internal_error" in text


def test_missing_and_broken_model_files_are_named(tmp_path: Any) -> None:
    with pytest.raises(ModelFilesError, match="tokenizer.json"):
        load_text_model(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelFilesError, match="tokenizer_config.json"):
        load_text_model(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelFilesError, match="not a JSON object"):
        load_text_model(str(tmp_path))
