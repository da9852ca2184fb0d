"""Settings of a worker: environment variables with the prefix PRECIS_, read once at the start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from precis.wire.addresses import address_of
from precis.wire.settings import PREFIX, refuse_unknown


class Settings(BaseSettings):
    """Each with its unit, and a line on why to change it."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, protected_namespaces=())

    queue_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="Redis or Valkey for jobs and records; noeviction; also redis+cluster://, redis+sentinel://",
    )
    store_url: str = Field("", description="Redis or Valkey for snapshots, volatile-lru; empty: the same as the queue")
    archive_url: str = Field(
        "", description="where snapshots go beside the store: s3://, gs://, az://, file://; needs the extra `archive`"
    )
    model: str = Field("SmolLM2-135M-Instruct", description="the embedded default, a folder, or a Hugging Face id")
    model_name: str = Field("", description="how clients call the model; empty: as in `model`")
    data_dir: Path = Field(Path("~/.local/share/precis"), description="where the embedded default model is unpacked")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="of weights and cache")
    threads: int = Field(0, ge=0, description="CPU threads of torch; 0: torch's own choice")
    slots: int = Field(8, ge=1, le=256, description="answers decoded at once: more is throughput, fewer is latency")
    lease_s: float = Field(15.0, ge=0.5, description="seconds after which a silent worker's jobs go to others")
    hot_bytes: int = Field(2 << 30, ge=0, description="bytes of snapshots kept ready on the device")
    host_bytes: int = Field(8 << 30, ge=0, description="bytes of snapshots kept in host memory beside a GPU")
    seal_key: str = Field("", description="secret that signs snapshots; set it where others can write to the store")
    tracing: bool = Field(False, description="send spans to OTEL_EXPORTER_OTLP_ENDPOINT; needs the extra `tracing`")
    log_format: Literal["lines", "json"] = Field("lines", description="of the log: for people, or JSON per line")
    encryption_keys: str = Field(
        "", description="secrets that encrypt what is stored, by commas; the first seals, all open; as at the API"
    )
    metrics_port: int = Field(9108, ge=0, description="port of /metrics; 0: a free one, printed in the log")
    vllm_metrics: bool = Field(False, description="the same numbers under vLLM's names as well")
    role: Literal["all", "compress", "answer"] = Field("all", description="which jobs this worker takes")
    chunk_bytes: int = Field(
        4 << 20, ge=1024, le=64 << 20, description="largest piece of a snapshot that is read or written at once"
    )

    @field_validator("queue_url", "store_url")
    @classmethod
    def _leads_to_redis(cls, url: str) -> str:
        """Said at the start, not by the first request."""
        if url:
            address_of(url)
        return url


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
