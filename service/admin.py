"""Routes for whoever runs the server: keys, tenants' quotas and usage, and who changed what."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Path, Query
from pydantic import Field

from precis.wire import keys
from precis.wire.records import ApiKey, Quota
from service.access import Scope, needs
from service.schemas import Strict
from service.state import StateDep

router = APIRouter(prefix="/v1/admin", tags=["admin"], dependencies=[Depends(needs("admin"))])
_TENANT = r"^[a-z0-9][a-z0-9_-]{0,62}$"
Tenant = Annotated[str, Path(pattern=_TENANT)]


class KeyIn(Strict):
    """A key to be made."""

    tenant: str = Field("default", pattern=_TENANT, description="whose contexts it sees")
    scopes: list[Scope] = Field(["ask", "write"], min_length=1)
    name: str = Field("", max_length=128)
    ttl_s: int | None = Field(None, gt=0, description="seconds to live; left out: for ever")


class QuotaIn(Strict):
    """A tenant's bounds; 0 = none."""

    max_contexts: int = Field(0, ge=0)
    max_bytes: int = Field(0, ge=0, description="stored; estimated while a context is being compressed")
    max_active: int = Field(0, ge=0, description="contexts waiting or being compressed")
    requests_per_minute: int = Field(0, ge=0)


@router.post("/keys", status_code=201)
async def create_key(wanted: KeyIn, state: StateDep) -> dict[str, Any]:
    """Make a key. It is shown this once: only its hash is kept."""
    now = datetime.now(UTC).timestamp()
    expire_at = None if wanted.ttl_s is None else now + wanted.ttl_s
    made, secret = await state.access.create_key(wanted.tenant, list(wanted.scopes), wanted.name, expire_at)
    return {**key_out(made), "key": secret}


@router.get("/keys")
async def list_keys(state: StateDep) -> dict[str, Any]:
    """All keys, without the keys themselves."""
    return {"object": "list", "data": [key_out(each) for each in await state.access.list_keys()]}


@router.delete("/keys/{key_id}")
async def revoke_key(key_id: str, state: StateDep) -> dict[str, Any]:
    """Revoke a key; the next request with it is refused."""
    await state.access.revoke(key_id)
    return {"id": key_id, "object": "key", "deleted": True}


@router.get("/tenants/{tenant}")
async def get_tenant(tenant: Tenant, state: StateDep) -> dict[str, Any]:
    """What a tenant takes and may take."""
    quota = msgspec.to_builtins(await state.access.quota(tenant))
    return {"id": tenant, "object": "tenant", "usage": await state.access.usage(tenant), "quota": quota}


@router.put("/tenants/{tenant}/quota")
async def set_quota(tenant: Tenant, wanted: QuotaIn, state: StateDep) -> dict[str, Any]:
    """Change a tenant's bounds."""
    await state.access.set_quota(tenant, Quota(**wanted.model_dump()))
    return await get_tenant(tenant, state)


@router.get("/audit")
async def audit(state: StateDep, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> dict[str, Any]:
    """Who changed what, the newest first; the last 10,000 changes are kept."""
    found = await state.stores.queue.xrevrange(keys.AUDIT, count=limit)
    data = []
    for entry_id, fields in found:
        seconds = int(entry_id.decode().split("-")[0]) / 1000
        when = datetime.fromtimestamp(seconds, UTC).isoformat()
        data.append({"time": when, **{name.decode(): value.decode() for name, value in fields.items()}})
    return {"object": "list", "data": data}


def key_out(key: ApiKey) -> dict[str, Any]:
    """A key as clients see it."""
    return {
        "id": key.id,
        "object": "key",
        "tenant": key.tenant,
        "scopes": key.scopes,
        "name": key.name,
        "created_at": datetime.fromtimestamp(key.created_at, UTC).isoformat(),
        "expire_time": None if key.expire_at is None else datetime.fromtimestamp(key.expire_at, UTC).isoformat(),
    }
