"""What is read when Prometheus asks: queues, contexts, tenants, memory of the servers."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from redis.exceptions import ResponseError

from precis import __version__
from precis.wire import keys
from precis.wire.records import DEFAULT_TENANT, ApiKey
from service import metrics
from service.state import State
from service.store import infos

_MOST_TENANTS = 100  # labels; the rest is in the totals


async def read(state: State) -> None:
    """Set all gauges of this process."""
    metrics.INFO.labels(__version__).set(1)
    await _queues(state)
    await _contexts(state)
    for server, client in (("queue", state.stores.queue), ("store", state.stores.snapshots)):
        memory, stats = await infos(client, "memory"), await infos(client, "stats")
        for kind, field in (("used", "used_memory"), ("max", "maxmemory")):
            metrics.STORE_MEMORY.labels(server, kind).set(sum(int(node.get(field, 0)) for node in memory))
        metrics.STORE_EVICTED.labels(server).set(sum(int(node.get("evicted_keys", 0)) for node in stats))


async def _queues(state: State) -> None:
    workers = await state.fleet.workers()
    metrics.WORKERS.set(len(workers))
    for raw in await state.stores.queue.smembers(keys.MODELS):  # also of models that no worker serves now
        model = raw.decode()
        for kind, stream in (("compress", keys.compress_jobs(model)), ("answer", keys.answer_jobs(model))):
            name = f"{kind}:{model}"
            own = [keys.worker_jobs(worker.id) for worker in workers if worker.model == model and kind == "answer"]
            depths = [await state.stores.queue.xlen(each) for each in (stream, *own)]
            metrics.QUEUE_DEPTH.labels(name).set(sum(depths))
            metrics.QUEUE_OLDEST.labels(name).set(await _oldest_s(state.stores.queue, stream))


async def _oldest_s(client: Any, stream: str) -> float:
    """Seconds that the first entry has waited which no worker was given yet."""
    try:
        groups = await client.xinfo_groups(stream)
    except ResponseError:  # no worker has ever listened
        return 0.0
    last = next((group["last-delivered-id"] for group in groups if group["name"] == keys.GROUP.encode()), b"0-0")
    found = await client.xrange(stream, min=b"(" + last, count=1)
    return max(0.0, time.time() - int(found[0][0].split(b"-")[0]) / 1000) if found else 0.0


async def _contexts(state: State) -> None:
    totals = await state.stores.queue.hgetall(keys.TOTALS)
    for kind in ("raw", "stored"):
        metrics.CONTEXT_BYTES.labels(kind).set(int(totals.get(f"{kind}_bytes".encode(), 0)))
    stored = await state.stores.queue.hvals(keys.API_KEYS)
    tenants = {DEFAULT_TENANT, *(msgspec.json.decode(each, type=ApiKey).tenant for each in stored)}
    counts = {"all": 0, "active": 0}
    for tenant in sorted(tenants)[:_MOST_TENANTS]:
        usage, quota = await state.access.usage(tenant), await state.access.quota(tenant)
        counts["all"] += usage["contexts"]
        counts["active"] += usage["active"]
        metrics.TENANT_QUOTA.labels(tenant).set(quota.max_bytes)
        for kind in ("raw", "stored"):
            metrics.TENANT_BYTES.labels(tenant, kind).set(usage[f"{kind}_bytes"])
    for name, count in counts.items():
        metrics.CONTEXTS.labels(name).set(count)
