"""Settings of the API: environment variables with the prefix PRECIS_, read once at the start."""

from __future__ import annotations

import ipaddress
import os
from typing import Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from precis.wire.addresses import address_of
from precis.wire.presets import AUTO
from precis.wire.records import Quota
from precis.wire.settings import PREFIX, refuse_unknown

_SHORTEST_KEY = 16


class Settings(BaseSettings):
    """Each with its unit, and a line on why to change it."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True)

    queue_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="Redis or Valkey for jobs and records; noeviction; also redis+cluster://, redis+sentinel://",
    )
    store_url: str = Field("", description="Redis or Valkey for snapshots, volatile-lru; empty: the same as the queue")
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 lets other machines in")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: a free one")
    max_body_bytes: int = Field(20 << 20, ge=1024, description="largest request; larger ones get 413")
    max_import_bytes: int = Field(4 << 30, ge=1024, description="largest exported context that is taken over")
    compress_queue_limit: int = Field(64, ge=1, description="contexts waiting or running at most; beyond: 429")
    answer_queue_limit: int = Field(256, ge=1, description="answers waiting or running at most; beyond: 429")
    default_ttl_s: int = Field(7 * 86400, ge=1, description="seconds that a context lives if the upload does not say")
    answer_timeout_s: float = Field(
        600.0, gt=0, description="seconds without any event after which an answer is given up"
    )
    worker_grace_s: float = Field(10.0, ge=0, description="seconds without a live worker before requests get 503")
    admin_key: str = Field("", description="secret that makes keys; with it every request needs a key")
    open: bool = Field(False, description="without admin_key: let everybody in who reaches the port, not only loopback")
    tracing: bool = Field(False, description="send spans to OTEL_EXPORTER_OTLP_ENDPOINT; needs the extra `tracing`")
    log_format: Literal["lines", "json"] = Field("lines", description="of the log: for people, or JSON per line")
    encryption_keys: str = Field(
        "", description="secrets that encrypt what is stored, by commas; the first seals, all open; as at the workers"
    )
    quota_contexts: int = Field(0, ge=0, description="contexts of a tenant that has no quota of its own; 0: any number")
    quota_bytes: int = Field(0, ge=0, description="stored bytes of such a tenant; 0: any number")
    quota_active: int = Field(0, ge=0, description="contexts of such a tenant that wait or are compressed; 0: any")
    quota_requests_per_minute: int = Field(0, ge=0, description="requests a minute of such a tenant; 0: any number")
    auto_cache: bool = Field(
        False, description="chats that do not say `cache` have long beginnings stored that came twice"
    )
    default_policy: str = Field(AUTO, description="policy of uploads that name none")

    @field_validator("queue_url", "store_url")
    @classmethod
    def _leads_to_redis(cls, url: str) -> str:
        """Said at the start, not by the first request."""
        if url:
            address_of(url)
        return url


def check_exposure(host: str, admin_key: str, *, open_to_all: bool) -> None:
    """Stop the start of a server that would let strangers in.

    Raises:
        SystemExit: saying what to set.
    """
    if admin_key and len(admin_key) < _SHORTEST_KEY:
        raise SystemExit(f"PRECIS_ADMIN_KEY needs at least {_SHORTEST_KEY} characters")
    if admin_key or open_to_all or is_loopback(host):
        return
    raise SystemExit(
        f"without keys the server listens on loopback only, not on {host}: set PRECIS_ADMIN_KEY to a long secret and "
        "make keys with `precis keys create`, or set PRECIS_OPEN=true if something else guards the port"
    )


def quota_of(settings: Settings) -> Quota:
    """The bounds of tenants that have none of their own."""
    return Quota(
        settings.quota_contexts, settings.quota_bytes, settings.quota_active, settings.quota_requests_per_minute
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load() -> Settings:
    """Read the environment.

    Raises:
        SystemExit: naming a PRECIS_* variable that does not exist, or cannot be.
    """
    refuse_unknown(os.environ)
    try:
        return Settings()
    except ValidationError as error:
        told = (
            f"{PREFIX}{each['loc'][0]}".upper() + f": {each['msg'].removeprefix('Value error, ')}"
            for each in error.errors()
        )
        raise SystemExit("; ".join(told)) from None
