"""Middleware before all endpoints: assigns request ids, checks hosts and API keys, and turns errors into responses."""

from __future__ import annotations

import hmac
import re
import time
import uuid
from typing import Final

from attrs import frozen
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_sdk.server.chat_page import PAGE_PATHS
from paged_sdk.server.disconnect import CLIENT_DISCONNECTED
from paged_sdk.server.drain import Drain
from paged_sdk.server.errors import path_of, problem_for, problem_response
from paged_sdk.server.metrics import Metrics
from paged_sdk.server.record import RequestRecord
from paged_sdk.server.settings import ServerSettings
from paged_sdk.wire.problem import Problem

__all__ = ["RequestMiddleware"]

OPEN_PATHS: Final = ("/health", "/ready")
"""Health checks: answered without an API key, and while the server shuts down."""

_REQUEST_ID: Final = re.compile(r"[\w.:-]{1,128}", re.ASCII)


@frozen
class RequestMiddleware:
    """Wraps an application as ASGI middleware.

    :ivar app: the wrapped application
    """

    app: ASGIApp
    settings: ServerSettings
    drain: Drain
    metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        record = RequestRecord.begin(scope, request_id)
        start, status = time.monotonic(), 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        async def refuse(problem: Problem) -> None:
            record.error = problem.code or problem.type
            await problem_response(scope, problem)(scope, receive, send_named)

        try:
            with self.drain.counted():
                try:
                    problem = self._refusal(path_of(scope), headers)
                    if problem is None:
                        await self.app(scope, receive, send_named)
                    else:
                        await refuse(problem)
                except Exception as error:
                    problem = problem_for(error, request_id, record.names)
                    if status:  # the response has begun: its status can no longer change
                        record.error = problem.code or problem.type
                        raise
                    await refuse(problem)
            if not status and self.drain.is_over:
                await refuse(self.drain.interruption)
        finally:
            seconds = time.monotonic() - start
            status = status or CLIENT_DISCONNECTED
            route = _path_of_route(scope)
            self.metrics.note_request(route, status, seconds)
            record.log(route, status, seconds)

    def _refusal(self, path: str, headers: Headers) -> Problem | None:
        """Return why a request is refused before its endpoint runs; None: it is not."""
        hosts = self.settings.allowed_hosts
        host = headers.get("host", "")
        if hosts and _host_name(host) not in hosts:
            return Problem(status=400, message=f"host not allowed: {host[:100]!r}", code="host_not_allowed")
        if path in OPEN_PATHS:
            return None
        if self.drain.has_begun:
            return self.drain.refusal
        is_page = self.settings.page and path in PAGE_PATHS
        if self.settings.api_keys and not is_page and not self._has_key(headers):
            return Problem(
                status=401,
                message="an API key is needed: send Authorization: Bearer KEY, and a key that this server has",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return None

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Compare with all keys, so that the time does not tell which one matched.
        found = [hmac.compare_digest(key.encode(), given.encode()) for key in self.settings.api_keys]
        return any(found)


def _path_of_route(scope: Scope) -> str:
    """Return the path of the route that a request matches, even if the request was refused; empty: none."""
    own, taken = scope["app"].routes, scope.get("route")
    if taken not in own:  # None, or the mount in the outer application
        taken = next((route for route in own if route.matches(scope)[0] is not Match.NONE), None)
    return getattr(taken, "path", "")


def _host_name(host: str) -> str:
    """Return a host without its port."""
    return re.sub(r":\d+$", "", host).strip("[]").lower()
