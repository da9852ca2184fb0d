"""The API process: `create_app(settings)`, and `python -m service.app` to run it."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import structlog
import uvicorn
from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from opentelemetry.trace import get_current_span
from starlette.exceptions import HTTPException

from precis import __version__
from precis.errors import BodyTooLarge
from precis.wire import logs, traces
from precis.wire.vault import Vault
from service import (
    admin,
    audit,
    batch,
    changes,
    chat,
    contexts,
    exchange,
    gemini,
    kept,
    metrics,
    page,
    problems,
    progress,
    queries,
    responses,
    sessions,
    system,
    upload,
)
from service.access import Access, needs
from service.events import Follower
from service.fleet import Fleet
from service.jobs import Jobs
from service.openapi import described
from service.records import Records
from service.settings import Settings, check_exposure, load, quota_of
from service.state import State
from service.store import connect

_QUIET = ("/healthz", "/readyz", "/metrics")  # asked all the time by machines
# Spans of requests only: logs of failed validation would hold what was sent, and metrics are our own.
_TELEMETRY = TelemetryConfig(
    operation_spans=False,
    metrics=False,
    logs=False,
    auto_configure=False,
    exclude=lambda scope: scope["path"] in _QUIET,
)
_PLAIN_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
_GRACE_S = 5  # after the streams were told of the shutdown


def create_app(settings: Settings) -> FastAPI:
    """Put the API together."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        stores, vault = connect(settings.queue_url, settings.store_url), Vault(settings.encryption_keys)
        state = State(
            settings=settings,
            stores=stores,
            records=Records(stores, settings.compress_queue_limit, vault),
            jobs=Jobs(stores.queue, settings.answer_queue_limit),
            fleet=Fleet(stores.queue, settings.worker_grace_s),
            follower=Follower(stores.queue, uuid.uuid4().hex[:12]),
            access=Access(stores.queue, settings.admin_key, quota_of(settings)),
            vault=vault,
        )
        app.state.precis = state
        await state.follower.start()
        forever = [asyncio.create_task(task) for task in (state.records.sweep_forever(), state.fleet.prepare_forever())]
        yield
        for task in forever:
            task.cancel()
        await state.follower.stop()
        await stores.close()

    app = FastAPI(
        title="Precis",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=_operation_id,
        dependencies=[Depends(_tell_trace)],
        telemetry=_TELEMETRY,
    )
    problems.install(app)
    app.include_router(system.open_router)
    app.include_router(page.router)
    for module in (
        upload,
        contexts,
        changes,
        exchange,
        kept,
        progress,
        queries,
        batch,
        sessions,
        chat,
        responses,
        gemini,
        system,
    ):
        app.include_router(module.router, dependencies=[Depends(needs("ask"))])
    app.include_router(admin.router)
    app.openapi = lambda: described(app)  # type: ignore[method-assign]
    app.add_middleware(Watch, max_body_bytes=settings.max_body_bytes, max_import_bytes=settings.max_import_bytes)
    return app


def _operation_id(route: APIRoute) -> str:
    return route.name


class Watch:
    """Counts and logs every request, and answers bodies that are declared too large in our own shape."""

    def __init__(self, app: Any, max_body_bytes: int, max_import_bytes: int) -> None:
        self._app, self._limits = app, {"/v1/contexts/import": max_import_bytes}
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """As ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status, request_id = 499, _request_id(dict(scope["headers"]).get(b"x-request-id", b""))
        structlog.contextvars.bind_contextvars(request=request_id)

        async def noting(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
                metrics.REQUEST_SECONDS.labels(_route(scope)).observe(time.monotonic() - began)
            await send(message)

        length = dict(scope["headers"]).get(b"content-length", b"0")
        limit = self._limits.get(scope["path"], self._max_body_bytes)
        try:
            if length.isdigit() and int(length) > limit:
                error = BodyTooLarge(f"the body has {int(length)} bytes, the limit is {limit}", limit=limit)
                await _drain(receive, 4 * self._max_body_bytes)
                await problems.response_of(error, scope["path"])(scope, receive, noting)
            else:
                await self._app(scope, _bounded(receive, limit), noting)
        finally:
            await audit.note(scope, _route(scope), status)
            metrics.REQUESTS.labels(scope["method"], _route(scope), status).inc()
            log = structlog.get_logger("http")
            (log.debug if scope["path"] in _QUIET else log.info)(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status,
                ms=round((time.monotonic() - began) * 1000, 1),
            )


async def _tell_trace() -> None:
    """Let the request's span, which FastAPI makes, say by which id logs know it."""
    get_current_span().set_attribute("precis.request", structlog.contextvars.get_contextvars().get("request", ""))


def _request_id(given: bytes) -> str:
    """The client's own, if it is one that may stand in a log; else a new one."""
    return given.decode() if _PLAIN_ID.fullmatch(given) else uuid.uuid4().hex[:16]


def _bounded(receive: Any, limit: int) -> Any:
    """A body that does not say its length is cut off at the limit."""
    n_read = 0

    async def receive_bounded() -> MutableMapping[str, Any]:
        nonlocal n_read
        message: MutableMapping[str, Any] = await receive()
        n_read += len(message.get("body", b""))
        if n_read > limit:
            raise HTTPException(413)  # FastAPI lets no other exception out of its body parsing
        return message

    return receive_bounded


async def _drain(receive: Any, limit: int) -> None:
    """Read a refused body within reason: a client that is still sending would not see the answer."""
    n_read = 0
    while n_read < limit:
        message = await receive()
        n_read += len(message.get("body", b""))
        if not message.get("more_body"):
            return


def _route(scope: dict[str, Any]) -> str:
    """The route's pattern, so that ids do not become label values."""
    return getattr(scope.get("route"), "path", "unmatched")


class Server(uvicorn.Server):
    """uvicorn, but open streams are told at once that the server stops."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._precis_app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On SIGTERM or SIGINT: end all streams with an error event, then stop as uvicorn does."""
        state: State | None = getattr(self._precis_app.state, "precis", None)
        if state is not None and not state.draining:
            state.draining = True
            state.follower.end_all("the server is shutting down: ask again")
        super().handle_exit(sig, frame)


def main(arguments: list[str]) -> None:
    """Run the API until SIGTERM or SIGINT.

    Args:
        arguments: `--fd N` takes over a listening socket from the parent process; without it one is made.
    """
    settings = load()
    logs.configure(settings.log_format)
    traces.configure("precis-api", on=settings.tracing)
    check_exposure(settings.host, settings.admin_key, open_to_all=settings.open)
    if not settings.admin_key:
        structlog.get_logger("api").warning(
            "no_keys", why="PRECIS_ADMIN_KEY is not set: whoever reaches the port may do all"
        )
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,
    )
    taken_over = [socket.socket(fileno=int(arguments[1]))] if arguments[:1] == ["--fd"] else None
    Server(config, app).run(sockets=taken_over)


if __name__ == "__main__":
    main(sys.argv[1:])
