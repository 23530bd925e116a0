"""The OpenAI endpoints: chat completions, completions, models; and vLLM's tokenize and detokenize.

Owns the order of the checks: body, fields, model name, prompt, room. Always holds: a refused request has
touched nothing; streaming and whole answers come from the same generation; a client that goes away ends it
in both.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextvars import ContextVar

import orjson
from aiohttp import web

from engine.worker.front.errors import ApiError, invalid
from engine.worker.front.fields import text, token_ids, wrong_type
from engine.worker.front.generate import Generation, Prompt
from engine.worker.front.output import Piece
from engine.worker.front.prompts import required
from engine.worker.front.responses import Shape
from engine.worker.front.service import Service
from engine.worker.front.streaming import EventStream, with_pings
from engine.worker.front.validate import (
    ChatRequest,
    CompletionRequest,
    Options,
    chat_request,
    completion_request,
    parse_json,
)

REQUEST_ID: ContextVar[str] = ContextVar("request_id")
"""The id of the request that the current task answers."""
INLINE_LOGPROBS = 200
"""Answers with more log probability entries are encoded in a thread."""


class OpenAiApi:
    """Handlers over one `Service`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        """Each path, with `/v1` and without it where clients use both."""
        both = [
            ("POST", "/chat/completions", self.chat_completions),
            ("POST", "/completions", self.completions),
            ("GET", "/models", self.models),
            ("GET", "/models/{id:.+}", self.model),
        ]
        routes = [
            web.route(method, prefix + path, run) for method, path, run in both for prefix in ("/v1", "")
        ]
        return [
            *routes,
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
        ]

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        arrived_s = time.monotonic()
        service = self._service
        raw = await read_body(request, service.settings.body_timeout_s)
        asked = chat_request(parse_json(raw), service.vocab_rows, private=service.config.private)
        service.check_model(asked.options.model)
        ids = _given_ids(asked.options)
        if ids is None:
            ids = await self._render(asked, len(raw))
        return await self._answer(request, asked, [Prompt(ids)], "messages", arrived_s)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        arrived_s = time.monotonic()
        service = self._service
        raw = await read_body(request, service.settings.body_timeout_s)
        asked = completion_request(parse_json(raw), service.vocab_rows, private=service.config.private)
        service.check_model(asked.options.model)
        ids = _given_ids(asked.options)
        if ids is not None:
            prompts = [Prompt(ids, self._echo_of(ids, asked))]
        else:
            prompts = [await self._prompt(prompt, asked) for prompt in asked.prompts]
        return await self._answer(request, asked, prompts, "prompt", arrived_s)

    async def models(self, _request: web.Request) -> web.Response:
        """GET /v1/models."""
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{id}."""
        self._service.check_model(request.match_info["id"])
        return json_response(self._model_card())

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize: token ids of `prompt` (or `content`), or of rendered `messages`."""
        service = self._service
        raw = await read_body(request, service.settings.body_timeout_s)
        body = parse_json(raw)
        if body.get("model") is not None:
            service.check_model(text("model", body["model"], 0))
        if body.get("messages") is not None:
            asked = chat_request({"model": "", **body}, service.vocab_rows, private=False)
            ids = await self._render(asked, len(raw))
        else:
            given = body.get("prompt") if body.get("prompt") is not None else body.get("content")
            special = body.get("add_special_tokens")
            if special is not None and not isinstance(special, bool):
                raise wrong_type("add_special_tokens", "a boolean", special)
            plain = text("prompt", required(given, "prompt"), 0)
            ids = await service.prompts.text(plain, add_special=special is not False)
        return json_response({"count": len(ids), "max_model_len": service.capacity, "tokens": ids})

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize: the text of `tokens`."""
        service = self._service
        body = parse_json(await read_body(request, service.settings.body_timeout_s))
        ids = token_ids("tokens", required(body.get("tokens"), "tokens"), service.vocab_rows)
        plain = service.text.decode(list(ids))
        return json_response({"prompt": plain, "content": plain})

    def _model_card(self) -> dict[str, object]:
        service = self._service
        return {
            "id": service.config.served_model_name,
            "object": "model",
            "created": int(service.info.get("started", 0)),
            "owned_by": "warmfront",
            "max_model_len": service.capacity,
        }

    async def _render(self, asked: ChatRequest, body_bytes: int) -> tuple[int, ...]:
        return await self._service.prompts.chat(
            asked.messages,
            asked.tools,
            add_generation_prompt=asked.add_generation_prompt,
            body_bytes=body_bytes,
        )

    async def _prompt(self, prompt: str | tuple[int, ...], asked: CompletionRequest) -> Prompt:
        if isinstance(prompt, str):
            ids = await self._service.prompts.text(prompt, add_special=asked.add_special_tokens)
            return Prompt(ids, prompt)
        return Prompt(prompt, self._echo_of(prompt, asked))

    def _echo_of(self, ids: tuple[int, ...], asked: CompletionRequest) -> str:
        return self._service.text.decode(list(ids)) if asked.echo else ""

    async def _answer(
        self,
        request: web.Request,
        asked: ChatRequest | CompletionRequest,
        prompts: Sequence[Prompt],
        param: str,
        arrived_s: float,
    ) -> web.StreamResponse:
        service, options = self._service, asked.options
        chat = isinstance(asked, ChatRequest)
        echo = isinstance(asked, CompletionRequest) and asked.echo
        response_id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        shape = Shape(
            "chat" if chat else "completions",
            response_id=response_id,
            created=int(time.time()),
            model=options.model,
            fingerprint=f"fp_{str(service.info['fingerprint'])[:16]}",
            table=service.text,
            wants_logprobs=options.logprobs is not None,
            include_usage=options.include_usage,
            continuous_usage=options.continuous_usage,
            private=options.extension is not None,
            echoed=[prompt.text if echo else "" for prompt in prompts for _ in range(options.n)],
        )
        with service.generation(
            response_id, prompts, options, param, prompt_logprobs=echo and options.logprobs is not None
        ) as generation:
            if options.stream:
                return await self._stream(request, generation, shape, arrived_s)
            return await self._whole(generation, shape, arrived_s)

    async def _whole(self, generation: Generation, shape: Shape, arrived_s: float) -> web.Response:
        service = self._service
        pieces: list[list[Piece]] = [[] for _ in range(len(generation))]
        begun = False
        async for batch in generation.batches():
            if not begun:
                begun = True
                service.metrics.first_token(time.monotonic() - arrived_s)
            for index, piece in batch:
                pieces[index].append(piece)
        entries = [generation.prompt_entries[generation.prompt_of(index)] for index in range(len(generation))]
        usage = generation.usage()
        if sum(len(piece.entries) for parts in pieces for piece in parts) > INLINE_LOGPROBS:
            body = await service.in_thread(lambda: shape.body(pieces, entries, usage))
        else:
            body = shape.body(pieces, entries, usage)
        return web.Response(body=body, content_type="application/json")

    async def _stream(
        self, request: web.Request, generation: Generation, shape: Shape, arrived_s: float
    ) -> web.StreamResponse:
        settings = self._service.settings
        request_id = REQUEST_ID.get()
        events = EventStream(request, {"x-request-id": request_id}, write_timeout_s=settings.write_timeout_s)
        begun = False
        try:
            async for batch in with_pings(generation.batches(), events, settings.ping_s):
                if not begun:
                    begun = True
                    self._service.metrics.first_token(time.monotonic() - arrived_s)
                usage = generation.usage() if shape.continuous_usage else None
                await events.send_all(
                    shape.events(index, piece, generation.prompt_entries[generation.prompt_of(index)], usage)
                    for index, piece in batch
                )
            await events.send(shape.closing(generation.usage()))
        except ApiError as error:
            if not events.is_open:
                raise
            await events.send(error.event(request_id))
        return await events.finish()


def _given_ids(options: Options) -> tuple[int, ...] | None:
    return None if options.extension is None else options.extension.token_ids


def json_response(value: object, status: int = 200) -> web.Response:
    """A JSON body, encoded with orjson."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


async def read_body(request: web.Request, timeout_s: float) -> bytes:
    """The whole body; 413 over the limit, 408 when the client stalls."""
    limit = request.client_max_size
    if request.content_length is not None and request.content_length > limit:
        raise ApiError(413, f"The body is larger than {limit} bytes.", code="body_too_large")
    try:
        async with asyncio.timeout(timeout_s):
            raw = await request.read()
    except TimeoutError as error:
        raise ApiError(408, "The body did not arrive in time.", code="body_timeout") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise ApiError(413, f"The body is larger than {limit} bytes.", code="body_too_large") from error
    if not raw:
        raise invalid("body", "a JSON object is needed.", "invalid_json")
    return raw
