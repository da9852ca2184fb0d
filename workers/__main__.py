"""`python -m workers`: settings, model, loop, exit code."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import redis
import structlog
import torch
import transformers
from prometheus_client import REGISTRY, start_http_server

from precis import native
from precis.errors import PrecisError
from precis.wire import logs, traces
from precis.wire.presets import HEADS, TRANSFORM
from precis.wire.records import WorkerRecord
from precis.wire.vault import Vault
from workers import artifacts, metrics, models
from workers.aliases import Aliases
from workers.archive import Archive
from workers.cache import SnapshotCache
from workers.compress import Compressor
from workers.energy import EnergyMeter
from workers.jobs import Heart, Queue
from workers.loop import Worker
from workers.memory import Arena, keep_freed
from workers.records import Records
from workers.sessions import Sessions
from workers.settings import Settings, load
from workers.snapshots import SnapshotStore
from workers.stores import connect
from workers.warm import warm

_T = TypeVar("_T")
_AGAIN_S = 0.5


def build(settings: Settings, served: models.Served) -> Worker:
    """Wire a worker together."""
    worker_id = uuid.uuid4().hex[:12]
    client = connect(settings.queue_url)
    vault = Vault(settings.encryption_keys)
    records = Records(client, vault)
    archive = Archive(settings.archive_url, connect(settings.queue_url), vault) if settings.archive_url else None
    snapshots = connect(settings.store_url or settings.queue_url)
    store = SnapshotStore(snapshots, settings.chunk_bytes, vault=vault, archive=archive)
    seal_key = settings.seal_key.encode()
    on_cpu = served.model.device.type == "cpu"
    arena = Arena(settings.hot_bytes) if on_cpu and settings.hot_bytes > 0 else None
    beside = 0 if on_cpu else settings.host_bytes
    return Worker(
        served=served,
        client=client,
        queue=Queue(client, worker_id, served.card.name, settings.role, settings.lease_s),
        heart=Heart(connect(settings.queue_url), worker_id, settings.lease_s),
        records=records,
        cache=SnapshotCache(served, records, store, seal_key, settings.hot_bytes, arena, beside),
        compressor=Compressor(served, client, records, store, seal_key),
        sessions=Sessions(served, client, store, seal_key, vault),
        described=WorkerRecord(
            id=worker_id,
            pid=os.getpid(),
            host=socket.gethostname(),
            role=settings.role,
            model=served.card.name,
            device=str(served.model.device),
            load=0,
            slots=settings.slots,
            hot=[],
            started_at=time.time(),
        ),
    )


def patiently(work: Callable[[], _T]) -> _T:
    """What needs the store, as soon as it is there: a worker may be started before it, or while it restarts."""
    while True:
        try:
            return work()
        except (redis.ConnectionError, redis.TimeoutError) as error:
            structlog.get_logger("worker").warning("store_unreachable", error=str(error))
            time.sleep(_AGAIN_S)


def _tell_metrics(settings: Settings, described: WorkerRecord, dtype: str) -> None:
    """What does not change, and what others call differently."""
    told = (described.id, described.model, described.device, dtype, described.role, metrics.VERSION)
    metrics.INFO.labels(*told).set(1)
    if settings.vllm_metrics:
        REGISTRY.register(Aliases(described.model))
    device = torch.device(described.device)
    if device.type == "cuda":
        REGISTRY.register(EnergyMeter(device.index or 0))


def main() -> int:
    """Run one worker until SIGTERM or SIGINT."""
    settings = load()
    logs.configure(settings.log_format)
    traces.configure("precis-worker", on=settings.tracing)
    transformers.logging.disable_progress_bar()
    log = structlog.get_logger("worker")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = models.pick_device(settings.device)
    if device.type == "cpu":
        keep_freed()
    dtype = models.pick_dtype(settings.dtype, device)
    try:
        location = models.locate(settings.model, settings.data_dir.expanduser())
        name = settings.model_name or (settings.model if location != settings.model else models.read_name(location))
        served = models.serve(name, location, device, dtype)
    except PrecisError as error:
        log.error("cannot_serve", code=error.code, why=error.detail)  # noqa: TRY400 — a refusal, not a bug
        return 2
    client, data_dir = connect(settings.queue_url), settings.data_dir.expanduser()
    for kind in (HEADS, TRANSFORM):
        find = partial(artifacts.find, client, data_dir, served.weights, served.model.geometry, kind)
        served = served.with_artifact(patiently(find))
    worker = patiently(partial(build, settings, served))
    warm(served, worker.cache)

    def stop(_signal: int, _frame: object) -> None:
        worker.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    _tell_metrics(settings, worker.described, served.card.dtype)
    server, _ = start_http_server(settings.metrics_port, "127.0.0.1" if not settings.metrics_port else "0.0.0.0")
    if device.type == "cpu" and native.library() is None:
        log.warning("no_kernels", why="there was no C++ compiler when precis was installed: scoring is slower")
    worker.heart.start()
    archive = worker.cache.store.archive
    if archive is not None:
        archive.start()
    log.info(
        "worker_ready",
        pid=os.getpid(),
        model=name,
        device=str(device),
        dtype=served.card.dtype,
        metrics=server.server_port,
    )
    try:
        worker.run()
    finally:
        worker.heart.stop()
        if archive is not None:
            archive.close()
    log.info("worker_stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
