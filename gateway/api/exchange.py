"""One completion request, from its first byte to its ledger entry.

Owns the order of the steps (DESIGN section 2): accept, identify, route, canonicalize, tokenize and hash,
admit, choose, forward, account. Always holds: every request that got as far as a handler leaves exactly one
ledger entry; a slot, a dispatch and an upstream connection are given back on every path, cancellation (the
client is gone) included; another replica is tried only while nothing of an answer has reached the client,
and never the same one twice.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import orjson
from aiohttp import web

from gateway import errors
from gateway.api.accept import check_site, read_body, request_id_of, traceparent_of
from gateway.api.account import Seen, reported_timings, split_ttft, take_usage
from gateway.api.body import Kind, ParsedBody, parse_body
from gateway.api.plan import Plan
from gateway.api.relay import AttemptFailed, Relay, StalledClient, refusal
from gateway.api.services import Services
from gateway.canon.service import CanonOutcome
from gateway.canon.text import PoolText, PromptChain
from gateway.errors import ApiError
from gateway.identity import cache_scope, identify
from gateway.routing.router import Decision, Dispatch, NoReplica, RouteQuery
from gateway.telemetry.ledger import LedgerEntry
from gateway.telemetry.metrics import PARTS
from gateway.telemetry.shadow import ShadowItem
from gateway.upstream.client import Call, UpstreamBroken
from gateway.upstream.dialects import (
    DIALECTS,
    Outgoing,
    Usage,
    refuses_priority,
    upstream_body,
    upstream_headers,
)
from policies import Policy, Route, Tenant

UNORDERED = "no_priority"
"""Reason of an attempt that the same replica gets once more, without a priority."""
_PATHS: dict[Kind, str] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
_ACCEPT, _CANON, _TOKENIZE, _QUEUE, _CONNECT = (
    PARTS.index(name) for name in ("accept", "canonicalize", "tokenize", "gateway_queue", "connect")
)


class Exchange:
    """One request; `run` gives its response and records it."""

    def __init__(self, services: Services, request: web.BaseRequest, kind: Kind) -> None:
        self._services = services
        self._request = request
        self._kind = kind
        self._started = time.perf_counter()
        self._policy: Policy = services.policy
        self._relay: Relay | None = None
        self._decision: Decision | None = None
        self._first_read_at = 0.0
        self._first_sent_at = 0.0
        self._sent_at = 0.0
        self._usage: Usage | None = None
        self._plan: Plan | None = None
        self.entry = LedgerEntry(
            request_id_of(request.headers), time.time(), _PATHS[kind], policy=self._policy.version
        )

    async def run(self) -> web.StreamResponse:
        """Serve the request; raises only CancelledError."""
        entry = self.entry
        entry.outcome = "internal"
        entry.status = 500
        try:
            response = await self._serve()
            entry.status = response.status
            return response
        except ApiError as error:
            entry.status = error.status
            entry.outcome = "refused" if error.status < 500 or error.status == 503 else "upstream_error"
            return await self._answer_error(error)
        except (asyncio.CancelledError, ConnectionResetError):
            entry.status, entry.outcome = 499, "client_gone"
            raise
        except StalledClient:
            entry.status, entry.outcome = 499, "stalled_client"
            raise ConnectionResetError("the client stalled") from None
        except Exception as error:
            entry.error = type(error).__name__
            return await self._answer_error(errors.internal())
        finally:
            self._account()

    # --- before a replica is chosen -------------------------------------------------------------------------

    async def _serve(self) -> web.StreamResponse:
        services, entry, policy = self._services, self.entry, self._policy
        headers = self._request.headers
        if services.draining:
            raise errors.draining()
        tenant = identify(policy, headers)
        if tenant is None:
            check_site(headers, services.config.host)
        else:
            entry.tenant = tenant.name
        limit = min(services.config.max_body_bytes, policy.limits.body_bytes)
        raw = await read_body(self._request, limit, services.config.body_timeout_s)
        parsed = parse_body(self._kind, raw)
        entry.stream = parsed.stream
        route = self._route(tenant, parsed.model)
        served = policy.model_for(parsed.model, route.pool)
        if served is None:
            raise errors.model_not_found(parsed.model)
        class_ = policy.class_for(tenant, route, headers.get("x-warmfront-class"))
        entry.route, entry.class_, entry.pool, entry.model = route.name, class_.name, route.pool, served
        accepted = time.perf_counter()
        entry.parts[_ACCEPT] = accepted - self._started

        who = entry.tenant or ""
        canon = self._canonicalize(route, who, parsed)
        canonicalized = time.perf_counter()
        entry.parts[_CANON] = canonicalized - accepted
        text = services.texts.get(route.pool) or PoolText(None, f"text:{served}", 16, None)
        canon, chain = await self._chain(tenant, route, text, parsed, canon)
        tokenized = time.perf_counter()
        entry.parts[_TOKENIZE] = tokenized - canonicalized
        entry.chain, entry.prompt_tokens = chain.form, chain.count
        entry.canon, entry.ruleset, entry.bypass = canon.mode, canon.ruleset, canon.bypass
        entry.edits = len(canon.edits)
        plan = self._plan = Plan(tenant, route, class_, parsed, canon, text, chain)

        if not services.pools[route.pool].ready():
            raise errors.no_replica()
        ticket = await services.gates[route.pool].admit(class_.name)
        try:
            admitted = time.perf_counter()
            entry.parts[_QUEUE] = admitted - tokenized
            services.retries.request()
            return await self._attempts(plan, admitted)
        finally:
            ticket.release()

    def _route(self, tenant: Tenant | None, model: str) -> Route:
        policy = self._policy
        route = policy.route_for(tenant, _PATHS[self._kind], model, self._request.headers)
        if route is not None:
            return route
        if all(policy.model_for(model, pool) is None for pool in policy.pools):
            raise errors.model_not_found(model)
        raise errors.no_route()

    def _canonicalize(self, route: Route, tenant: str, parsed: ParsedBody) -> CanonOutcome:
        services = self._services
        if self._kind != "chat":
            return CanonOutcome("off", "", parsed.raw, [], parsed.body)
        services.learning.offer(route, tenant, parsed.messages)
        asked = self._request.headers.get("x-warmfront-canon")
        return services.canon.canonicalize(route, tenant, parsed.raw, parsed.body, parsed.messages, asked)

    async def _chain(
        self, tenant: Tenant | None, route: Route, text: PoolText, parsed: ParsedBody, canon: CanonOutcome
    ) -> tuple[CanonOutcome, PromptChain]:
        """Hash the prompt; where only the edits made it too long, the original is what will be sent."""
        models = self._services.text_models
        seed = text.seed(cache_scope(tenant, parsed.cache_salt))
        if self._kind == "completion":
            add_special = parsed.body.get("add_special_tokens") is not False
            chain = await models.completion_chain(text, seed, parsed.body["prompt"], add_special=add_special)
        else:
            chain = await models.chat_chain(text, seed, canon.messages, canon.body)
        limit = text.context_length
        if limit is None or chain.tokens is None or chain.count < limit:
            return canon, chain
        if canon.raw is not parsed.raw:
            original = await models.chat_chain(text, seed, parsed.messages, parsed.body)
            if original.count < limit:
                self._services.canon.count_bypass(route.name, "context")
                canon = replace(
                    canon,
                    raw=parsed.raw,
                    messages=parsed.messages,
                    body=parsed.body,
                    other=None,
                    bypass="context",
                )
                return canon, original
            chain = original
        raise errors.context_length_exceeded(
            chain.count, limit, "messages" if self._kind == "chat" else "prompt"
        )

    # --- attempts -------------------------------------------------------------------------------------------

    async def _attempts(self, plan: Plan, admitted: float) -> web.StreamResponse:
        services, entry = self._services, self.entry
        parsed = plan.parsed
        max_tokens = parsed.max_tokens
        if max_tokens is None:
            max_tokens = self._policy.limits.default_max_tokens
        query = RouteQuery(
            plan.chain.count, plan.chain.hashes, plan.chain.block_size, plan.class_.rank, max_tokens
        )
        pool = services.pools[plan.route.pool]
        tried: frozenset[str] = frozenset()
        failure: AttemptFailed | None = None
        while True:
            try:
                decision = self._decision = services.router.choose(pool, query, tried)
            except NoReplica:
                return await self._give_up(failure.error if failure is not None else errors.no_replica())
            replica = decision.replica
            if not tried:
                entry.available_tokens = decision.available_tokens
                entry.candidates = decision.candidates
            entry.captured_tokens = decision.captured_tokens
            entry.replica = replica.id
            entry.attempts += 1
            with services.router.dispatch(decision, query) as dispatch:
                try:
                    return await self._attempt(plan, decision, dispatch, admitted)
                except AttemptFailed as failed:
                    failure = failed
                    dispatch.finish("retried" if failed.retriable else "error")
            if failure.reason == UNORDERED:
                continue
            if failure.refused:
                replica.mark_down("connection refused")
            tried |= {replica.id}
            may_retry = failure.retriable and entry.attempts < services.config.max_attempts
            if not (may_retry and pool.ready(tried) and services.retries.take()):
                return await self._give_up(failure.error)
            services.metrics.retries.labels(failure.reason).inc()

    async def _attempt(
        self, plan: Plan, decision: Decision, dispatch: Dispatch, admitted: float
    ) -> web.StreamResponse:
        services, entry = self._services, self.entry
        replica = decision.replica
        dialect = DIALECTS[replica.dialect]
        parsed, limits = plan.parsed, self._policy.limits
        outgoing = Outgoing(
            raw=plan.canon.raw,
            body=parsed.body,
            stream=parsed.stream,
            asked_usage=parsed.include_usage,
            tokens=plan.chain.tokens if self._kind == "chat" else None,
            seed=plan.chain.seed,
            priority=plan.class_.rank,
            deadline_ms=None,
            request_id=entry.request_id,
            ordered=services.unordered.get(replica.id) != replica.epoch,
            output_cap=limits.default_max_tokens
            if self._kind == "chat" and parsed.max_tokens is None
            else None,
        )
        body = upstream_body(dialect, outgoing, replica.model)
        head = upstream_headers(replica.api_key, entry.request_id, traceparent_of(self._request.headers))
        call = services.client.call(services.origin(replica.base_url), "POST", entry.path, head, body)
        try:
            with services.live.watching(replica, call):
                await call.start()
                entry.parts[_CONNECT] = call.sent_at - admitted
                self._sent_at = call.sent_at
                answer = self._stream if parsed.stream else self._whole
                return await answer(call, plan, dispatch)
        except AttemptFailed as failed:
            error = failed.error
            if not (outgoing.ordered and refuses_priority(dialect, error.status, error.message)):
                raise
            services.unordered[replica.id] = replica.epoch
            raise AttemptFailed(UNORDERED, error) from None
        except UpstreamBroken as broken:
            failure = errors.upstream_failed("The upstream failed before it answered.")
            raise AttemptFailed("broken", failure, refused=broken.refused) from None
        finally:
            call.release()

    async def _stream(self, call: Call, plan: Plan, dispatch: Dispatch) -> web.StreamResponse:
        relay = self._relay
        if relay is None:
            relay = self._relay = Relay(
                self._request,
                self._services.config,
                self._headers(plan),
                request_id=self.entry.request_id,
                show_usage=plan.parsed.include_usage,
                choices=plan.parsed.choices,
            )
        elif relay.response is None:
            relay.headers = self._headers(plan)  # another replica answers now
        try:
            self.entry.outcome = await relay.run(call, dispatch.first_token)
        finally:
            self._usage = relay.reader.usage
            self._first_read_at, self._first_sent_at = relay.first_read_at, relay.first_sent_at
        usage = relay.reader.usage
        dispatch.finish("ok" if self.entry.outcome == "ok" else "error", reported_timings(usage))
        self.entry.counted = relay.reader.content
        assert relay.response is not None
        return relay.response

    async def _whole(self, call: Call, plan: Plan, dispatch: Dispatch) -> web.StreamResponse:
        config = self._services.config
        if not await call.head(config.upstream_idle_s):
            raise UpstreamBroken("the upstream was silent for too long")
        body = await call.read(config.max_response_bytes, config.upstream_idle_s)
        if call.status != 200:
            raise refusal(call.status, body)
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise AttemptFailed("malformed", errors.upstream_failed("The upstream did not answer with JSON."))
        if answer.get("error"):
            raise refusal(502, body)
        usage = self._usage = Usage.read(answer)
        dispatch.finish("ok", reported_timings(usage))
        if answer.pop("warmfront", None) is not None:
            body = orjson.dumps(answer)
        self.entry.outcome = "ok"
        self.entry.counted = True
        headers = self._headers(plan)
        headers["Content-Type"] = "application/json"
        return web.Response(body=body, headers=headers)

    # --- answers and accounts -------------------------------------------------------------------------------

    def _headers(self, plan: Plan | None) -> dict[str, str]:
        entry = self.entry
        headers = {"x-request-id": entry.request_id}
        if plan is not None and self._services.config.headers_exposed:
            if entry.replica:
                headers["x-warmfront-replica"] = entry.replica
            headers["x-warmfront-class"] = entry.class_
            headers["x-warmfront-route"] = entry.route
            headers["x-warmfront-policy"] = self._policy.version
            headers["x-warmfront-canon"] = plan.canon.header
        return headers

    async def _give_up(self, error: ApiError) -> web.StreamResponse:
        """The last attempt failed: an HTTP error, or an in-band one where 200 is committed."""
        relay = self._relay
        if relay is None or relay.response is None:
            raise error
        self.entry.outcome, self.entry.error = "upstream_error", error.code
        await relay.fail(error)
        return relay.response

    async def _answer_error(self, error: ApiError) -> web.StreamResponse:
        entry = self.entry
        entry.error = entry.error or error.code
        relay = self._relay
        if relay is not None and relay.response is not None:
            await relay.fail(error)
            return relay.response
        headers = {**self._headers(self._plan), **error.headers, "Content-Type": "application/json"}
        return web.Response(status=error.status, body=error.body(entry.request_id), headers=headers)

    def _account(self) -> None:
        entry, usage, plan, services = self.entry, self._usage, self._plan, self._services
        entry.total_s = time.perf_counter() - self._started
        if plan is not None and usage is not None and take_usage(entry, usage, self._expected_tokens(plan)):
            services.metrics.template_mismatch.labels(entry.pool).inc()
        if entry.counted:
            seen = Seen(self._started, self._sent_at, self._first_read_at, self._first_sent_at)
            split_ttft(entry, usage, seen)
            if plan is not None and self._kind == "chat":
                canon = plan.canon
                services.prefixes.note(entry, plan.text, plan.chain, canon.messages, canon.body.get("tools"))
        services.ledger.record(entry)
        if entry.counted and plan is not None and usage is not None and entry.outcome == "ok":
            self._follow(plan)

    def _expected_tokens(self, plan: Plan) -> int | None:
        """What the engine must count as prompt tokens; None where the gateway can only estimate it."""
        return plan.chain.count if plan.chain.tokens is not None and self._kind == "chat" else None

    def _follow(self, plan: Plan) -> None:
        canon = plan.canon
        if self._kind != "chat" or canon.mode == "off" or self._decision is None:
            return
        blocks = self._decision.replica.info.get("num_blocks")
        item = ShadowItem(
            entry=self.entry,
            seed=plan.chain.seed,
            messages=canon.messages if canon.other is None else canon.other,
            tools=plan.parsed.body.get("tools"),
            capacity=blocks if isinstance(blocks, int) else None,
            enforced=canon.mode == "enforce" and canon.bypass is None,
            same=canon.other is None,
        )
        self._services.shadow.offer(item)
