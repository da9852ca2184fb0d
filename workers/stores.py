"""Connections of a worker to queue and store instance."""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

from precis.wire.addresses import address_of

_AWAY = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.MasterDownError,
    redis.exceptions.TryAgainError,
)


def is_away(error: Exception) -> bool:
    """Whether the server cannot be reached or takes no writes now, so that the same may go well later.

    MISCONF is a full disk, NOREPLICAS too few replicas; READONLY a master that is one no more.
    """
    refused = isinstance(error, redis.ResponseError) and str(error).startswith(("MISCONF", "NOREPLICAS"))
    return isinstance(error, _AWAY) or refused


def connect(url: str) -> redis.Redis:
    """A client that never repeats a command by itself: a repeated XADD would be a second job.

    Args:
        url: see `precis.wire.addresses`.

    Raises:
        ValueError: if it leads nowhere, saying why.
    """
    address = address_of(url)
    options: dict[str, Any] = {
        "socket_timeout": 60,
        "socket_connect_timeout": 5,
        "health_check_interval": 15,
        "retry": Retry(NoBackoff(), 0),
        "socket_read_size": 1 << 20,
    }
    if address.kind == "one":
        return redis.Redis.from_url(url, retry_on_timeout=False, **options)
    options = {**parse_url(address.plain), **options}  # type: ignore[no-untyped-call]
    for name in ("host", "port", "connection_class"):
        options.pop(name, None)
    if address.is_tls:
        options["ssl"] = True
    if address.kind == "cluster":
        options.pop("db", None)
        nodes = [ClusterNode(host, port) for host, port in address.hosts]  # type: ignore[no-untyped-call]
        cluster: Any = redis.RedisCluster(startup_nodes=nodes, require_full_coverage=True, **options)
        return cluster  # type: ignore[no-any-return]
    own = {"socket_timeout": 5, "socket_connect_timeout": 5, "ssl": address.is_tls, **dict(address.sentinel_login)}
    sentinels: Any = Sentinel(address.hosts, sentinel_kwargs=own, **options)  # type: ignore[no-untyped-call]
    return sentinels.master_for(address.service)  # type: ignore[no-any-return]
