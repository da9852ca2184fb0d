"""Settings of the API: environment variables with the prefix PRECIS_, read once at the start."""

from __future__ import annotations

import os

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from precis.wire.presets import AUTO
from precis.wire.settings import PREFIX, refuse_unknown


class Settings(BaseSettings):
    """Each with its unit, and a line on why to change it."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True)

    queue_url: str = Field("redis://127.0.0.1:6379/0", description="Redis or Valkey for jobs and records; noeviction")
    store_url: str = Field("", description="Redis or Valkey for snapshots, volatile-lru; empty: the same as the queue")
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 lets other machines in")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: a free one")
    max_body_bytes: int = Field(20 << 20, ge=1024, description="largest request; larger ones get 413")
    compress_queue_limit: int = Field(64, ge=1, description="contexts waiting or running at most; beyond: 429")
    answer_queue_limit: int = Field(256, ge=1, description="answers waiting or running at most; beyond: 429")
    default_ttl_s: int = Field(7 * 86400, ge=1, description="seconds that a context lives if the upload does not say")
    answer_timeout_s: float = Field(
        600.0, gt=0, description="seconds without any event after which an answer is given up"
    )
    worker_grace_s: float = Field(10.0, ge=0, description="seconds without a live worker before requests get 503")
    default_policy: str = Field(AUTO, description="policy of uploads that name none")


def load() -> Settings:
    """Read the environment.

    Raises:
        SystemExit: naming a PRECIS_* variable that does not exist.
    """
    refuse_unknown(os.environ)
    return Settings()
