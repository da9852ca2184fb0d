"""Routes about the service itself: models, workers, health, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from redis.exceptions import RedisError

from precis import __version__
from precis.errors import ModelNotFound
from precis.wire import keys
from service import gauges
from service.state import State, StateDep
from service.store import ping

router = APIRouter(tags=["system"])
open_router = APIRouter(tags=["system"])  # needs no key: says nothing of anybody's data


@open_router.get("/v1")
async def index() -> dict[str, Any]:
    """What this is and where to go."""
    return {"name": "precis", "version": __version__, "openapi": "/openapi.json", "contexts": "/v1/contexts"}


@router.get("/v1/models")
async def list_models(state: StateDep) -> dict[str, Any]:
    """Models with a live worker, in OpenAI's shape."""
    data = []
    for name in await state.fleet.models():
        try:
            card = await state.fleet.card(name)
        except ModelNotFound:  # its worker is about to announce it anew
            continue
        data.append(
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "precis",
                "max_length": card.max_length,
                "max_context": card.max_context,
                "dtype": card.dtype,
                "digest": card.digest,
                "raw_bytes_per_token": card.raw_bytes_per_token,
            }
        )
    return {"object": "list", "data": data}


@router.get("/v1/workers")
async def list_workers(state: StateDep) -> dict[str, Any]:
    """Live workers."""
    data = [
        {
            "id": w.id,
            "pid": w.pid,
            "host": w.host,
            "role": w.role,
            "model": w.model,
            "device": w.device,
            "load": w.load,
            "slots": w.slots,
            "hot": len(w.hot),
        }
        for w in await state.fleet.workers()
    ]
    return {"object": "list", "data": data}


@router.get("/v1/queues")
async def list_queues(state: StateDep) -> dict[str, Any]:
    """Jobs that wait or run, per model."""
    data = []
    for model in await state.fleet.models():
        compressions = await state.stores.queue.xlen(keys.compress_jobs(model))
        answers = await state.stores.queue.xlen(keys.answer_jobs(model))
        for worker in await state.fleet.workers(model):
            answers += await state.stores.queue.xlen(keys.worker_jobs(worker.id))
        data.append({"model": model, "compressions": compressions, "answers": answers})
    return {"object": "list", "data": data}


@open_router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Whether the process is alive."""
    return {"status": "ok"}


@open_router.get("/readyz", responses={503: {"description": "no request can be served now"}})
async def readyz(request: Request) -> Response:
    """Whether requests can be served: the stores answer and a worker lives."""
    state: State = request.app.state.precis
    problems = []
    if state.draining:
        problems.append("shutting down")
    try:
        await ping(state.stores.queue)
        await ping(state.stores.snapshots)
        if not await state.fleet.workers():
            problems.append("no worker is up yet")
    except RedisError as error:
        problems.append(f"the store cannot be reached ({type(error).__name__})")
    return JSONResponse(
        {"status": "unavailable" if problems else "ready", "problems": problems}, 503 if problems else 200
    )


@open_router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def prometheus(request: Request) -> Response:
    """Metrics of this process, with queue depths and totals read now."""
    state: State = request.app.state.precis
    await gauges.read(state)
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
