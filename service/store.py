"""Connections of the API to queue and store instance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from precis.wire.addresses import address_of

_FILL = 0.9  # share of the store's memory that snapshots may take


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
    """Clients for both URLs; one for both where they are the same.

    Raises:
        ValueError: if a URL leads nowhere, saying why.
    """
    queue = _client(queue_url)
    return Stores(queue, queue if store_url in ("", queue_url) else _client(store_url))


async def ping(client: Any) -> None:
    """Fail if the server, or one of a cluster's masters, does not answer."""
    for node in await _masters(client):
        await client.ping(**node)


async def infos(client: Any, section: str) -> list[dict[str, Any]]:
    """What the server says of itself, or each of a cluster's masters."""
    return [await client.info(section, **node) for node in await _masters(client)]


async def free_bytes(client: Any) -> float:
    """Room for another snapshot; of a cluster's nodes the largest, since which one it will be is not known yet."""
    return max(_free_of(memory) for memory in await infos(client, "memory"))


def _free_of(memory: dict[str, Any]) -> float:
    limit = _FILL * float(memory.get("maxmemory", 0)) or math.inf
    evicts = memory.get("maxmemory_policy", "noeviction") != "noeviction"
    return limit if evicts else limit - float(memory.get("used_memory", 0))


async def _masters(client: Any) -> list[dict[str, Any]]:
    """Arguments that send a command to each."""
    if not isinstance(client, RedisCluster):
        return [{}]
    await client.initialize()
    return [{"target_nodes": [node]} for node in client.get_primaries()]


def _client(url: str) -> Any:
    address = address_of(url)
    options: dict[str, Any] = {
        "socket_timeout": 30,
        "socket_connect_timeout": 2,
        "health_check_interval": 15,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": 256,
    }
    if address.kind == "one":
        return Redis.from_url(url, retry_on_timeout=False, **options)
    options = {**parse_url(address.plain), **options}
    for name in ("host", "port", "connection_class"):
        options.pop(name, None)
    if address.is_tls:
        options["ssl"] = True
    if address.kind == "cluster":
        options.pop("db", None)
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        return RedisCluster(startup_nodes=nodes, require_full_coverage=True, **options)
    own = {"socket_timeout": 2, "socket_connect_timeout": 2, "ssl": address.is_tls, **dict(address.sentinel_login)}
    sentinels: Any = Sentinel(address.hosts, sentinel_kwargs=own, **options)  # type: ignore[no-untyped-call]
    return sentinels.master_for(address.service)
