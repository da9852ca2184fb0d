"""Connections of the API to queue and store instance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff


@dataclass(frozen=True, slots=True)
class Stores:
    """Clients.

    Attributes:
        queue: jobs and records; never repeats a command by itself.
        snapshots: the store instance.
    """

    queue: Any
    snapshots: Any

    async def close(self) -> None:
        """Close the connections."""
        await self.queue.aclose()
        if self.snapshots is not self.queue:
            await self.snapshots.aclose()


def connect(queue_url: str, store_url: str) -> Stores:
    """Clients for both URLs; one for both where they are the same."""
    queue = _client(queue_url)
    return Stores(queue, queue if store_url in ("", queue_url) else _client(store_url))


def _client(url: str) -> Any:
    return Redis.from_url(
        url,
        socket_timeout=30,
        socket_connect_timeout=2,
        health_check_interval=15,
        retry=Retry(NoBackoff(), 0),
        retry_on_timeout=False,
        max_connections=256,
    )
