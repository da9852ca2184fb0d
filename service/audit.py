"""Who changed what: a capped stream in the store, and a log line each. Questions are no changes; no text is noted."""

from __future__ import annotations

from typing import Any

import structlog
from redis.exceptions import RedisError

from precis.wire import keys
from service.access import Caller
from service.state import State

_CAP = 10_000
_ASKS = ("/queries", "/score", "/prefetch", "/batch")
_REFUSED = (401, 403)


async def note(scope: dict[str, Any], route: str, status: int) -> None:
    """Note a request if it was a change; a request that was refused for its key is logged only."""
    caller: Caller | None = scope.get("state", {}).get("caller")
    said = {
        "tenant": caller.tenant if caller else "",
        "key": caller.key_id if caller else "",
        "method": scope["method"],
        "route": route,
        "target": str(scope.get("state", {}).get("target") or scope["path"]),
        "status": str(status),
        "client": (scope.get("client") or [""])[0],
    }
    if status in _REFUSED:
        structlog.get_logger("audit").warning("refused", **said)
    if caller is None or not _changes(scope["method"], route):
        return
    structlog.get_logger("audit").info("changed", **said)
    state: State = scope["app"].state.precis
    try:
        await state.stores.queue.xadd(keys.AUDIT, said, maxlen=_CAP, approximate=True)
    except RedisError as error:
        structlog.get_logger("audit").error("not_noted", error=type(error).__name__, **said)


def _changes(method: str, route: str) -> bool:
    if method in ("GET", "HEAD", "OPTIONS"):
        return False
    return route.startswith(("/v1/contexts", "/v1/admin", "/v1beta/cachedContents")) and not route.endswith(_ASKS)
