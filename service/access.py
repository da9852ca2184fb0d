"""Who asks, and what they may: keys, scopes, tenants, rates. Handlers take `CallerDep`, which says whose data they see.

A key is 32 random bytes; the store has its SHA-256 only. Without an admin key in the settings everybody who reaches
the port is one caller with every scope, and the server listens on loopback (`settings.check_exposure`).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Depends, Request

from precis.errors import Forbidden, InvalidRequest, RateLimited, Unauthorized
from precis.wire import keys
from precis.wire.records import DEFAULT_TENANT, ApiKey, Quota

Scope = Literal["ask", "write", "admin"]
SCOPES: tuple[Scope, ...] = ("ask", "write", "admin")
_PREFIX = "pk_"
_HEADERS = ("x-api-key", "x-goog-api-key")
# Tokens of one bucket: as many as come in a minute, refilled evenly. Gives the seconds to wait, 0 for go.
_TAKE = """
local limit, now = tonumber(ARGV[1]), redis.call('TIME')
local at = tonumber(now[1]) + tonumber(now[2]) / 1e6
local held = redis.call('HMGET', KEYS[1], 'left', 'at')
local left = math.min(limit, (tonumber(held[1]) or limit) + (at - (tonumber(held[2]) or at)) * limit / 60)
if left < 1 then return tostring((1 - left) * 60 / limit) end
redis.call('HSET', KEYS[1], 'left', tostring(left - 1), 'at', tostring(at))
redis.call('EXPIRE', KEYS[1], 120)
return '0'
"""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks.

    Attributes:
        key_id: of the key used; "admin" for the settings' own, "" where none is needed.
    """

    tenant: str
    key_id: str
    scopes: frozenset[str]


class Access:
    """Keys and quotas."""

    def __init__(self, client: Any, admin_key: str, default_quota: Quota) -> None:
        self._redis, self._default = client, default_quota
        self._admin = digest_of(admin_key) if admin_key else ""
        self._take = client.register_script(_TAKE)

    @property
    def needs_key(self) -> bool:
        """Whether requests must bring a key."""
        return bool(self._admin)

    async def caller(self, headers: Any) -> Caller:
        """Whose key is in a request's headers.

        Raises:
            Unauthorized: if there is none, or nobody's.
        """
        if not self.needs_key:
            return Caller(DEFAULT_TENANT, "", frozenset(SCOPES))
        given = key_in(headers)
        if not given:
            raise Unauthorized("a key is needed: send it as Authorization: Bearer KEY")
        digest = digest_of(given)
        if hmac.compare_digest(digest, self._admin):
            return Caller(DEFAULT_TENANT, "admin", frozenset(SCOPES))
        stored = await self._redis.hget(keys.API_KEYS, digest)
        found = None if stored is None else msgspec.json.decode(stored, type=ApiKey)
        if found is None or (found.expire_at is not None and found.expire_at <= time.time()):
            raise Unauthorized("the key is not known, or has expired or been revoked")
        return Caller(found.tenant, found.id, frozenset(found.scopes))

    async def quota(self, tenant: str) -> Quota:
        """A tenant's bounds, or everybody's."""
        stored = await self._redis.hget(keys.QUOTAS, tenant)
        return self._default if stored is None else msgspec.json.decode(stored, type=Quota)

    async def set_quota(self, tenant: str, quota: Quota) -> None:
        """Change a tenant's bounds; they hold from the next request on."""
        await self._redis.hset(keys.QUOTAS, tenant, msgspec.json.encode(quota))

    async def usage(self, tenant: str) -> dict[str, int]:
        """What a tenant's contexts take."""
        found = await self._redis.hgetall(keys.usage(tenant))
        names = ("contexts", "active", "bytes", "raw_bytes", "stored_bytes")
        return {name: int(found.get(name.encode(), 0)) for name in names}

    async def check_rate(self, caller: Caller) -> None:
        """Count a request.

        Raises:
            RateLimited: if there were too many; says when to come again.
        """
        limit = (await self.quota(caller.tenant)).requests_per_minute
        if not limit:
            return
        wait = float(await self._take(keys=[keys.rate(caller.tenant)], args=[limit]))
        if wait:
            detail = f"{limit} requests a minute are allowed: wait {wait:.1f} s"
            raise RateLimited(detail, retry_after_s=max(1, round(wait + 0.5)))

    async def create_key(
        self, tenant: str, scopes: list[str], name: str, expire_at: float | None
    ) -> tuple[ApiKey, str]:
        """A new key: what is stored of it, and the key, which is never seen again."""
        secret = _PREFIX + secrets.token_urlsafe(32)
        made = ApiKey(f"key_{secrets.token_hex(6)}", tenant, scopes, name, time.time(), expire_at)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(keys.API_KEYS, digest_of(secret), msgspec.json.encode(made))
            pipe.hset(keys.API_KEY_IDS, made.id, digest_of(secret))
            await pipe.execute()
        return made, secret

    async def list_keys(self) -> list[ApiKey]:
        """All keys, the oldest first."""
        stored = await self._redis.hvals(keys.API_KEYS)
        return sorted((msgspec.json.decode(each, type=ApiKey) for each in stored), key=lambda key: key.created_at)

    async def revoke(self, key_id: str) -> None:
        """Make a key worthless from the next request on.

        Raises:
            InvalidRequest: if there is no such key.
        """
        digest = await self._redis.hget(keys.API_KEY_IDS, key_id)
        if digest is None:
            raise InvalidRequest(f"there is no key {key_id}")
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hdel(keys.API_KEYS, digest)
            pipe.hdel(keys.API_KEY_IDS, key_id)
            await pipe.execute()


def key_in(headers: Any) -> str:
    """The key of a request, as our own, OpenAI's, Anthropic's or Google's clients send it; "" if there is none."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and value.strip():
        return str(value.strip())
    return next((headers[name] for name in _HEADERS if headers.get(name)), "")


def digest_of(secret: str) -> str:
    """SHA-256, in hex. Keys are random, so that no slow hash is needed."""
    return hashlib.sha256(secret.encode()).hexdigest()


async def caller_of(request: Request) -> Caller:
    """The caller of a request, found once."""
    known: Caller | None = getattr(request.state, "caller", None)
    if known is None:
        access: Access = request.app.state.precis.access
        known = request.state.caller = await access.caller(request.headers)
        await access.check_rate(known)
    return known


CallerDep = Annotated[Caller, Depends(caller_of)]


def needs(scope: Scope) -> Callable[[Caller], Coroutine[Any, Any, None]]:
    """A dependency that refuses keys without a scope."""

    async def check(caller: CallerDep) -> None:
        if scope not in caller.scopes:
            raise Forbidden(f"this key may not do that: it needs the scope {scope}")

    return check
