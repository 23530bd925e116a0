"""Endpoints for the gateway and for people: health, metrics, the engine's description, cache and pins.

Owns their bodies. Always holds: `/health` is 200 only when a request would be served; figures are the step
process's own, asked for at that moment, and say how old they are when it does not answer.
"""

from __future__ import annotations

import math
import os
from typing import Any

from aiohttp import web

from engine.core.pins import PinSpec
from engine.worker.front.errors import ApiError, invalid
from engine.worker.front.fields import number, text, token_ids
from engine.worker.front.openai_api import json_response, read_body
from engine.worker.front.prompts import required
from engine.worker.front.service import Service
from engine.worker.front.validate import chain_seed_bytes, parse_json

MAX_TTL_S = 10 * 365 * 86_400.0
FRESH_S = 1.0  # how long a probe waits for fresh figures


class AdminApi:
    """Handlers over one `Service`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        """The paths under `/engine`, and health and metrics."""
        return [
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
            web.get("/engine/info", self.info),
            web.get("/engine/cache", self.cache),
            web.post("/engine/cache/clear", self.clear_cache),
            web.get("/engine/pins", self.pins),
            web.post("/engine/pins", self.pin),
            web.delete("/engine/pins/{id:.+}", self.unpin),
        ]

    async def health(self, _request: web.Request) -> web.Response:
        """GET /health."""
        state = await self._state()
        return json_response({"status": state}, status=200 if state == "ok" else 503)

    async def _state(self) -> str:
        service, client = self._service, self._service.client
        if client.failed.is_set():
            return "failed"
        if not service.is_ready:
            return "loading"
        if service.is_stalled:
            await client.recent_stats(FRESH_S)  # it may have been this process that was stopped
        return "stalled" if service.is_stalled else "ok"

    async def metrics(self, _request: web.Request) -> web.Response:
        """GET /metrics, in Prometheus' text format."""
        service = self._service
        stats = await self._figures() if service.is_ready else {}
        return web.Response(
            body=service.metrics.exposition(stats),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def info(self, _request: web.Request) -> web.Response:
        """GET /engine/info."""
        service = self._service
        config, info = service.config, service.info
        return json_response(
            {
                **info,
                "model": config.served_model_name,
                "name": config.name,
                "text_fingerprint": service.text.fingerprint_parts,
                "context_length": service.capacity,
                "mode": config.mode,
                "threads": config.threads,
                "model_dir": config.model_dir,
                "events": config.events,
                "events_replay": config.replay_endpoint,
                "pid": os.getpid(),
            }
        )

    async def cache(self, _request: web.Request) -> web.Response:
        """GET /engine/cache: answered in about a second at most, whatever the step process does."""
        figures = self._cache(await self._figures())
        return json_response({**figures, "stalled": self._service.is_stalled})

    async def clear_cache(self, _request: web.Request) -> web.Response:
        """POST /engine/cache/clear: drop every cached block, pins excepted."""
        _ = self._service.info
        return json_response(self._cache(await self._service.client.clear_cache()))

    async def pins(self, _request: web.Request) -> web.Response:
        """GET /engine/pins."""
        stats = await self._ready_stats()
        return json_response(
            {
                "pins": self._service.client.pins,
                "budget_blocks": stats.get("pin_budget", 0),
                "pinned_blocks": stats.get("pinned", 0),
            }
        )

    async def pin(self, request: web.Request) -> web.Response:
        """POST /engine/pins: keep a token prefix resident."""
        service = self._service
        body = parse_json(await read_body(request, service.settings.body_timeout_s))
        pin_id = text("id", required(body.get("id"), "id"), 0)
        if not pin_id or "/" in pin_id or len(pin_id) > 200:
            raise invalid("id", "must have 1 to 200 characters and no '/'.")
        ids = token_ids("token_ids", required(body.get("token_ids"), "token_ids"), service.vocab_rows)
        if len(ids) > service.capacity:
            raise ApiError(
                400,
                f"The pin has {len(ids)} tokens and this replica holds {service.capacity} at most: the"
                " model's context, or what the KV pool holds of it.",
                param="token_ids",
                code="context_length_exceeded",
            )
        ttl_s = body.get("ttl_s")
        spec = PinSpec(
            pin_id=pin_id,
            token_ids=ids,
            seed=chain_seed_bytes("seed", text("seed", required(body.get("seed"), "seed"), 0)),
            ttl_s=None if ttl_s is None else number(math.ulp(0.0), MAX_TTL_S)("ttl_s", ttl_s, 0),
            tenant=text("tenant", body.get("tenant") or "", 0),
        )
        pins = await service.client.pin(spec)
        return json_response(_by_id(pins, pin_id) or {"id": pin_id, "state": "over_budget"})

    async def unpin(self, request: web.Request) -> web.Response:
        """DELETE /engine/pins/{id}."""
        pin_id = request.match_info["id"]
        _ = self._service.info
        if _by_id(self._service.client.pins, pin_id) is None:
            raise ApiError(404, f"There is no pin '{pin_id[:200]}'.", param="id", code="pin_not_found")
        await self._service.client.unpin(pin_id)
        return json_response({"id": pin_id, "state": "released"})

    async def _ready_stats(self) -> dict[str, Any]:
        _ = self._service.info
        return await self._service.client.query_stats()

    async def _figures(self) -> dict[str, Any]:
        """Stats that are fresh, or the last ones; and how long ago the step process said anything."""
        _ = self._service.info
        client = self._service.client
        return {**await client.recent_stats(FRESH_S), "step_age_s": round(client.silence_s(), 3)}

    def _cache(self, stats: dict[str, Any]) -> dict[str, Any]:
        return {**stats, "streams": self._service.streams}


def _by_id(pins: tuple[dict[str, Any], ...], pin_id: str) -> dict[str, Any] | None:
    return next((pin for pin in pins if pin.get("id") == pin_id), None)
