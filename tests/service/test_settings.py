"""Settings that cannot be stop the start, named, and in one line."""

from __future__ import annotations

from typing import Any

import pytest

import service.settings
import workers.settings


@pytest.mark.parametrize("load", [service.settings.load, workers.settings.load])
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("PRECIS_QUEUE_URL", "redis+sentinel://a", "PRECIS_QUEUE_URL: .*master's name"),
        ("PRECIS_STORE_URL", "localhost:6379", "PRECIS_STORE_URL: .*no way to Redis"),
        ("PRECIS_LOG_FORMAT", "xml", "PRECIS_LOG_FORMAT: Input should be 'lines' or 'json'"),
        ("PRECIS_PROT", "1", "unknown settings: PRECIS_PROT"),
    ],
)
def test_the_start_is_stopped(monkeypatch: pytest.MonkeyPatch, load: Any, name: str, value: str, why: str) -> None:
    monkeypatch.delenv("PRECIS_TEST_SERVER", raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=why):
        load()
